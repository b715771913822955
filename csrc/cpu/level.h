// The arithmetic of the operators, once per instruction set: what a level offers, and which one runs.
//
// Everything that touches columns is compiled once for each level, into a namespace of its name; checks,
// work sharing and registration are compiled once, for the oldest CPU of the architecture. The level is
// chosen when the first operator runs, so that one library serves every CPU of its architecture.
#pragma once

#include <cstdint>

namespace doge_fast {

// Storage types, as levels know them.
enum class Storage : int32_t { float32, float64, bfloat16, float16 };

struct Term {
  int64_t row;
  double coefficient;
};

// Rows of equal length, any distance apart.
struct Rows {
  const void* data;
  int64_t row_stride;
  int64_t num_rows;
  Storage storage;
};

struct Level {
  const char* name;

  // Products of all pairs of rows over `columns` columns from `first` on, onto the sums of a piece.
  // `scratch`: gram_scratch_bytes(); `sums`: gram_sum_bytes(), zero at the beginning of a piece.
  void (*gram_add)(const Rows& rows, int64_t first, int64_t columns, void* scratch, void* sums);
  // What a piece has added up, one number per pair.
  void (*gram_end)(const void* sums, int64_t num_rows, double* pairs);

  // out = sum over terms, on `columns` columns from `first` on.
  void (*weighted_sum)(const Rows& rows, int64_t first, int64_t columns, const Term* terms,
                       int64_t num_terms, Storage out_storage, void* out, bool past_cache);

  // row = grad, or row += grad, on n elements.
  void (*accumulate)(const void* grad, Storage grad_storage, void* row, Storage row_storage, int64_t n,
                     bool add, bool past_cache);
};

// Sizes that do not depend on the level: work is dealt out and memory laid out before one is chosen.

// What a level may call a register at most.
constexpr int64_t MAX_VECTOR_BYTES = 64;

// Columns of a tile at most: up to 768 rows of float32, and those of the next tile, fit in the second-level
// cache.
constexpr int64_t tile_columns(int64_t num_rows) {
  constexpr int64_t most = 512, least = 64, second_level_bytes = 192 << 10;
  const int64_t fit = second_level_bytes / static_cast<int64_t>(sizeof(float)) / num_rows / 64 * 64;
  return fit < least ? least : fit > most ? most : fit;
}

// A tile of copied rows, of float64 at most, with a cache line between them, so that equal columns of the rows
// do not share a cache set.
constexpr int64_t gram_scratch_bytes(int64_t num_rows) {
  return num_rows * (tile_columns(num_rows) * static_cast<int64_t>(sizeof(double)) + 64);
}

// Per pair a register of float32 sums and one of float64 sums.
constexpr int64_t gram_sum_bytes(int64_t num_pairs) { return num_pairs * 2 * MAX_VECTOR_BYTES; }

// The best level that this CPU has, or the one that DOGE_FAST_CPU_LEVEL names.
// Throws std::runtime_error if it names one that is not there.
const Level& level();

}  // namespace doge_fast
