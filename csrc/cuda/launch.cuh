// Shared by the kernels: storage types, pieces of rows, reductions of a warp, launches.
//
// Storage is float32 or narrower, and a sum over columns or rows is float32. Triton or torch takes float64 rows.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>

#include <type_traits>
#include <utility>

#include "../check.h"
#include "instructions.cuh"

// The emulated operators have another library name, because both may be loaded in one process.
#ifdef DOGE_EMULATED
#define DOGE_LIBRARY doge_fast_cuda_emulated
#define DOGE_UNROLL
#define DOGE_UNROLL_BY(times)
#else
#define DOGE_LIBRARY doge_fast_cuda
#define DOGE_PRAGMA(what) _Pragma(#what)
#define DOGE_UNROLL DOGE_PRAGMA(unroll)
#define DOGE_UNROLL_BY(times) DOGE_PRAGMA(unroll times)
#endif

namespace doge_fast::cuda {

constexpr int LANES = 32;

// Calls `each` with 0 to COUNT - 1 as types. Arrays in registers need constant indices, and the compiler does
// not always unroll a long loop completely.
template <typename Each, int... INDEX>
__device__ __forceinline__ void unroll(Each&& each, std::integer_sequence<int, INDEX...>) {
  (each(std::integral_constant<int, INDEX>{}), ...);
}
template <int COUNT, typename Each>
__device__ __forceinline__ void unroll(Each&& each) {
  unroll(each, std::make_integer_sequence<int, COUNT>{});
}

struct Bfloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

template <typename T>
constexpr int PER_PIECE = sizeof(Piece) / sizeof(T);

__device__ __forceinline__ float wide(Bfloat16 x) { return float_of(static_cast<uint32_t>(x.bits) << 16); }
__device__ __forceinline__ float wide(Float16 x) { return float_of_half(x.bits); }

__device__ __forceinline__ void narrow(float& to, float x) { to = x; }
__device__ __forceinline__ void narrow(Float16& to, float x) { to.bits = half_of(x); }
__device__ __forceinline__ void narrow(Bfloat16& to, float x) { to.bits = bfloat_of(x); }

// The 32-bit word of one element or two, in registers.
__device__ __forceinline__ uint32_t word_of(const float* elements) { return bits_of(elements[0]); }
template <typename T>
__device__ __forceinline__ uint32_t word_of(const T* elements) {
  return elements[0].bits | static_cast<uint32_t>(elements[1].bits) << 16;
}

template <typename T>
__device__ __forceinline__ Piece piece_of(const T (&elements)[PER_PIECE<T>]) {
  Piece piece;
  DOGE_UNROLL
  for (int i = 0; i < 4; ++i) piece.word[i] = word_of(elements + i * PER_PIECE<T> / 4);
  return piece;
}

// Elements of a piece, widened.
__device__ __forceinline__ void unpack(const Piece& piece, float (&to)[4], float) {
  DOGE_UNROLL
  for (int i = 0; i < 4; ++i) to[i] = float_of(piece.word[i]);
}
template <typename T>
__device__ __forceinline__ void unpack(const Piece& piece, float (&to)[8], T) {
  DOGE_UNROLL
  for (int i = 0; i < 4; ++i) {
    to[2 * i] = wide(T{static_cast<uint16_t>(piece.word[i])});
    to[2 * i + 1] = wide(T{static_cast<uint16_t>(piece.word[i] >> 16)});
  }
}

// A piece loaded element by element, from any address; zeros past `count` elements.
template <typename T>
__device__ __forceinline__ Piece load_elements(const T* from, int64_t count) {
  T elements[PER_PIECE<T>];
  DOGE_UNROLL
  for (int i = 0; i < PER_PIECE<T>; ++i) elements[i] = i < count ? from[i] : T{};
  return piece_of<T>(elements);
}

// Writes COUNT elements with wide stores; `to` is a multiple of their size, or of 16 bytes.
template <typename T, int COUNT>
__device__ __forceinline__ void store_together(T* to, const T (&elements)[COUNT]) {
  struct alignas(sizeof(T) * COUNT < 16 ? sizeof(T) * COUNT : 16) Block {
    T elements[COUNT];
  };
  Block block;
  DOGE_UNROLL
  for (int i = 0; i < COUNT; ++i) block.elements[i] = elements[i];
  *reinterpret_cast<Block*>(to) = block;
}

// The sum over the lanes, with the same bits in every lane.
template <typename T>
__device__ __forceinline__ T warp_sum(T x) {
  DOGE_UNROLL
  for (int distance = LANES / 2; distance > 0; distance /= 2) x += from_lane_xor(x, distance);
  return x;
}

// A chunk of columns of all rows: its address in row 0, the stride of rows and the number of columns, in
// elements. int64, because a row may be longer than 2^31 elements.
template <typename T>
struct Chunk {
  const T* first;
  int64_t row_stride;
  int64_t length;
};

// Fields of a chunk in its table; with a metric the last is the address of its second moments.
template <bool SCALED>
constexpr int GRAM_FIELDS = SCALED ? 4 : 3;
constexpr int SUM_FIELDS = 4;

template <typename T>
__device__ __forceinline__ Chunk<T> chunk_at(const int64_t* entry) {
  return {reinterpret_cast<const T*>(entry[0]), entry[1], entry[2]};
}

__device__ __forceinline__ const float* moments_at(const int64_t* entry) {
  return reinterpret_cast<const float*>(entry[3]);
}

// sqrt(v) + eps, or infinity where v is 0: the inverse is the metric.
__device__ __forceinline__ float divisor_of(float moment, float eps) {
  // Selected after the root: a branch around it makes ptxas spill.
  const float divisor = sqrtf(moment) + eps;
  return moment == 0 ? float_of(0x7f800000U) : divisor;
}

#ifdef DOGE_EMULATED
using Stream = int;
struct Launcher {
  explicit Launcher(const Tensor&) {}

