// gram_RR = sum over blocks of block D block^T, in one pass over memory; D is diagonal, a metric of columns or 1.
// With halves, of the sums of two rows each; a last row has the products of these two. gram_and_sum writes the sum
// of these sums, each times its coefficient, in the same pass.
//
// Reads every block and its second moments once (R*N and N elements); writes R*R doubles, and N elements of the
// weighted sum. The columns of a partial sum and the order of additions depend on the sizes and the CPU alone: on
// one kind of CPU the result is bitwise the same for any number of threads.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include "gram.h"
#include "schedule.h"

namespace doge_fast {
namespace {

using namespace arithmetic;

// A thread has two registers of sums for every pair of rows: at this limit 256 MiB.
constexpr int64_t MAX_ROWS = 2048;

// The memory of a worker: a tile of copied rows, and the running sums of a piece.
class Worker {
 public:
  Worker(int64_t num_rows, bool has_halves)
      : num_rows_(num_rows),
        has_halves_(has_halves),
        sum_bytes_(gram_sum_bytes(num_products_of(num_rows, has_halves))),
        scratch_(aligned_array(gram_scratch_bytes(num_rows))),
        sums_(aligned_array(sum_bytes_)) {}

  void begin() { std::memset(sums_.get(), 0, sum_bytes_); }

  void add(const Rows& rows, const Moments& moments, const WeightedSum& weighted, int64_t first, int64_t last) {
    gram_add(rows, moments, has_halves_, weighted, first, last - first, scratch_.get(), sums_.get());
  }

  void end(double* products) const { gram_end(sums_.get(), num_rows_, has_halves_, products); }

 private:
  static constexpr std::align_val_t CACHE_LINE{64};
  struct Free {
    void operator()(void* memory) const { ::operator delete[](memory, CACHE_LINE); }
  };
  using Array = std::unique_ptr<void, Free>;
  static Array aligned_array(int64_t bytes) { return Array(::operator new[](bytes, CACHE_LINE)); }

