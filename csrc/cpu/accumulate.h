// row = grad, or row += grad, on n elements.
#pragma once

#include "vectors.h"

namespace doge_fast::arithmetic {

constexpr int64_t ACCUMULATE_TILE = 1024;

template <typename A>
void add_to(A* sum, const A* value, int64_t n) {
  int64_t i = 0;
  for (; i + LANES<A> <= n; i += LANES<A>) store(sum + i, load(sum + i) + load(value + i));
  for (; i < n; ++i) sum[i] += value[i];
}

// The type that represents every number of both storage types.
template <typename T, typename Row>
struct Common {
  using type = float;
};
template <typename T>
struct Common<T, double> {
  using type = double;
};
template <typename Row>
struct Common<double, Row> {
  using type = double;
};
template <>
struct Common<double, double> {
  using type = double;
};

// Without tiles in between: both are loaded as vectors of the type of the sum.
template <bool add, typename T, typename Row>
void accumulate_vectors(const T* grad, Row* row, int64_t n, bool past_cache) {
  using A = typename Common<T, Row>::type;
  const auto one = [&](int64_t i) {
    const A value = widened(grad[i]);
    narrow_to(row[i], add ? static_cast<A>(widened(row[i])) + value : value);
  };
  const auto vector = [&](int64_t i) {
    return add ? load(row + i) + load(grad + i) : load(grad + i);
  };
  int64_t i = 0;
  if (past_cache)
    for (; i < n && !is_streamable(row + i); ++i) one(i);
  for (; i + 2 * LANES<A> <= n; i += 2 * LANES<A>)
    put_pair<A>(row + i, vector(i), vector(i + LANES<A>), past_cache);
  for (; i + LANES<A> <= n; i += LANES<A>) put<A>(row + i, vector(i), past_cache);
  for (; i < n; ++i) one(i);
}

template <typename T, typename Row>
void accumulate_span(const T* grad, Row* row, int64_t n, bool add, bool past_cache) {
  using A = typename Common<T, Row>::type;
  if constexpr (IS_SAME<T, Row>) {
    if (!add && !past_cache) {
      __builtin_memcpy(row, grad, n * sizeof(T));
      return;
    }
  }
  if constexpr (IS_SAME<A, Accumulator<T>> && IS_SAME<A, Accumulator<Row>>) {
    if (add)
      accumulate_vectors<true>(grad, row, n, false);
    else
      accumulate_vectors<false>(grad, row, n, past_cache);
  } else {
    alignas(64) A sum[ACCUMULATE_TILE], value[ACCUMULATE_TILE];
    for (int64_t i = 0; i < n; i += ACCUMULATE_TILE) {
      const int64_t size = least(ACCUMULATE_TILE, n - i);
      widen(grad + i, sum, size);
      if (add) {
        widen(row + i, value, size);
        add_to(sum, value, size);
      }
      narrow(sum, row + i, size, past_cache && !add);
    }
  }
}

inline void accumulate(const void* grad, ScalarType grad_dtype, void* row, ScalarType row_dtype, int64_t n,
                       bool add, bool past_cache) {
  with_type(grad_dtype, [&](auto zero) {
    using T = decltype(zero);
    with_type(row_dtype, [&](auto row_zero) {
      using Row = decltype(row_zero);
      accumulate_span(static_cast<const T*>(grad), static_cast<Row*>(row), n, add, past_cache);
    });
  });
}

}  // namespace doge_fast::arithmetic
