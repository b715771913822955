// Products of groups of rows on the matrix units, as exact as the storage is.
//
// A group is 8 rows; lane 4 g + t of a warp holds piece t of row g, 16 bytes. The instruction expects other
// columns in these lanes. But a sum over columns has no order, and the lanes hold the same columns in all rows.
// So the pieces as they are loaded from memory are the operands of both sides, and no data moves between lanes.
// The left side has 16 rows, two groups.
//
// Matrix units truncate their sums. So these start from zero every few pieces, and are added to the running sums
// by an addition that rounds.
//
// A product waits some 25 cycles for the previous one of the same sum. So the products of a piece are divided
// into phases: a kernel interleaves the phases of several tiles, or adds the phases of one tile to several sums,
// `chains`, which are added at the end.
#pragma once

#include "launch.cuh"

namespace doge_fast::cuda {

template <typename T>
struct Product;

// float32 as the sum of two tf32 numbers, 22 bits; the product of the low parts is below 2^-22.
template <>
struct Product<float> {
  struct Operand {
    uint32_t high[4];
    uint32_t low[4];
  };

  static __device__ __forceinline__ Operand operand(const Piece& piece) {
    Operand parts;
    DOGE_UNROLL
    for (int i = 0; i < 4; ++i) {
      const float x = float_of(piece.word[i]);
      parts.high[i] = round_to_tf32(x);
      // For an infinite x the low part is inf - inf, NaN, and so is every sum that it enters.
      parts.low[i] = round_to_tf32(x - float_of(parts.high[i]));
    }
    return parts;
  }

  // Low by high and high by low, at two columns each, then high by high: the small products come first.
  static constexpr int PHASES = 6;
  // The chain, of 1 or 3, to which a phase is added.
  static __device__ __forceinline__ constexpr int chain(int phase, int chains) {
    return chains == 1 || phase >= 4 ? 0 : 1 + phase % 2;
  }

  template <int PHASE>
  static __device__ __forceinline__ void multiply(float (&sums)[4], const Operand (&left)[2],
                                                  const Operand& right) {
    constexpr int K = PHASE < 4 ? PHASE / 2 * 2 : (PHASE - 4) * 2;
    const auto& upper = PHASE < 4 && PHASE % 2 == 0 ? left[0].low : left[0].high;
    const auto& lower = PHASE < 4 && PHASE % 2 == 0 ? left[1].low : left[1].high;
    const auto& columns = PHASE < 4 && PHASE % 2 == 1 ? right.low : right.high;
    multiply_tf32(sums, {upper[K], lower[K], upper[K + 1], lower[K + 1]}, {columns[K], columns[K + 1]});
  }
};

// Products of 16-bit numbers are exact in float32.
template <typename T>
struct HalfProduct {
  using Operand = Piece;

  static __device__ __forceinline__ Operand operand(const Piece& piece) { return piece; }

  static constexpr int PHASES = 2;
  static __device__ __forceinline__ constexpr int chain(int phase, int chains) { return phase % chains; }

  template <int PHASE>
  static __device__ __forceinline__ void multiply(float (&sums)[4], const Operand (&left)[2],
                                                  const Operand& right) {
    constexpr int K = 2 * PHASE;
    const uint32_t rows[4] = {left[0].word[K], left[1].word[K], left[0].word[K + 1], left[1].word[K + 1]};
    const uint32_t columns[2] = {right.word[K], right.word[K + 1]};
    if constexpr (std::is_same_v<T, Bfloat16>)
      multiply_bf16(sums, rows, columns);
    else
      multiply_f16(sums, rows, columns);
  }
};
template <>
struct Product<Bfloat16> : HalfProduct<Bfloat16> {};
template <>
struct Product<Float16> : HalfProduct<Float16> {};

// sums += the chains, added from the last to the first.
template <int CHAINS, int SUMS>
__device__ __forceinline__ void add_chains(float (&sums)[SUMS], const float (&chains)[CHAINS][SUMS]) {
  DOGE_UNROLL
  for (int i = 0; i < SUMS; ++i) {
    float sum = chains[CHAINS - 1][i];
    DOGE_UNROLL
    for (int c = CHAINS - 2; c >= 0; --c) sum += chains[c][i];
    sums[i] += sum;
  }
}

// The most columns of a float32 sum; sums over more are float64.
constexpr int64_t MAX_FLOAT_COLUMNS = 8192;

}  // namespace doge_fast::cuda
