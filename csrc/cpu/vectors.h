// Vectors of the CPU that this is compiled for: their types, loads, stores and conversions.
//
// GCC and Clang vector types: the same source becomes AVX-512, AVX2, SSE2 or NEON, and `a * b + c`
// becomes one fused multiply-add where there is one. The builder compiles for the CPU of the machine.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "../check.h"

namespace doge_fast::arithmetic {

// Rows of equal length; the stride between them is arbitrary.
struct Rows {
  const void* data;
  int64_t row_stride;
  int64_t num_rows;
  ScalarType dtype;

  // The rows of a block that check_blocks has accepted.
  static Rows of(const Tensor& block) {
    return {block.const_data_ptr(), block.stride(0), block.size(0), block.scalar_type()};
  }
};

// The second moments of a block's columns: a metric d_n = 1 / (sqrt(v_n) + eps). Without data, d = 1.
struct Moments {
  const void* data = nullptr;
  ScalarType dtype = ScalarType::Float;
  double eps = 0;
};

struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

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
constexpr int64_t FLOAT_LANES = LANES<float>;

template <typename A, typename B>
constexpr bool IS_SAME = false;
template <typename A>
constexpr bool IS_SAME<A, A> = true;

// The type of sums over elements of a storage type.
template <typename T>
struct AccumulatorOf {
  using type = float;
};
template <>
struct AccumulatorOf<double> {
  using type = double;
};
template <typename T>
using Accumulator = typename AccumulatorOf<T>::type;

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

template <typename T>
[[gnu::always_inline]] inline Vector<T> broadcast(T value) {
  return Vector<T>{} + value;
}

template <typename T>
[[gnu::always_inline]] inline void store(T* to, Vector<T> value) {
  *reinterpret_cast<Vector<T>*>(to) = value;
}

// Writes to memory without going through the caches, for results larger than these. `to` is aligned to
// VECTOR_BYTES.
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

using Words16 = typename VectorOf<uint16_t, VECTOR_BYTES / 2>::type;
using Words32 = Vector<uint32_t>;

// The same for VECTOR_BYTES / 2 bytes, to which `to` is aligned.
[[gnu::always_inline]] inline void store_past_cache(uint16_t* to, Words16 words) {
#if defined(__AVX512F__)
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), (__m256i)words);
#elif defined(__AVX__)
  _mm_stream_si128(reinterpret_cast<__m128i*>(to), (__m128i)words);
#elif defined(__x86_64__)
  long long bytes;
  __builtin_memcpy(&bytes, &words, sizeof(bytes));
  _mm_stream_si64(reinterpret_cast<long long*>(to), bytes);
#else
  *reinterpret_cast<Words16*>(to) = words;
#endif
}

// One element of storage to float or double, exactly; and back, rounded to nearest even. NaN stays NaN.
inline float widened(float value) { return value; }
inline double widened(double value) { return value; }
inline float widened(BFloat16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float result;
  __builtin_memcpy(&result, &bits, sizeof(result));
  return result;
}
inline float widened(Half value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(value.bits & 0x7fff) << 13;
  uint32_t bits = magnitude + (112U << 23);
  if ((value.bits & 0x7c00) == 0x7c00) bits = magnitude + (224U << 23);
  float result;
  if ((value.bits & 0x7c00) == 0) {
    // Subnormal: a multiple of 2^-24.
    result = static_cast<float>(value.bits & 0x3ff) * 0x1p-24F;
    __builtin_memcpy(&bits, &result, sizeof(bits));
  }
  bits |= sign;
  __builtin_memcpy(&result, &bits, sizeof(result));
  return result;
}

