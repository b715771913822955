// Products of all pairs of rows over a span of columns, onto running sums.
//
// If the sums of all pairs fit in registers, the rows are read once, together. More rows are multiplied one tile
// of columns at a time; each call multiplies a few rows by a few others. Rows are read in place, and 16-bit
// elements are widened in registers; only very many rows are copied to a contiguous tile first. During the
// products the rows of the next tile are prefetched, a few cache lines at a time: many at once would delay the
// loads that products wait for. float32 products are summed in registers over a tile, in float32 memory over
// some tiles, and then in float64. With a metric, a tile's rows are scaled by its root into a contiguous tile in
// the first-level cache, and that is multiplied. Rows in halves are added into that tile, on the way of which the
// two halves of each row are multiplied, and all rows are added up, each times its coefficient, if that is asked for.
#pragma once

#include <limits>

#include "vectors.h"

namespace doge_fast::arithmetic {

// A call multiplies PANEL rows by each other or by PARTNERS rows above them. Its sums are in registers, of which
// there are 16 or 32: PANEL * PARTNERS sums, PARTNERS operands and one more operand. ROWS_AT_ONCE rows have few
// enough pairs that all sums fit. (Where rows are widened first, GCC spills some sums to the stack.)
//
// A call prefetches at most MOST_ROWS_AHEAD rows of the next tile; CPUs with AVX2 but without AVX-512 were slower
// with several. The first-level cache should hold TILE_BYTES of a tile's rows, the rows of the next tile that
// arrive meanwhile and, for up to 24 rows, the sums. But at least least_run_bytes are read of a row, because
// memory is slower in shorter runs. The first-level cache does not hold more than MOST_ROWS_FIRST_LEVEL rows:
// then GROUP rows at a time are multiplied by the rows above.
constexpr int64_t PANEL = 4;
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int64_t PARTNERS = 6;
constexpr int64_t ROWS_AT_ONCE = 7;
constexpr int64_t MOST_ROWS_AHEAD = PANEL * PARTNERS;
constexpr int64_t TILE_BYTES = 12 << 10;
constexpr int64_t MOST_ROWS_FIRST_LEVEL = 48;
constexpr int64_t least_run_bytes(int64_t num_rows) {
  return num_rows <= 24 ? 512 : num_rows <= MOST_ROWS_FIRST_LEVEL ? 768 : 1024;
}
// Rows of 16 bits that are widened take TILES_WIDENED times TILE_BYTES, if MOST_TERMS and tile_columns() allow
// it: they are bound by arithmetic.
constexpr int64_t TILES_WIDENED = 2;
constexpr int64_t MOST_WIDENED_IN_PLACE = 128;
#else
constexpr int64_t PARTNERS = 3;
constexpr int64_t ROWS_AT_ONCE = 4;
constexpr int64_t MOST_ROWS_AHEAD = 1;
constexpr int64_t TILE_BYTES = 24 << 10;
constexpr int64_t MOST_ROWS_FIRST_LEVEL = 32;
constexpr int64_t least_run_bytes(int64_t) { return 1 << 10; }
constexpr int64_t TILES_WIDENED = 1;
constexpr int64_t MOST_WIDENED_IN_PLACE = 80;
#endif
constexpr int64_t GROUP = 3 * PANEL;
// More rows are copied to a contiguous tile first, because a tile of rows on that many pages misses the TLB. The
// copy costs little beside R * R / 2 products.
constexpr int64_t MOST_IN_PLACE = 128;
// A lane of a float32 sum adds at most MOST_TERMS terms over a tile. These terms, and the tiles that it adds up
// before it is moved to float64, are together at most MOST_ADDITIONS. So the error is below 1e-6 even if all
// terms are equal, when every addition rounds the same way.
constexpr int64_t MOST_TERMS = 48;
constexpr int64_t MOST_ADDITIONS = 60;
static_assert(MOST_ADDITIONS > MOST_TERMS);
// Rows that are read together are prefetched this far ahead, in bytes of all of them.
constexpr int64_t BYTES_AHEAD = 8 << 10;
// With a metric the first-level cache holds a scaled tile beside the rows: SCALED_BYTES of it. Up to
// MOST_SCALED_AT_ONCE rows are prefetched while they are scaled, more rows during the products. Measured on Zen 4.
constexpr int64_t SCALED_BYTES = 8 << 10;
constexpr int64_t MOST_SCALED_AT_ONCE = 8;
constexpr int64_t MOMENT_BYTES_AHEAD = 1 << 10;
// So many sums of halves are made together: of more, memory would be read in too many places.
constexpr int64_t HALVES_AT_ONCE = 8;

// The largest number of columns of a tile: up to 768 rows of float32, and those of the next tile, fit in the
// second-level cache.
constexpr int64_t tile_columns(int64_t num_rows) {
  constexpr int64_t most = 512, least = 64, second_level_bytes = 192 << 10;
  const int64_t fit = second_level_bytes / static_cast<int64_t>(sizeof(float)) / num_rows / 64 * 64;
  return fit < least ? least : fit > most ? most : fit;
}

// The bytes of a tile of copied rows, the roots of their metric and their weighted sum, in float64 or narrower.
// There is a cache line between rows, so that the same column of all rows does not fall into one cache set.
constexpr int64_t gram_scratch_bytes(int64_t num_rows) {
  return (num_rows + 2) * (tile_columns(num_rows) * static_cast<int64_t>(sizeof(double)) + 64);
}

// Per product a register of float32 sums and one of float64 sums.
constexpr int64_t gram_sum_bytes(int64_t num_products) { return num_products * 2 * VECTOR_BYTES; }

inline int64_t pair_index(int64_t row, int64_t partner) { return row * (row + 1) / 2 + partner; }

// Of all pairs of rows, and then of the halves of each row.
inline int64_t num_products_of(int64_t num_rows, bool has_halves) {
  return pair_index(num_rows, has_halves ? num_rows : 0);
}

// How a type is multiplied: STEP columns at a time, as PARTS operands.
template <typename T>
struct Operand {
  using Value = Vector<T>;
  using Sum = Vector<T>;
  static constexpr int64_t STEP = LANES<T>;
  static constexpr int64_t PARTS = 1;
  template <int64_t part>
  [[gnu::always_inline]] static Value get(const T* from) {
    return load(from);
  }
  [[gnu::always_inline]] static void add(Sum& sum, Value a, Value b) { sum += a * b; }
};

// sum += a * b in the sum's register. GCC would write some results to another register and copy them back; with
// sums in 12 of 16 registers that spills.
[[gnu::always_inline]] inline void add_product(Vector<float>& sum, Vector<float> a, Vector<float> b) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
#else
  sum += a * b;
#endif
}

