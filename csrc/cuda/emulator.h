// Emulates a GPU on one CPU thread, for tests on machines without a GPU. Each CUDA thread of a block is a fiber
// that runs until a barrier or an instruction of the whole warp.
//
// It shows wrong indices, wrong fragments, barriers that are missing or that some threads skip (fibers run in
// ascending order in one launch and in descending order in the next), missing waits for copies (a copy arrives at
// the last moment), memory that was never written (it starts as NaN), and the truncation of tensor cores. It shows
// neither speed nor races between blocks.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
// One block runs at a time.
#define __shared__ static

namespace doge_fast::cuda {

struct alignas(16) Piece {
  uint32_t word[4];
};

namespace emulator {

constexpr int LANES = 32;
constexpr size_t STACK_BYTES = 128 * 1024;
constexpr size_t SHARED_BYTES = 227 * 1024;
constexpr size_t EXCHANGE_BYTES = 64;

struct Copy {
  Piece* target;
  const void* source;
  bool is_wanted;
};

// Releases its group when all have arrived.
struct Barrier {
  int size = 0;
  int arrived = 0;
  int generation = 0;
};

struct Fiber {
  ucontext_t start;
  jmp_buf state;
  std::unique_ptr<char[]> stack;
  bool is_started = false;
  bool is_done = false;
  // The half of the warp's exchange that this fiber writes next.
  int turn = 0;
  std::vector<std::vector<Copy>> copy_groups;
  std::vector<Copy> open_group;
};

struct Warp {
  Barrier barrier;
  alignas(16) char exchange[2][LANES][EXCHANGE_BYTES];
};

struct Machine {
  std::mutex in_use;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Barrier barrier;
  ucontext_t scheduler_context;
  jmp_buf scheduler;
  std::function<void()> kernel;
  int num_threads = 0;
  int running = 0;
  bool has_moved = false;
  bool is_descending = false;
  std::unique_ptr<char[]> shared{new char[SHARED_BYTES + 16]};
};

inline Machine machine;

struct Index {
  unsigned x = 0;
  unsigned y = 0;
};

inline Fiber& fiber() { return machine.fibers[machine.running]; }

inline void yield() {
  if (_setjmp(fiber().state) == 0) _longjmp(machine.scheduler, 1);
}

inline void wait_at(Barrier& barrier) {
  const int generation = barrier.generation;
  machine.has_moved = true;
  if (++barrier.arrived == barrier.size) {
    barrier.arrived = 0;
    ++barrier.generation;
    return;
  }
  while (barrier.generation == generation) yield();
}

inline Warp& warp() { return machine.warps[machine.running / LANES]; }

// The values of `mine` of all lanes of the warp, in the order of lanes.
template <typename T>
std::vector<T> gather(const T& mine) {
  static_assert(sizeof(T) <= EXCHANGE_BYTES);
  const int turn = fiber().turn ^= 1;
  std::memcpy(warp().exchange[turn][machine.running % LANES], &mine, sizeof(T));
  wait_at(warp().barrier);
  std::vector<T> all(LANES);
  for (int lane = 0; lane < LANES; ++lane)
    std::memcpy(&all[lane], warp().exchange[turn][lane], sizeof(T));
  return all;
}

inline void run_fiber() {
  machine.kernel();
  fiber().is_done = true;
  machine.has_moved = true;
  _longjmp(machine.scheduler, 1);
}

inline void resume(int index) {
  machine.running = index;
  if (_setjmp(machine.scheduler) != 0) return;
  if (fiber().is_started) _longjmp(fiber().state, 1);
  fiber().is_started = true;
  setcontext(&fiber().start);
}

inline void prepare_block(int num_threads) {
  machine.num_threads = num_threads;
  machine.barrier = {num_threads};
  machine.warps.resize(num_threads / LANES);
  for (Warp& each : machine.warps) each.barrier = {LANES};
  if (machine.fibers.size() < static_cast<size_t>(num_threads)) machine.fibers.resize(num_threads);
  std::memset(machine.shared.get(), 0xff, SHARED_BYTES + 16);
  for (int i = 0; i < num_threads; ++i) {
    Fiber& each = machine.fibers[i];
    if (!each.stack) each.stack.reset(new char[STACK_BYTES]);
    each.is_started = each.is_done = false;
    each.turn = 0;
    each.copy_groups.clear();
    each.open_group.clear();
    getcontext(&each.start);
    each.start.uc_stack.ss_sp = each.stack.get();
    each.start.uc_stack.ss_size = STACK_BYTES;
    each.start.uc_link = nullptr;
    makecontext(&each.start, &run_fiber, 0);
  }
}

inline void run_block() {
  for (int left = machine.num_threads; left > 0;) {
    machine.has_moved = false;
    left = 0;
    for (int i = 0; i < machine.num_threads; ++i) {
      const int index = machine.is_descending ? machine.num_threads - 1 - i : i;
      if (!machine.fibers[index].is_done) resume(index);
      left += !machine.fibers[index].is_done;
    }
    if (left > 0 && !machine.has_moved) {
      std::fprintf(stderr, "the emulated GPU: %d threads wait at a barrier that others left out\n", left);
      std::abort();
    }
  }
}

inline Index thread_index() { return {static_cast<unsigned>(machine.running)}; }
inline Index block_index;
inline Index grid_size;
inline Index block_size;

template <typename Kernel>
void run_grid(unsigned columns, unsigned rows, int num_threads, Kernel&& kernel) {
  const std::lock_guard<std::mutex> lock(machine.in_use);
  machine.kernel = std::forward<Kernel>(kernel);
  machine.is_descending = !machine.is_descending;
  grid_size = {columns, rows};
  block_size = {static_cast<unsigned>(num_threads), 1};
  for (block_index.y = 0; block_index.y < rows; ++block_index.y)
    for (block_index.x = 0; block_index.x < columns; ++block_index.x) {
      prepare_block(num_threads);
      run_block();
    }
}

inline void arrive(const std::vector<Copy>& group) {
  for (const Copy& copy : group)
    if (copy.is_wanted)
      std::memcpy(copy.target, copy.source, sizeof(Piece));
    else
      std::memset(copy.target, 0, sizeof(Piece));
}

// Tensor cores truncate.
inline float truncated(double x) {
  const float nearest = static_cast<float>(x);
  return std::abs(static_cast<double>(nearest)) > std::abs(x) ? std::nextafter(nearest, 0.0F) : nearest;
}

struct Operands {
  uint32_t left[4];
  uint32_t right[2];
};

// at(word, k) is column k of a register's word, which holds COLUMNS columns.
template <int COLUMNS, typename At>
void multiply(float (&sums)[4], const uint32_t (&left)[4], const uint32_t (&right)[2], At at) {
  Operands mine;
  std::copy_n(left, 4, mine.left);
  std::copy_n(right, 2, mine.right);
  const auto all = gather(mine);
  const int lane = machine.running % LANES;
  for (int c = 0; c < 4; ++c) {
    const int row = lane / 4 + 8 * (c / 2);
    const int column = 2 * (lane % 4) + c % 2;
    double sum = sums[c];
    for (int half = 0; half < 2; ++half)
      for (int k = 0; k < 4 * COLUMNS; ++k) {
        const uint32_t x = all[row % 8 * 4 + k / COLUMNS].left[row / 8 + 2 * half];
        const uint32_t y = all[column * 4 + k / COLUMNS].right[half];
        sum += static_cast<double>(at(x, k % COLUMNS)) * at(y, k % COLUMNS);
      }
    sums[c] = truncated(sum);
  }
}

}  // namespace emulator

#define threadIdx (::doge_fast::cuda::emulator::thread_index())
#define blockIdx (::doge_fast::cuda::emulator::block_index)
#define gridDim (::doge_fast::cuda::emulator::grid_size)
#define blockDim (::doge_fast::cuda::emulator::block_size)

using std::fma;

inline void __syncthreads() { emulator::wait_at(emulator::machine.barrier); }

inline Piece load16(const void* from) {
  Piece piece;
  if (reinterpret_cast<uintptr_t>(from) % sizeof(Piece) != 0) {
    std::fprintf(stderr, "the emulated GPU: 16 bytes loaded from an address that is no multiple\n");
    std::abort();
  }
  std::memcpy(&piece, from, sizeof(piece));
  return piece;
}

inline Piece* dynamic_shared() {
  const auto address = reinterpret_cast<uintptr_t>(emulator::machine.shared.get());
  return reinterpret_cast<Piece*>((address + 15) / 16 * 16);
}

inline void start_copy(Piece* shared, const void* from, bool is_wanted) {
  emulator::fiber().open_group.push_back({shared, from, is_wanted});
}
inline void end_copy_group() {
  emulator::fiber().copy_groups.push_back(std::exchange(emulator::fiber().open_group, {}));
}
template <int LATEST>
void wait_for_copies() {
  auto& groups = emulator::fiber().copy_groups;
  while (groups.size() > LATEST) {
    emulator::arrive(groups.front());
    groups.erase(groups.begin());
  }
}

template <typename To, typename From>
To bits_as(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  std::memcpy(&y, &x, sizeof(y));
  return y;
}
inline uint32_t bits_of(float x) { return bits_as<uint32_t>(x); }
inline float float_of(uint32_t bits) { return bits_as<float>(bits); }
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }

