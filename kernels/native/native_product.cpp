// A product of tokens with a matrix: GroupNorm or SiLU before it, SiLU, GELU or a sum after it, in the same pass.
#include <cmath>
#include "parallel.h"
#include "vectors.h"

namespace {

// The fields in the order in which `product.py` packs them. All tensors are dense.
struct Product {
  const float *x;                                    // (batch, tokens, in)
  const float *weight, *bias;                        // (panels, in, PANEL), (panels * PANEL): zeros fill up
  const float *norm_weight, *norm_bias;              // (in,) or null
  const float *residual;                             // as y, or null
  float *y;                                          // (batch, tokens, out)
  float *statistics;                                 // (batch, 2): mean and 1 / deviation of images, with norm_weight
  int64_t batch, tokens, in, out, silu_before, act, threads;
  double eps;
};

enum Activation { NONE, SILU, GELU };
constexpr int64_t PANEL = 16;                        // channels of y whose weights lie side by side
constexpr int VECTORS = PANEL / LANES;
constexpr int ROWS = LANES == 16 ? 14 : 6;           // tokens whose sums fill the registers
constexpr int64_t TILE = 8 * ROWS;                   // tokens that are in the cache while all panels pass
constexpr int64_t CHUNK = 8192;                      // numbers that are in the cache while their deviations are added

// y = x weight + bias for R tokens and the channels of one panel, `count` of which exist.
template <int R>
void multiply(const Product& s, const float* x, int64_t panel, const float* residual, float* y) {
  const float *weight = s.weight + panel * s.in * PANEL, *bias = s.bias + panel * PANEL;
  vec acc[R][VECTORS];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < VECTORS; v++) acc[r][v] = load<vec>(bias + v * LANES);
  for (int64_t k = 0; k < s.in; k++) {
    vec w[VECTORS];
    for (int v = 0; v < VECTORS; v++) w[v] = load<vec>(weight + k * PANEL + v * LANES);
    for (int r = 0; r < R; r++)
      for (int v = 0; v < VECTORS; v++) acc[r][v] += x[r * s.in + k] * w[v];
  }
  if (s.act)
    for (int r = 0; r < R; r++)
      for (int v = 0; v < VECTORS; v++) acc[r][v] = s.act == SILU ? silu(acc[r][v]) : gelu(acc[r][v]);
  const int64_t count = std::min(PANEL, s.out - panel * PANEL);
  for (int r = 0; r < R; r++) {
    const int64_t at = r * s.out + panel * PANEL;
    if (count == PANEL) {
      for (int v = 0; v < VECTORS; v++)
        store(y + at + v * LANES, residual ? acc[r][v] + load<vec>(residual + at + v * LANES) : acc[r][v]);
    } else {
      for (int64_t c = 0; c < count; c++)
        y[at + c] = acc[r][c / LANES][c % LANES] + (residual ? residual[at + c] : 0);
    }
  }
}

// The same for less than ROWS tokens.
template <int R>
void multiply_rest(const Product& s, int64_t rows, const float* x, int64_t panel, const float* residual, float* y) {
  if constexpr (R > 0) {
    if (rows == R) multiply<R>(s, x, panel, residual, y);
    else multiply_rest<R - 1>(s, rows, x, panel, residual, y);
  }
}