#if defined(__AVX512BF16__)
// One instruction multiplies pairs of bfloat16 exactly and adds both products to a float32.
template <>
struct Operand<BFloat16> {
  using Value = __m512bh;
  using Sum = Vector<float>;
  static constexpr int64_t STEP = 32;
  static constexpr int64_t PARTS = 1;
  template <int64_t part>
  [[gnu::always_inline]] static Value get(const BFloat16* from) {
    return (__m512bh)_mm512_loadu_si512(from);
  }
  [[gnu::always_inline]] static void add(Sum& sum, Value a, Value b) {
    sum = (Sum)_mm512_dpbf16_ps((__m512)sum, a, b);
  }
};
#else
// The order of columns does not matter as long as it is the same in all rows. So a shift of 32-bit words gives the
// even columns, and a mask the odd ones.
#if defined(__AVX2__) && !defined(__AVX512F__)
alignas(32) inline constexpr uint32_t UPPER_HALVES[8] = {
    0xffff0000U, 0xffff0000U, 0xffff0000U, 0xffff0000U,
    0xffff0000U, 0xffff0000U, 0xffff0000U, 0xffff0000U};
#endif
template <>
struct Operand<BFloat16> {
  using Value = Vector<float>;
  using Sum = Vector<float>;
  static constexpr int64_t STEP = 2 * FLOAT_LANES;
  static constexpr int64_t PARTS = 2;
  template <int64_t part>
  [[gnu::always_inline]] static Value get(const BFloat16* from) {
    typedef uint32_t Words __attribute__((vector_size(VECTOR_BYTES), may_alias, aligned(2)));
    Words words = *reinterpret_cast<const Words*>(from);
    if constexpr (part == 0) return (Value)(words << 16);
#if defined(__AVX2__) && !defined(__AVX512F__)
    // The mask is read from memory: in a register it would spill one of the sums.
    asm("vpand %1, %0, %0" : "+x"(words) : "m"(UPPER_HALVES));
    return (Value)words;
#else
    return (Value)(words & 0xffff0000U);
#endif
  }
  [[gnu::always_inline]] static void add(Sum& sum, Value a, Value b) { add_product(sum, a, b); }
};
#endif

template <>
struct Operand<Half> {
  using Value = Vector<float>;
  using Sum = Vector<float>;
  static constexpr int64_t STEP = 2 * FLOAT_LANES;
  static constexpr int64_t PARTS = 2;
  template <int64_t part>
  [[gnu::always_inline]] static Value get(const Half* from) {
    return load(from + part * FLOAT_LANES);
  }
  [[gnu::always_inline]] static void add(Sum& sum, Value a, Value b) { add_product(sum, a, b); }
};

