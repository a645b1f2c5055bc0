// The recurrence of gated linear attention along the columns and then along the rows of a grid, with all that stands
// between two products around it.
#include <cmath>
#include "../native/parallel.h"
#include "recurrence.h"

namespace {

// The fields in the order in which `native.py` packs them.
struct Axes {
  const void* x;                                     // (batch, height, width, 2 C + 3 heads keys), C = heads dim
  void* y;                                           // (batch, height, width, C)
  const float *weight, *bias;                        // of the norm, (C,)
  int64_t batch, height, width, heads, keys, dim, is_bf16, threads;
  double rate, eps;                                  // o = sigmoid(x)^rate
};

// (x - mean) / sqrt(variance + eps), in place.
void normalize(float* x, int64_t count, float eps) {
  vec sums{};
  int64_t c = 0;
  float mean = 0, square = 0;
  for (; c + LANES <= count; c += LANES) sums += load<vec>(x + c);
  for (; c < count; c++) mean += x[c];
  mean = (mean + sum(sums)) / count;
  sums = vec{};
  for (c = 0; c + LANES <= count; c += LANES) {
    vec centered = load<vec>(x + c) - mean;
    sums += centered * centered;
  }
  for (; c < count; c++) square += (x[c] - mean) * (x[c] - mean);
  const float scale = 1 / std::sqrt((square + sum(sums)) / count + eps);
  for (c = 0; c + LANES <= count; c += LANES) store(x + c, (load<vec>(x + c) - mean) * scale);
  for (; c < count; c++) x[c] = (x[c] - mean) * scale;
}

template <class T> int run_axes(const Axes& a) {
  const int64_t H = a.height, W = a.width, C = a.heads * a.dim, states = a.heads * a.keys;
  const int64_t row = 2 * C + 3 * states, part = round_up(states, LANES), step = 3 * part;
  const int64_t width = round_up(a.dim, LANES), tokens = a.batch * H * W, longest = std::max(H, W);
  const int64_t line = round_up(C, LANES), scratch = longest * (2 * width + line + step) + a.keys * width;
  const int64_t threads = std::min(a.threads, std::max<int64_t>(1, tokens * states * a.dim / 65536));
  Memory memory(tokens * (line + step) + threads * round_up(scratch, 16));
  if (!memory.data) return NO_MEMORY;
  float *columns = memory.data, *kept = columns + tokens * line;          // the normalized result, and e, s and o

  // Both directions of a line for all heads, from `values(t)` (C,) and states (length, step) to out (length, line).
  auto recur = [&](auto&& values, int64_t length, const float* all, int64_t all_step, float* work, float* out) {
    float *i = work, *y = i + longest * width, *state = y + longest * width;
    for (int64_t h = 0; h < a.heads; h++) {
      for (int64_t t = 0; t < length; t++)
        map(values(t) + h * a.dim, a.dim, i + t * width, same);
      std::memset(y, 0, size_t(length * width) * 4);
      Tokens tokens{length, a.keys, width, all_step, i, all + h * a.keys, all + part + h * a.keys,
                    all + 2 * part + h * a.keys, nullptr, nullptr, nullptr, nullptr, state, y, false, false, 0};
      for (bool reverse : {false, true}) {
        std::memset(state, 0, size_t(a.keys * width) * 4);
        tokens.reverse = reverse;
        if (reverse) run<KEYS, true>(tokens);
        else run<KEYS, false>(tokens);
      }
      for (int64_t t = 0; t < length; t++) std::memcpy(out + t * line + h * a.dim, y + t * width, size_t(a.dim) * 4);
    }
  };
  auto work = [&](int64_t worker) { return kept + tokens * step + worker * round_up(scratch, 16); };

  parallel(a.batch * W, threads, [&](int64_t task, int64_t worker) {
    const int64_t first = task / W * H * W + task % W;                    // the column's first token
    const T* x = (const T*)a.x + first * row;
    float *out = work(worker), *all = out + longest * line;
    const float rate = float(a.rate);
    auto activate = [](vec z) { return silu(z); };
    for (int64_t t = 0; t < H; t++) {
      const T* token = x + t * W * row + 2 * C;
      float* to = all + t * step;
      map(token, states, to, activate);
      map(token + states, states, to + part, activate);
      map(token + 2 * states, states, to + 2 * part, [&](vec z) {
        vec log = softplus(-z) * -rate;
        const vec least = vec{} + STEP_LOG_MIN;
        return decay(log < least ? least : log);
      });
      std::memcpy(kept + (first + t * W) * step, to, size_t(step) * 4);
    }
    recur([&](int64_t t) { return x + t * W * row; }, H, all, step, all + longest * step, out);
    for (int64_t t = 0; t < H; t++) {
      normalize(out + t * line, C, float(a.eps));
      std::memcpy(columns + (first + t * W) * line, out + t * line, size_t(C) * 4);
    }
  });
  parallel(a.batch * H, threads, [&](int64_t task, int64_t worker) {
    const T* gate = (const T*)a.x + task * W * row + C;
    T* y = (T*)a.y + task * W * C;
    float* out = work(worker);
    recur([&](int64_t t) { return columns + (task * W + t) * line; }, W, kept + task * W * step, step,
          out + longest * line, out);
    for (int64_t t = 0; t < W; t++, gate += row, y += C) {
      normalize(out + t * line, C, float(a.eps));
      auto finish = [&](auto one, int64_t c, vec g) {
        using V = decltype(one);
        V n = load<V>(out + t * line + c) * load<V>(a.weight + c) + load<V>(a.bias + c);
        if constexpr (sizeof(V) == 4) store(y + c, n * silu(g)[0]);
        else store(y + c, n * silu(g));
      };
      int64_t c = 0;
      for (; c + LANES <= C; c += LANES) finish(vec{}, c, load<vec>(gate + c));
      for (; c < C; c++) finish(0.f, c, vec{} + load<float>(gate + c));
    }
  });
  return 0;
}

}  // namespace

extern "C" int SUBQUAD_NAME(eos_axes)(const Axes* a) { return a->is_bf16 ? run_axes<bf16>(*a) : run_axes<float>(*a); }