  template <typename... Parameters, typename... Arguments>
  void operator()(void (*kernel)(Parameters...), unsigned columns, unsigned rows, int num_threads,
                  size_t shared_bytes, Arguments... arguments) const {
    DOGE_CHECK(shared_bytes <= emulator::SHARED_BYTES, "no GPU has ", shared_bytes, " bytes to share.");
    emulator::run_grid(columns, rows, num_threads,
                       [=] { kernel(static_cast<Parameters>(arguments)...); });
  }
};
#else
// Launches on the current stream of a tensor's device, and raises at once if that fails.
class Launcher {
 public:
  explicit Launcher(const Tensor& tensor) : guard_(tensor.get_device_index()) {
    TORCH_ERROR_CODE_CHECK(
        aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream_));
  }

  template <typename... Parameters, typename... Arguments>
  void operator()(void (*kernel)(Parameters...), unsigned columns, unsigned rows, int num_threads,
                  size_t shared_bytes, Arguments... arguments) const {
    // CUDA wants this call if dynamic and declared shared memory are more than 48 KiB.
    if (shared_bytes > 0)
      STD_CUDA_CHECK(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                          cudaFuncAttributeMaxDynamicSharedMemorySize,
                                          static_cast<int>(shared_bytes)));
    kernel<<<dim3(columns, rows), num_threads, shared_bytes, static_cast<cudaStream_t>(stream_)>>>(
        static_cast<Parameters>(arguments)...);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  void* stream_ = nullptr;
};
#endif

// Calls `run` with a value of the storage type of `dtype`.
template <typename Run>
void with_storage(ScalarType dtype, const char* op, Run&& run) {
  switch (dtype) {
    case ScalarType::Float:
      return run(float{});
    case ScalarType::Half:
      return run(Float16{});
    case ScalarType::BFloat16:
      return run(Bfloat16{});
    default:
      fail(op, " needs float32, bfloat16 or float16; received ", name(dtype), ".");
  }
}

// A table of chunks, [num_chunks, `fields`] int64, as kernels/chunks.py makes it.
inline const int64_t* check_table(const Tensor& table, int64_t fields, const char* op) {
  DOGE_CHECK(table.dim() == 2 && table.size(0) > 0 && table.size(1) == fields &&
                 table.scalar_type() == ScalarType::Long && table.is_contiguous(),
             op, " needs a table of shape [chunks, ", fields, "] int64; received shape ", shape(table),
             " of ", name(table.scalar_type()), ".");
  return static_cast<const int64_t*>(table.const_data_ptr());
}

}  // namespace doge_fast::cuda