// The rows that a call prefetches: at each step of its columns one cache line per row, `step` bytes after the
// last one.
struct Passing {
  const char* first;
  const char* last;
  int64_t row_bytes;
  int64_t step;

  [[gnu::always_inline]] void fetch() {
    for (const char* at = first; at != last; at += row_bytes) __builtin_prefetch(at, 0, 3);
    first += step;
    last += step;
  }
};

// The rows of the next tile. A call prefetches a share of them equal to its share of this tile's products, up to
// MOST_ROWS_AHEAD, so that prefetches are spread evenly.
struct Ahead {
  const char* row = nullptr;
  int64_t row_bytes = 0;
  int64_t num_rows = 0;
  int64_t step = 0;
  int64_t num_products = 0;
  int64_t num_fetched = 0;

  Passing take(int64_t products) {
    num_products += products;
    const int64_t share = num_rows == 0 ? 0 : 2 * num_products / (num_rows + 1);
    const int64_t due = least(share, num_fetched + MOST_ROWS_AHEAD);
    const Passing passing{row + num_fetched * row_bytes, row + due * row_bytes, row_bytes, step};
    num_fetched = due;
    return passing;
  }
};

// Makes GCC address several rows of a loop from one pointer. It would use a pointer per row, more than there are
// registers. Without AVX-512 that is as fast or faster.
template <typename T>
[[gnu::always_inline]] inline void keep_pointer([[maybe_unused]] const T*& pointer) {
#if defined(__AVX512F__)
  asm("" : "+r"(pointer));
#endif
}

// The sets of sums. Few sums do not hide the latency of a multiply-add: then the two parts of an operand have
// separate sums, which `join` adds.
template <typename T>
constexpr int64_t sets_of(int64_t num_sums) {
  return Operand<T>::PARTS == 2 && num_sums < 8 ? 2 : 1;
}

template <typename T, int64_t SETS, int64_t NUM_SUMS>
[[gnu::always_inline]] inline void join(typename Operand<T>::Sum* sums) {
  if constexpr (SETS == 2)
#pragma GCC unroll 16
    for (int64_t i = 0; i < NUM_SUMS; ++i) sums[i] += sums[NUM_SUMS + i];
}

template <typename T, int64_t part, int64_t ROWS>
[[gnu::always_inline]] inline void multiply_panel(const T* panel, int64_t row_stride,
                                                  typename Operand<T>::Sum* sums) {
  typename Operand<T>::Value value[ROWS];
#pragma GCC unroll 8
  for (int64_t i = 0; i < ROWS; ++i)
    value[i] = Operand<T>::template get<part>(panel + i * row_stride);
#pragma GCC unroll 8
  for (int64_t i = 0; i < ROWS; ++i)
#pragma GCC unroll 8
    for (int64_t j = 0; j <= i; ++j) Operand<T>::add(sums[i * (i + 1) / 2 + j], value[i], value[j]);
}

// A tile of columns, and the sums over it, in the order of the calls.
template <typename T>
struct Tile {
  using Sum = typename Operand<T>::Sum;

  const T* rows_RC;
  int64_t row_stride;
  int64_t columns;
  Sum* sums;
  Ahead ahead;

  template <int64_t NUM_SUMS>
  void add(const Sum* more) {
    Sum* to = sums;
#pragma GCC unroll 32
    for (int64_t i = 0; i < NUM_SUMS; ++i) to[i] += more[i];
    sums = to + NUM_SUMS;
  }
};

// The products of ROWS rows from `row` on with each other. ALONE: there are no other rows, and the call prefetches
// the columns that follow.
template <typename T, int64_t ROWS, bool ALONE>
void add_panel(Tile<T>& tile, int64_t row) {
  using Sum = typename Operand<T>::Sum;
  const int64_t row_stride = tile.row_stride;
  const T* panel = tile.rows_RC + row * row_stride;
  constexpr int64_t NUM_SUMS = ROWS * (ROWS + 1) / 2;
  constexpr int64_t SETS = sets_of<T>(NUM_SUMS);
  Sum sums[SETS * NUM_SUMS] = {};
  constexpr int64_t ahead = BYTES_AHEAD / ROWS / static_cast<int64_t>(sizeof(T));
  Passing passing = ALONE ? Passing{} : tile.ahead.take(NUM_SUMS);
  for (const T* const last = panel + tile.columns; panel != last; panel += Operand<T>::STEP) {
    keep_pointer(panel);
    if constexpr (ALONE) {
#pragma GCC unroll 8
      for (int64_t i = 0; i < ROWS; ++i) __builtin_prefetch(panel + i * row_stride + ahead, 0, 3);
    } else {
      passing.fetch();
    }
    multiply_panel<T, 0, ROWS>(panel, row_stride, sums);
    if constexpr (Operand<T>::PARTS == 2)
      multiply_panel<T, 1, ROWS>(panel, row_stride, sums + (SETS - 1) * NUM_SUMS);
  }
  join<T, SETS, NUM_SUMS>(sums);
  tile.template add<NUM_SUMS>(sums);
}

