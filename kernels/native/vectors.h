// Vectors of floats as wide as the processor's registers, and the functions of them that the operators need.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

struct bf16 {
  uint16_t bits;
};

constexpr float LOG2E = 1.4426950408889634f;

static inline int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// load<V>(p): V = vec reads LANES numbers, V = float reads one, which the tails of loops use.
template <class V> static inline V load(const float* p) {
  V x;
  std::memcpy(&x, p, sizeof(V));
  return x;
}
template <class V> static inline V load(const bf16* p);
template <> inline vec load<vec>(const bf16* p) {
  halves h;
  std::memcpy(&h, p, sizeof(h));
  return (vec)(__builtin_convertvector(h, words) << 16);
}
template <> inline float load<float>(const bf16* p) {
  uint32_t w = uint32_t(p->bits) << 16;
  float x;
  std::memcpy(&x, &w, 4);
  return x;
}

static inline void store(float* p, vec x) { std::memcpy(p, &x, sizeof(x)); }
static inline void store(float* p, float x) { *p = x; }
// To the nearest even number, and NaN to NaN.
static inline void store(bf16* p, vec x) {
  words w = (words)x;
  words rounded = (w + 0x7fffu + ((w >> 16) & 1u)) >> 16;
  halves h = __builtin_convertvector(x == x ? rounded : words{} + 0x7fc0u, halves);
  std::memcpy(p, &h, sizeof(h));
}
static inline void store(bf16* p, float x) {
  uint32_t w;
  std::memcpy(&w, &x, 4);
  p->bits = (w & 0x7fffffffu) > 0x7f800000u ? 0x7fc0 : uint16_t((w + 0x7fffu + ((w >> 16) & 1u)) >> 16);
}

// The sum of a vector, by halves.
static inline float sum(vec x) {
#if defined(__AVX512F__)
  x += __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  x += __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 8, 9, 10, 11, 12, 13, 14, 15);
#elif defined(__AVX2__)
  x += __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3);
#endif
  return (x[0] + x[2]) + (x[1] + x[3]);
}
// The signs of n - l, n - l - 1, ...: 1, 0 or -1.
static inline vec signs(int64_t n, int64_t l) {
  ints position;
  for (int i = 0; i < LANES; i++) position[i] = i;
  const ints at = ints{} + int32_t(n - l);
  return __builtin_convertvector((position > at) - (position < at), vec);
}
static inline vec absolute(vec x) { return (vec)((ints)x & 0x7fffffff); }

// 2^x for x up to 128, where it is infinite; at least 2^-126. NaN stays NaN: each comparison with it is false.
static inline vec exp2(vec x) {
  const vec least = vec{} - 126.f, most = vec{} + 128.f;
  x = x < least ? least : x;
  x = x > most ? most : x;
  vec whole = (x + 12582912.f) - 12582912.f, f = x - whole;              // 1.5 * 2^23 rounds to integers
  vec p = 1.5403530e-4f * f + 1.3333558e-3f;
  p = p * f + 9.6181291e-3f;
  p = p * f + 5.5504109e-2f;
  p = p * f + 2.4022651e-1f;
  p = p * f + 6.9314718e-1f;
  p = p * f + 1.f;
  return (vec)((ints)p + (__builtin_convertvector(whole, ints) << 23));
}

// log(1 + e^x), by the series of artanh: log(1 + u) = 2 artanh(u / (2 + u)).
static inline vec softplus(vec x) {
  vec u = exp2(-absolute(x) * LOG2E), s = u / (u + 2.f), t = s * s;
  vec p = t * (2.f / 13) + 2.f / 11;
  p = p * t + 2.f / 9;
  p = p * t + 2.f / 7;
  p = p * t + 2.f / 5;
  p = p * t + 2.f / 3;
  p = p * t + 2.f;
  return (x > 0.f ? x : vec{}) + s * p;
}

// Phi(-|x|), with Abramowitz and Stegun, 7.1.26, for the error function (absolute error 1.5e-7), from e^(-x^2 / 2).
static inline vec normal_tail(vec x, vec bell) {
  vec t = 1.f / (absolute(x) * (0.3275911f * 0.70710678f) + 1.f);
  vec p = t * 1.061405429f - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  return 0.5f * ((p * t + 0.254829592f) * t) * bell;
}
// x Phi(x), and its derivative Phi(x) + x e^(-x^2 / 2) / sqrt(2 pi).
static inline vec gelu(vec x) {
  vec tail = normal_tail(x, exp2(x * x * (-0.5f * LOG2E)));
  return x * (x > 0.f ? 1.f - tail : tail);
}
static inline vec gelu_gradient(vec x) {
  vec bell = exp2(x * x * (-0.5f * LOG2E)), tail = normal_tail(x, bell);
  return (x > 0.f ? 1.f - tail : tail) + x * bell * 0.39894228f;
}

// x sigmoid(x).
static inline vec silu(vec x) { return x / (exp2(x * -LOG2E) + 1.f); }
static inline float silu(float x) { return silu(vec{} + x)[0]; }
