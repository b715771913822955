// The Gram matrix of up to 64 rows on the matrix units, all of it in the registers of a warp.
//
// A warp multiplies all rows by all rows on its columns, which no other warp reads. So one lane loads an element,
// splits it once and passes it to nobody, and there is no barrier before the sums are flushed. The next pieces
// are copied to shared memory by the lane that will read them: they take no registers while they are in
// flight, and they may belong to the next chunk. SCALED: in the metric of second moments, by whose root the lane
// multiplies what it loaded; float32 alone.
// Reads each row once, and the moments; writes one float64 set of tiles per program.
#pragma once

#include "gram_layout.cuh"
#include "gram_products.cuh"

namespace doge_fast::cuda {

constexpr int TILES_WARPS = 4;
constexpr int TILES_THREADS = TILES_WARPS * LANES;
constexpr int MAX_GROUPS = 8;

// Pieces of a row that a lane multiplies at a time.
template <int GROUPS>
constexpr int STEPS = GROUPS == 1 ? 8 : GROUPS == 2 ? 4 : GROUPS <= 4 ? 2 : 1;

// Stages of a ring in shared memory, [STEPS, GROUPS + SCALED, TILES_THREADS] each; all but one are in flight. Two or three
// blocks fit on a multiprocessor of 164 KB. They have 48 KB or more in flight, enough to hide memory's latency.
template <int GROUPS>
constexpr int TILES_STAGES = STEPS<GROUPS> == 1 && GROUPS < MAX_GROUPS ? 4 : 3;
template <int GROUPS, bool SCALED>
constexpr int STAGE_PIECES = STEPS<GROUPS> * (GROUPS + SCALED) * TILES_THREADS;
template <int GROUPS, bool SCALED>
constexpr size_t TILES_SHARED_BYTES = TILES_STAGES<GROUPS> * STAGE_PIECES<GROUPS, SCALED> * sizeof(Piece);

// Tiles whose products are interleaved, and the chains of each. Six tiles hide the latency of a product. Fewer
// tiles need several chains: three for the products of a split number, or two.
template <typename T, int GROUPS>
constexpr int TILES_TOGETHER = std::is_same_v<T, float> && GROUPS <= 3 ? 1 : 6;
template <typename T, int GROUPS>
constexpr int TILES_CHAINS = std::is_same_v<T, float> ? (GROUPS <= 3 ? 3 : 1) : GROUPS == 1 ? 2 : 1;

// The position of a program's next load.
template <typename T, int GROUPS, bool SCALED>
struct Loads {
  // Pieces of a lane at a step: of its rows, and of their moments.
  static constexpr int WIDTH = GROUPS + SCALED;
  // Columns of a warp, and of the block.
  static constexpr int WARP_STEP = STEPS<GROUPS> * 4 * PER_PIECE<T>;
  static constexpr int STEP = TILES_WARPS * WARP_STEP;

  const int64_t* entry;
  const int64_t* end;
  Chunk<T> chunk;
  const float* moments;
  int64_t start;

  __device__ __forceinline__ Loads(const int64_t* table, const ProgramChunks& chunks)
      : entry(table + chunks.first * GRAM_FIELDS<SCALED>),
        end(table + chunks.last * GRAM_FIELDS<SCALED>),
        chunk(chunk_at<T>(entry)),
        moments(SCALED ? moments_at(entry) : nullptr),
        start(0) {}

  // Starts copying rows 8 i + lane / 4 at this lane's columns to `stage`, where this lane has every
  // TILES_THREADS-th piece; zeros past the rows and past the chunk. Ends a group of copies. Returns false if all
  // chunks were copied before.
  __device__ __forceinline__ bool start_next(Piece* stage, int num_rows, bool is_aligned) {
    const bool is_more = entry < end;
    if (is_more) {
      if (is_aligned)
        copy_aligned(stage, num_rows);
      else
        copy_ragged(stage, num_rows);
      start += STEP;
      if (start >= chunk.length) {
        start = 0;
        entry += GRAM_FIELDS<SCALED>;
        if (entry < end) {
          chunk = chunk_at<T>(entry);
          if constexpr (SCALED) moments = moments_at(entry);
        }
      }
    }
    // Ends a group without copies, too, because wait_for_copies counts groups.
    end_copy_group();
    return is_more;
  }

 private:
  static constexpr int NEXT = 4 * PER_PIECE<T>;