// The sum of f(x) for `count` numbers.
template <class F> double total(const float* x, int64_t count, F&& f) {
  vec sums[4] = {};
  int64_t n = 0;
  for (; n + 4 * LANES <= count; n += 4 * LANES)
    for (int v = 0; v < 4; v++) sums[v] += f(load<vec>(x + n + v * LANES));
  double rest = 0;
  for (; n < count; n++) rest += f(vec{} + x[n])[0];
  return rest + sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// Mean and 1 / deviation of each image. Deviations are added up from the mean of a chunk.
void measure(const Product& s, float* means, float* squares, int64_t chunks) {
  const int64_t size = s.tokens * s.in;
  parallel(s.batch * chunks, s.threads, [&](int64_t task, int64_t) {
    const int64_t begin = task % chunks * CHUNK, count = std::min(CHUNK, size - begin);
    const float* x = s.x + task / chunks * size + begin;
    const float mean = means[task] = float(total(x, count, [](vec v) { return v; }) / double(count));
    squares[task] = float(total(x, count, [&](vec v) { return (v - mean) * (v - mean); }));
  });
  for (int64_t b = 0; b < s.batch; b++) {
    double mean = 0, square = 0, seen = 0;
    for (int64_t c = 0; c < chunks; c++) {
      const double count = double(std::min(CHUNK, size - c * CHUNK)), step = means[b * chunks + c] - mean;
      seen += count;
      mean += step * count / seen;
      square += squares[b * chunks + c] + step * step * count * (seen - count) / seen;
    }
    s.statistics[2 * b] = float(mean);
    s.statistics[2 * b + 1] = float(1 / std::sqrt(square / double(size) + s.eps));
  }
}

}  // namespace

extern "C" int SUBQUAD_NAME(product)(const Product* arguments) {
  const Product& s = *arguments;
  const int64_t tiles = std::max<int64_t>(1, (s.tokens + TILE - 1) / TILE);
  const int64_t rows = round_up((s.tokens + tiles - 1) / tiles, ROWS);
  const int64_t panels = (s.out + PANEL - 1) / PANEL, chunks = (s.tokens * s.in + CHUNK - 1) / CHUNK;
  // Few tokens: threads share their panels.
  const int64_t tasks = s.threads > 1 ? 4 * s.threads : 1;
  const int64_t wanted = std::min(panels, tasks / std::max<int64_t>(1, s.batch * tiles) + 1);
  const int64_t width = (panels + wanted - 1) / wanted, blocks = (panels + width - 1) / width;
  const bool changed = s.norm_weight || s.silu_before;
  const int64_t space = changed ? round_up(rows * s.in, 16) : 0;
  Memory memory(std::max(s.threads * space, s.norm_weight ? 2 * s.batch * chunks : 0));
  if (!memory.data) return NO_MEMORY;
  if (s.norm_weight) measure(s, memory.data, memory.data + s.batch * chunks, chunks);
  parallel(s.batch * tiles * blocks, s.threads, [&](int64_t task, int64_t worker) {
    const int64_t image = task / (tiles * blocks), first = task / blocks % tiles * rows, block = task % blocks * width;
    const int64_t count = std::min(rows, s.tokens - first), token = image * s.tokens + first;
    const float* x = s.x + token * s.in;
    if (changed) {
      float* to = memory.data + worker * space;
      const float mean = s.norm_weight ? s.statistics[2 * image] : 0;
      const float scale = s.norm_weight ? s.statistics[2 * image + 1] : 0;
      auto change = [&](auto one, float* p, int64_t n, int64_t c) {
        using V = decltype(one);
        V v = load<V>(x + n * s.in + c);
        if (s.norm_weight) v = (v - mean) * scale * load<V>(s.norm_weight + c) + load<V>(s.norm_bias + c);
        if (s.silu_before) v = silu(v);
        store(p + n * s.in + c, v);
      };
      for (int64_t n = 0; n < count; n++) {
        int64_t c = 0;
        for (; c + LANES <= s.in; c += LANES) change(vec{}, to, n, c);
        for (; c < s.in; c++) change(0.f, to, n, c);
      }
      x = to;
    }
    const float* residual = s.residual ? s.residual + token * s.out : nullptr;
    float* y = s.y + token * s.out;
    for (int64_t p = block; p < std::min(panels, block + width); p++) {
      int64_t n = 0;
      for (; n + ROWS <= count; n += ROWS)
        multiply<ROWS>(s, x + n * s.in, p, residual ? residual + n * s.out : nullptr, y + n * s.out);
      multiply_rest<ROWS - 1>(s, count - n, x + n * s.in, p, residual ? residual + n * s.out : nullptr, y + n * s.out);
    }
  });
  return 0;
}
