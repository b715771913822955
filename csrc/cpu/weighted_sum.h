// out = sum of rows, each times its coefficient, on a span of columns.
//
// A group of up to eight rows is added to a tile of columns, which stays in the nearest caches for the next
// group. The last group, often the only one, is written directly to the result, vector by vector, so that reads
// and writes alternate. A result larger than the caches is written without going through them.
#pragma once

#include "vectors.h"

namespace doge_fast::arithmetic {

struct Term {
  int64_t row;
  double coefficient;
};

// 64 KB of a 16-bit row at a time, because the hardware's prefetcher is slow to start on each row.
template <typename A>
constexpr int64_t SUM_TILE = (128 << 10) / static_cast<int64_t>(sizeof(A));
constexpr int64_t MAX_GROUP = 8;
// Rows of 16 bits are prefetched this far ahead, and at their end in a tile the first columns of the next group,
// which the hardware prefetches too late. If there is only one group, its rows together are prefetched
// ALONE_BYTES_AHEAD.
constexpr int64_t SUM_BYTES_AHEAD = 384;
constexpr int64_t ALONE_BYTES_AHEAD = 8 << 10;

// Up to MAX_GROUP rows; `rows_RN` is the first row at the tile's first column.
template <typename T>
struct Group {
  const T* rows_RN;
  const Term* terms;
  int64_t num_terms;
};

// The tile to which a group is added, and the result to which the last group writes.
template <typename T, typename Out>
struct Sums {
  Accumulator<T>* tile;
  Out* out;
  bool is_first;
  bool is_last;
  bool past_cache;
};

// For each row of a group its address, its prefetch address at column 0, and its coefficient.
template <typename T, int64_t GROUP>
struct Reads {
  const T* row[GROUP];
  const T* ahead[GROUP];
  Accumulator<T> coefficient[GROUP];
};

template <typename T>
constexpr bool ASKS_AHEAD = sizeof(T) == 2;
template <typename T>
constexpr int64_t SUM_STEP = 4 * LANES<Accumulator<T>>;

// (first ? 0 : tile) + sum over GROUP terms, from `column` on, in whole steps up to `end`. Returns the column
// after the last step.
template <typename T, typename Out, int64_t GROUP>
int64_t add_steps(const Reads<T, GROUP>& reads, int64_t column, int64_t end, const Sums<T, Out>& sums) {
  using A = Accumulator<T>;
  constexpr int64_t UNROLL = SUM_STEP<T> / LANES<A>;
  // Local copies, because the compiler must assume that a store changes what a reference refers to.
  const Reads<T, GROUP> from = reads;
  const auto [tile, out, is_first, is_last, past_cache] = sums;
  for (; column + SUM_STEP<T> <= end; column += SUM_STEP<T>) {
    Vector<A> sum[UNROLL];
#pragma GCC unroll 4
    for (int64_t u = 0; u < UNROLL; ++u)
      sum[u] = is_first ? Vector<A>{} : load(tile + column + u * LANES<A>);
    if constexpr (ASKS_AHEAD<T>) {
      constexpr int64_t line = 64 / static_cast<int64_t>(sizeof(T));
#pragma GCC unroll 8
      for (int64_t g = 0; g < GROUP; ++g)
#pragma GCC unroll 4
        for (int64_t at = 0; at < SUM_STEP<T>; at += line)
          __builtin_prefetch(from.ahead[g] + column + at, 0, 3);
    }
#pragma GCC unroll 8
    for (int64_t g = 0; g < GROUP; ++g)
#pragma GCC unroll 4
      for (int64_t u = 0; u < UNROLL; ++u)
        sum[u] += broadcast(from.coefficient[g]) * load(from.row[g] + column + u * LANES<A>);
    if constexpr (HAS_PUT<A, Out>) {
      if (is_last) {
#pragma GCC unroll 2
        for (int64_t u = 0; u < UNROLL; u += 2)
          put_pair<A>(out + column + u * LANES<A>, sum[u], sum[u + 1], past_cache);
        continue;
      }
    }
#pragma GCC unroll 4
    for (int64_t u = 0; u < UNROLL; ++u) store(tile + column + u * LANES<A>, sum[u]);
  }
  return column;
}

// The same on `columns` columns. `next` is the group that is read next.
template <typename T, typename Out, int64_t GROUP>
void add_group(const Group<T>& group, const Group<T>& next, int64_t row_stride, int64_t columns,
               const Sums<T, Out>& sums) {
  using A = Accumulator<T>;
  constexpr auto bytes = static_cast<int64_t>(sizeof(T));
  const bool is_alone = sums.is_first && sums.is_last;
  const int64_t ahead = (is_alone ? ALONE_BYTES_AHEAD / GROUP : SUM_BYTES_AHEAD) / bytes;
  Reads<T, GROUP> reads;
  for (int64_t g = 0; g < GROUP; ++g) {
    reads.row[g] = group.rows_RN + group.terms[g].row * row_stride;
    reads.ahead[g] = reads.row[g] + ahead;
    reads.coefficient[g] = static_cast<A>(group.terms[g].coefficient);
  }
  int64_t column = 0;
  if (ASKS_AHEAD<T> && !is_alone) {
    column = add_steps(reads, column, columns - ahead, sums);
    for (int64_t g = 0; g < GROUP; ++g)
      reads.ahead[g] = next.rows_RN + next.terms[least(g, next.num_terms - 1)].row * row_stride - column;
  }
  column = add_steps(reads, column, columns, sums);
  for (; column < columns; ++column) {
    A sum = sums.is_first ? A{0} : sums.tile[column];
    for (int64_t g = 0; g < GROUP; ++g)
      sum += reads.coefficient[g] * static_cast<A>(widened(reads.row[g][column]));
    if (HAS_PUT<A, Out> && sums.is_last)
      narrow_to(sums.out[column], sum);
    else
      sums.tile[column] = sum;
  }
}

template <typename T, typename Out, int64_t GROUP = MAX_GROUP>
void add_group_of(const Group<T>& group, const Group<T>& next, int64_t row_stride, int64_t columns,
                  const Sums<T, Out>& sums) {
  if constexpr (GROUP > 1) {
    if (group.num_terms < GROUP)
      return add_group_of<T, Out, GROUP - 1>(group, next, row_stride, columns, sums);
  }
  add_group<T, Out, GROUP>(group, next, row_stride, columns, sums);
}

template <typename T, typename Out>
void sum_span(const T* rows_RN, int64_t row_stride, const Term* terms, int64_t num_terms, Out* out,
              int64_t columns, bool past_cache) {
  using A = Accumulator<T>;
  alignas(64) A tile[SUM_TILE<A>];
  // Streaming stores begin where the result is aligned to a vector.
  int64_t head = 0;
  if (past_cache)
    while (head < columns && !is_streamable(out + head)) ++head;
  // Groups of equal size, because a group of few rows is slow.
  const int64_t num_groups = (num_terms + MAX_GROUP - 1) / MAX_GROUP;
  const auto group_of = [&](int64_t i, int64_t first) -> Group<T> {
    const int64_t begin = i * num_terms / num_groups;
    return {rows_RN + first, terms + begin, (i + 1) * num_terms / num_groups - begin};
  };
  for (int64_t first = 0; first < columns;) {
    const bool in_head = first < head;
    const int64_t size = in_head ? head : least(SUM_TILE<A>, columns - first);
    for (int64_t i = 0; i < num_groups; ++i) {
      const bool is_last = i + 1 == num_groups;
      const Group<T> next = is_last ? group_of(0, first + size) : group_of(i + 1, first);
      const Sums<T, Out> sums{tile, out + first, i == 0, is_last, past_cache && !in_head};
      add_group_of(group_of(i, first), next, row_stride, size, sums);
    }
    if (num_terms == 0) __builtin_memset(tile, 0, size * sizeof(A));
    if (num_terms == 0 || !HAS_PUT<A, Out>) narrow(tile, out + first, size, past_cache && !in_head);
    first += size;
  }
}

inline void weighted_sum(const Rows& rows, int64_t first, int64_t columns, const Term* terms,
                         int64_t num_terms, ScalarType out_dtype, void* out, bool past_cache) {
  with_type(rows.dtype, [&](auto zero) {
    using T = decltype(zero);
    with_type(out_dtype, [&](auto out_zero) {
      using Out = decltype(out_zero);
      sum_span(static_cast<const T*>(rows.data) + first, rows.row_stride, terms, num_terms,
               static_cast<Out*>(out) + first, columns, past_cache);
    });
  });
}

}  // namespace doge_fast::arithmetic
