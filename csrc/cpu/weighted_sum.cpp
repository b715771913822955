// outs[p] = sum_r coefficients_R[r] * blocks[p][r]
//
// Reads the rows whose coefficient is not zero (up to R*N elements), once; writes N. Up to eight rows
// are added to a tile of columns in one go; the tile stays in the first-level cache until all rows
// are in, and leaves it for memory without passing through the caches when the result is larger than
// they are. Rows with a coefficient of exactly zero are not read: they may hold anything.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <array>
#include <vector>

#include "../check.h"
#include "schedule.h"
#include "vectors.h"

namespace doge_fast {
namespace {

constexpr int64_t TILE = 1024;
constexpr int64_t MAX_GROUP = 8;
// Tiles that one thread takes at a time.
constexpr int64_t TILES_PER_PIECE = 64;

struct Term {
  int64_t row;
  double coefficient;
};

struct Block {
  const void* data;
  int64_t row_stride;
  ScalarType dtype;
  void* out;
  ScalarType out_dtype;
};

// tile = (first ? 0 : tile) + sum over GROUP terms, on `columns` columns.
template <typename T, int64_t GROUP>
void add_group(const T* rows_RN, int64_t row_stride, const Term* terms, int64_t columns, bool is_first,
               Accumulator<T>* tile) {
  using A = Accumulator<T>;
  const T* row[GROUP];
  A coefficient[GROUP];
  for (int64_t g = 0; g < GROUP; ++g) {
    row[g] = rows_RN + terms[g].row * row_stride;
    coefficient[g] = static_cast<A>(terms[g].coefficient);
  }
  constexpr int64_t UNROLL = 4;
  int64_t column = 0;
  for (; column + UNROLL * LANES<A> <= columns; column += UNROLL * LANES<A>) {
    Vector<A> sum[UNROLL];
#pragma GCC unroll 4
    for (int64_t u = 0; u < UNROLL; ++u)
      sum[u] = is_first ? Vector<A>{} : load(tile + column + u * LANES<A>);
#pragma GCC unroll 8
    for (int64_t g = 0; g < GROUP; ++g)
#pragma GCC unroll 4
      for (int64_t u = 0; u < UNROLL; ++u)
        sum[u] += broadcast(coefficient[g]) * load(row[g] + column + u * LANES<A>);
#pragma GCC unroll 4
    for (int64_t u = 0; u < UNROLL; ++u) store(tile + column + u * LANES<A>, sum[u]);
  }
  for (; column < columns; ++column) {
    A sum = is_first ? A{0} : tile[column];
    for (int64_t g = 0; g < GROUP; ++g) sum += coefficient[g] * static_cast<A>(row[g][column]);
    tile[column] = sum;
  }
}

template <typename T, int64_t GROUP = MAX_GROUP>
void add_group_of(int64_t size, const T* rows_RN, int64_t row_stride, const Term* terms,
                  int64_t columns, bool is_first, Accumulator<T>* tile) {
  if constexpr (GROUP > 1) {
    if (size < GROUP)
      return add_group_of<T, GROUP - 1>(size, rows_RN, row_stride, terms, columns, is_first, tile);
  }
  add_group<T, GROUP>(rows_RN, row_stride, terms, columns, is_first, tile);
}

template <typename T, typename Out>
void sum_span(const T* rows_RN, int64_t row_stride, Out* out, int64_t num_columns,
              const std::vector<Term>& terms, bool past_cache) {
  alignas(64) Accumulator<T> tile[TILE];
  const int64_t num_terms = static_cast<int64_t>(terms.size());
  if (num_terms == 0) std::fill(tile, tile + TILE, Accumulator<T>{0});
  for (int64_t column = 0; column < num_columns; column += TILE) {
    const int64_t columns = std::min(TILE, num_columns - column);
    for (int64_t term = 0; term < num_terms; term += MAX_GROUP)
      add_group_of<T>(std::min(MAX_GROUP, num_terms - term), rows_RN + column, row_stride,
                      terms.data() + term, columns, term == 0, tile);
    narrow(tile, out + column, columns, past_cache);
  }
}

void sum_block(const Block& block, int64_t first, int64_t last, const std::vector<Term>& terms,
               bool past_cache) {
  with_type(block.dtype, [&](auto zero) {
    using T = decltype(zero);
    with_type(block.out_dtype, [&](auto out_zero) {
      using Out = decltype(out_zero);
      sum_span(static_cast<const T*>(block.data) + first, block.row_stride,
               static_cast<Out*>(block.out) + first, last - first, terms, past_cache);
    });
  });
}

std::vector<Term> nonzero_terms(const Tensor& coefficients_R, int64_t num_rows) {
  DOGE_CHECK(coefficients_R.is_cpu() && coefficients_R.scalar_type() == ScalarType::Double,
             "weighted_sum needs float64 coefficients on the CPU; received ",
             name(coefficients_R.scalar_type()), coefficients_R.is_cpu() ? "." : " on another device.");
  DOGE_CHECK(coefficients_R.dim() == 1 && coefficients_R.size(0) == num_rows,
             "weighted_sum needs one coefficient per row, shape [", num_rows, "]; received shape ",
             shape(coefficients_R), ".");
  const double* values = static_cast<const double*>(coefficients_R.const_data_ptr());
  const int64_t stride = coefficients_R.stride(0);
  std::vector<Term> terms;
  for (int64_t row = 0; row < num_rows; ++row)
    if (values[row * stride] != 0) terms.push_back({row, values[row * stride]});
  return terms;
}

void weighted_sum(TensorList blocks, Tensor coefficients_R, TensorList outs) {
  DOGE_CHECK(blocks.size() == outs.size(), "weighted_sum needs one output per block; received ",
             outs.size(), " for ", blocks.size(), " blocks.");
  if (blocks.empty()) return;
  const int64_t num_rows = check_blocks(blocks, "weighted_sum");
  const std::vector<Term> terms = nonzero_terms(coefficients_R, num_rows);
  std::vector<Block> table;
  std::vector<int64_t> lengths;
  int64_t num_bytes = 0, out_bytes = 0;
  for (size_t p = 0; p < blocks.size(); ++p) {
    const Tensor& block = blocks[p];
    const Tensor& out = outs[p];
    check_contiguous(out, "weighted_sum", "outs", p);
    DOGE_CHECK(out.numel() == block.size(1), "weighted_sum needs an output as long as its block; outs[",
               p, "] has ", out.numel(), " elements, blocks[", p, "] ", block.size(1), " columns.");
    table.push_back({block.const_data_ptr(), block.stride(0), block.scalar_type(),
                     out.mutable_data_ptr(), out.scalar_type()});
    lengths.push_back(block.size(1));
    num_bytes += block.numel() * static_cast<int64_t>(block.element_size());
    out_bytes += out.numel() * static_cast<int64_t>(out.element_size());
  }
  const bool past_cache = is_larger_than_cache(out_bytes);
  const Columns columns(std::move(lengths), TILE);
  const int64_t num_pieces = (columns.num_units() + TILES_PER_PIECE - 1) / TILES_PER_PIECE;
  for_each_piece(
      num_pieces, num_bytes, [] { return 0; },
      [&](int64_t piece, int) {
        columns.for_each_span(piece, num_pieces, [&](const Columns::Span& span) {
          sum_block(table[span.tensor], span.first, span.last, terms, past_cache);
        });
        if (past_cache) finish_streaming();
      });
}

STABLE_TORCH_LIBRARY_FRAGMENT(doge_fast_cpp, library) {
  library.def("weighted_sum(Tensor[] blocks, Tensor coefficients_R, Tensor(a!)[] outs) -> ()");
}
// Whatever the device, so that a tensor elsewhere and an empty list get our message, not the
// dispatcher's.
STABLE_TORCH_LIBRARY_IMPL(doge_fast_cpp, CompositeExplicitAutograd, library) {
  library.impl("weighted_sum", TORCH_BOX(&weighted_sum));
}

}  // namespace
}  // namespace doge_fast
