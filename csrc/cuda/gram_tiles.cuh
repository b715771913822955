// The Gram matrix of up to 64 rows on the matrix units, all of it in the registers of a warp.
//
// Every warp has columns of its own and multiplies all rows with all rows there, so that each element
// is loaded by one lane, split once and never passed on: no shared memory and no barrier before the
// sums are flushed. The next pieces are on their way while these are multiplied.
// Reads each row once; writes one float64 set of tiles per program.
#pragma once

#include "gram_layout.cuh"
#include "gram_products.cuh"

namespace doge_fast::cuda {

constexpr int TILES_WARPS = 4;
constexpr int TILES_THREADS = TILES_WARPS * LANES;
constexpr int MAX_GROUPS = 8;

// Pieces of a row that a lane loads at a time: some eight loads are on their way together.
template <int GROUPS>
constexpr int STEPS = GROUPS == 1 ? 8 : GROUPS == 2 ? 4 : GROUPS <= 4 ? 2 : 1;

// Whether the next pieces are loaded before these are multiplied: where registers are left for them.
template <typename T, int GROUPS>
constexpr bool IS_AHEAD = !std::is_same_v<T, float> || GROUPS < 8;

// Sums of a tile that grow side by side; more tiles hide each other's latency and need the registers.
template <typename T, int GROUPS>
constexpr int TILE_CHAINS = std::is_same_v<T, float> ? (GROUPS <= 3 ? 3 : 1) : GROUPS == 1 ? 2 : 1;

// Rows 8 i + lane / 4 at the lane's columns; zeros past the rows and past the chunk.
template <typename T, int GROUPS>
__device__ __forceinline__ void load_groups(Piece (&pieces)[STEPS<GROUPS>][GROUPS], const Chunk<T>& chunk,
                                            int64_t column, int num_rows, bool is_aligned) {
  constexpr int64_t NEXT = 4 * PER_PIECE<T>;
  const int row = threadIdx.x % LANES / 4;
  const T* from = chunk.first + row * chunk.row_stride + column;
  // Outside the loops: loads that follow each other without a branch are all on their way at once.
  if (is_aligned) {
    DOGE_UNROLL
    for (int i = 0; i < GROUPS; ++i)
      DOGE_UNROLL
      for (int s = 0; s < STEPS<GROUPS>; ++s) {
        const bool is_inside = 8 * i + row < num_rows && column + s * NEXT < chunk.length;
        pieces[s][i] = is_inside ? load16(from + 8 * i * chunk.row_stride + s * NEXT) : Piece{};
      }
  } else {
    DOGE_UNROLL
    for (int i = 0; i < GROUPS; ++i)
      DOGE_UNROLL
      for (int s = 0; s < STEPS<GROUPS>; ++s) {
        const int64_t left = 8 * i + row < num_rows ? chunk.length - column - s * NEXT : 0;
        pieces[s][i] = load_elements(from + 8 * i * chunk.row_stride + s * NEXT, left);
      }
  }
}

template <typename T, int GROUPS>
__device__ __forceinline__ void add_tiles(
    Sum<T> (&sums)[TilesOf<T, GROUPS>::TILES][TilesOf<T, GROUPS>::SUMS],
    const typename Product<T>::Operand (&operands)[STEPS<GROUPS>][GROUPS]) {
  using Tiles = TilesOf<T, GROUPS>;
  using Operand = typename Product<T>::Operand;
  constexpr int HEIGHT = Tiles::HEIGHT;
  constexpr int CHAINS = TILE_CHAINS<T, GROUPS>;
  unroll<Tiles::TILES>([&](auto index) {
    constexpr int TILE = decltype(index)::value;
    constexpr int FIRST = Tiles::tall_of(TILE) * HEIGHT;
    constexpr int GROUP = TILE - Tiles::tile(Tiles::tall_of(TILE), 0);
    // The last tall tile may lack its lower half.
    constexpr int LAST = FIRST + HEIGHT - 1;
    Sum<T> fresh[CHAINS][Tiles::SUMS] = {};
    DOGE_UNROLL
    for (int s = 0; s < STEPS<GROUPS>; ++s) {
      Operand left[HEIGHT];
      left[0] = operands[s][FIRST];
      if constexpr (LAST > FIRST) left[1] = LAST < GROUPS ? operands[s][LAST % GROUPS] : Operand{};
      if constexpr (std::is_same_v<T, double>)
        Product<T>::add(sums[TILE], left, operands[s][GROUP]);
      else
        Product<T>::add(fresh, left, operands[s][GROUP], s);
    }
    if constexpr (!std::is_same_v<T, double>) add_chains(sums[TILE], fresh);
  });
}

// Adds the sums of the warps, one after the other, to `totals`, [ENTRIES].
template <typename T, int GROUPS>
__device__ __forceinline__ void flush_tiles(
    Sum<T> (&sums)[TilesOf<T, GROUPS>::TILES][TilesOf<T, GROUPS>::SUMS], double* totals) {
  using Tiles = TilesOf<T, GROUPS>;
  const int lane = threadIdx.x % LANES;
  for (int turn = 0; turn < TILES_WARPS; ++turn) {
    if (static_cast<int>(threadIdx.x) / LANES == turn)
      unroll<Tiles::TILES * Tiles::SUMS>([&](auto index) {
        constexpr int ENTRY = decltype(index)::value;
        Sum<T>& sum = sums[ENTRY / Tiles::SUMS][ENTRY % Tiles::SUMS];
        totals[ENTRY * LANES + lane] += sum;
        sum = 0;
      });
    __syncthreads();
  }
}

template <typename T, int GROUPS>
__global__ void __launch_bounds__(TILES_THREADS)
    gram_tiles(const int64_t* table, int64_t num_chunks, bool is_aligned, int num_rows, double* partials) {
  using Tiles = TilesOf<T, GROUPS>;
  constexpr int64_t WARP_STEP = STEPS<GROUPS> * 4 * PER_PIECE<T>;
  constexpr int64_t STEP = TILES_WARPS * WARP_STEP;
  __shared__ double totals[Tiles::ENTRIES];
  for (int i = threadIdx.x; i < Tiles::ENTRIES; i += TILES_THREADS) totals[i] = 0;
  __syncthreads();
  Sum<T> sums[Tiles::TILES][Tiles::SUMS] = {};
  // Columns in this warp's sums.
  int64_t run = 0;
  for (int64_t c = blockIdx.x; c < num_chunks; c += gridDim.x) {
    const auto chunk = chunk_at<T>(table + c * GRAM_FIELDS);
    const int64_t longer = (chunk.length + STEP - 1) / STEP * WARP_STEP;
    if (!std::is_same_v<T, double> && run + longer > MAX_FLOAT_COLUMNS) {
      flush_tiles<T, GROUPS>(sums, totals);
      run = 0;
    }
    run += longer;
    // [STEPS, GROUPS] of 16 bytes
    Piece next[STEPS<GROUPS>][GROUPS];
    int64_t column = threadIdx.x / LANES * WARP_STEP + threadIdx.x % 4 * PER_PIECE<T>;
    if (IS_AHEAD<T, GROUPS>) load_groups<T, GROUPS>(next, chunk, column, num_rows, is_aligned);
    for (int64_t start = 0; start < chunk.length; start += STEP) {
      if (!IS_AHEAD<T, GROUPS>) load_groups<T, GROUPS>(next, chunk, column, num_rows, is_aligned);
      typename Product<T>::Operand operands[STEPS<GROUPS>][GROUPS];
      DOGE_UNROLL
      for (int s = 0; s < STEPS<GROUPS>; ++s)
        DOGE_UNROLL
        for (int i = 0; i < GROUPS; ++i) operands[s][i] = Product<T>::operand(next[s][i]);
      column += STEP;
      if (IS_AHEAD<T, GROUPS>) load_groups<T, GROUPS>(next, chunk, column, num_rows, is_aligned);
      add_tiles<T, GROUPS>(sums, operands);
    }
  }
  flush_tiles<T, GROUPS>(sums, totals);
  double* mine = partials + static_cast<int64_t>(blockIdx.x) * Tiles::ENTRIES;
  for (int i = threadIdx.x; i < Tiles::ENTRIES; i += TILES_THREADS) mine[i] = totals[i];
}

}  // namespace doge_fast::cuda
