// Symmetric scans of lines: with a[t] = exp(step[t]),
//     before[t] = a[t] (x[t - 1] + before[t - 1]),    behind[t] = a[t + 1] (x[t + 1] + behind[t + 1]),
//     y = x + before + behind
#include "../native/parallel.h"
#include "../native/vectors.h"

namespace {

// The fields in the order in which `__init__.py` packs them. x and y are dense (outer, length, inner, dim), and
// steps (outer, length, inner).
struct Scan {
  const void* x;
  const float* steps;
  void* y;
  int64_t outer, length, inner, dim, x_is_bf16, y_is_bf16, threads;
};

// A token of x (dim,) meets what arrives at it, a state: sum += a state, state = x + a state.
template <class T> void meet(const T* x, float a, int64_t dim, float* state, float* sum) {
  auto channels = [&](auto number, int64_t d) {
    using V = decltype(number);
    const V arrives = a * load<V>(state + d);
    store(sum + d, load<V>(sum + d) + arrives);
    store(state + d, load<V>(x + d) + arrives);
  };
  int64_t d = 0;
  for (; d + LANES <= dim; d += LANES) channels(vec{}, d);
  for (; d < dim; d++) channels(0.f, d);
}

template <class X, class Y> int run(const Scan& s) {
  const int64_t L = s.length, D = s.dim, padded = round_up(L, LANES), step = s.inner * D;
  const int64_t lines = s.outer * s.inner;
  const int64_t threads = std::min(s.threads, lines), size = round_up(padded + D + L * D, 16);
  Memory memory(threads * size);
  if (!memory.data) return NO_MEMORY;
  parallel(lines, threads, [&](int64_t line, int64_t worker) {
    float *a = memory.data + worker * size, *state = a + padded, *sums = state + D;
    const int64_t first = line / s.inner * L * s.inner + line % s.inner;
    const X* x = (const X*)s.x + first * D;
    for (int64_t t = 0; t < padded; t++) a[t] = t < L ? s.steps[first + t * s.inner] * LOG2E : 0;
    for (int64_t t = 0; t < padded; t += LANES) store(a + t, exp2(load<vec>(a + t)));
    for (int64_t t = 0; t < L; t++)
      for (int64_t d = 0; d < D; d++) sums[t * D + d] = load<float>(x + t * step + d);
    std::memset(state, 0, 4 * D);
    for (int64_t t = 0; t < L; t++) meet(x + t * step, a[t], D, state, sums + t * D);
    std::memset(state, 0, 4 * D);
    for (int64_t t = L; t--;) meet(x + t * step, t + 1 < L ? a[t + 1] : 0.f, D, state, sums + t * D);
    for (int64_t t = 0; t < L; t++)
      for (int64_t d = 0; d < D; d++) store((Y*)s.y + first * D + t * step + d, sums[t * D + d]);
  });
  return 0;
}

}  // namespace

extern "C" int SUBQUAD_NAME(polyline_scan)(const Scan* s) {
  if (s->x_is_bf16) return s->y_is_bf16 ? run<bf16, bf16>(*s) : run<bf16, float>(*s);
  return s->y_is_bf16 ? run<float, bf16>(*s) : run<float, float>(*s);
}
