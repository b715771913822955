// rows[i] = grads[i], or rows[i] += grads[i], for many pairs in one call.
//
// Reads the gradients once (N elements) and, when adding, the rows once; writes the rows once. A copy
// that is larger than the caches goes past them; an addition does not, its rows are in them already.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <vector>

#include "../check.h"
#include "schedule.h"
#include "vectors.h"

namespace doge_fast {
namespace {

constexpr int64_t TILE = 1024;
constexpr int64_t TILES_PER_PIECE = 256;

struct Pair {
  const void* grad;
  ScalarType grad_dtype;
  void* row;
  ScalarType row_dtype;
};

template <typename A>
void add_to(A* sum, const A* value, int64_t n) {
  int64_t i = 0;
  for (; i + LANES<A> <= n; i += LANES<A>) store(sum + i, load(sum + i) + load(value + i));
  for (; i < n; ++i) sum[i] += value[i];
}

template <typename T, typename Row>
void accumulate_span(const T* grad, Row* row, int64_t n, bool add, bool past_cache) {
  // Neither storage type loses anything on its way into this one.
  using A = std::conditional_t<std::is_same_v<T, double> || std::is_same_v<Row, double>, double, float>;
  if constexpr (std::is_same_v<T, Row>) {
    if (!add && !past_cache) {
      std::memcpy(row, grad, n * sizeof(T));
      return;
    }
    if constexpr (std::is_same_v<T, A>) {
      if (add) {
        add_to(row, grad, n);
      } else {
        narrow(grad, row, n, past_cache);
      }
      return;
    }
  }
  alignas(64) A sum[TILE], value[TILE];
  for (int64_t i = 0; i < n; i += TILE) {
    const int64_t size = std::min(TILE, n - i);
    widen(grad + i, sum, size);
    if (add) {
      widen(row + i, value, size);
      add_to(sum, value, size);
    }
    narrow(sum, row + i, size, past_cache && !add);
  }
}

void accumulate_pair(const Pair& pair, int64_t first, int64_t last, bool add, bool past_cache) {
  with_type(pair.grad_dtype, [&](auto zero) {
    using T = decltype(zero);
    with_type(pair.row_dtype, [&](auto row_zero) {
      using Row = decltype(row_zero);
      accumulate_span(static_cast<const T*>(pair.grad) + first, static_cast<Row*>(pair.row) + first,
                      last - first, add, past_cache);
    });
  });
}

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
    table.push_back({grads[i].const_data_ptr(), grads[i].scalar_type(), rows[i].mutable_data_ptr(),
                     rows[i].scalar_type()});
    lengths.push_back(rows[i].numel());
    num_bytes += rows[i].numel() * static_cast<int64_t>(rows[i].element_size());
  }
  const bool past_cache = !add && is_larger_than_cache(num_bytes);
  const Columns columns(std::move(lengths), TILE);
  const int64_t num_pieces = (columns.num_units() + TILES_PER_PIECE - 1) / TILES_PER_PIECE;
  for_each_piece(
      num_pieces, num_bytes, [] { return 0; },
      [&](int64_t piece, int) {
        columns.for_each_span(piece, num_pieces, [&](const Columns::Span& span) {
          accumulate_pair(table[span.tensor], span.first, span.last, add, past_cache);
        });
        if (past_cache) finish_streaming();
      });
}

STABLE_TORCH_LIBRARY_FRAGMENT(doge_fast_cpp, library) {
  library.def("accumulate(Tensor[] grads, Tensor(a!)[] rows, bool add) -> ()");
}
// Whatever the device, so that a tensor elsewhere and an empty list get our message, not the
// dispatcher's.
STABLE_TORCH_LIBRARY_IMPL(doge_fast_cpp, CompositeExplicitAutograd, library) {
  library.impl("accumulate", TORCH_BOX(&accumulate));
}

}  // namespace
}  // namespace doge_fast