template <typename T, int64_t ROWS, bool ALONE>
void add_panel_of(int64_t num_rows, Tile<T>& tile, int64_t row) {
  if constexpr (ROWS > 1) {
    if (num_rows < ROWS) return add_panel_of<T, ROWS - 1, ALONE>(num_rows, tile, row);
  }
  add_panel<T, ROWS, ALONE>(tile, row);
}

template <typename T, int64_t part, int64_t ROWS, int64_t WITH>
[[gnu::always_inline]] inline void multiply_block(const T* panel, const T* partners,
                                                  int64_t row_stride,
                                                  typename Operand<T>::Sum* sums) {
  // The partners stay in registers, and the panel's rows are loaded one by one. The other way needs one
  // register more than AVX2 has, and every load is then repeated.
  typename Operand<T>::Value other[WITH];
#pragma GCC unroll 8
  for (int64_t j = 0; j < WITH; ++j)
    other[j] = Operand<T>::template get<part>(partners + j * row_stride);
#pragma GCC unroll 8
  for (int64_t i = 0; i < ROWS; ++i) {
    const auto value = Operand<T>::template get<part>(panel + i * row_stride);
#pragma GCC unroll 8
    for (int64_t j = 0; j < WITH; ++j) Operand<T>::add(sums[i * WITH + j], value, other[j]);
  }
}

// The products of ROWS rows from `row` on with WITH rows from `partner` on.
template <typename T, int64_t ROWS, int64_t WITH>
void add_block(Tile<T>& tile, int64_t row, int64_t partner) {
  using Sum = typename Operand<T>::Sum;
  const int64_t row_stride = tile.row_stride;
  const T* panel = tile.rows_RC + row * row_stride;
  const T* partners = tile.rows_RC + partner * row_stride;
  constexpr int64_t NUM_SUMS = ROWS * WITH;
  constexpr int64_t SETS = sets_of<T>(NUM_SUMS);
  Sum sums[SETS * NUM_SUMS] = {};
  Passing passing = tile.ahead.take(NUM_SUMS);
  for (const T* const last = panel + tile.columns; panel != last; panel += Operand<T>::STEP) {
    keep_pointer(panel);
    keep_pointer(partners);
    passing.fetch();
    multiply_block<T, 0, ROWS, WITH>(panel, partners, row_stride, sums);
    if constexpr (Operand<T>::PARTS == 2)
      multiply_block<T, 1, ROWS, WITH>(panel, partners, row_stride, sums + (SETS - 1) * NUM_SUMS);
    partners += Operand<T>::STEP;
  }
  join<T, SETS, NUM_SUMS>(sums);
  tile.template add<NUM_SUMS>(sums);
}

template <typename T, int64_t ROWS, int64_t WITH>
void add_block_of(int64_t width, Tile<T>& tile, int64_t row, int64_t partner) {
  if constexpr (WITH > 1) {
    if (width < WITH) return add_block_of<T, ROWS, WITH - 1>(width, tile, row, partner);
  }
  add_block<T, ROWS, WITH>(tile, row, partner);
}

// Calls block() for rows [row, last) and shares of the rows [above, end_above). The shares are as equal as
// possible, because a share of one row would be bound by latency.
template <typename Block>
void for_each_block(int64_t row, int64_t last, int64_t above, int64_t end_above, const Block& block) {
  const int64_t num_above = end_above - above;
  const int64_t num_shares = (num_above + PARTNERS - 1) / PARTNERS;
  for (int64_t share = 0; share < num_shares; ++share) {
    const int64_t partner = above + num_above * share / num_shares;
    const int64_t width = above + num_above * (share + 1) / num_shares - partner;
    for (int64_t panel = row; panel < last; panel += PANEL) block(panel, partner, width);
  }
}

