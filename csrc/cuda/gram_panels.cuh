// The Gram matrix of more than 64 rows on the matrix units: pairs of panels of 128 rows.
//
// A block multiplies two panels, or one with itself: one pass over the rows up to 128 of them. Stages
// of 64 bytes a row wait in shared memory, several under way at a time; a stage is read as it was
// written, 16 bytes a lane, without bank conflicts: 8 lanes read two rows, 128 adjacent bytes. A warp
// holds the sums of 32 rows by 64.
// Reads a panel once for every pair that it is in; writes one float64 square per program and pair.
#pragma once

#include "gram_layout.cuh"
#include "gram_products.cuh"

namespace doge_fast::cuda {

constexpr int PANELS_WARPS = 8;
constexpr int PANELS_THREADS = PANELS_WARPS * LANES;
constexpr int PANEL = Panels::SIDE;
constexpr int STAGES = 4;
// 64 bytes.
constexpr int PIECES_PER_ROW = 4;
constexpr int PANEL_PIECES = PANEL * PIECES_PER_ROW;

constexpr size_t panels_shared_bytes(bool has_two) {
  return STAGES * (has_two ? 2 : 1) * PANEL_PIECES * sizeof(Piece);
}

// Sums of a tile that grow side by side: all of its products of a stage.
template <typename T>
constexpr int PANEL_CHAINS = std::is_same_v<T, float> ? 3 : std::is_same_v<T, double> ? 1 : 2;

template <typename T>
struct PanelTiles {
  static constexpr int GROUPS_LEFT = Product<T>::GROUPS_LEFT;
  static constexpr int SUMS = GROUPS_LEFT == 2 ? 4 : 2;
  static constexpr int TALL = 4 / GROUPS_LEFT;
  static constexpr int WIDE = 8;
  Sum<T> sums[TALL][WIDE][SUMS];
};

// Rows from the first of either panel to the last one that there is.
struct PanelPair {
  int left_rows;
  int right_rows;
  bool is_diagonal;
};

// Where a warp's sums stand within the pair, and those of its tiles that hold anything that is wanted.
struct WarpPlace {
  int row;
  int column;
  // Bit 8 tall + group.
  uint32_t wanted;