  int64_t num_rows_;
  bool has_halves_;
  int64_t sum_bytes_;
  Array scratch_;
  Array sums_;
};

// The number of pieces, which have separate partial sums. There are enough for many threads. But a piece has
// fixed costs (its first tile is not prefetched; a register per product is cleared, flushed and added up), so it
// must not be short. All partial sums together take 64 MiB at most.
int64_t choose_num_pieces(int64_t num_units, int64_t unit, int64_t num_products) {
  constexpr int64_t few = 8, enough = 64, most = 256, short_piece = 8192, long_piece = 262144;
  constexpr int64_t partial_bytes = 64 << 20;
  const int64_t fit = partial_bytes / (num_products * static_cast<int64_t>(sizeof(double)));
  const int64_t columns = num_units * unit;
  const int64_t wanted = std::max({few, std::min(enough, columns / short_piece), columns / long_piece});
  return std::min({num_units, wanted, std::clamp<int64_t>(fit, 1, most)});
}

using Optionals = std::vector<std::optional<Tensor>>;

// [n_p] each, contiguous, or none.
void check_moments(const TensorList& blocks, const Optionals& moments) {
  DOGE_CHECK(moments.size() == blocks.size(), "gram needs as many second moments as blocks; received ",
             moments.size(), " and ", blocks.size(), ".");
  for (size_t p = 0; p < blocks.size(); ++p) {
    if (!moments[p]) continue;
    check_contiguous(*moments[p], "gram", "second_moments", p);
    DOGE_CHECK(moments[p]->numel() == blocks[p].size(1), "gram needs second moments as long as rows; blocks[", p,
               "] has ", blocks[p].size(1), " columns, second_moments[", p, "] has ", moments[p]->numel(),
               " elements.");
  }
}

// `weighted`: of each block, or of none.
Tensor gram_of(const TensorList& blocks, const std::optional<Optionals>& second_moments, double eps, bool has_halves,
               std::vector<WeightedSum> weighted) {
  const int64_t num_read = check_blocks(blocks, "gram");
  if (second_moments) check_moments(blocks, *second_moments);
  DOGE_CHECK(1 <= num_read && num_read <= MAX_ROWS, "gram needs 1 to ", MAX_ROWS, " rows; received ", num_read, ".");
  DOGE_CHECK(!has_halves || num_read % 2 == 0, "gram needs two rows for each sum of halves; received ", num_read,
             " rows.");
  const int64_t num_rows = has_halves ? num_read / 2 : num_read;
  weighted.resize(blocks.size());
  std::vector<Rows> table;
  std::vector<Moments> moments(blocks.size());
  std::vector<int64_t> lengths;
  int64_t num_bytes = 0;
  for (const Tensor& block : blocks) {
    table.push_back(Rows::of(block));
    lengths.push_back(block.size(1));
    num_bytes += block.numel() * static_cast<int64_t>(block.element_size());
  }
  for (size_t p = 0; second_moments && p < blocks.size(); ++p)
    if (const auto& of_block = (*second_moments)[p])
      moments[p] = {of_block->const_data_ptr(), of_block->scalar_type(), eps};
  // A piece is a number of whole tiles.
  const int64_t unit = tile_columns(num_rows);
  const Columns columns(std::move(lengths), unit);
  const int64_t num_products = num_products_of(num_rows, has_halves);
  const int64_t num_pieces = choose_num_pieces(columns.num_units(), unit, num_products);
  std::vector<double> partial_sums(num_pieces * num_products);
  for_each_piece(
      num_pieces, num_bytes, [&] { return Worker(num_rows, has_halves); },
      [&](int64_t piece, Worker& worker) {
        worker.begin();
        columns.for_each_span(piece, num_pieces, [&](const Columns::Span& span) {
          worker.add(table[span.tensor], moments[span.tensor], weighted[span.tensor], span.first, span.last);
        });
        if (weighted[0].past_cache) finish_streaming();
        worker.end(partial_sums.data() + piece * num_products);
      });

  Tensor gram_RR = torch::stable::new_empty(blocks[0], {num_rows + has_halves, num_rows}, ScalarType::Double);
  double* out = static_cast<double*>(gram_RR.mutable_data_ptr());
  const auto product = [&](int64_t row, int64_t partner) {
    double sum = 0;
    for (int64_t piece = 0; piece < num_pieces; ++piece)
      sum += partial_sums[piece * num_products + pair_index(row, partner)];
    return sum;
  };
  for (int64_t row = 0; row < num_rows; ++row)
    for (int64_t partner = 0; partner <= row; ++partner)
      out[row * num_rows + partner] = out[partner * num_rows + row] = product(row, partner);
  // Behind all pairs: as those of one row more.
  for (int64_t row = 0; has_halves && row < num_rows; ++row) out[num_rows * num_rows + row] = product(num_rows, row);
  return gram_RR;
}

Tensor gram(TensorList blocks, std::optional<Optionals> second_moments, double eps, bool has_halves) {
  return gram_of(blocks, second_moments, eps, has_halves, {});
}

// With halves; coefficients_K is of their sums.
Tensor gram_and_sum(TensorList blocks, Tensor coefficients_K, TensorList outs, std::optional<Optionals> second_moments,
                    double eps) {
  const int64_t num_read = check_blocks(blocks, "gram_and_sum");
  check_outs(blocks, outs, "gram_and_sum");
  const std::vector<double> coefficients = values_of(coefficients_K, num_read / 2, "gram_and_sum");
  int64_t out_bytes = 0;
  for (const Tensor& out : outs) out_bytes += out.numel() * static_cast<int64_t>(out.element_size());
  const bool past_cache = is_larger_than_cache(out_bytes);
  std::vector<WeightedSum> weighted;
  for (const Tensor& out : outs)
    weighted.push_back({coefficients.data(), out.mutable_data_ptr(), out.scalar_type(), past_cache});
  return gram_of(blocks, second_moments, eps, true, std::move(weighted));
}

STABLE_TORCH_LIBRARY_FRAGMENT(doge_fast_cpp, library) {
  library.def("gram(Tensor[] blocks, Tensor?[]? second_moments=None, float eps=0., bool halves=False) -> Tensor");
  library.def(
      "gram_and_sum(Tensor[] blocks, Tensor coefficients_K, Tensor(a!)[] outs, Tensor?[]? second_moments=None, "
      "float eps=0.) -> Tensor");
}
// For every device, so that a tensor on another device and an empty list fail with our message, not the
// dispatcher's.
STABLE_TORCH_LIBRARY_IMPL(doge_fast_cpp, CompositeExplicitAutograd, library) {
  library.impl("gram", TORCH_BOX(&gram));
  library.impl("gram_and_sum", TORCH_BOX(&gram_and_sum));
}

}  // namespace
}  // namespace doge_fast