// The calls that make up all pairs of rows, in order: panel(row, rows) for rows with each other, all rows or
// up to PANEL; block(row, partner, width) for PANEL rows with `width` rows above. The narrow panel comes
// first, where it has no rows above: with partners it would have too few sums to hide latency. The panels of a
// group take the same few rows above before the next ones, so that these are read from the second level once.
template <typename Panel, typename Block>
void for_each_call(int64_t num_rows, const Panel& panel, const Block& block) {
  if (num_rows <= ROWS_AT_ONCE) return panel(0, num_rows);
  const int64_t rest = num_rows % PANEL;
  if (rest > 0) panel(0, rest);
  const int64_t group = num_rows <= MOST_ROWS_FIRST_LEVEL ? PANEL : GROUP;
  for (int64_t first = rest; first < num_rows; first += group) {
    const int64_t last = least(first + group, num_rows);
    for_each_block(first, last, 0, first, block);
    for (int64_t row = first; row < last; row += PANEL) {
      panel(row, PANEL);
      for_each_block(row, row + PANEL, first, row, block);
    }
  }
}

// All pairs of rows on one tile; its columns are a multiple of the operand's STEP. IS_COPY: the columns that
// follow in memory are not those of the next tile.
template <typename T, bool IS_COPY = false>
void add_tile(Tile<T> tile, int64_t num_rows) {
  for_each_call(
      num_rows,
      [&](int64_t row, int64_t rows) {
        if (rows == num_rows)
          add_panel_of<T, ROWS_AT_ONCE, !IS_COPY>(rows, tile, row);
        else
          add_panel_of<T, PANEL, false>(rows, tile, row);
      },
      [&](int64_t row, int64_t partner, int64_t width) {
        add_block_of<T, PANEL, PARTNERS>(width, tile, row, partner);
      });
}

// The element type of a copied tile: the storage type if there are products of it, else its accumulator.
template <typename T>
struct CopyOf {
  using type = Accumulator<T>;
};
#if defined(__AVX512BF16__)
template <>
struct CopyOf<BFloat16> {
  using type = BFloat16;
};
#endif

inline void copy_row(const BFloat16* from, BFloat16* to, int64_t n) {
  __builtin_memcpy(to, from, n * sizeof(BFloat16));
}
template <typename T, typename A>
inline void copy_row(const T* from, A* to, int64_t n) {
  widen(from, to, n);
}

// sqrt(d_n), where d_n = 1 / (sqrt(v_n) + eps), or 0 where v_n is 0. A is the type of a Value's elements.
template <typename A, typename Value>
[[gnu::always_inline]] inline Value root_of_metric(Value moment, A eps) {
  const Value divisor = square_root(moment) + eps;
  return (moment == 0) | (divisor == std::numeric_limits<A>::infinity()) ? Value{} : inverse_root(divisor);
}

// The roots of the metric at n columns from `first` on; ones without a metric.
template <typename A>
inline void roots_of(const Moments& moments, int64_t first, A* roots, int64_t n) {
  if (moments.data == nullptr) {
    for (int64_t i = 0; i < n; ++i) roots[i] = 1;
    return;
  }
  with_type(moments.dtype, [&](auto zero) {
    using V = decltype(zero);
    const V* from = static_cast<const V*>(moments.data) + first;
    int64_t i = 0;
    if constexpr (IS_SAME<A, Accumulator<V>>)
      for (; i + LANES<A> <= n; i += LANES<A>) {
        __builtin_prefetch(from + i + MOMENT_BYTES_AHEAD / static_cast<int64_t>(sizeof(V)), 0, 3);
        store(roots + i, root_of_metric(load(from + i), static_cast<A>(moments.eps)));
      }
    for (; i < n; ++i)
      roots[i] = static_cast<A>(root_of_metric(static_cast<double>(widened(from[i])), moments.eps));
  });
}

// n columns of all rows, times `roots`, to a contiguous tile. AHEAD: prefetches what follows.
template <bool AHEAD, typename T, typename A>
inline void scale_rows(const A* roots, const T* from, int64_t row_stride, int64_t num_rows, A* to, int64_t stride,
                       int64_t n) {
  int64_t i = 0;
  [[maybe_unused]] const int64_t ahead = BYTES_AHEAD / num_rows / static_cast<int64_t>(sizeof(T));
  for (; i + LANES<A> <= n; i += LANES<A>) {
    const Vector<A> root = load(roots + i);
    const T* row = from + i;
    A* out = to + i;
    for (int64_t r = 0; r < num_rows; ++r, row += row_stride, out += stride) {
      if constexpr (AHEAD) __builtin_prefetch(row + ahead, 0, 3);
      store(out, load(row) * root);
    }
  }
  for (; i < n; ++i)
    for (int64_t r = 0; r < num_rows; ++r) to[r * stride + i] = widened(from[r * row_stride + i]) * roots[i];
}

// Where the sum of all rows in halves goes, each times its coefficient, and its dtype. Without coefficients it is
// not asked for.
struct WeightedSum {
  const double* coefficients = nullptr;
  void* out = nullptr;
  ScalarType dtype = ScalarType::Float;
  bool past_cache = false;
};

