// rows[i] = grads[i], or rows[i] += grads[i], for many pairs in one call.
//
// Reads the gradients once (N elements) and, when adding, the rows once; writes the rows once. A copy that is
// larger than the caches does not go through them. An addition does, because it has read its rows into them.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <vector>

#include "accumulate.h"
#include "schedule.h"

namespace doge_fast {
namespace {

constexpr int64_t TILE = 1024;
// About the bytes of a piece. Copies take longer with four times as many, and with a quarter.
constexpr int64_t PIECE_BYTES = 512 << 10;

struct Pair {
  const char* grad;
  ScalarType grad_dtype;
  int64_t grad_bytes;
  char* row;
  ScalarType row_dtype;
  int64_t row_bytes;
};

void accumulate(TensorList grads, TensorList rows, bool add) {
  DOGE_CHECK(grads.size() == rows.size(), "accumulate needs one row per gradient; received ",
             rows.size(), " rows for ", grads.size(), " gradients.");
  std::vector<Pair> table;
  std::vector<int64_t> lengths;
  int64_t num_bytes = 0;
  for (size_t i = 0; i < grads.size(); ++i) {
    check_contiguous(grads[i], "accumulate", "grads", i);
    check_contiguous(rows[i], "accumulate", "rows", i);
    DOGE_CHECK(grads[i].numel() == rows[i].numel(),
               "accumulate needs a row as long as its gradient; rows[", i, "] has ", rows[i].numel(),
               " elements, grads[", i, "] ", grads[i].numel(), ".");
    table.push_back({static_cast<const char*>(grads[i].const_data_ptr()),
                     grads[i].scalar_type(),
                     static_cast<int64_t>(grads[i].element_size()),
                     static_cast<char*>(rows[i].mutable_data_ptr()),
                     rows[i].scalar_type(),
                     static_cast<int64_t>(rows[i].element_size())});
    lengths.push_back(rows[i].numel());
    num_bytes += rows[i].numel() * static_cast<int64_t>(rows[i].element_size());
  }
  const bool past_cache = !add && is_larger_than_cache(num_bytes);
  const Columns columns(std::move(lengths), TILE);
  const int64_t num_pieces = std::min(columns.num_units(), (num_bytes + PIECE_BYTES - 1) / PIECE_BYTES);
  for_each_piece(
      num_pieces, num_bytes, [] { return 0; },
      [&](int64_t piece, int) {
        columns.for_each_span(piece, num_pieces, [&](const Columns::Span& span) {
          const Pair& pair = table[span.tensor];
          arithmetic::accumulate(pair.grad + span.first * pair.grad_bytes, pair.grad_dtype,
                                 pair.row + span.first * pair.row_bytes, pair.row_dtype,
                                 span.last - span.first, add, past_cache);
        });
        if (past_cache) finish_streaming();
      });
}

STABLE_TORCH_LIBRARY_FRAGMENT(doge_fast_cpp, library) {
  library.def("accumulate(Tensor[] grads, Tensor(a!)[] rows, bool add) -> ()");
}
// For every device, so that a tensor on another device and an empty list fail with our message, not the
// dispatcher's.
STABLE_TORCH_LIBRARY_IMPL(doge_fast_cpp, CompositeExplicitAutograd, library) {
  library.impl("accumulate", TORCH_BOX(&accumulate));
}

}  // namespace
}  // namespace doge_fast
