// Products of groups of rows on the matrix units, as exact as the storage is.
//
// A group is 8 rows; lane 4 g + t of a warp holds a piece of row g, 16 bytes at piece t. Which column
// a piece stands for is the same in all rows, and a sum over columns has no order: so the pieces,
// loaded as they stand in memory, are the operands, of the left and of the right side alike, and no
// column changes lanes. Two groups make the 16 rows of a left side.
//
// Matrix units cut off what does not fit into their sum. So sums start from zero at every piece and
// are added to the running ones with a rounding addition.
//
// A product waits some 25 cycles for the one before it in the same sum. CHAINS sums side by side, added
// at the end, wait for each other no more: where a warp has few tiles to turn to meanwhile, and registers
// to spare.
#pragma once

#include "launch.cuh"

namespace doge_fast::cuda {

template <typename T>
struct Product;

// float32 as the sum of two tf32 numbers, 22 bits; the product of the low parts is below 2^-22.
template <>
struct Product<float> {
  static constexpr int GROUPS_LEFT = 2;
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
      // What is infinite must not become NaN less itself in one product and vanish in another: the
      // low part is NaN then, and so is every sum that it enters.
      parts.low[i] = round_to_tf32(x - float_of(parts.high[i]));
    }
    return parts;
  }

  // The small products first: one sum after the other adds them before the large ones.
  template <int CHAINS>
  static __device__ __forceinline__ void add(float (&sums)[CHAINS][4], const Operand (&left)[2],
                                             const Operand& right, int) {
    static_assert(CHAINS == 1 || CHAINS == 3);
    DOGE_UNROLL
    for (int k = 0; k < 4; k += 2) {
      multiply_tf32(sums[CHAINS - 1], {left[0].low[k], left[1].low[k], left[0].low[k + 1], left[1].low[k + 1]},
                    {right.high[k], right.high[k + 1]});
      multiply_tf32(sums[CHAINS / 2],
                    {left[0].high[k], left[1].high[k], left[0].high[k + 1], left[1].high[k + 1]},
                    {right.low[k], right.low[k + 1]});
    }
    DOGE_UNROLL
    for (int k = 0; k < 4; k += 2)
      multiply_tf32(sums[0], {left[0].high[k], left[1].high[k], left[0].high[k + 1], left[1].high[k + 1]},
                    {right.high[k], right.high[k + 1]});
  }
};

// Products of 16-bit numbers are exact in float32.
template <typename T>
struct HalfProduct {
  static constexpr int GROUPS_LEFT = 2;
  using Operand = Piece;

  static __device__ __forceinline__ Operand operand(const Piece& piece) { return piece; }

  // Piece `step` of those whose products are added; they take the sums by turns.
  template <int CHAINS>
  static __device__ __forceinline__ void add(float (&sums)[CHAINS][4], const Operand (&left)[2],
                                             const Operand& right, int step) {
    DOGE_UNROLL
    for (int k = 0; k < 4; k += 2) {
      float(&chain)[4] = sums[(2 * step + k / 2) % CHAINS];
      const uint32_t rows[4] = {left[0].word[k], left[1].word[k], left[0].word[k + 1],
                                left[1].word[k + 1]};
      const uint32_t columns[2] = {right.word[k], right.word[k + 1]};
      if constexpr (std::is_same_v<T, Bfloat16>)
        multiply_bf16(chain, rows, columns);
      else
        multiply_f16(chain, rows, columns);
    }
  }
};
template <>
struct Product<Bfloat16> : HalfProduct<Bfloat16> {};
template <>
struct Product<Float16> : HalfProduct<Float16> {};

// float64 units round like any other float64 arithmetic.
template <>
struct Product<double> {
  static constexpr int GROUPS_LEFT = 1;
  using Operand = Piece;

  static __device__ __forceinline__ Operand operand(const Piece& piece) { return piece; }

  static __device__ __forceinline__ void add(double (&sums)[2], const Operand (&left)[1],
                                             const Operand& right) {
    DOGE_UNROLL
    for (int k = 0; k < 4; k += 2)
      multiply_f64(sums, double_of(left[0].word[k], left[0].word[k + 1]),
                   double_of(right.word[k], right.word[k + 1]));
  }
};

// sum += the chains, the last first.
template <int CHAINS>
__device__ __forceinline__ void add_chains(float (&sums)[4], const float (&chains)[CHAINS][4]) {
  DOGE_UNROLL
  for (int i = 0; i < 4; ++i) {
    float sum = chains[CHAINS - 1][i];
    DOGE_UNROLL
    for (int c = CHAINS - 2; c >= 0; --c) sum += chains[c][i];
    sums[i] += sum;
  }
}

// Columns of a float32 sum at most; beyond, sums are float64.
constexpr int64_t MAX_FLOAT_COLUMNS = 8192;

}  // namespace doge_fast::cuda