// The same on a tile, to which some rows after others are added.
template <typename A>
struct Totals {
  const double* coefficients;
  A* run;
  bool is_first;
};

// The same of ROWS sums of rows 2 r and 2 r + 1, whose product in the metric is added to products[r]. IS_SUMMED:
// the sums, each times its coefficient, are added to the totals.
template <bool IS_SUMMED, int64_t ROWS, typename T, typename A>
inline void add_halves(const A* roots, const T* from, int64_t row_stride, A* to, int64_t stride, Vector<A>* products,
                       int64_t n, [[maybe_unused]] const Totals<A>& totals) {
  Vector<A> sums[ROWS] = {};
  [[maybe_unused]] A c[ROWS];
  if constexpr (IS_SUMMED)
    for (int64_t r = 0; r < ROWS; ++r) c[r] = static_cast<A>(totals.coefficients[r]);
  // Local copies, because the compiler must assume that a store changes what a reference refers to.
  [[maybe_unused]] const auto [coefficients, run, is_first] = totals;
  int64_t i = 0;
  for (; i + LANES<A> <= n; i += LANES<A>) {
    const Vector<A> root = load(roots + i);
    const T* row = from + i;
    A* out = to + i;
    [[maybe_unused]] Vector<A> total{};
    if constexpr (IS_SUMMED)
      if (!is_first) total = load(run + i);
#pragma GCC unroll 8
    for (int64_t r = 0; r < ROWS; ++r, row += 2 * row_stride, out += stride) {
      // The next tile, into the second level: so many rows would not stay in the first.
      __builtin_prefetch(row + n, 0, 2);
      __builtin_prefetch(row + row_stride + n, 0, 2);
      const Vector<A> first = load(row), second = load(row + row_stride);
      const Vector<A> first_scaled = first * root, second_scaled = second * root;
      store(out, first_scaled + second_scaled);
      sums[r] += first_scaled * second_scaled;
      if constexpr (IS_SUMMED) total += broadcast(c[r]) * (first + second);
    }
    if constexpr (IS_SUMMED) store(run + i, total);
  }
  for (; i < n; ++i) {
    [[maybe_unused]] A total{};
    if constexpr (IS_SUMMED)
      if (!is_first) total = run[i];
    for (int64_t r = 0; r < ROWS; ++r) {
      const T* row = from + 2 * r * row_stride + i;
      const A first = widened(row[0]), second = widened(row[row_stride]);
      const A first_scaled = first * roots[i], second_scaled = second * roots[i];
      to[r * stride + i] = first_scaled + second_scaled;
      sums[r][0] += first_scaled * second_scaled;
      if constexpr (IS_SUMMED) total += c[r] * (first + second);
    }
    if constexpr (IS_SUMMED) run[i] = total;
  }
#pragma GCC unroll 8
  for (int64_t r = 0; r < ROWS; ++r) products[r] += sums[r];
}

template <bool IS_SUMMED, int64_t ROWS, typename T, typename A>
inline void add_halves_of(int64_t num_rows, const A* roots, const T* from, int64_t row_stride, A* to, int64_t stride,
                          Vector<A>* products, int64_t n, const Totals<A>& totals) {
  if constexpr (ROWS > 1) {
    if (num_rows < ROWS)
      return add_halves_of<IS_SUMMED, ROWS - 1>(num_rows, roots, from, row_stride, to, stride, products, n, totals);
  }
  add_halves<IS_SUMMED, ROWS>(roots, from, row_stride, to, stride, products, n, totals);
}

using FloatSum = Vector<float>;
using DoubleSum = Vector<double>;

// Adds the float32 sums to the float64 sums, and clears them.
inline void flush(FloatSum* parts, DoubleSum* wholes, int64_t num_products) {
  using HalfVector = VectorOf<float, VECTOR_BYTES / 2>::type;
  for (int64_t i = 0; i < num_products; ++i) {
    HalfVector halves[2];
    __builtin_memcpy(halves, &parts[i], sizeof(halves));
    wholes[i] += __builtin_convertvector(halves[0], DoubleSum) + __builtin_convertvector(halves[1], DoubleSum);
    parts[i] = FloatSum{};
  }
}

template <typename T>
class Gram {
 public:
  Gram(const Rows& rows, const Moments& moments, bool has_halves, const WeightedSum& weighted, void* scratch,
       void* sums)
      : rows_RN_(static_cast<const T*>(rows.data)),
        row_stride_(rows.row_stride),
        num_rows_(rows.num_rows / (has_halves ? 2 : 1)),
        has_halves_(has_halves),
        moments_(moments),
        weighted_(weighted),
        num_products_(num_products_of(num_rows_, has_halves)),
        tile_(scratch),
        wholes_(static_cast<DoubleSum*>(sums)),
        parts_(reinterpret_cast<FloatSum*>(wholes_ + num_products_)) {}

