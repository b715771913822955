// The Gram matrix of few float32 rows: one exact multiply-add per column and pair of rows.
//
// A thread holds a sum for every pair. It loads 16 bytes of every row at a time, and multiplies them while the
// next ones arrive. 8 rows take 1.1 multiply-adds per byte: memory-bound on any GPU with 16-byte loads. SCALED: in
// the metric of second moments, by which a row is multiplied once for all its pairs.
// Reads each row once, and the moments; writes one float64 triangle per program.
#pragma once

#include "gram_layout.cuh"
#include "gram_products.cuh"

namespace doge_fast::cuda {

constexpr int PAIRS_THREADS = 256;
constexpr int PAIRS_WARPS = PAIRS_THREADS / LANES;
template <int ROWS>
constexpr int PAIRS_OF = ROWS * (ROWS + 1) / 2;

// [ROWS] pieces at `column` of a chunk, and one of its moments; zeros past its end.
template <int ROWS, bool SCALED>
__device__ __forceinline__ void load_column(Piece (&pieces)[ROWS + SCALED], const Chunk<float>& chunk,
                                            const float* moments, int64_t column, bool is_aligned) {
  const float* from = chunk.first + column;
  // The branch is outside the loop, so that all loads are in flight at once.
  if (is_aligned) {
    const bool is_inside = column < chunk.length;
    DOGE_UNROLL
    for (int r = 0; r < ROWS; ++r) pieces[r] = is_inside ? load16(from + r * chunk.row_stride) : Piece{};
    if constexpr (SCALED) pieces[ROWS] = is_inside ? load16(moments + column) : Piece{};
  } else {
    DOGE_UNROLL
    for (int r = 0; r < ROWS; ++r)
      pieces[r] = load_elements(from + r * chunk.row_stride, chunk.length - column);
    if constexpr (SCALED) pieces[ROWS] = load_elements(moments + column, chunk.length - column);
  }
}

template <int ROWS, bool SCALED>
__device__ __forceinline__ void add_products(float (&sums)[PAIRS_OF<ROWS>],
                                             const Piece (&pieces)[ROWS + SCALED], float eps) {
  DOGE_UNROLL
  for (int k = 0; k < 4; ++k) {
    float metric = 1;
    if constexpr (SCALED) metric = 1 / divisor_of(float_of(pieces[ROWS].word[k]), eps);
    DOGE_UNROLL
    for (int i = 0; i < ROWS; ++i) {
      const float left = SCALED ? float_of(pieces[i].word[k]) * metric : float_of(pieces[i].word[k]);
      DOGE_UNROLL
      for (int j = 0; j <= i; ++j) {
        float& sum = sums[i * (i + 1) / 2 + j];
        sum = fmaf(left, float_of(pieces[j].word[k]), sum);
      }
    }
  }
}

// Adds the sums of all threads in a fixed order; `total` of thread t is that of pair t.
template <int PAIRS>
__device__ __forceinline__ void flush(float (&sums)[PAIRS], double (*shared)[PAIRS], double& total) {
  DOGE_UNROLL
  for (int pair = 0; pair < PAIRS; ++pair) {
    const double sum = warp_sum(static_cast<double>(sums[pair]));
    if (threadIdx.x % LANES == 0) shared[threadIdx.x / LANES][pair] = sum;
    sums[pair] = 0;
  }
  __syncthreads();
  if (threadIdx.x < PAIRS)
    for (int warp = 0; warp < PAIRS_WARPS; ++warp) total += shared[warp][threadIdx.x];
  __syncthreads();
}

template <int ROWS, bool SCALED>
__global__ void __launch_bounds__(PAIRS_THREADS)
    gram_pairs(const int64_t* table, int64_t num_chunks, bool is_aligned, float eps, double* partials) {
  constexpr int PAIRS = PAIRS_OF<ROWS>;
  constexpr int64_t STEP = PAIRS_THREADS * PER_PIECE<float>;
  static_assert(PAIRS <= PAIRS_THREADS);
  __shared__ double shared[PAIRS_WARPS][PAIRS];
  float sums[PAIRS] = {};
  double total = 0;
  // Columns that this thread has added since the last flush.
  int64_t run = 0;
  const auto mine = ProgramChunks::of(blockIdx.x, gridDim.x, num_chunks);
  for (int64_t c = mine.first; c < mine.last; ++c) {
    const int64_t* entry = table + c * GRAM_FIELDS<SCALED>;
    const auto chunk = chunk_at<float>(entry);
    const float* moments = SCALED ? moments_at(entry) : nullptr;
    const int64_t longer = (chunk.length + STEP - 1) / STEP * PER_PIECE<float>;
    if (run + longer > MAX_FLOAT_COLUMNS) {
      flush<PAIRS>(sums, shared, total);
      run = 0;
    }
    run += longer;
    // [ROWS] of 4 columns, and their moments
    Piece next[ROWS + SCALED];
    int64_t column = threadIdx.x * PER_PIECE<float>;
    load_column<ROWS, SCALED>(next, chunk, moments, column, is_aligned);
    for (int64_t start = 0; start < chunk.length; start += STEP) {
      Piece pieces[ROWS + SCALED];
      DOGE_UNROLL
      for (int r = 0; r < ROWS + SCALED; ++r) pieces[r] = next[r];
      column += STEP;
      load_column<ROWS, SCALED>(next, chunk, moments, column, is_aligned);
      add_products<ROWS, SCALED>(sums, pieces, eps);
    }
  }
  flush<PAIRS>(sums, shared, total);
  if (threadIdx.x < PAIRS) partials[static_cast<int64_t>(blockIdx.x) * PAIRS + threadIdx.x] = total;
}

}  // namespace doge_fast::cuda
