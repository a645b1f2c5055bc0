// The loop over the tokens of a line, m_t = o_t * m_{t-1} + e_t i_t', y_t = m_t' s_t, with memories in registers.
#pragma once
#include "../native/vectors.h"

// Parts of an oscillation: factors of keys only, of keys and columns, or also a generated one of full rank.
enum Oscillation { KEYS, COLUMNS, GENERATED };
constexpr float STEP_LOG_MIN = -80;

// f(x) of `count` numbers; zeros fill up the last vector of x.
template <class T, class F> static inline void map(const T* x, int64_t count, float* out, F&& f) {
  int64_t c = 0;
  for (; c + LANES <= count; c += LANES) store(out + c, f(load<vec>(x + c)));
  if (c == count) return;
  vec last{};
  for (int64_t n = c; n < count; n++) last[n - c] = load<float>(x + n);
  store(out + c, f(last));
}
static inline vec same(vec x) { return x; }
static inline vec decay(vec log) { return exp2(log * LOG2E); }

// log2 of a generated oscillation for u = z weight; see `DecayGenerator`.
static inline vec generated(vec u, bool sigmoid, float rate) {
  vec log = sigmoid ? softplus(-u) * -rate : -u;
  const vec least = vec{} + STEP_LOG_MIN;
  log = log < least ? least : log;
  return (log > 0.f ? vec{} : log) * LOG2E;
}

// The derivative of a generated step log with respect to u; zero where step logs are clamped.
static inline vec slope(vec u, bool sigmoid, float rate) {
  if (!sigmoid) return u >= 0.f ? u <= -STEP_LOG_MIN ? vec{} - 1.f : vec{} : vec{};
  return softplus(-u) * rate > -STEP_LOG_MIN ? vec{} : rate / (exp2(u * LOG2E) + 1.f);
}

// Some tokens of a line in float32. Rows of `width` columns, a multiple of LANES: i, y, and where they are used, the
// factors od and zd; rows of at least `keys` numbers that lie `step` apart: e, s, ok and zk. z is zk or zd.
struct Tokens {
  int64_t count, keys, width, step;
  const float *i, *e, *s, *ok, *od, *zk, *zd;
  const float* weight;                               // (keys, width)
  float *memory, *y;                                 // (keys, width), which changes; what is added to
  bool reverse, sigmoid;
  float rate;                                        // 1 / tau

  template <Oscillation O> vec oscillation(int64_t t, int64_t k, int64_t d, vec w) const {
    vec o = ok[t * step + k] - vec{};                // unlike a sum with zero, this costs nothing
    if (O != KEYS) o *= load<vec>(od + t * width + d);
    if (O == GENERATED) o *= exp2(generated((zk ? zk[t * step + k] - vec{} : load<vec>(zd + t * width + d)) * w, sigmoid,
                                            rate));
    return o;
  }
};

// K keys and C vectors of columns. AGAIN: the term of a token itself was counted in the other direction.
template <Oscillation O, bool AGAIN, int K, int C> void run_tile(const Tokens& a, int64_t k, int64_t d) {
  vec m[K][C], w[K][C] = {};
  for (int r = 0; r < K; r++)
    for (int c = 0; c < C; c++) {
      m[r][c] = load<vec>(a.memory + (k + r) * a.width + d + c * LANES);
      if (O == GENERATED) w[r][c] = load<vec>(a.weight + (k + r) * a.width + d + c * LANES);
    }
  for (int64_t n = 0; n < a.count; n++) {
    const int64_t t = a.reverse ? a.count - 1 - n : n;
    const float *e = a.e + t * a.step + k, *s = a.s + t * a.step + k;
    vec x[C], y[C];
    for (int c = 0; c < C; c++) {
      x[c] = load<vec>(a.i + t * a.width + d + c * LANES);
      y[c] = load<vec>(a.y + t * a.width + d + c * LANES);
    }
    for (int r = 0; r < K; r++)
      for (int c = 0; c < C; c++) {
        vec kept = a.oscillation<O>(t, k + r, d + c * LANES, w[r][c]) * m[r][c];
        m[r][c] = kept + e[r] * x[c];
        y[c] += s[r] * (AGAIN ? kept : m[r][c]);
      }
    for (int c = 0; c < C; c++) store(a.y + t * a.width + d + c * LANES, y[c]);
  }
  for (int r = 0; r < K; r++)
    for (int c = 0; c < C; c++) store(a.memory + (k + r) * a.width + d + c * LANES, m[r][c]);
}

template <Oscillation O, bool AGAIN, int K> void run_keys(const Tokens& a, int64_t k) {
  int64_t d = 0;
  for (; d + 2 * LANES <= a.width; d += 2 * LANES) run_tile<O, AGAIN, K, 2>(a, k, d);
  if (d < a.width) run_tile<O, AGAIN, K, 1>(a, k, d);
}

template <Oscillation O, bool AGAIN> void run(const Tokens& a) {
  constexpr int KEYS_OF_TILE = 4;                    // with 2 vectors of columns, they fill the registers
  int64_t k = 0;
  for (; k + KEYS_OF_TILE <= a.keys; k += KEYS_OF_TILE) run_keys<O, AGAIN, KEYS_OF_TILE>(a, k);
  for (; k < a.keys; k++) run_keys<O, AGAIN, 1>(a, k);
}