  void add(int64_t first, int64_t columns) {
    const T* at = rows_RN_ + first;
    const int64_t most = is_scaled() ? columns_at_once<Scaled>() : columns_at_once<T>();
    // Sums of float64 rows are float64 from the start.
    const int64_t most_tiles = IS_SAME<T, double> ? 1 : MOST_ADDITIONS - most / FLOAT_LANES;
    for (int64_t left = columns; left > 0;) {
      const int64_t now = least(most, left);
      left -= now;
      if (is_scaled()) {
        add_scaled(at, now, left);
      } else if (num_rows_ <= MOST_ROWS<T>) {
        add_in_place(at, now, left);
      } else {
        add_copy(at, now, ahead_of<Copy>(at + now, left));
      }
      at += now;
      if (++num_tiles_ == most_tiles) flush_all();
    }
    flush_all();
  }

 private:
  using Copy = typename CopyOf<T>::type;
  using Scaled = Accumulator<T>;

  // More rows are copied before they are multiplied. O is the type of the operands.
  template <typename O>
  static constexpr int64_t MOST_ROWS = Operand<O>::PARTS == 2 ? MOST_WIDENED_IN_PLACE : MOST_IN_PLACE;

  // Whether the operands of products are made in the scratch tile.
  bool is_scaled() const { return has_halves_ || moments_.data != nullptr; }

  // The sums of products: a register per product, of float32 (which flush adds to float64) or of float64.
  auto* sums() const {
    if constexpr (IS_SAME<T, double>) {
      return wholes_;
    } else {
      return parts_;
    }
  }

  template <typename O>
  int64_t columns_at_once() const {
    // A copy of 16-bit elements holds twice the columns, and a step multiplies twice as many.
    const bool is_narrow = num_rows_ > MOST_ROWS<O> && sizeof(typename CopyOf<O>::type) == 2;
    const int64_t all = (is_narrow ? 2 : 1) * tile_columns(num_rows_);
    const int64_t most = IS_SAME<O, double> ? all : least(all, MOST_TERMS * FLOAT_LANES);
    if (num_rows_ > MOST_ROWS<O>) return most;
    constexpr int64_t bytes = static_cast<int64_t>(sizeof(O));
    constexpr int64_t times = Operand<O>::PARTS == 2 ? TILES_WIDENED : 1;
    const int64_t fit = times * (is_scaled() ? SCALED_BYTES : TILE_BYTES) / bytes / num_rows_ / 64 * 64;
    const int64_t least_run = times * least_run_bytes(num_rows_) / bytes;
    return least(fit < least_run ? least_run : fit, most);
  }

  void flush_all() {
    if constexpr (!IS_SAME<T, double>)
      if (num_tiles_ > 0) flush(parts_, wholes_, num_products_);
    num_tiles_ = 0;
  }

  // The rows to prefetch while a tile of operands of type O is multiplied, if `left` columns follow it.
  template <typename O>
  Ahead ahead_of(const T* next, int64_t left) const {
    Ahead ahead;
    if (left == 0) return ahead;
    constexpr int64_t bytes = static_cast<int64_t>(sizeof(T));
    ahead.row = reinterpret_cast<const char*>(next);
    ahead.row_bytes = row_stride_ * bytes;
    ahead.num_rows = num_rows_ * (has_halves_ ? 2 : 1);
    ahead.step = Operand<O>::STEP * bytes;
    return ahead;
  }

  // Columns that do not fill a step are copied, and padded with zeros.
  void add_in_place(const T* at, int64_t columns, int64_t left) {
    const int64_t whole = columns / Operand<T>::STEP * Operand<T>::STEP;
    if (whole > 0)
      add_tile(Tile<T>{at, row_stride_, whole, sums(), ahead_of<T>(at + columns, left)}, num_rows_);
    if (whole < columns) add_copy(at + whole, columns - whole, {});
  }

  // Through the scratch tile, whose end is filled with zeros.
  void add_copy(const T* at, int64_t columns, Ahead ahead) {
    Copy* tile = static_cast<Copy*>(tile_);
    const int64_t stride = columns_at_once<T>() + 64 / static_cast<int64_t>(sizeof(Copy));
    for (int64_t row = 0; row < num_rows_; ++row) copy_row(at + row * row_stride_, tile + row * stride, columns);
    add_filled(tile, stride, columns, ahead);
  }

