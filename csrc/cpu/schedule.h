// Pieces of work, and the threads that share them: a free thread takes the next piece.
#pragma once

#include <torch/csrc/stable/ops.h>

#if defined(__linux__)
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <atomic>
#include <vector>

namespace doge_fast {

// With less work per thread, starting a second thread takes longer than it saves.
constexpr int64_t MIN_BYTES_PER_THREAD = 256 << 10;

// Calls body(piece, state) for every piece, on torch's threads. Each worker makes one state by make_state(),
// for example scratch memory, and uses it for all its pieces. A slow thread takes fewer pieces.
template <typename MakeState, typename Body>
void for_each_piece(int64_t num_pieces, int64_t num_bytes, const MakeState& make_state, const Body& body) {
  std::atomic<int64_t> next{0};
  const auto work = [&](int64_t, int64_t) {
    auto state = make_state();
    for (int64_t piece; (piece = next.fetch_add(1, std::memory_order_relaxed)) < num_pieces;)
      body(piece, state);
  };
  const int64_t num_workers =
      std::min<int64_t>({num_pieces, static_cast<int64_t>(torch::stable::get_num_threads()),
                         1 + num_bytes / MIN_BYTES_PER_THREAD});
  if (num_workers <= 1) {
    work(0, 1);
  } else {
    torch::stable::parallel_for(0, num_workers, 1, work);
  }
}

// The columns of a list of tensors, divided into units of at most `unit` columns. A unit lies within one
// tensor. A piece is a range of units; which ones depends on the sizes and the number of pieces alone.
class Columns {
 public:
  struct Span {
    size_t tensor;
    int64_t first;
    int64_t last;
  };

  Columns(std::vector<int64_t> lengths, int64_t unit) : lengths_(std::move(lengths)), unit_(unit) {
    first_unit_.reserve(lengths_.size() + 1);
    first_unit_.push_back(0);
    for (const int64_t length : lengths_)
      first_unit_.push_back(first_unit_.back() + (length + unit_ - 1) / unit_);
  }

  int64_t num_units() const { return first_unit_.back(); }

  // Calls body(span) for the tensors, or parts of them, that make up piece `piece` of `num_pieces`.
  template <typename Body>
  void for_each_span(int64_t piece, int64_t num_pieces, const Body& body) const {
    const int64_t begin = begin_of(piece, num_pieces);
    const int64_t end = begin_of(piece + 1, num_pieces);
    const auto after = std::upper_bound(first_unit_.begin(), first_unit_.end(), begin);
    size_t tensor = static_cast<size_t>(after - first_unit_.begin()) - 1;
    for (int64_t at = begin; at < end; ++tensor) {
      const int64_t stop = std::min(end, first_unit_[tensor + 1]);
      if (stop == at) continue;
      const int64_t offset = first_unit_[tensor];
      body(Span{tensor, (at - offset) * unit_, std::min((stop - offset) * unit_, lengths_[tensor])});
      at = stop;
    }
  }

 private:
  // The first (num_units % num_pieces) pieces have one unit more than the others.
  int64_t begin_of(int64_t piece, int64_t num_pieces) const {
    return num_units() / num_pieces * piece + std::min(piece, num_units() % num_pieces);
  }

  std::vector<int64_t> lengths_;
  int64_t unit_;
  std::vector<int64_t> first_unit_;
};

// Writing a result larger than the last-level cache through it would evict all other data.
inline bool is_larger_than_cache(int64_t num_bytes) {
  static const int64_t cache_bytes = [] {
    long size = 0;
#if defined(__linux__) && defined(_SC_LEVEL3_CACHE_SIZE)
    size = sysconf(_SC_LEVEL3_CACHE_SIZE);
#endif
    return size > 0 ? static_cast<int64_t>(size) : int64_t{32} << 20;
  }();
  return num_bytes > cache_bytes;
}

// Streaming stores are weakly ordered: other threads may read their results after this has returned.
inline void finish_streaming() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace doge_fast