  __device__ __forceinline__ bool wants(int tall, int group) const { return wanted >> (8 * tall + group) & 1U; }
  __device__ __forceinline__ bool wants(int group) const { return (wanted >> group & 0x01010101U) != 0; }
};

// Below the diagonal is most of the work: the four schedulers, each with every fourth warp, get 16, 16,
// 20 and 20 tiles of it.
template <typename T>
__device__ __forceinline__ WarpPlace warp_place(int warp, const PanelPair& pair) {
  constexpr int HEIGHT = 8 * Product<T>::GROUPS_LEFT;
  WarpPlace place = {static_cast<int>(0x02103132U >> 4 * warp & 3U) * 32,
                     static_cast<int>(0x78U >> warp & 1U) * 64, 0};
  for (int tall = 0; tall < PanelTiles<T>::TALL; ++tall)
    for (int group = 0; group < PanelTiles<T>::WIDE; ++group) {
      const int row = place.row + tall * HEIGHT;
      const int column = place.column + 8 * group;
      const bool is_wanted = row < pair.left_rows && column < pair.right_rows &&
                             (!pair.is_diagonal || row + HEIGHT > column);
      place.wanted |= static_cast<uint32_t>(is_wanted) << (8 * tall + group);
    }
  return place;
}

// Starts copying one stage of a panel: `rows`, [PANEL, PIECES_PER_ROW], at columns from `column` on.
template <typename T>
__device__ __forceinline__ void start_stage(Piece* rows, const Chunk<T>& chunk, int64_t column, int num_rows,
                                            bool is_aligned) {
  // Rows that pad the last tile are zeros.
  const int padded = num_rows < PANEL ? (num_rows + 15) / 16 * 16 : PANEL;
  for (int i = threadIdx.x; i < padded * PIECES_PER_ROW; i += PANELS_THREADS) {
    const int row = i / PIECES_PER_ROW;
    const int64_t at = column + i % PIECES_PER_ROW * PER_PIECE<T>;
    const bool is_inside = row < num_rows && at < chunk.length;
    const T* from = chunk.first + (is_inside ? row * chunk.row_stride + at : 0);
    if (is_aligned)
      start_copy(rows + i, from, is_inside);
    else
      rows[i] = load_elements(from, is_inside ? chunk.length - at : 0);
  }
}

template <typename T>
__device__ __forceinline__ void add_stage(PanelTiles<T>& tiles, const Piece* left_rows,
                                          const Piece* right_rows, const WarpPlace& place) {
  using Tiles = PanelTiles<T>;
  using Operand = typename Product<T>::Operand;
  constexpr int HEIGHT = 8 * Tiles::GROUPS_LEFT;
  constexpr int CHAINS = PANEL_CHAINS<T>;
  // Of 8 rows, what a lane holds: row lane / 4, piece lane % 4, one after the other.
  const int lane = threadIdx.x % LANES;
  Operand left[Tiles::TALL][Tiles::GROUPS_LEFT];
  DOGE_UNROLL
  for (int tall = 0; tall < Tiles::TALL; ++tall)
    DOGE_UNROLL
    for (int h = 0; h < Tiles::GROUPS_LEFT; ++h) {
      const int row = place.row + tall * HEIGHT + 8 * h;
      left[tall][h] = Product<T>::operand(left_rows[row * PIECES_PER_ROW + lane]);
    }
  DOGE_UNROLL
  for (int group = 0; group < Tiles::WIDE; ++group) {
    if (!place.wants(group)) continue;
    const int column = place.column + 8 * group;
    const Operand right = Product<T>::operand(right_rows[column * PIECES_PER_ROW + lane]);
    DOGE_UNROLL
    for (int tall = 0; tall < Tiles::TALL; ++tall) {
      if (!place.wants(tall, group)) continue;
      Sum<T> fresh[CHAINS][Tiles::SUMS] = {};
      unroll<Product<T>::PHASES>([&](auto phase) {
        constexpr int PHASE = decltype(phase)::value;
        constexpr int CHAIN = Product<T>::chain(PHASE, CHAINS);
        Product<T>::template multiply<PHASE>(fresh[CHAIN], left[tall], right);
      });
      add_chains(tiles.sums[tall][group], fresh);
    }
  }
}

// Writes the sums into `square`, [PANEL, PANEL], or adds them to it; every entry has one thread.
template <typename T>
__device__ __forceinline__ void flush_panels(PanelTiles<T>& tiles, double* square, const WarpPlace& place,
                                             bool is_first) {
  using Tiles = PanelTiles<T>;
  constexpr int HEIGHT = 8 * Tiles::GROUPS_LEFT;
  const int lane = threadIdx.x % LANES;
  DOGE_UNROLL
  for (int tall = 0; tall < Tiles::TALL; ++tall)
    DOGE_UNROLL
    for (int group = 0; group < Tiles::WIDE; ++group) {
      if (!place.wants(tall, group)) continue;
      const int top = place.row + tall * HEIGHT;
      const int column = place.column + 8 * group;
      DOGE_UNROLL
      for (int i = 0; i < Tiles::SUMS; ++i) {
        double& entry = square[(top + 8 * (i / 2) + lane / 4) * PANEL + column + 2 * (lane % 4) + i % 2];
        entry = is_first ? tiles.sums[tall][group][i] : entry + tiles.sums[tall][group][i];
        tiles.sums[tall][group][i] = 0;
      }
    }
}

template <typename T>
__global__ void __launch_bounds__(PANELS_THREADS, sizeof(Sum<T>) > 4 ? 1 : 2)
    gram_panels(const int64_t* table, int64_t num_chunks, bool is_aligned, int num_rows, double* partials) {
  constexpr int64_t STEP = PIECES_PER_ROW * PER_PIECE<T>;
  // Pairs of the same chunks start together: the second-level cache has the panels that they share.
  const Entry panels = Triangle::entry(blockIdx.x);
  const PanelPair pair = {num_rows - PANEL * panels.row, num_rows - PANEL * panels.column,
                          panels.row == panels.column};
  const WarpPlace place = warp_place<T>(threadIdx.x / LANES, pair);
  // [STAGES, 1 or 2, PANEL, PIECES_PER_ROW]
  Piece* stages = dynamic_shared();
  const int stage_pieces = pair.is_diagonal ? PANEL_PIECES : 2 * PANEL_PIECES;
  const int right_offset = pair.is_diagonal ? 0 : PANEL_PIECES;
  double* square =
      partials + (static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x) * Panels::ENTRIES;

  PanelTiles<T> tiles = {};
  bool is_first = true;
  int64_t run = 0;
  const auto mine = ProgramChunks::of(blockIdx.y, gridDim.y, num_chunks);
  for (int64_t c = mine.first; c < mine.last; ++c) {
    const auto chunk = chunk_at<T>(table + c * GRAM_FIELDS);
    if (!std::is_same_v<T, double> && run > 0 && run + chunk.length > MAX_FLOAT_COLUMNS) {
      flush_panels(tiles, square, place, is_first);
      is_first = false;
      run = 0;
    }
    run += chunk.length;
    const Chunk<T> left = {chunk.first + panels.row * PANEL * chunk.row_stride, chunk.row_stride,
                           chunk.length};
    const Chunk<T> right = {chunk.first + panels.column * PANEL * chunk.row_stride, chunk.row_stride,
                            chunk.length};
    const int num_steps = static_cast<int>((chunk.length + STEP - 1) / STEP);
    const auto start = [&](int step) {
      if (step < num_steps) {
        Piece* stage = stages + step % STAGES * stage_pieces;
        start_stage(stage, left, step * STEP, pair.left_rows, is_aligned);
        if (!pair.is_diagonal)
          start_stage(stage + right_offset, right, step * STEP, pair.right_rows, is_aligned);
      }
      // Empty groups keep the count at the end of a chunk.
      end_copy_group();
    };
    for (int step = 0; step < STAGES - 1; ++step) start(step);
    for (int step = 0; step < num_steps; ++step) {
      wait_for_copies<STAGES - 2>();
      // Everybody's copies have arrived, and everybody is done with the stage that is written next.
      __syncthreads();
      start(step + STAGES - 1);
      const Piece* stage = stages + step % STAGES * stage_pieces;
      add_stage(tiles, stage, stage + right_offset, place);
    }
    // The next chunk writes the stages that the slowest warp may still read.
    __syncthreads();
  }
  flush_panels(tiles, square, place, is_first);
}

}  // namespace doge_fast::cuda
