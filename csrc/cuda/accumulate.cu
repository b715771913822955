// rows[i] = grads[i], or rows[i] += grads[i], for up to MAX_PAIRS pairs in one launch.
//
// Gradients have new addresses in every step. So the addresses are parameters of the launch, at most 4 KiB:
// nothing is uploaded, and a CUDA graph has a copy of them.
// Reads each gradient once, and each row once when adding; writes each row once.

#include <algorithm>
#include <map>
#include <vector>

#include "launch.cuh"

namespace doge_fast::cuda {
namespace {

constexpr int THREADS = 256;
// A thread takes TIMES times TOGETHER elements; TOGETHER 16-bit elements are 16 bytes.
constexpr int TOGETHER = 8;
constexpr int TIMES = 2;
constexpr int BLOCK_ELEMENTS = THREADS * TOGETHER * TIMES;
constexpr int MAX_PAIRS = 144;

// The parameter of a launch, by value. first_block[i] is the first block of pair i.
struct Pairs {
  const void* grad[MAX_PAIRS];
  void* row[MAX_PAIRS];
  int64_t length[MAX_PAIRS];
  uint32_t first_block[MAX_PAIRS];
  int32_t count;
};
// The limit for the parameters of a launch, on every GPU.
static_assert(sizeof(Pairs) <= 4096);

// The last pair that begins at or before `block`.
__device__ __forceinline__ int pair_of(const Pairs& pairs, uint32_t block) {
  int low = 0;
  int high = pairs.count - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (pairs.first_block[middle] <= block)
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}

// TOGETHER elements; zeros past `count` of them.
template <typename T>
__device__ __forceinline__ void load_together(Piece (&pieces)[TOGETHER / PER_PIECE<T>], const T* from,
                                              int64_t count, bool is_wide) {
  constexpr int PIECES = TOGETHER / PER_PIECE<T>;
  if (is_wide) {
    DOGE_UNROLL
    for (int p = 0; p < PIECES; ++p) pieces[p] = load16(from + p * PER_PIECE<T>);
  } else {
    DOGE_UNROLL
    for (int p = 0; p < PIECES; ++p)
      pieces[p] = load_elements(from + p * PER_PIECE<T>, count - p * PER_PIECE<T>);
  }
}

template <typename T>
__device__ __forceinline__ void widen(float (&to)[TOGETHER], const Piece (&pieces)[TOGETHER / PER_PIECE<T>]) {
  DOGE_UNROLL
  for (int p = 0; p < TOGETHER / PER_PIECE<T>; ++p) {
    float elements[PER_PIECE<T>];
    unpack(pieces[p], elements, T{});
    DOGE_UNROLL
    for (int i = 0; i < PER_PIECE<T>; ++i) to[p * PER_PIECE<T> + i] = elements[i];
  }
}

template <typename Grad, typename Row, bool ADD>
__global__ void __launch_bounds__(THREADS) accumulate(const __grid_constant__ Pairs pairs) {
  const int pair = pair_of(pairs, blockIdx.x);
  const int64_t length = pairs.length[pair];
  const auto* grad = static_cast<const Grad*>(pairs.grad[pair]);
  auto* row = static_cast<Row*>(pairs.row[pair]);
  const bool is_aligned =
      (reinterpret_cast<uintptr_t>(grad) | reinterpret_cast<uintptr_t>(row)) % sizeof(Piece) == 0;
  const int64_t start = static_cast<int64_t>(blockIdx.x - pairs.first_block[pair]) * BLOCK_ELEMENTS;

  Piece grads[TIMES][TOGETHER / PER_PIECE<Grad>];
  Piece rows[TIMES][TOGETHER / PER_PIECE<Row>];
  DOGE_UNROLL
  for (int time = 0; time < TIMES; ++time) {
    const int64_t at = start + (time * THREADS + threadIdx.x) * TOGETHER;
    const bool is_wide = is_aligned && at + TOGETHER <= length;
    load_together(grads[time], grad + at, length - at, is_wide);
    if constexpr (ADD) load_together<Row>(rows[time], row + at, length - at, is_wide);
  }
  DOGE_UNROLL
  for (int time = 0; time < TIMES; ++time) {
    const int64_t at = start + (time * THREADS + threadIdx.x) * TOGETHER;
    float sums[TOGETHER];
    widen<Grad>(sums, grads[time]);
    if constexpr (ADD) {
      float before[TOGETHER];
      widen<Row>(before, rows[time]);
      DOGE_UNROLL
      for (int i = 0; i < TOGETHER; ++i) sums[i] = before[i] + sums[i];
    }
    Row elements[TOGETHER];
    DOGE_UNROLL
    for (int i = 0; i < TOGETHER; ++i) narrow(elements[i], sums[i]);
    if (is_aligned && at + TOGETHER <= length) {
      store_together(row + at, elements);
    } else {
      DOGE_UNROLL
      for (int i = 0; i < TOGETHER; ++i)
        if (at + i < length) row[at + i] = elements[i];
    }
  }
}

// Pairs of one pair of dtypes, launched when they are MAX_PAIRS, and at `flush`.
class Queue {
 public:
  Queue(ScalarType grad, ScalarType row, bool add) : grad_(grad), row_(row), add_(add) {}

