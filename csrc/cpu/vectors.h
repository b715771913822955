// One vector register of the machine the file is compiled for, and the ways in and out of it.
//
// GCC and Clang vector types: the same source becomes AVX-512, AVX2, SSE2 or NEON, and `a * b + c`
// becomes one fused multiply-add where there is one.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace doge_fast {

using BFloat16 = c10::BFloat16;
using Half = c10::Half;

#if defined(__AVX512F__)
constexpr int64_t VECTOR_BYTES = 64;
#elif defined(__AVX__)
constexpr int64_t VECTOR_BYTES = 32;
#else
constexpr int64_t VECTOR_BYTES = 16;
#endif

template <typename T, int64_t bytes>
struct VectorOf {
  // may_alias and the small alignment make an unaligned load out of a plain dereference.
  typedef T type __attribute__((vector_size(bytes), may_alias, aligned(alignof(T))));
};
template <typename T>
using Vector = typename VectorOf<T, VECTOR_BYTES>::type;
template <typename T>
constexpr int64_t LANES = VECTOR_BYTES / static_cast<int64_t>(sizeof(T));

// What a storage type is added up in.
template <typename T>
using Accumulator = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename T>
[[gnu::always_inline]] inline Vector<T> broadcast(T value) {
  return Vector<T>{} + value;
}

template <typename T>
[[gnu::always_inline]] inline void store(T* to, Vector<T> value) {
  *reinterpret_cast<Vector<T>*>(to) = value;
}

// Past the caches: for a result that is larger than them. `to` is aligned to VECTOR_BYTES.
template <typename T>
[[gnu::always_inline]] inline void store_past_cache(T* to, Vector<T> value) {
#if defined(__AVX512F__)
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), (__m512i)value);
#elif defined(__AVX__)
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), (__m256i)value);
#elif defined(__x86_64__)
  _mm_stream_si128(reinterpret_cast<__m128i*>(to), (__m128i)value);
#else
  store(to, value);
#endif
}

// Streaming stores are weakly ordered; other threads may look once this has returned.
inline void finish_streaming() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

constexpr int64_t FLOAT_LANES = LANES<float>;
using Words16 = typename VectorOf<uint16_t, VECTOR_BYTES / 2>::type;
using Words32 = Vector<uint32_t>;

// LANES<Accumulator<T>> elements of storage, widened.
[[gnu::always_inline]] inline Vector<float> load(const float* from) {
  return *reinterpret_cast<const Vector<float>*>(from);
}
[[gnu::always_inline]] inline Vector<double> load(const double* from) {
  return *reinterpret_cast<const Vector<double>*>(from);
}
[[gnu::always_inline]] inline Vector<float> load(const BFloat16* from) {
  const Words16 words = *reinterpret_cast<const Words16*>(from);
  return (Vector<float>)(__builtin_convertvector(words, Words32) << 16);
}
[[gnu::always_inline]] inline Vector<float> load(const Half* from) {
#if defined(__AVX512F__)
  return (Vector<float>)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__AVX__) && defined(__F16C__)
  return (Vector<float>)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  Vector<float> value{};
  for (int64_t i = 0; i < FLOAT_LANES; ++i) value[i] = static_cast<float>(from[i]);
  return value;
#endif
}

// FLOAT_LANES values rounded to nearest even; a NaN stays one, as in torch's own conversion.
[[gnu::always_inline]] inline void round_to(BFloat16* to, Vector<float> value) {
  const Words32 bits = (Words32)value;
  const Words32 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Words32 is_nan = (Words32)(value != value);
  const Words32 words = (rounded & ~is_nan) | (is_nan & 0x7fc0);
  *reinterpret_cast<Words16*>(to) = __builtin_convertvector(words, Words16);
}
[[gnu::always_inline]] inline void round_to(Half* to, Vector<float> value) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                      _mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX__) && defined(__F16C__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                   _mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int64_t i = 0; i < FLOAT_LANES; ++i) to[i] = static_cast<Half>(value[i]);
#endif
}

// Storage -> accumulator, n elements.
template <typename T, typename A>
inline void widen(const T* from, A* to, int64_t n) {
  int64_t i = 0;
  if constexpr (std::is_same_v<A, Accumulator<T>>)
    for (; i + LANES<A> <= n; i += LANES<A>) store(to + i, load(from + i));
  for (; i < n; ++i) to[i] = static_cast<A>(from[i]);
}

// Whether a store of this pair of types can go past the caches.
template <typename A, typename T>
constexpr bool CAN_STREAM = std::is_same_v<A, T>;

// Accumulator -> storage, n elements; past the caches if asked for and possible.
template <typename A, typename T>
inline void narrow(const A* from, T* to, int64_t n, bool past_cache) {
  int64_t i = 0;
  if constexpr (CAN_STREAM<A, T>) {
    if (!past_cache) {
      std::memcpy(to, from, n * sizeof(T));
      return;
    }
    for (; i < n && reinterpret_cast<uintptr_t>(to + i) % VECTOR_BYTES; ++i) to[i] = from[i];
    for (; i + LANES<T> <= n; i += LANES<T>) store_past_cache(to + i, load(from + i));
  } else if constexpr (std::is_same_v<A, float> && sizeof(T) == 2) {
    for (; i + FLOAT_LANES <= n; i += FLOAT_LANES) round_to(to + i, load(from + i));
  }
  for (; i < n; ++i) to[i] = static_cast<T>(from[i]);
}

}  // namespace doge_fast