inline void narrow_to(float& to, double value) { to = static_cast<float>(value); }
inline void narrow_to(double& to, double value) { to = value; }
inline void narrow_to(BFloat16& to, double exact) {
  const float value = static_cast<float>(exact);
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  to.bits = value != value ? 0x7fc0
                           : static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline void narrow_to(Half& to, double exact) {
  const float value = static_cast<float>(exact);
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  bits &= 0x7fffffff;
  uint32_t half;
  if (bits > 0x7f800000) {
    half = 0x7e00;
  } else if (bits >= 0x477ff000) {
    // Nearer to infinity than to the largest float16.
    half = 0x7c00;
  } else if (bits < 0x38800000) {
    // Adding 0.5 rounds to a multiple of 2^-24, and leaves it in the lowest bits of the sum.
    float magnitude;
    __builtin_memcpy(&magnitude, &bits, sizeof(magnitude));
    const float shifted = magnitude + 0.5F;
    uint32_t sum;
    __builtin_memcpy(&sum, &shifted, sizeof(sum));
    half = sum - 0x3f000000;
  } else {
    half = (bits - (112U << 23) + 0xfff + ((bits >> 13) & 1)) >> 13;
  }
  to.bits = static_cast<uint16_t>(sign | half);
}

// FLOAT_LANES (or LANES<double>) adjacent elements of storage, widened.
[[gnu::always_inline]] inline Vector<float> load(const float* from) {
  return *reinterpret_cast<const Vector<float>*>(from);
}
[[gnu::always_inline]] inline Vector<double> load(const double* from) {
  return *reinterpret_cast<const Vector<double>*>(from);
}
// Intrinsics: each is one instruction, where GCC's __builtin_convertvector from 16 to 32 bits takes six.
[[gnu::always_inline]] inline Vector<float> load(const BFloat16* from) {
#if defined(__AVX512F__)
  const auto words = (Words32)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__AVX2__)
  const auto words = (Words32)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  const auto words = __builtin_convertvector(*reinterpret_cast<const Words16*>(from), Words32);
#endif
  return (Vector<float>)(words << 16);
}
[[gnu::always_inline]] inline Vector<float> load(const Half* from) {
#if defined(__AVX512F__)
  return (Vector<float>)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__AVX__) && defined(__F16C__)
  return (Vector<float>)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  Vector<float> value{};
  for (int64_t i = 0; i < FLOAT_LANES; ++i) value[i] = widened(from[i]);
  return value;
#endif
}

inline double square_root(double value) { return __builtin_sqrt(value); }
[[gnu::always_inline]] inline Vector<float> square_root(Vector<float> value) {
#if defined(__AVX512F__)
  return (Vector<float>)_mm512_sqrt_ps((__m512)value);
#elif defined(__AVX__)
  return (Vector<float>)_mm256_sqrt_ps((__m256)value);
#elif defined(__x86_64__)
  return (Vector<float>)_mm_sqrt_ps((__m128)value);
#else
  for (int64_t i = 0; i < LANES<float>; ++i) value[i] = __builtin_sqrtf(value[i]);
  return value;
#endif
}
[[gnu::always_inline]] inline Vector<double> square_root(Vector<double> value) {
#if defined(__AVX512F__)
  return (Vector<double>)_mm512_sqrt_pd((__m512d)value);
#elif defined(__AVX__)
  return (Vector<double>)_mm256_sqrt_pd((__m256d)value);
#elif defined(__x86_64__)
  return (Vector<double>)_mm_sqrt_pd((__m128d)value);
#else
  for (int64_t i = 0; i < LANES<double>; ++i) value[i] = __builtin_sqrt(value[i]);
  return value;
#endif
}

// 1 / sqrt(x) of a finite x > 0.
inline double inverse_root(double value) { return 1 / __builtin_sqrt(value); }
[[gnu::always_inline]] inline Vector<double> inverse_root(Vector<double> value) {
  return 1.0 / square_root(value);
}
[[gnu::always_inline]] inline Vector<float> inverse_root(Vector<float> value) {
#if defined(__AVX512F__)
  // An estimate of 14 bits and a step of Newton's method take a third of the time of a root and a division.
  const auto near = (Vector<float>)_mm512_rsqrt14_ps((__m512)value);
  return near + near * (0.5F - 0.5F * value * near * near);
#else
  return 1.0F / square_root(value);
#endif
}

// FLOAT_LANES values rounded to nearest even; NaN stays NaN, as in torch's conversion.
[[gnu::always_inline]] inline Words16 rounded(const BFloat16*, Vector<float> value) {
  const Words32 bits = (Words32)value;
  const Words32 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Words32 is_nan = (Words32)(value != value);
  const Words32 words = (rounded & ~is_nan) | (is_nan & 0x7fc0);
#if defined(__AVX512F__)
  return (Words16)_mm512_cvtepi32_epi16((__m512i)words);
#else
  return __builtin_convertvector(words, Words16);
#endif
}
[[gnu::always_inline]] inline Words16 rounded(const Half*, Vector<float> value) {
#if defined(__AVX512F__)
  return (Words16)_mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__AVX__) && defined(__F16C__)
  return (Words16)_mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT);
