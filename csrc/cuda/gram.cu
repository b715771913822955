// sum_p B_p B_p^T over a table of chunks, [R, R] float64.
//
// Program p takes chunks p, p + P, p + 2 P, ...; sums are float32 over at most 8192 columns and float64
// beyond (float64 throughout for float64 rows); a second launch adds the programs' partial results in
// a fixed order. P depends on the table and the number of rows, on no device: bitwise reproducible.
// Up to 8 rows of float32 as pairs, up to 64 rows of anything as tiles of one warp, beyond as panels.

#include "gram_panels.cuh"
#include "gram_pairs.cuh"
#include "gram_tiles.cuh"

namespace doge_fast::cuda {
namespace {

constexpr int MAX_PAIR_ROWS = 8;
// Enough to fill any GPU several times over, so that the last ones to finish leave it idle shortly.
constexpr int64_t MAX_PROGRAMS = 2048;
// Float64 entries of all partial results together: 64 MiB.
constexpr int64_t MAX_PARTIAL_ENTRIES = 1 << 23;
constexpr int REDUCE_WAYS = 32;

// gram = or += the sum of the programs' partial results, [num_partials, gridDim.y, entries], which Map
// tells apart. Each way adds every 32nd partial result, and one lane adds the ways.
template <typename Map>
__global__ void __launch_bounds__(REDUCE_WAYS* LANES)
    gram_reduce(const double* partials, int64_t num_partials, int entries, int num_rows, bool add,
                double* gram) {
  __shared__ double shared[REDUCE_WAYS][LANES];
  const int lane = threadIdx.x % LANES;
  const int way = threadIdx.x / LANES;
  const int index = blockIdx.x * LANES + lane;
  const Entry at = Map::entry(blockIdx.y, index);
  // Both triangles come from one: three-pass products are not symmetric to the last bit.
  const bool is_wanted = index < entries && at.row < num_rows && at.column <= at.row;
  double sum = 0;
  if (is_wanted) {
    const int64_t stride = static_cast<int64_t>(gridDim.y) * entries;
    const double* from = partials + static_cast<int64_t>(blockIdx.y) * entries + index;
    DOGE_UNROLL_BY(8)
    for (int64_t p = way; p < num_partials; p += REDUCE_WAYS) sum += from[p * stride];
  }
  shared[way][lane] = sum;
  __syncthreads();
  if (way == 0 && is_wanted) {
    for (int other = 1; other < REDUCE_WAYS; ++other) sum += shared[other][lane];
    double& entry = gram[static_cast<int64_t>(at.row) * num_rows + at.column];
    sum += add ? entry : 0;
    entry = sum;
    gram[static_cast<int64_t>(at.column) * num_rows + at.row] = sum;
  }
}

// What a table asks for.
struct Problem {
  const int64_t* table;
  int64_t num_chunks;
  bool is_aligned;
  int num_rows;
  bool add;
  Tensor gram_RR;

