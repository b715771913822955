// out = sum of rows, each times its coefficient, on a span of columns.
//
// Up to eight rows are added to a tile of columns in one go; the tile stays in the first-level cache
// until all rows are in, and leaves it for memory without passing through the caches when the result is
// larger than they are.
#pragma once

#include "vectors.h"

namespace doge_fast::DOGE_LEVEL_NAME {

// Half of the first-level cache: 8 KB of a 16-bit row at a time, enough for the prefetcher.
template <typename A>
constexpr int64_t SUM_TILE = (16 << 10) / static_cast<int64_t>(sizeof(A));
constexpr int64_t MAX_GROUP = 8;

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
    for (int64_t g = 0; g < GROUP; ++g)
      sum += coefficient[g] * static_cast<A>(widened(row[g][column]));
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
void sum_span(const T* rows_RN, int64_t row_stride, const Term* terms, int64_t num_terms, Out* out,
              int64_t columns, bool past_cache) {
  using A = Accumulator<T>;
  alignas(64) A tile[SUM_TILE<A>];
  for (int64_t first = 0; first < columns; first += SUM_TILE<A>) {
    const int64_t size = least(SUM_TILE<A>, columns - first);
    if (num_terms == 0) __builtin_memset(tile, 0, size * sizeof(A));
    for (int64_t term = 0; term < num_terms; term += MAX_GROUP)
      add_group_of(least(MAX_GROUP, num_terms - term), rows_RN + first, row_stride, terms + term, size,
                   term == 0, tile);
    narrow(tile, out + first, size, past_cache);
  }
}

inline void weighted_sum(const Rows& rows, int64_t first, int64_t columns, const Term* terms,
                         int64_t num_terms, Storage out_storage, void* out, bool past_cache) {
  with_type(rows.storage, [&](auto zero) {
    using T = decltype(zero);
    with_type(out_storage, [&](auto out_zero) {
      using Out = decltype(out_zero);
      sum_span(static_cast<const T*>(rows.data) + first, rows.row_stride, terms, num_terms,
               static_cast<Out*>(out) + first, columns, past_cache);
    });
  });
}

}  // namespace doge_fast::DOGE_LEVEL_NAME