  // The same of rows that are scaled by the root of the metric, or of the sums of halves.
  void add_scaled(const T* at, int64_t columns, int64_t left) {
    const int64_t stride = columns_at_once<Scaled>() + 64 / static_cast<int64_t>(sizeof(Scaled));
    Scaled* tile = static_cast<Scaled*>(tile_);
    Scaled* roots = tile + num_rows_ * stride;
    roots_of(moments_, at - rows_RN_, roots, columns);
    const bool are_few = !has_halves_ && num_rows_ <= MOST_SCALED_AT_ONCE;
    if (has_halves_ && weighted_.coefficients != nullptr) {
      Scaled* totals = roots + stride;
      add_all_halves<true>(roots, at, tile, stride, totals, columns);
      with_type(weighted_.dtype, [&](auto zero) {
        auto* out = static_cast<decltype(zero)*>(weighted_.out) + (at - rows_RN_);
        narrow(totals, out, columns, weighted_.past_cache);
        // The next run, to be written: stores to memory that is in no cache would wait.
        if (!weighted_.past_cache)
          for (int64_t i = 0; i < least(columns, left); i += 64 / static_cast<int64_t>(sizeof(zero)))
            __builtin_prefetch(out + columns + i, 1, 2);
      });
    } else if (has_halves_) {
      add_all_halves<false>(roots, at, tile, stride, nullptr, columns);
    } else if (are_few) {
      scale_rows<true>(roots, at, row_stride_, num_rows_, tile, stride, columns);
    } else {
      scale_rows<false>(roots, at, row_stride_, num_rows_, tile, stride, columns);
    }
    add_filled(tile, stride, columns, are_few ? Ahead{} : ahead_of<Scaled>(at + columns, left));
  }

  template <bool IS_SUMMED>
  void add_all_halves(const Scaled* roots, const T* at, Scaled* tile, int64_t stride, Scaled* totals,
                      int64_t columns) {
    auto* products = sums() + pair_index(num_rows_, 0);
    const int64_t num_shares = (num_rows_ + HALVES_AT_ONCE - 1) / HALVES_AT_ONCE;
    for (int64_t share = 0; share < num_shares; ++share) {
      const int64_t row = num_rows_ * share / num_shares;
      add_halves_of<IS_SUMMED, HALVES_AT_ONCE>(
          num_rows_ * (share + 1) / num_shares - row, roots, at + 2 * row * row_stride_, row_stride_,
          tile + row * stride, stride, products + row, columns,
          Totals<Scaled>{IS_SUMMED ? weighted_.coefficients + row : nullptr, totals, share == 0});
    }
  }

  template <typename O>
  void add_filled(O* tile, int64_t stride, int64_t columns, Ahead ahead) {
    constexpr int64_t step = Operand<O>::STEP;
    const int64_t padded = (columns + step - 1) / step * step;
    if (columns < padded)
      for (int64_t row = 0; row < num_rows_; ++row)
        for (int64_t i = columns; i < padded; ++i) tile[row * stride + i] = O{};
    add_tile<O, true>(Tile<O>{tile, stride, padded, sums(), ahead}, num_rows_);
  }

  const T* rows_RN_;
  int64_t row_stride_;
  // Of the matrix; with halves two rows are read for each.
  int64_t num_rows_;
  bool has_halves_;
  Moments moments_;
  WeightedSum weighted_;
  int64_t num_products_;
  void* tile_;
  DoubleSum* wholes_;
  FloatSum* parts_;
  // Tiles since the last flush.
  int64_t num_tiles_ = 0;
};

inline void gram_add(const Rows& rows, const Moments& moments, bool has_halves, const WeightedSum& weighted,
                     int64_t first, int64_t columns, void* scratch, void* sums) {
  with_type(rows.dtype, [&](auto zero) {
    using T = decltype(zero);
    Gram<T>(rows, moments, has_halves, weighted, scratch, sums).add(first, columns);
  });
}

inline void gram_end(const void* sums, int64_t num_rows, bool has_halves, double* products) {
  const DoubleSum* whole = static_cast<const DoubleSum*>(sums);
  const auto next = [&](int64_t place) {
    double sum = 0;
    for (int64_t lane = 0; lane < LANES<double>; ++lane) sum += (*whole)[lane];
    ++whole;
    products[place] = sum;
  };
  for_each_call(
      num_rows,
      [&](int64_t row, int64_t rows) {
        for (int64_t i = 0; i < rows; ++i)
          for (int64_t j = 0; j <= i; ++j) next(pair_index(row + i, row + j));
      },
      [&](int64_t row, int64_t partner, int64_t width) {
        for (int64_t i = 0; i < PANEL; ++i)
          for (int64_t j = 0; j < width; ++j) next(pair_index(row + i, partner + j));
      });
  for (int64_t place = pair_index(num_rows, 0); place < num_products_of(num_rows, has_halves); ++place) next(place);
}

}  // namespace doge_fast::arithmetic
