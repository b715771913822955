// out = sum_r c_r row_r over a table of chunks; the coefficients are on the device.
//
// A block takes one chunk, and a thread 16 columns of it. Their sums stay in registers, and rows are added in
// order: there is no reduction, and results are bitwise reproducible. A row whose coefficient is exactly zero is
// not read. Reads each other row once; writes each output once.

#include "launch.cuh"

namespace doge_fast::cuda {
namespace {

constexpr int THREADS = 256;
constexpr int COLUMNS_PER_THREAD = 16;
constexpr int64_t CHUNK_COLUMNS = THREADS * COLUMNS_PER_THREAD;
// Rows in a list; more rows take several lists.
constexpr int MAX_LISTED = 512;
// Rows whose loads are in flight at once.
constexpr int ROWS_AHEAD = 2;

template <typename T>
constexpr int PIECES = COLUMNS_PER_THREAD / PER_PIECE<T>;

struct Listed {
  int row[MAX_LISTED];
  float coefficient[MAX_LISTED];
  int count;
};

// Lists the rows from `first` on whose coefficients are not zero, in order. Called by the first warp.
__device__ void list_rows(Listed& listed, const double* coefficients_R, int64_t first, int64_t num_rows) {
  int count = 0;
  for (int64_t start = first; start < first + MAX_LISTED; start += LANES) {
    const int64_t row = start + threadIdx.x;
    const double coefficient = row < num_rows ? coefficients_R[row] : 0;
    // A NaN is not zero: it must reach the output.
    const bool is_used = coefficient != 0;
    const uint32_t used = lanes_where(is_used);
    if (is_used) {
      const int place = count + count_bits(used & ((1U << threadIdx.x) - 1));
      listed.row[place] = static_cast<int>(row);
      listed.coefficient[place] = static_cast<float>(coefficient);
    }
    count += count_bits(used);
  }
  if (threadIdx.x == 0) listed.count = count;
}

// The first column of piece `p` of this thread; adjacent threads have adjacent pieces.
template <typename T>
__device__ __forceinline__ int64_t column_of(int p) {
  return (p * THREADS + threadIdx.x) * PER_PIECE<T>;
}

template <typename T>
__device__ __forceinline__ void load_row(Piece (&pieces)[PIECES<T>], const Chunk<T>& chunk, int64_t row,
                                         bool is_aligned) {
  const T* from = chunk.first + row * chunk.row_stride;
  if (is_aligned) {
    DOGE_UNROLL
    for (int p = 0; p < PIECES<T>; ++p)
      pieces[p] = column_of<T>(p) < chunk.length ? load16(from + column_of<T>(p)) : Piece{};
  } else {
    DOGE_UNROLL
    for (int p = 0; p < PIECES<T>; ++p)
      pieces[p] = load_elements(from + column_of<T>(p), chunk.length - column_of<T>(p));
  }
}

template <typename T>
__device__ __forceinline__ void add_row(float (&sums)[PIECES<T>][PER_PIECE<T>],
                                        const Piece (&pieces)[PIECES<T>], float coefficient) {
  DOGE_UNROLL
  for (int p = 0; p < PIECES<T>; ++p) {
    float elements[PER_PIECE<T>];
    unpack(pieces[p], elements, T{});
    DOGE_UNROLL
    for (int i = 0; i < PER_PIECE<T>; ++i) sums[p][i] = fma(elements[i], coefficient, sums[p][i]);
  }
}

template <typename T>
__device__ __forceinline__ void add_listed(float (&sums)[PIECES<T>][PER_PIECE<T>], const Chunk<T>& chunk,
                                           const Listed& listed, bool is_aligned) {
  const int count = listed.count;
  int k = 0;
  for (; k + ROWS_AHEAD <= count; k += ROWS_AHEAD) {
    Piece pieces[ROWS_AHEAD][PIECES<T>];
    DOGE_UNROLL
    for (int a = 0; a < ROWS_AHEAD; ++a) load_row(pieces[a], chunk, listed.row[k + a], is_aligned);
    DOGE_UNROLL
    for (int a = 0; a < ROWS_AHEAD; ++a) add_row<T>(sums, pieces[a], listed.coefficient[k + a]);
  }
  for (; k < count; ++k) {
    Piece pieces[PIECES<T>];
    load_row(pieces, chunk, listed.row[k], is_aligned);
    add_row<T>(sums, pieces, listed.coefficient[k]);
  }
}

template <typename T, typename Out>
__device__ __forceinline__ void store_sums(Out* out, const float (&sums)[PIECES<T>][PER_PIECE<T>],
                                           int64_t length, bool is_aligned) {
  DOGE_UNROLL
  for (int p = 0; p < PIECES<T>; ++p) {
    Out elements[PER_PIECE<T>];
    DOGE_UNROLL
    for (int i = 0; i < PER_PIECE<T>; ++i) narrow(elements[i], sums[p][i]);
    const int64_t column = column_of<T>(p);
    if (is_aligned) {
      if (column < length) store_together(out + column, elements);
    } else {
      DOGE_UNROLL
      for (int i = 0; i < PER_PIECE<T>; ++i)
        if (column + i < length) out[column + i] = elements[i];
    }
  }
}

template <typename T, typename Out>
__global__ void __launch_bounds__(THREADS)
    weighted_sum(const int64_t* table, bool is_aligned, const double* coefficients_R, int64_t num_rows) {
  __shared__ Listed listed;
  const int64_t* entry = table + static_cast<int64_t>(blockIdx.x) * SUM_FIELDS;
  const auto chunk = chunk_at<T>(entry);
  float sums[PIECES<T>][PER_PIECE<T>] = {};
  for (int64_t first = 0; first < num_rows; first += MAX_LISTED) {
    if (threadIdx.x < LANES) list_rows(listed, coefficients_R, first, num_rows);
    __syncthreads();
    add_listed(sums, chunk, listed, is_aligned);
    // The next rows overwrite the list.
    __syncthreads();
  }
  store_sums<T>(reinterpret_cast<Out*>(entry[3]), sums, chunk.length, is_aligned);
}

// Writes to the addresses in the table, whose chunks have at most `chunk_columns` columns.
void run(Tensor table, int64_t chunk_columns, bool is_aligned, ScalarType dtype, ScalarType out_dtype,
         Tensor coefficients_R) {
  DOGE_CHECK(chunk_columns <= CHUNK_COLUMNS, "weighted_sum takes at most ", CHUNK_COLUMNS,
             " columns a block; the table has chunks of ", chunk_columns, ".");
  const int64_t* chunks = check_table(table, SUM_FIELDS, "weighted_sum");
  DOGE_CHECK(coefficients_R.scalar_type() == ScalarType::Double && coefficients_R.is_contiguous(),
             "weighted_sum needs contiguous float64 coefficients; received ",
             name(coefficients_R.scalar_type()), ".");
  const Launcher launch(coefficients_R);
  with_storage(dtype, "weighted_sum", [&](auto storage) {
    with_storage(out_dtype, "weighted_sum", [&](auto out) {
      launch(weighted_sum<decltype(storage), decltype(out)>, table.size(0), 1, THREADS, 0, chunks, is_aligned,
             static_cast<const double*>(coefficients_R.const_data_ptr()), coefficients_R.numel());
    });
  });
}

STABLE_TORCH_LIBRARY_FRAGMENT(DOGE_LIBRARY, library) {
  library.def(
      "weighted_sum(Tensor table, int chunk_columns, bool is_aligned, ScalarType dtype, "
      "ScalarType out_dtype, Tensor coefficients_R) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(DOGE_LIBRARY, CompositeExplicitAutograd, library) {
  library.impl("weighted_sum", TORCH_BOX(&run));
}

}  // namespace
}  // namespace doge_fast::cuda
