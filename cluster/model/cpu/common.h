// Vectors and elements that all kernels share. An element is a float or a bfloat16; arithmetic is in float32.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kVectors = 4;
#else
constexpr int kLanes = 8, kVectors = 2;
#endif
constexpr int kVectorBytes = kLanes * 4;
constexpr int kPanel = kLanes * kVectors;   // outputs of a panel of packed weights
constexpr int64_t kStepBytes = kPanel * 4;  // of a step of a panel

typedef float Floats __attribute__((vector_size(kLanes * 4), may_alias));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4), may_alias));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4), may_alias));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2), may_alias));
typedef int8_t Bytes __attribute__((vector_size(kLanes), may_alias));
struct BFloat16 {
  uint16_t bits;
};

template <class Vector>
inline Vector load(const void* source) {
  Vector value;
  std::memcpy(&value, source, sizeof(value));
  return value;
}
template <class Vector>
inline void store(void* target, Vector value) {
  std::memcpy(target, &value, sizeof(value));
}

#if defined(__AVX512F__)
inline Floats splat(float value) { return (Floats)_mm512_set1_ps(value); }
inline Words words_of(Halves value) { return (Words)_mm512_cvtepu16_epi32((__m256i)value); }
inline Ints words_of(Bytes value) { return (Ints)_mm512_cvtepi8_epi32((__m128i)value); }
inline Floats larger(Floats a, Floats b) { return (Floats)_mm512_max_ps((__m512)a, (__m512)b); }
inline float largest(Floats value) { return _mm512_reduce_max_ps((__m512)value); }
inline float sum_of(Floats value) { return _mm512_reduce_add_ps((__m512)value); }
inline Ints nearest(Floats value) { return (Ints)_mm512_cvtps_epi32((__m512)value); }
#else
inline Floats splat(float value) { return (Floats)_mm256_set1_ps(value); }
inline Words words_of(Halves value) { return __builtin_convertvector(value, Words); }
inline Ints words_of(Bytes value) { return __builtin_convertvector(value, Ints); }
inline Floats larger(Floats a, Floats b) { return (Floats)_mm256_max_ps((__m256)a, (__m256)b); }
inline float largest(Floats value) {
  float result = value[0];
  for (int lane = 1; lane < kLanes; lane++) result = std::max(result, value[lane]);
  return result;
}
inline float sum_of(Floats value) {
  float sum = 0;
  for (int lane = 0; lane < kLanes; lane++) sum += value[lane];
  return sum;
}
inline Ints nearest(Floats value) { return (Ints)_mm256_cvtps_epi32((__m256)value); }
#endif
inline Floats splat_word(const void* source) { return splat(load<float>(source)); }  // any 4 bytes, by one load

inline float as_float(float value) { return value; }
inline float as_float(BFloat16 value) {
  const uint32_t bits = (uint32_t)value.bits << 16;
  return load<float>(&bits);
}

inline Floats widened(const float* p) { return load<Floats>(p); }
inline Floats widened(const BFloat16* p) { return (Floats)(words_of(load<Halves>(p)) << 16); }
inline Floats widened(const int8_t* p) { return __builtin_convertvector(words_of(load<Bytes>(p)), Floats); }

// To bfloat16, nearest even. The instruction takes numbers below 2^-126 for 0.
inline Halves halves_of(Floats value) {
#if defined(__AVX512BF16__)
  return (Halves)_mm512_cvtneps_pbh((__m512)value);
#else
  const Words bits = (Words)value;
  const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return __builtin_convertvector((Words)(value != value) ? ((bits >> 16) | 0x40u) : rounded, Halves);
#endif
}

inline void store_floats(float* target, Floats value) { store(target, value); }
inline void store_floats(BFloat16* target, Floats value) { store(target, halves_of(value)); }

// What a value becomes when it is stored as Element and read again.
template <class Element>
Floats rounded(Floats value);
template <>
inline Floats rounded<float>(Floats value) {
  return value;
}
template <>
inline Floats rounded<BFloat16>(Floats value) {
  return (Floats)(words_of(halves_of(value)) << 16);
}

// Of `count` elements, which may be fewer than kLanes or none; what is missing is 0.
template <class Element>
inline Floats load_some(const Element* source, int64_t count) {
  if (count >= kLanes) return widened(source);
  Element lanes[kLanes] = {};
  for (int64_t lane = 0; lane < count; lane++) lanes[lane] = source[lane];
  return widened(lanes);
}
template <class Element>
inline void store_some(Element* target, int64_t count, Floats value) {
  if (count >= kLanes) return store_floats(target, value);
  Element lanes[kLanes];
  store_floats(lanes, value);
  for (int64_t lane = 0; lane < count; lane++) target[lane] = lanes[lane];
}

inline Floats exp_of(Floats x) {  // relative error below 2e-7; x in (-104, 88) or clamped to it
  const Floats zero = {};
  x = x > 88.0f ? zero + 88.0f : x;
  x = x < -87.0f ? zero - 87.0f : x;
  const Floats magic = zero + 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  Floats shifted = x * 1.44269504f + magic;
  Floats n = shifted - magic;
  Floats r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  Words exponent = ((Words)shifted << 23) + 0x3f800000u;
  return p * (Floats)exponent;
}

inline Floats silu(Floats x) { return x / (exp_of(-x) + 1.0f); }

}  // namespace
