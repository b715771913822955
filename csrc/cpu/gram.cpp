// gram_RR = sum over blocks of block block^T, in one pass over memory.
//
// Reads every block once (R*N elements); writes R*R doubles. A tile of columns that fits in the
// first-level cache (the second, for many rows) serves every pair of rows. float32 products are
// added up in registers over one tile and in float64 from there on; which columns make up a partial
// sum, and in which order those are added, follows from the sizes alone: the result is bitwise the
// same for any number of threads.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <memory>
#include <vector>

#include "../check.h"
#include "schedule.h"
#include "vectors.h"

namespace doge_fast {
namespace {

constexpr int64_t MAX_ROWS = 512;
// Rows whose products with each other, and with PARTNERS rows above, are held in registers:
// PANEL * PARTNERS sums, PANEL rows and one more operand must fit in 16 registers, or in 32.
constexpr int64_t PANEL = 4;
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int64_t PARTNERS = 6;
#else
constexpr int64_t PARTNERS = 3;
#endif
// Up to so many rows a tile is read where it lies, in steps this short: the next columns arrive while
// these are multiplied only if the processor can look that far ahead, and rows a multiple of 4096
// bytes apart compete for the same cache sets. More rows than that are copied together first, which
// costs little beside R*R/2 products.
constexpr int64_t MAX_ROWS_IN_PLACE = 16;
constexpr int64_t COLUMNS_IN_PLACE = 128;
constexpr int64_t CACHE_LINE = 64;

// Columns of one copied tile, and the unit in which work is dealt out: the rows of a tile fit in the
// first-level cache when they are few, in the second when they are many. At most 8192, so that a
// float32 sum stays short.
int64_t tile_columns(int64_t num_rows) {
  if (num_rows <= MAX_ROWS_IN_PLACE) return 256;
  constexpr int64_t most = 512, second_level_bytes = 192 << 10;
  const int64_t fit = second_level_bytes / static_cast<int64_t>(sizeof(float)) / num_rows;
  return std::clamp<int64_t>(fit / 32 * 32, 32, most);
}
static_assert(COLUMNS_IN_PLACE <= 8192);

int64_t pair_index(int64_t row, int64_t partner) { return row * (row + 1) / 2 + partner; }

using Sum = Vector<double>;

// A register of products onto a register of doubles.
[[gnu::always_inline]] inline void flush(Sum& total, Vector<double> sum) { total += sum; }
[[gnu::always_inline]] inline void flush(Sum& total, Vector<float> sum) {
  using HalfVector = VectorOf<float, VECTOR_BYTES / 2>::type;
  HalfVector halves[2];
  std::memcpy(halves, &sum, sizeof(sum));
  total += __builtin_convertvector(halves[0], Sum) + __builtin_convertvector(halves[1], Sum);
}

// ROWS rows from `row` on, with each other.
template <typename T, int64_t ROWS>
void add_panel(const T* rows_RC, int64_t row_stride, int64_t row, int64_t columns, Sum* totals) {
  const T* panel = rows_RC + row * row_stride;
  Vector<T> sums[ROWS * (ROWS + 1) / 2] = {};
  for (int64_t column = 0; column < columns; column += LANES<T>) {
    Vector<T> value[ROWS];
#pragma GCC unroll 8
    for (int64_t i = 0; i < ROWS; ++i) value[i] = load(panel + i * row_stride + column);
#pragma GCC unroll 8
    for (int64_t i = 0; i < ROWS; ++i)
#pragma GCC unroll 8
      for (int64_t j = 0; j <= i; ++j) sums[i * (i + 1) / 2 + j] += value[i] * value[j];
  }
#pragma GCC unroll 8
  for (int64_t i = 0; i < ROWS; ++i)
#pragma GCC unroll 8
    for (int64_t j = 0; j <= i; ++j)
      flush(totals[pair_index(row + i, row + j)], sums[i * (i + 1) / 2 + j]);
}

// ROWS rows from `row` on, with WITH rows from `partner` on.
template <typename T, int64_t ROWS, int64_t WITH>
void add_block(const T* rows_RC, int64_t row_stride, int64_t row, int64_t partner, int64_t columns,
               Sum* totals) {
  const T* panel = rows_RC + row * row_stride;
  const T* partners = rows_RC + partner * row_stride;
  Vector<T> sums[ROWS * WITH] = {};
  for (int64_t column = 0; column < columns; column += LANES<T>) {
    // The partners wait in registers, the panel passes by: the other way round needs one register
    // more than AVX2 has, and every load is then repeated.
    Vector<T> other[WITH];
#pragma GCC unroll 8
    for (int64_t j = 0; j < WITH; ++j) other[j] = load(partners + j * row_stride + column);
#pragma GCC unroll 8
    for (int64_t i = 0; i < ROWS; ++i) {
      const Vector<T> value = load(panel + i * row_stride + column);
#pragma GCC unroll 8
      for (int64_t j = 0; j < WITH; ++j) sums[i * WITH + j] += value * other[j];
    }
  }
#pragma GCC unroll 8
  for (int64_t i = 0; i < ROWS; ++i)
#pragma GCC unroll 8
    for (int64_t j = 0; j < WITH; ++j)
      flush(totals[pair_index(row + i, partner + j)], sums[i * WITH + j]);
}

template <typename T, int64_t ROWS, int64_t WITH>
void add_block_of(int64_t width, const T* rows_RC, int64_t row_stride, int64_t row, int64_t partner,
                  int64_t columns, Sum* totals) {
  if constexpr (WITH > 1) {
    if (width < WITH)
      return add_block_of<T, ROWS, WITH - 1>(width, rows_RC, row_stride, row, partner, columns, totals);
  }
  add_block<T, ROWS, WITH>(rows_RC, row_stride, row, partner, columns, totals);
}

template <typename T, int64_t ROWS>
void add_rows(const T* rows_RC, int64_t row_stride, int64_t row, int64_t columns, Sum* totals) {
  add_panel<T, ROWS>(rows_RC, row_stride, row, columns, totals);
  // The rows above in shares as equal as can be: 4 as 2 + 2, not 3 + 1, which would wait on latency.
  const int64_t num_shares = (row + PARTNERS - 1) / PARTNERS;
  for (int64_t share = 0; share < num_shares; ++share) {
    const int64_t partner = row * share / num_shares;
    const int64_t width = row * (share + 1) / num_shares - partner;
    add_block_of<T, ROWS, PARTNERS>(width, rows_RC, row_stride, row, partner, columns, totals);
  }
}

// All pairs of rows on one tile; `columns` is a multiple of LANES<T>.
template <typename T>
void add_tile(const T* rows_RC, int64_t row_stride, int64_t num_rows, int64_t columns, Sum* totals) {
  int64_t row = 0;
  for (; row + PANEL <= num_rows; row += PANEL)
    add_rows<T, PANEL>(rows_RC, row_stride, row, columns, totals);
  switch (num_rows - row) {
    case 1:
      return add_rows<T, 1>(rows_RC, row_stride, row, columns, totals);
    case 2:
      return add_rows<T, 2>(rows_RC, row_stride, row, columns, totals);
    case 3:
      return add_rows<T, 3>(rows_RC, row_stride, row, columns, totals);
  }
}
static_assert(PANEL == 4, "add_tile lists the widths of a last, narrower panel");

struct Block {
  const void* data;
  int64_t row_stride;
  int64_t columns;
  ScalarType dtype;
};

// What one worker needs: a tile of widened rows, and the running sums of the piece in hand.
class Worker {
 public:
  explicit Worker(int64_t num_rows)
      : num_rows_(num_rows),
        tile_(tile_columns(num_rows)),
        num_pairs_(pair_index(num_rows, 0)),
        // One line more than a tile, so that equal columns of the rows do not share a cache set.
        tile_stride_(tile_ + CACHE_LINE / static_cast<int64_t>(sizeof(double))),
        rows_RC_(aligned_array(num_rows * tile_stride_ * sizeof(double))),
        totals_(aligned_array(num_pairs_ * sizeof(Sum))) {}

