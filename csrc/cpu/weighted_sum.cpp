// outs[p] = sum_r coefficients_R[r] * blocks[p][r]
//
// Reads each row whose coefficient is not zero once (up to R*N elements); writes N. Up to eight rows at a time
// are added to a tile of columns, which stays in the nearest caches until it has all rows. A result larger
// than the caches is written without going through them. A row with a coefficient of exactly zero is not
// read: it may hold NaN.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <vector>

#include "schedule.h"
#include "weighted_sum.h"

namespace doge_fast {
namespace {

using namespace arithmetic;

constexpr int64_t TILE = 1024;
// About the size of a piece: TILES_PER_PIECE tiles, but at least PIECE_BYTES of rows.
constexpr int64_t TILES_PER_PIECE = 32;
constexpr int64_t PIECE_BYTES = 1 << 20;

struct Block {
  Rows rows;
  ScalarType out_dtype;
  void* out;
};

std::vector<Term> nonzero_terms(const Tensor& coefficients_R, int64_t num_rows) {
  const std::vector<double> values = values_of(coefficients_R, num_rows, "weighted_sum");
  std::vector<Term> terms;
  for (int64_t row = 0; row < num_rows; ++row)
    if (values[row] != 0) terms.push_back({row, values[row]});
  return terms;
}

void weighted_sum(TensorList blocks, Tensor coefficients_R, TensorList outs) {
  if (blocks.empty() && outs.empty()) return;
  const int64_t num_rows = check_blocks(blocks, "weighted_sum");
  check_outs(blocks, outs, "weighted_sum");
  const std::vector<Term> terms = nonzero_terms(coefficients_R, num_rows);
  std::vector<Block> table;
  std::vector<int64_t> lengths;
  int64_t num_bytes = 0, out_bytes = 0;
  for (size_t p = 0; p < blocks.size(); ++p) {
    const Tensor& block = blocks[p];
    const Tensor& out = outs[p];
    table.push_back({Rows::of(block), out.scalar_type(), out.mutable_data_ptr()});
    lengths.push_back(block.size(1));
    num_bytes += block.numel() * static_cast<int64_t>(block.element_size());
    out_bytes += out.numel() * static_cast<int64_t>(out.element_size());
  }
  const bool past_cache = is_larger_than_cache(out_bytes);
  const Columns columns(std::move(lengths), TILE);
  const int64_t num_pieces = std::min((columns.num_units() + TILES_PER_PIECE - 1) / TILES_PER_PIECE,
                                      1 + num_bytes / PIECE_BYTES);
  for_each_piece(
      num_pieces, num_bytes, [] { return 0; },
      [&](int64_t piece, int) {
        columns.for_each_span(piece, num_pieces, [&](const Columns::Span& span) {
          const Block& block = table[span.tensor];
          arithmetic::weighted_sum(block.rows, span.first, span.last - span.first, terms.data(),
                                   static_cast<int64_t>(terms.size()), block.out_dtype, block.out,
                                   past_cache);
        });
        if (past_cache) finish_streaming();
      });
}

STABLE_TORCH_LIBRARY_FRAGMENT(doge_fast_cpp, library) {
  library.def("weighted_sum(Tensor[] blocks, Tensor coefficients_R, Tensor(a!)[] outs) -> ()");
}
// For every device, so that a tensor on another device and an empty list fail with our message, not the
// dispatcher's.
STABLE_TORCH_LIBRARY_IMPL(doge_fast_cpp, CompositeExplicitAutograd, library) {
  library.impl("weighted_sum", TORCH_BOX(&weighted_sum));
}

}  // namespace
}  // namespace doge_fast