inline float float_of_half(uint16_t bits) { return static_cast<float>(bits_as<_Float16>(bits)); }
inline uint16_t half_of(float x) { return bits_as<uint16_t>(static_cast<_Float16>(x)); }
inline uint16_t bfloat_of(float x) {
  const uint32_t bits = bits_of(x);
  if (x != x) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline uint32_t round_to_tf32(float x) {
  const uint32_t bits = bits_of(x);
  const bool is_finite = (bits & 0x7f800000U) != 0x7f800000U;
  return is_finite ? (bits + 0x1000) & 0xffffe000U : bits;
}

template <typename T>
T from_lane_xor(T x, int mask) {
  return emulator::gather(x)[emulator::machine.running % emulator::LANES ^ mask];
}
inline uint32_t lanes_where(bool is_so) {
  const auto all = emulator::gather(static_cast<char>(is_so));
  uint32_t lanes = 0;
  for (int lane = 0; lane < emulator::LANES; ++lane) lanes |= static_cast<uint32_t>(all[lane]) << lane;
  return lanes;
}
inline int count_bits(uint32_t bits) { return __builtin_popcount(bits); }

inline void multiply_tf32(float (&sums)[4], const uint32_t (&left)[4], const uint32_t (&right)[2]) {
  emulator::multiply<1>(sums, left, right,
                        [](uint32_t word, int) { return float_of(word & 0xffffe000U); });
}
inline void multiply_bf16(float (&sums)[4], const uint32_t (&left)[4], const uint32_t (&right)[2]) {
  emulator::multiply<2>(sums, left, right, [](uint32_t word, int k) {
    return float_of(k == 0 ? word << 16 : word & 0xffff0000U);
  });
}
inline void multiply_f16(float (&sums)[4], const uint32_t (&left)[4], const uint32_t (&right)[2]) {
  emulator::multiply<2>(sums, left, right, [](uint32_t word, int k) {
    return float_of_half(static_cast<uint16_t>(k == 0 ? word : word >> 16));
  });
}

}  // namespace doge_fast::cuda