  void begin() { std::memset(totals_.get(), 0, num_pairs_ * sizeof(Sum)); }

  void add(const Block& block, int64_t first, int64_t last) {
    with_type(block.dtype, [&](auto zero) {
      using T = decltype(zero);
      const T* rows_RN = static_cast<const T*>(block.data) + first;
      add_span(rows_RN, block.row_stride, last - first);
    });
  }

  void end(double* partial_pairs) const {
    for (int64_t pair = 0; pair < num_pairs_; ++pair) {
      const Sum total = totals()[pair];
      double sum = 0;
      for (int64_t lane = 0; lane < LANES<double>; ++lane) sum += total[lane];
      partial_pairs[pair] = sum;
    }
  }

 private:
  struct Free {
    void operator()(void* memory) const { ::operator delete[](memory, std::align_val_t{CACHE_LINE}); }
  };
  using Array = std::unique_ptr<void, Free>;
  static Array aligned_array(size_t bytes) {
    return Array(::operator new[](bytes, std::align_val_t{CACHE_LINE}));
  }

  Sum* totals() const { return static_cast<Sum*>(totals_.get()); }

  template <typename T>
  void add_span(const T* rows_RN, int64_t row_stride, int64_t columns) {
    using A = Accumulator<T>;
    int64_t column = 0;
    if constexpr (std::is_same_v<T, A>) {
      const int64_t whole = num_rows_ <= MAX_ROWS_IN_PLACE ? columns / LANES<A> * LANES<A> : 0;
      for (; column < whole; column += COLUMNS_IN_PLACE)
        add_tile(rows_RN + column, row_stride, num_rows_, std::min(COLUMNS_IN_PLACE, whole - column),
                 totals());
      column = whole;
    }
    for (; column < columns; column += tile_)
      add_copy(rows_RN + column, row_stride, std::min(tile_, columns - column));
  }

