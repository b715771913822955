// sum_p B_p D_p B_p^T over a table of chunks, [R, R] float64, up to 64 rows; D is a metric of float32 columns, or 1.
//
// A program takes consecutive chunks, and later programs take fewer. Sums are float32 over at most 8192 columns
// and float64 across these; a second launch adds the programs' partial results in a fixed order. The chunks of a
// program depend on the table and the number of rows, not on the device: results are bitwise reproducible.
//
// Up to 8 rows of float32 are multiplied in pairs, up to 64 rows in tiles of one warp. Triton takes more rows.

#include <optional>

#include "gram_pairs.cuh"
#include "gram_tiles.cuh"

namespace doge_fast::cuda {
namespace {

constexpr int MAX_PAIR_ROWS = 8;
// At least three times as many programs as a GPU runs at once (see ProgramChunks). With more rows fewer programs
// run at once, and each writes more. MAX_PARTIAL_ENTRIES float64 of all partial results are 128 MiB.
#ifdef DOGE_EMULATED
// Small, so that some programs have several of the few chunks that a test has time for.
constexpr int64_t MAX_PROGRAMS = 300;
constexpr int64_t MAX_PROGRAMS_OF_MANY_ROWS = 20;
constexpr int64_t MAX_PARTIAL_ENTRIES = 1 << 18;
#else
constexpr int64_t MAX_PROGRAMS = 4096;
constexpr int64_t MAX_PROGRAMS_OF_MANY_ROWS = 2048;
constexpr int64_t MAX_PARTIAL_ENTRIES = 1 << 24;
#endif
constexpr int64_t FEW_ENTRIES = 1024;
// Entries that a block reduces: 32 bytes, the smallest memory transaction.
constexpr int REDUCE_ENTRIES = 4;
constexpr int REDUCE_WARPS = 32;
constexpr int REDUCE_THREADS = REDUCE_WARPS * LANES;
constexpr int REDUCE_WAYS = REDUCE_THREADS / REDUCE_ENTRIES;

// gram = or += the sum of the programs' partial results, [num_partials, entries]; Map::entry gives an entry's row
// and column. Way w adds partial results w, w + 256 ...; then the ways of a warp are added in pairs, and the
// warps one after the other.
template <typename Map>
__global__ void __launch_bounds__(REDUCE_THREADS)
    gram_reduce(const double* partials, int64_t num_partials, int entries, int num_rows, bool add,
                double* gram) {
  __shared__ double shared[REDUCE_WARPS][REDUCE_ENTRIES];
  const int place = threadIdx.x % REDUCE_ENTRIES;
  const int way = threadIdx.x / REDUCE_ENTRIES;
  const int index = blockIdx.x * REDUCE_ENTRIES + place;
  const Entry at = Map::entry(index);
  // One triangle is written to both, because the products in three passes are not bitwise symmetric.
  const bool is_wanted = index < entries && at.row < num_rows && at.column <= at.row;
  double sum = 0;
  if (is_wanted) {
    DOGE_UNROLL_BY(8)
    for (int64_t p = way; p < num_partials; p += REDUCE_WAYS) sum += partials[p * entries + index];
  }
  DOGE_UNROLL
  for (int distance = LANES / 2; distance >= REDUCE_ENTRIES; distance /= 2) sum += from_lane_xor(sum, distance);
  if (threadIdx.x % LANES < REDUCE_ENTRIES) shared[threadIdx.x / LANES][place] = sum;
  __syncthreads();
  if (threadIdx.x < REDUCE_ENTRIES && is_wanted) {
    for (int warp = 1; warp < REDUCE_WARPS; ++warp) sum += shared[warp][place];
    double& entry = gram[static_cast<int64_t>(at.row) * num_rows + at.column];
    sum += add ? entry : 0;
    entry = sum;
    gram[static_cast<int64_t>(at.column) * num_rows + at.row] = sum;
  }
}

// The arguments of a call.
struct Problem {
  const int64_t* table;
  int64_t num_chunks;
  bool is_aligned;
  int num_rows;
  float eps;
  bool add;
  Tensor gram_RR;

