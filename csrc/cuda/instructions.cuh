// Instructions of a GPU that CUDA C++ lacks, and nothing else.
//
// Compiled for a CPU, with DOGE_EMULATED, the same names come from emulator.h: then all code that includes this
// file is the code that a GPU runs.
#pragma once

#include <cstdint>

#ifdef DOGE_EMULATED
#include "emulator.h"
#else
#include <cuda_runtime.h>

namespace doge_fast::cuda {

// 16 bytes, the widest load of a thread.
struct alignas(16) Piece {
  uint32_t word[4];
};

// Loads 16 bytes that the launch does not write before it has read them: the compiler may move the load. They
// do not go through the first-level cache, because nothing is read twice.
__device__ __forceinline__ Piece load16(const void* from) {
  Piece piece;
  asm("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(piece.word[0]), "=r"(piece.word[1]), "=r"(piece.word[2]), "=r"(piece.word[3])
      : "l"(from));
  return piece;
}

// Shared memory of a launch, beyond what kernels declare; 16-byte aligned.
__device__ __forceinline__ Piece* dynamic_shared() {
  extern __shared__ Piece memory[];
  return memory;
}

// Starts an asynchronous copy of 16 bytes to shared memory, of zeros unless `is_wanted`.
__device__ __forceinline__ void start_copy(Piece* shared, const void* from, bool is_wanted) {
  const auto target = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(from),
               "r"(is_wanted ? 16 : 0)
               : "memory");
}

// Ends a group of copies of this thread, possibly an empty one.
__device__ __forceinline__ void end_copy_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all but the latest `LATEST` groups of this thread have arrived.
template <int LATEST>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LATEST) : "memory");
}

__device__ __forceinline__ uint32_t bits_of(float x) { return __float_as_uint(x); }
__device__ __forceinline__ float float_of(uint32_t bits) { return __uint_as_float(bits); }

__device__ __forceinline__ float float_of_half(uint16_t bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}
__device__ __forceinline__ uint16_t half_of(float x) {
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
__device__ __forceinline__ uint16_t bfloat_of(float x) {
  uint16_t bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}

// The nearest number with tf32's 11 bits; ties away from zero.
__device__ __forceinline__ uint32_t round_to_tf32(float x) {
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return bits;
}

template <typename T>
__device__ __forceinline__ T from_lane_xor(T x, int mask) {
  return __shfl_xor_sync(0xffffffffU, x, mask);
}
__device__ __forceinline__ uint32_t lanes_where(bool is_so) { return __ballot_sync(0xffffffffU, is_so); }
__device__ __forceinline__ int count_bits(uint32_t bits) { return __popc(bits); }

// sums += left right^T over 8 columns: lane 4 g + t holds rows g and g + 8 of `left` and row g of
// `right` at columns t and t + 4, and of the sums rows g and g + 8 at 2 t and 2 t + 1.
__device__ __forceinline__ void multiply_tf32(float (&sums)[4], const uint32_t (&left)[4],
                                              const uint32_t (&right)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
}

// The same over 16 columns: two neighbours, at 2 t and at 2 t + 8, in each register.
__device__ __forceinline__ void multiply_bf16(float (&sums)[4], const uint32_t (&left)[4],
                                              const uint32_t (&right)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
}
__device__ __forceinline__ void multiply_f16(float (&sums)[4], const uint32_t (&left)[4],
                                             const uint32_t (&right)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
}

}  // namespace doge_fast::cuda
#endif