  __device__ __forceinline__ int64_t column() const {
    return start + threadIdx.x / LANES * WARP_STEP + threadIdx.x % 4 * PER_PIECE<T>;
  }

  __device__ __forceinline__ void copy_aligned(Piece* stage, int num_rows) const {
    const int row = threadIdx.x % LANES / 4;
    const T* from = chunk.first + row * chunk.row_stride + column();
    DOGE_UNROLL
    for (int i = 0; i < GROUPS; ++i)
      DOGE_UNROLL
      for (int s = 0; s < STEPS<GROUPS>; ++s) {
        const bool is_inside = 8 * i + row < num_rows && column() + s * NEXT < chunk.length;
        start_copy(stage + (s * WIDTH + i) * TILES_THREADS,
                   is_inside ? from + 8 * i * chunk.row_stride + s * NEXT : chunk.first, is_inside);
      }
    if constexpr (SCALED)
      DOGE_UNROLL
      for (int s = 0; s < STEPS<GROUPS>; ++s) {
        const int64_t at = column() + s * NEXT;
        const bool is_inside = at < chunk.length;
        start_copy(stage + (s * WIDTH + GROUPS) * TILES_THREADS, is_inside ? moments + at : moments, is_inside);
      }
  }

  __device__ __forceinline__ void copy_ragged(Piece* stage, int num_rows) const {
    const int row = threadIdx.x % LANES / 4;
    const T* from = chunk.first + row * chunk.row_stride + column();
    for (int i = 0; i < GROUPS; ++i)
      for (int s = 0; s < STEPS<GROUPS>; ++s) {
        const int64_t left = 8 * i + row < num_rows ? chunk.length - column() - s * NEXT : 0;
        stage[(s * WIDTH + i) * TILES_THREADS] =
            load_elements(from + 8 * i * chunk.row_stride + s * NEXT, left);
      }
    if constexpr (SCALED)
      for (int s = 0; s < STEPS<GROUPS>; ++s) {
        const int64_t at = column() + s * NEXT;
        stage[(s * WIDTH + GROUPS) * TILES_THREADS] = load_elements(moments + at, chunk.length - at);
      }
  }
};

// The roots of the metric at a piece's columns.
__device__ __forceinline__ void roots_of(const Piece& moments, float eps, float (&roots)[4]) {
  DOGE_UNROLL
  for (int i = 0; i < 4; ++i) roots[i] = rsqrtf(divisor_of(float_of(moments.word[i]), eps));
}

__device__ __forceinline__ Piece scaled(Piece piece, const float (&roots)[4]) {
  DOGE_UNROLL
  for (int i = 0; i < 4; ++i) piece.word[i] = bits_of(float_of(piece.word[i]) * roots[i]);
  return piece;
}

template <typename T, int GROUPS>
__device__ __forceinline__ void add_tiles(
    float (&sums)[Tiles::tiles(GROUPS)][Tiles::SUMS],
    const typename Product<T>::Operand (&operands)[STEPS<GROUPS>][GROUPS]) {
  using Operand = typename Product<T>::Operand;
  constexpr int TILES = Tiles::tiles(GROUPS);
  constexpr int TOGETHER = TILES_TOGETHER<T, GROUPS>;
  constexpr int CHAINS = TILES_CHAINS<T, GROUPS>;
  constexpr int PHASES = Product<T>::PHASES;
  unroll<(TILES + TOGETHER - 1) / TOGETHER>([&](auto batch) {
    constexpr int FIRST_TILE = decltype(batch)::value * TOGETHER;
    constexpr int COUNT = TILES - FIRST_TILE < TOGETHER ? TILES - FIRST_TILE : TOGETHER;
    float fresh[COUNT][CHAINS][Tiles::SUMS] = {};
    unroll<STEPS<GROUPS> * PHASES>([&](auto turn) {
      constexpr int STEP = decltype(turn)::value / PHASES;
      constexpr int PHASE = decltype(turn)::value % PHASES;
      unroll<COUNT>([&](auto index) {
        constexpr int TILE = FIRST_TILE + decltype(index)::value;
        constexpr int FIRST = 2 * Tiles::tall_of(TILE);
        constexpr int GROUP = TILE - Tiles::tile(Tiles::tall_of(TILE), 0);
        constexpr int CHAIN = Product<T>::chain(PHASE, CHAINS);
        // The last tall tile may lack its lower half.
        const Operand left[2] = {operands[STEP][FIRST],
                                 FIRST + 1 < GROUPS ? operands[STEP][(FIRST + 1) % GROUPS] : Operand{}};
        Product<T>::template multiply<PHASE>(
            fresh[decltype(index)::value][CHAIN], left, operands[STEP][GROUP]);
      });
    });
    unroll<COUNT>([&](auto index) {
      add_chains(sums[FIRST_TILE + decltype(index)::value], fresh[decltype(index)::value]);
    });
  });
}

// Adds the sums of the warps, one after the other, to `totals`, [ENTRIES].
template <int TILES>
__device__ __forceinline__ void flush_tiles(float (&sums)[TILES][Tiles::SUMS], double* totals) {
  const int lane = threadIdx.x % LANES;
  for (int turn = 0; turn < TILES_WARPS; ++turn) {
    if (static_cast<int>(threadIdx.x) / LANES == turn)
      unroll<TILES * Tiles::SUMS>([&](auto index) {
        constexpr int ENTRY = decltype(index)::value;
        float& sum = sums[ENTRY / Tiles::SUMS][ENTRY % Tiles::SUMS];
        totals[ENTRY * LANES + lane] += sum;
        sum = 0;
      });
    __syncthreads();
  }
}

template <typename T, int GROUPS, bool SCALED>
__global__ void __launch_bounds__(TILES_THREADS)
    gram_tiles(const int64_t* table, int64_t num_chunks, bool is_aligned, int num_rows, float eps,
               double* partials) {
  static_assert(!SCALED || std::is_same_v<T, float>);
  using Loads = Loads<T, GROUPS, SCALED>;
  constexpr int ENTRIES = Tiles::entries(GROUPS);
  constexpr int STAGES = TILES_STAGES<GROUPS>;
  __shared__ double totals[ENTRIES];
  for (int i = threadIdx.x; i < ENTRIES; i += TILES_THREADS) totals[i] = 0;
  __syncthreads();
  // [STAGES, STEPS, GROUPS + SCALED, TILES_THREADS]; this thread has one index of the last dimension.
  Piece* stages = dynamic_shared() + threadIdx.x;
  Loads loads(table, ProgramChunks::of(blockIdx.x, gridDim.x, num_chunks));
  // Stages that are in flight or have arrived.
  int ahead = 0;
  for (int stage = 0; stage < STAGES - 1; ++stage)
    ahead += loads.start_next(stages + stage * STAGE_PIECES<GROUPS, SCALED>, num_rows, is_aligned);
  float sums[Tiles::tiles(GROUPS)][Tiles::SUMS] = {};
  // Columns that this warp has added since the last flush.
  int run = 0;
  for (int stage = 0; ahead > 0; stage = stage + 1 < STAGES ? stage + 1 : 0) {
    if (run + Loads::WARP_STEP > MAX_FLOAT_COLUMNS) {
      flush_tiles(sums, totals);
      run = 0;
    }
    run += Loads::WARP_STEP;
    wait_for_copies<STAGES - 2>();
    const Piece* arrived = stages + stage * STAGE_PIECES<GROUPS, SCALED>;
    typename Product<T>::Operand operands[STEPS<GROUPS>][GROUPS];
    DOGE_UNROLL
    for (int s = 0; s < STEPS<GROUPS>; ++s) {
      const Piece* step = arrived + s * Loads::WIDTH * TILES_THREADS;
      float roots[4];
      if constexpr (SCALED) roots_of(step[GROUPS * TILES_THREADS], eps, roots);
      DOGE_UNROLL
      for (int i = 0; i < GROUPS; ++i) {
        const Piece& piece = step[i * TILES_THREADS];
        operands[s][i] = Product<T>::operand(SCALED ? scaled(piece, roots) : piece);
      }
    }
    // The previous stage is free: its pieces are multiplied.
    Piece* free = stages + (stage > 0 ? stage - 1 : STAGES - 1) * STAGE_PIECES<GROUPS, SCALED>;
    ahead += loads.start_next(free, num_rows, is_aligned) - 1;
    add_tiles<T, GROUPS>(sums, operands);
  }
  flush_tiles(sums, totals);
  double* mine = partials + static_cast<int64_t>(blockIdx.x) * ENTRIES;
  for (int i = threadIdx.x; i < ENTRIES; i += TILES_THREADS) mine[i] = totals[i];
}

}  // namespace doge_fast::cuda
