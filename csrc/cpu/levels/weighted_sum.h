// out = sum of rows, each times its coefficient, on a span of columns.
//
// Up to eight rows are added to a tile of columns in one go; the tile stays in the nearest caches
// while groups of eight follow each other. The last group, often the only one, goes straight to the
// result, so that reads and writes take turns vector by vector; past the caches when the result is
// larger than they are.
#pragma once

#include "vectors.h"

namespace doge_fast::DOGE_LEVEL_NAME {

// 32 KB of a 16-bit row at a time: the hardware's prefetcher takes its time at each row's beginning.
template <typename A>
constexpr int64_t SUM_TILE = (64 << 10) / static_cast<int64_t>(sizeof(A));
constexpr int64_t MAX_GROUP = 8;
// How far ahead rows of 16 bits are asked for, all of a group together: left to the hardware they come too
// late where memory is fast. Wider ones come in time, and asking costs them a tenth.
constexpr int64_t SUM_BYTES_AHEAD = 8 << 10;

// What a group adds to and where the sum goes: the tile, or the result when no group follows.
template <typename T, typename Out>
struct Sums {
  Accumulator<T>* tile;
  Out* out;
  bool is_first;
  bool is_last;
  bool past_cache;
};

// (first ? 0 : tile) + sum over GROUP terms, on `columns` columns.
template <typename T, typename Out, int64_t GROUP>
void add_group(const T* rows_RN, int64_t row_stride, const Term* terms, int64_t columns,
               const Sums<T, Out>& sums) {
  using A = Accumulator<T>;
  const T* row[GROUP];
  A coefficient[GROUP];
  for (int64_t g = 0; g < GROUP; ++g) {
    row[g] = rows_RN + terms[g].row * row_stride;
    coefficient[g] = static_cast<A>(terms[g].coefficient);
  }
  constexpr int64_t UNROLL = 4;
  A* const tile = sums.tile;
  int64_t column = 0;
  for (; column + UNROLL * LANES<A> <= columns; column += UNROLL * LANES<A>) {
    Vector<A> sum[UNROLL];
#pragma GCC unroll 4
    for (int64_t u = 0; u < UNROLL; ++u)
      sum[u] = sums.is_first ? Vector<A>{} : load(tile + column + u * LANES<A>);
    if constexpr (sizeof(T) == 2) {
      constexpr int64_t line = 64, bytes = static_cast<int64_t>(sizeof(T));
      constexpr int64_t ahead = SUM_BYTES_AHEAD / GROUP;
#pragma GCC unroll 8
      for (int64_t g = 0; g < GROUP; ++g)
#pragma GCC unroll 4
        for (int64_t at = 0; at < UNROLL * LANES<A> * bytes; at += line)
          __builtin_prefetch(reinterpret_cast<const char*>(row[g] + column) + ahead + at, 0, 3);
    }
#pragma GCC unroll 8
    for (int64_t g = 0; g < GROUP; ++g)
#pragma GCC unroll 4
      for (int64_t u = 0; u < UNROLL; ++u)
        sum[u] += broadcast(coefficient[g]) * load(row[g] + column + u * LANES<A>);
    if constexpr (HAS_PUT<A, Out>) {
      if (sums.is_last) {
#pragma GCC unroll 2
        for (int64_t u = 0; u < UNROLL; u += 2)
          put_pair<A>(sums.out + column + u * LANES<A>, sum[u], sum[u + 1], sums.past_cache);
        continue;
      }
    }
#pragma GCC unroll 4
    for (int64_t u = 0; u < UNROLL; ++u) store(tile + column + u * LANES<A>, sum[u]);
  }
  for (; column < columns; ++column) {
    A sum = sums.is_first ? A{0} : tile[column];
    for (int64_t g = 0; g < GROUP; ++g)
      sum += coefficient[g] * static_cast<A>(widened(row[g][column]));
    if (HAS_PUT<A, Out> && sums.is_last)
      narrow_to(sums.out[column], sum);
    else
      tile[column] = sum;
  }
}

template <typename T, typename Out, int64_t GROUP = MAX_GROUP>
void add_group_of(int64_t size, const T* rows_RN, int64_t row_stride, const Term* terms,
                  int64_t columns, const Sums<T, Out>& sums) {
  if constexpr (GROUP > 1) {
    if (size < GROUP)
      return add_group_of<T, Out, GROUP - 1>(size, rows_RN, row_stride, terms, columns, sums);
  }
  add_group<T, Out, GROUP>(rows_RN, row_stride, terms, columns, sums);
}

template <typename T, typename Out>
void sum_span(const T* rows_RN, int64_t row_stride, const Term* terms, int64_t num_terms, Out* out,
              int64_t columns, bool past_cache) {
  using A = Accumulator<T>;
  alignas(64) A tile[SUM_TILE<A>];
  // Streaming starts at a vector's boundary of the result.
  int64_t head = 0;
  if (past_cache)
    while (head < columns && !is_streamable(out + head)) ++head;
  for (int64_t first = 0; first < columns;) {
    const bool in_head = first < head;
    const int64_t size = in_head ? head : least(SUM_TILE<A>, columns - first);
    for (int64_t term = 0; term < num_terms; term += MAX_GROUP) {
      const int64_t group = least(MAX_GROUP, num_terms - term);
      const Sums<T, Out> sums{tile, out + first, term == 0, term + group == num_terms,
                              past_cache && !in_head};
      add_group_of(group, rows_RN + first, row_stride, terms + term, size, sums);
    }
    if (num_terms == 0) __builtin_memset(tile, 0, size * sizeof(A));
    if (num_terms == 0 || !HAS_PUT<A, Out>) narrow(tile, out + first, size, past_cache && !in_head);
    first += size;
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