  // The number of programs with `entries` partial results each.
  int64_t num_programs(int64_t entries) const {
    const int64_t most = std::max<int64_t>(1, MAX_PARTIAL_ENTRIES / entries);
    return std::min(
        {entries <= FEW_ENTRIES ? MAX_PROGRAMS : MAX_PROGRAMS_OF_MANY_ROWS, most, num_chunks});
  }
  Tensor partials(int64_t num_programs, int64_t entries) const {
    return torch::stable::new_empty(gram_RR, {num_programs, entries});
  }
};

template <typename Map>
void reduce(const Launcher& launch, const Problem& problem, const Tensor& partials, int entries) {
  launch(gram_reduce<Map>, (entries + REDUCE_ENTRIES - 1) / REDUCE_ENTRIES, 1, REDUCE_THREADS, 0,
         static_cast<const double*>(partials.const_data_ptr()), partials.size(0), entries, problem.num_rows,
         problem.add, static_cast<double*>(problem.gram_RR.mutable_data_ptr()));
}

template <int ROWS, bool SCALED>
void run_pairs(const Launcher& launch, const Problem& problem) {
  if constexpr (ROWS < MAX_PAIR_ROWS)
    if (problem.num_rows > ROWS) return run_pairs<ROWS + 1, SCALED>(launch, problem);
  const int64_t num_programs = problem.num_programs(PAIRS_OF<ROWS>);
  const Tensor partials = problem.partials(num_programs, PAIRS_OF<ROWS>);
  launch(gram_pairs<ROWS, SCALED>, num_programs, 1, PAIRS_THREADS, 0, problem.table, problem.num_chunks,
         problem.is_aligned, problem.eps, static_cast<double*>(partials.mutable_data_ptr()));
  reduce<Triangle>(launch, problem, partials, PAIRS_OF<ROWS>);
}

template <typename T, int GROUPS, bool SCALED>
void run_tiles(const Launcher& launch, const Problem& problem) {
  if constexpr (GROUPS < MAX_GROUPS)
    if (problem.num_rows > 8 * GROUPS) return run_tiles<T, GROUPS + 1, SCALED>(launch, problem);
  constexpr int ENTRIES = Tiles::entries(GROUPS);
  const int64_t num_programs = problem.num_programs(ENTRIES);
  const Tensor partials = problem.partials(num_programs, ENTRIES);
  launch(gram_tiles<T, GROUPS, SCALED>, num_programs, 1, TILES_THREADS, TILES_SHARED_BYTES<GROUPS, SCALED>,
         problem.table, problem.num_chunks, problem.is_aligned, problem.num_rows, problem.eps,
         static_cast<double*>(partials.mutable_data_ptr()));
  reduce<Tiles>(launch, problem, partials, ENTRIES);
}

template <typename T, bool SCALED>
void run(const Launcher& launch, const Problem& problem) {
  if (std::is_same_v<T, float> && problem.num_rows <= MAX_PAIR_ROWS)
    return run_pairs<1, SCALED>(launch, problem);
  // Up to 8 float32 rows never reach this, so their tiles need not be compiled.
  constexpr int FEWEST_GROUPS = std::is_same_v<T, float> ? 2 : 1;
  run_tiles<T, FEWEST_GROUPS, SCALED>(launch, problem);
}

// gram_RR = or, with `add`, += the products over the chunks of `table`, all rows of one dtype. With `eps` in the
// metric of float32 second moments, which the table then has.
void gram(Tensor table, bool is_aligned, ScalarType dtype, std::optional<double> eps, Tensor gram_RR, bool add) {
  const int64_t* chunks = check_table(table, eps ? GRAM_FIELDS<true> : GRAM_FIELDS<false>, "gram");
  DOGE_CHECK(!eps || dtype == ScalarType::Float, "gram takes a metric of float32 rows; received ", name(dtype), ".");
  const int64_t num_rows = gram_RR.size(0);
  DOGE_CHECK(gram_RR.scalar_type() == ScalarType::Double && gram_RR.is_contiguous() && num_rows > 0 &&
                 gram_RR.numel() == num_rows * num_rows,
             "gram needs a contiguous float64 result of shape [R, R]; received shape ", shape(gram_RR),
             " of ", name(gram_RR.scalar_type()), ".");
  DOGE_CHECK(num_rows <= 8 * MAX_GROUPS, "gram takes up to ", 8 * MAX_GROUPS, " rows; received ", num_rows, ".");
  const Launcher launch(gram_RR);
  const Problem problem{chunks,
                        table.size(0),
                        is_aligned,
                        static_cast<int>(num_rows),
                        static_cast<float>(eps.value_or(0)),
                        add,
                        gram_RR};
  if (eps) return run<float, true>(launch, problem);
  with_storage(dtype, "gram", [&](auto storage) { run<decltype(storage), false>(launch, problem); });
}

STABLE_TORCH_LIBRARY_FRAGMENT(DOGE_LIBRARY, library) {
  library.def(
      "gram(Tensor table, bool is_aligned, ScalarType dtype, float? eps, Tensor(a!) gram_RR, bool add) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(DOGE_LIBRARY, CompositeExplicitAutograd, library) {
  library.impl("gram", TORCH_BOX(&gram));
}

}  // namespace
}  // namespace doge_fast::cuda