  void push(const Launcher& launch, const Tensor& grad, const Tensor& row) {
    const int64_t blocks = (row.numel() + BLOCK_ELEMENTS - 1) / BLOCK_ELEMENTS;
    if (blocks == 0) return;
    DOGE_CHECK(blocks <= MAX_BLOCKS, "accumulate launches at most 2^31 blocks; a row has ", row.numel(),
               " elements. Split it in two.");
    if (pairs_.count == MAX_PAIRS || num_blocks_ + blocks > MAX_BLOCKS) flush(launch);
    pairs_.grad[pairs_.count] = grad.const_data_ptr();
    pairs_.row[pairs_.count] = row.mutable_data_ptr();
    pairs_.length[pairs_.count] = row.numel();
    pairs_.first_block[pairs_.count] = static_cast<uint32_t>(num_blocks_);
    ++pairs_.count;
    num_blocks_ += blocks;
  }

  void flush(const Launcher& launch) {
    if (pairs_.count == 0) return;
    with_storage(grad_, "accumulate", [&](auto grad) {
      with_storage(row_, "accumulate", [&](auto row) {
        const auto kernel = add_ ? accumulate<decltype(grad), decltype(row), true>
                                 : accumulate<decltype(grad), decltype(row), false>;
        launch(kernel, num_blocks_, 1, THREADS, 0, pairs_);
      });
    });
    pairs_.count = 0;
    num_blocks_ = 0;
  }

 private:
  static constexpr int64_t MAX_BLOCKS = (int64_t{1} << 31) - 1;
  ScalarType grad_;
  ScalarType row_;
  bool add_;
  Pairs pairs_ = {};
  int64_t num_blocks_ = 0;
};

// Contiguous pairs of equal lengths on one device.
void run(TensorList grads, TensorList rows, bool add) {
  DOGE_CHECK(grads.size() == rows.size(), "accumulate needs one row per gradient; received ", rows.size(),
             " rows for ", grads.size(), " gradients.");
  if (grads.empty()) return;
  const Launcher launch(grads[0]);
  std::map<std::pair<ScalarType, ScalarType>, Queue> queues;
  for (size_t i = 0; i < grads.size(); ++i) {
    DOGE_CHECK(grads[i].is_contiguous() && rows[i].is_contiguous() && grads[i].numel() == rows[i].numel(),
               "accumulate needs contiguous pairs of one length; grads[", i, "] has shape ", shape(grads[i]),
               ", rows[", i, "] ", shape(rows[i]), ".");
    const auto dtypes = std::make_pair(grads[i].scalar_type(), rows[i].scalar_type());
    const auto [queue, _] = queues.try_emplace(dtypes, dtypes.first, dtypes.second, add);
    queue->second.push(launch, grads[i], rows[i]);
  }
  for (auto& [_, queue] : queues) queue.flush(launch);
}

STABLE_TORCH_LIBRARY_FRAGMENT(DOGE_LIBRARY, library) {
  library.def("accumulate(Tensor[] grads, Tensor(a!)[] rows, bool add) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(DOGE_LIBRARY, CompositeExplicitAutograd, library) {
  library.impl("accumulate", TORCH_BOX(&run));
}

}  // namespace
}  // namespace doge_fast::cuda