#else
  Words16 words{};
  for (int64_t i = 0; i < FLOAT_LANES; ++i) {
    Half half;
    narrow_to(half, value[i]);
    words[i] = half.bits;
  }
  return words;
#endif
}

// Writes FLOAT_LANES (or LANES<double>) values to adjacent elements of storage. With `past_cache`, `to` is
// aligned to the bytes that are written.
template <typename A, typename T>
[[gnu::always_inline]] inline void put(T* to, Vector<A> value, bool past_cache) {
  if constexpr (IS_SAME<A, T>) {
    if (past_cache)
      store_past_cache(to, value);
    else
      store(to, value);
  } else {
    const Words16 words = rounded(to, value);
    auto* target = reinterpret_cast<uint16_t*>(to);
    if (past_cache)
      store_past_cache(target, words);
    else
      *reinterpret_cast<Words16*>(target) = words;
  }
}

// Writes two vectors to adjacent elements of storage.
template <typename A, typename T>
[[gnu::always_inline]] inline void put_pair(T* to, Vector<A> first, Vector<A> second, bool past_cache) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  // One store of 32 bytes needs half the shuffles of two stores of 16 bytes.
  if constexpr (IS_SAME<T, BFloat16>) {
    const auto words_of = [](Vector<float> value) {
      const auto bits = (__m256i)value;
      const auto is_odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
      const auto sum = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), is_odd);
      const auto is_nan = (__m256i)_mm256_cmp_ps((__m256)value, (__m256)value, _CMP_UNORD_Q);
      return _mm256_blendv_epi8(_mm256_srli_epi32(sum, 16), _mm256_set1_epi32(0x7fc0), is_nan);
    };
    const auto words = _mm256_packus_epi32(words_of(first), words_of(second));
    const auto in_order = _mm256_permute4x64_epi64(words, 0xd8);
    auto* target = reinterpret_cast<__m256i*>(to);
    if (past_cache)
      _mm256_stream_si256(target, in_order);
    else
      _mm256_storeu_si256(target, in_order);
    return;
  }
#endif
  put<A>(to, first, past_cache);
  put<A>(to + LANES<A>, second, past_cache);
}

template <typename T>
inline bool is_streamable(const T* to) {
  return reinterpret_cast<uintptr_t>(to) % VECTOR_BYTES == 0;
}

// Whether `put` can write a vector of A to storage of T.
template <typename A, typename T>
constexpr bool HAS_PUT = IS_SAME<A, T> || (IS_SAME<A, float> && sizeof(T) == 2);

// Storage -> accumulator, n elements.
template <typename T, typename A>
inline void widen(const T* from, A* to, int64_t n) {
  int64_t i = 0;
  if constexpr (IS_SAME<A, Accumulator<T>>)
    for (; i + LANES<A> <= n; i += LANES<A>) store(to + i, load(from + i));
  for (; i < n; ++i) to[i] = static_cast<A>(widened(from[i]));
}

// Accumulator -> storage, n elements. With `past_cache`, aligned vectors do not go through the caches.
template <typename A, typename T>
inline void narrow(const A* from, T* to, int64_t n, bool past_cache) {
  int64_t i = 0;
  if constexpr (IS_SAME<A, T>) {
    if (!past_cache) {
      __builtin_memcpy(to, from, n * sizeof(T));
      return;
    }
  }
  if constexpr (HAS_PUT<A, T>) {
    if (past_cache)
      for (; i < n && !is_streamable(to + i); ++i) narrow_to(to[i], from[i]);
    for (; i + 2 * LANES<A> <= n; i += 2 * LANES<A>)
      put_pair<A>(to + i, load(from + i), load(from + i + LANES<A>), past_cache);
    for (; i + LANES<A> <= n; i += LANES<A>) put<A>(to + i, load(from + i), past_cache);
  }
  for (; i < n; ++i) narrow_to(to[i], from[i]);
}

// Calls body(T{}) with the C++ type of a checked dtype.
template <typename Body>
inline void with_type(ScalarType dtype, const Body& body) {
  switch (dtype) {
    case ScalarType::Float:
      return body(float{});
    case ScalarType::Double:
      return body(double{});
    case ScalarType::BFloat16:
      return body(BFloat16{});
    default:
      return body(Half{});
  }
}

}  // namespace doge_fast::arithmetic