  // Programs whose partial results, `entries` each, fit.
  int64_t num_programs(int64_t entries) const {
    const int64_t most = std::max<int64_t>(1, MAX_PARTIAL_ENTRIES / entries);
    return std::min({MAX_PROGRAMS, most, num_chunks});
  }
  Tensor partials(int64_t num_programs, int64_t entries) const {
    return torch::stable::new_empty(gram_RR, {num_programs, entries});
  }
};

template <typename Map>
void reduce(const Launcher& launch, const Problem& problem, const Tensor& partials, int entries,
            int64_t num_pairs) {
  launch(gram_reduce<Map>, (entries + LANES - 1) / LANES, num_pairs, REDUCE_WAYS * LANES, 0,
         static_cast<const double*>(partials.const_data_ptr()), partials.size(0), entries, problem.num_rows,
         problem.add, static_cast<double*>(problem.gram_RR.mutable_data_ptr()));
}

template <int ROWS>
void run_pairs(const Launcher& launch, const Problem& problem) {
  if constexpr (ROWS < MAX_PAIR_ROWS)
    if (problem.num_rows > ROWS) return run_pairs<ROWS + 1>(launch, problem);
  const int64_t num_programs = problem.num_programs(PAIRS_OF<ROWS>);
  const Tensor partials = problem.partials(num_programs, PAIRS_OF<ROWS>);
  launch(gram_pairs<ROWS>, num_programs, 1, PAIRS_THREADS, 0, problem.table, problem.num_chunks,
         problem.is_aligned, static_cast<double*>(partials.mutable_data_ptr()));
  reduce<Triangle>(launch, problem, partials, PAIRS_OF<ROWS>, 1);
}

template <typename T, int GROUPS>
void run_tiles(const Launcher& launch, const Problem& problem) {
  if constexpr (GROUPS < MAX_GROUPS)
    if (problem.num_rows > 8 * GROUPS) return run_tiles<T, GROUPS + 1>(launch, problem);
  using Tiles = TilesOf<T, GROUPS>;
  const int64_t num_programs = problem.num_programs(Tiles::ENTRIES);
  const Tensor partials = problem.partials(num_programs, Tiles::ENTRIES);
  launch(gram_tiles<T, GROUPS>, num_programs, 1, TILES_THREADS, 0, problem.table, problem.num_chunks,
         problem.is_aligned, problem.num_rows, static_cast<double*>(partials.mutable_data_ptr()));
  reduce<typename Tiles::Map>(launch, problem, partials, Tiles::ENTRIES, 1);
}

template <typename T>
void run_panels(const Launcher& launch, const Problem& problem) {
  const int64_t num_panels = (problem.num_rows + PANEL - 1) / PANEL;
  const int64_t num_pairs = num_panels * (num_panels + 1) / 2;
  const int64_t entries = num_pairs * Panels::ENTRIES;
  const int64_t num_programs = problem.num_programs(entries);
  const Tensor partials = problem.partials(num_programs, entries);
  launch(gram_panels<T>, num_programs, num_pairs, PANELS_THREADS, panels_shared_bytes(num_pairs > 1),
         problem.table, problem.num_chunks, problem.is_aligned, problem.num_rows,
         static_cast<double*>(partials.mutable_data_ptr()));
  reduce<Panels>(launch, problem, partials, Panels::ENTRIES, num_pairs);
}

template <typename T>
void run(const Launcher& launch, const Problem& problem) {
  if (std::is_same_v<T, float> && problem.num_rows <= MAX_PAIR_ROWS) return run_pairs<1>(launch, problem);
  // Few float32 rows are pairs: their tiles need not be compiled.
  constexpr int FEWEST_GROUPS = std::is_same_v<T, float> ? 2 : 1;
  if (problem.num_rows <= 8 * MAX_GROUPS) return run_tiles<T, FEWEST_GROUPS>(launch, problem);
  run_panels<T>(launch, problem);
}

// gram_RR = or, with `add`, += the products over the chunks of `table`, all rows of one dtype.
void gram(Tensor table, bool is_aligned, ScalarType dtype, Tensor gram_RR, bool add) {
  const int64_t* chunks = check_table(table, GRAM_FIELDS, "gram");
  const int64_t num_rows = gram_RR.size(0);
  DOGE_CHECK(gram_RR.scalar_type() == ScalarType::Double && gram_RR.is_contiguous() && num_rows > 0 &&
                 gram_RR.numel() == num_rows * num_rows,
             "gram needs a contiguous float64 result of shape [R, R]; received shape ", shape(gram_RR),
             " of ", name(gram_RR.scalar_type()), ".");
  const Launcher launch(gram_RR);
  const Problem problem{chunks, table.size(0), is_aligned, static_cast<int>(num_rows), add, gram_RR};
  with_storage(dtype, "gram", [&](auto storage) { run<decltype(storage)>(launch, problem); });
}

STABLE_TORCH_LIBRARY_FRAGMENT(DOGE_LIBRARY, library) {
  library.def("gram(Tensor table, bool is_aligned, ScalarType dtype, Tensor(a!) gram_RR, bool add) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(DOGE_LIBRARY, CompositeExplicitAutograd, library) {
  library.impl("gram", TORCH_BOX(&gram));
}

}  // namespace
}  // namespace doge_fast::cuda
