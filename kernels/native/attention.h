// What the two attentions of PPMA share: their arguments, heads in float32, and products in registers.
#pragma once
#include <cmath>
#include "parallel.h"
#include "vectors.h"
#include <type_traits>

enum Paths { BOTH, V2H, H2V };

// The fields in the order in which `attention.py` packs them. Strides count elements.
struct Attention {
  const void *q, *k, *v;
  void* y;
  const float *log_alpha, *log_beta;        // step logs, or with `rate`, what softplus is applied to
  const float *table, *bias, *rate;         // cosines and sines (N, D / 2, 2), or null; (heads,) each, or null
  int64_t batch, heads, height, width, dim, value_dim;
  int64_t q_strides[3], k_strides[3], v_strides[3], y_strides[3];         // batch, head, token
  int64_t alpha_strides[4], beta_strides[4];                              // batch, head, row, column
  int64_t is_bf16, multiplicative, paths, threads;
  double scale;                                                           // of k

  int64_t tokens() const { return height * width; }
  int64_t groups() const { return batch * heads; }
};

// Arguments of training, in the order in which `attention.py` packs them: dense float32 tensors with leading groups. a and
// b are what the operator makes of the step logs. Without `grad`, y is computed, and otherwise the gradients are.
struct Training {
  const float *grad, *q, *k, *v, *a, *b;
  float *y, *dq, *dk, *dv, *da, *db;
  int64_t groups, height, width, dim, value_dim, paths, threads;
};

// The first number of a head at its first token.
template <class T> static inline T* head(T* x, const int64_t* strides, const Attention& a, int64_t g) {
  return x + g / a.heads * strides[0] + g % a.heads * strides[1];
}

// Read a head's vector in float32, multiplied by a factor and, with a table, rotated. Zeros fill up to `padded`.
template <class T>
static void read(const T* x, int64_t dim, int64_t padded, const float* table, float factor, float* out) {
  int64_t d = 0;
  for (; d + LANES <= dim; d += LANES) store(out + d, load<vec>(x + d) * factor);
  for (; d < dim; d++) out[d] = load<float>(x + d) * factor;
  for (; d < padded; d++) out[d] = 0;
  if (!table) return;
  for (d = 0; d < dim; d += 2) {
    float c = table[d], s = table[d + 1], x0 = out[d], x1 = out[d + 1];
    out[d] = x0 * c - x1 * s;
    out[d + 1] = x0 * s + x1 * c;
  }
}

// Step logs of a line of the grid in base 2, from `logs` with the given stride; zeros fill up to `padded`.
static void read_steps(const Attention& a, int64_t g, const float* logs, int64_t stride, int64_t count, int64_t padded,
                       float* out) {
  for (int64_t n = 0; n < count; n++) out[n] = logs[n * stride];
  for (int64_t n = count; n < padded; n++) out[n] = 0;
  const float bias = a.rate ? a.bias[g % a.heads] : 0, rate = a.rate ? a.rate[g % a.heads] : 0;
  const vec least = vec{} - 80.f;
  for (int64_t n = 0; n < padded; n += LANES) {
    vec x = load<vec>(out + n);
    if (a.rate) x = softplus(x + bias) * -rate;
    x = x < least ? least : x;
    x = x > 0.f ? vec{} : x;
    store(out + n, x * LOG2E);
  }
}

// Sums of the step logs along rows, sa, and along columns, sb: (height, padded) each. A step's own row or column begins
// with 0: no path goes through its log. Added in float64 and rounded once.
[[maybe_unused]] static void sums(const Attention& a, int64_t g, int64_t padded, float* sa, float* sb) {
  const float* alpha = head(a.log_alpha, a.alpha_strides, a, g);
  const float* beta = head(a.log_beta, a.beta_strides, a, g);
  for (int64_t i = 0; i < a.height; i++) {
    float *row = sa + i * padded, *column = sb + i * padded;
    read_steps(a, g, alpha + i * a.alpha_strides[2], a.alpha_strides[3], a.width, padded, row);
    read_steps(a, g, beta + i * a.beta_strides[2], a.beta_strides[3], a.width, padded, column);
    double total = 0;
    for (int64_t j = 0; j < a.width; j++) row[j] = float(total += j ? row[j] : 0);
    for (int64_t j = 0; j < padded; j++) column[j] = i ? column[j] + column[j - padded] : 0;
  }
}