  // Rows that are widened, too many, or not whole registers long: by way of the scratch tile.
  template <typename T>
  void add_copy(const T* rows_RN, int64_t row_stride, int64_t columns) {
    using A = Accumulator<T>;
    A* rows_RC = static_cast<A*>(rows_RC_.get());
    const int64_t padded = (columns + LANES<A> - 1) / LANES<A> * LANES<A>;
    for (int64_t row = 0; row < num_rows_; ++row) {
      A* to = rows_RC + row * tile_stride_;
      widen(rows_RN + row * row_stride, to, columns);
      std::fill(to + columns, to + padded, A{0});
    }
    add_tile(rows_RC, tile_stride_, num_rows_, padded, totals());
  }

  int64_t num_rows_;
  int64_t tile_;
  int64_t num_pairs_;
  int64_t tile_stride_;
  Array rows_RC_;
  Array totals_;
};

// Pieces of work, each with its own partial sums: enough to share out evenly among many threads, and
// no more than 64 MiB of sums.
int64_t choose_num_pieces(int64_t num_units, int64_t num_pairs) {
  constexpr int64_t most = 256, partial_bytes = 64 << 20;
  const int64_t fit = partial_bytes / (num_pairs * static_cast<int64_t>(sizeof(double)));
  return std::min(num_units, std::clamp<int64_t>(fit, 1, most));
}

Tensor gram(TensorList blocks) {
  const int64_t num_rows = check_blocks(blocks, "gram");
  DOGE_CHECK(1 <= num_rows && num_rows <= MAX_ROWS, "gram needs 1 to ", MAX_ROWS,
             " rows; received ", num_rows, ".");
  std::vector<Block> table;
  std::vector<int64_t> lengths;
  int64_t num_bytes = 0;
  for (const Tensor& block : blocks) {
    table.push_back({block.const_data_ptr(), block.stride(0), block.size(1), block.scalar_type()});
    lengths.push_back(block.size(1));
    num_bytes += block.numel() * static_cast<int64_t>(block.element_size());
  }
  const Columns columns(std::move(lengths), tile_columns(num_rows));
  const int64_t num_pairs = pair_index(num_rows, 0);
  const int64_t num_pieces = choose_num_pieces(columns.num_units(), num_pairs);
  std::vector<double> partial_pairs(num_pieces * num_pairs);
  for_each_piece(
      num_pieces, num_bytes, [&] { return Worker(num_rows); },
      [&](int64_t piece, Worker& worker) {
        worker.begin();
        columns.for_each_span(piece, num_pieces, [&](const Columns::Span& span) {
          worker.add(table[span.tensor], span.first, span.last);
        });
        worker.end(partial_pairs.data() + piece * num_pairs);
      });

  Tensor gram_RR = torch::stable::new_empty(blocks[0], {num_rows, num_rows}, ScalarType::Double);
  double* out = static_cast<double*>(gram_RR.mutable_data_ptr());
  for (int64_t row = 0; row < num_rows; ++row) {
    for (int64_t partner = 0; partner <= row; ++partner) {
      double sum = 0;
      for (int64_t piece = 0; piece < num_pieces; ++piece)
        sum += partial_pairs[piece * num_pairs + pair_index(row, partner)];
      out[row * num_rows + partner] = out[partner * num_rows + row] = sum;
    }
  }
  return gram_RR;
}

STABLE_TORCH_LIBRARY_FRAGMENT(doge_fast_cpp, library) {
  library.def("gram(Tensor[] blocks) -> Tensor");
}
// Whatever the device, so that a tensor elsewhere and an empty list get our message, not the
// dispatcher's.
STABLE_TORCH_LIBRARY_IMPL(doge_fast_cpp, CompositeExplicitAutograd, library) {
  library.impl("gram", TORCH_BOX(&gram));
}

}  // namespace
}  // namespace doge_fast