// Vectors of keys that are multiplied at a time: with 4 queries, their products fill the registers.
constexpr int TILE = LANES == 16 ? 4 : 2;

// acc[a][b] = q[a] . keys[LANES b ...], for keys (dim, ld).
template <int Q, int V>
static inline void logits(const float* q, int64_t ldq, const float* keys, int64_t ld, int64_t dim, vec (&acc)[Q][V]) {
  for (int a = 0; a < Q; a++)
    for (int b = 0; b < V; b++) acc[a][b] = vec{};
  for (int64_t d = 0; d < dim; d++) {
    vec k[V];
    for (int b = 0; b < V; b++) k[b] = load<vec>(keys + d * ld + LANES * b);
    for (int a = 0; a < Q; a++)
      for (int b = 0; b < V; b++) acc[a][b] += q[a * ldq + d] * k[b];
  }
}

// Call f(t, acc) with the products of Q queries and TILE vectors of keys from t on, then with those of single vectors.
template <int Q, class F>
static inline void for_logits(const float* q, int64_t ldq, const float* keys, int64_t count, int64_t dim, F&& f) {
  int64_t t = 0;
  for (; t + TILE * LANES <= count; t += TILE * LANES) {
    vec acc[Q][TILE];
    logits<Q, TILE>(q, ldq, keys + t, count, dim, acc);
    for (int b = 0; b < TILE; b++) {
      vec one[Q];
      for (int a = 0; a < Q; a++) one[a] = acc[a][b];
      f(t + b * LANES, one);
    }
  }
  for (; t < count; t += LANES) {
    vec acc[Q][1], one[Q];
    logits<Q, 1>(q, ldq, keys + t, count, dim, acc);
    for (int a = 0; a < Q; a++) one[a] = acc[a][0];
    f(t, one);
  }
}

// y[a][...] = sum_t weights[a][t] v[t][...], for V vectors of channels.
template <int Q, int V>
static inline void weigh(const float* weights, int64_t ldw, const float* v, int64_t ldv, int64_t count, float* y,
                         int64_t ldy) {
  vec acc[Q][V] = {};
  for (int64_t t = 0; t < count; t++) {
    vec x[V];
    for (int b = 0; b < V; b++) x[b] = load<vec>(v + t * ldv + LANES * b);
    for (int a = 0; a < Q; a++)
      for (int b = 0; b < V; b++) acc[a][b] += weights[a * ldw + t] * x[b];
  }
  for (int a = 0; a < Q; a++)
    for (int b = 0; b < V; b++) store(y + a * ldy + LANES * b, acc[a][b]);
}

// The same for any number of channels, a multiple of LANES.
template <int Q>
static inline void weigh_all(const float* weights, int64_t ldw, const float* v, int64_t ldv, int64_t count,
                             int64_t channels, float* y, int64_t ldy) {
  int64_t c = 0;
  for (; c + 2 * LANES <= channels; c += 2 * LANES) weigh<Q, 2>(weights, ldw, v + c, ldv, count, y + c, ldy);
  if (c < channels) weigh<Q, 1>(weights, ldw, v + c, ldv, count, y + c, ldy);
}

// to[m] += sum over Q rows of weights[x][m] from[x], for `count` rows of `channels` numbers, a multiple of LANES.
template <int Q>
static inline void spread(const float* weights, int64_t ldw, int64_t count, const float* from, int64_t channels,
                          float* to) {
  for (int64_t m = 0; m < count; m++)
    for (int64_t d = 0; d < channels; d += LANES) {
      vec acc = load<vec>(to + m * channels + d);
      for (int x = 0; x < Q; x++) acc += weights[x * ldw + m] * load<vec>(from + x * channels + d);
      store(to + m * channels + d, acc);
    }
}

// Write a head's vector.
template <class T> static inline void write(const float* x, int64_t dim, T* out) {
  int64_t d = 0;
  for (; d + LANES <= dim; d += LANES) store(out + d, load<vec>(x + d));
  for (; d < dim; d++) store(out + d, x[d]);
}
