// Depthwise convolution of channels-last tokens, with GELU before it, and the residual and a sum in the same pass.
#include "../native/parallel.h"
#include "../native/vectors.h"

namespace {

// The fields in the order in which `kernels/native/__init__.py` packs them. Strides count elements; channels lie side
// by side.
struct Convolution {
  const void *x, *weight, *bias, *add;               // add may be null
  void* y;                                           // dense
  int64_t batch, height, width, channels, side;
  int64_t x_strides[3], add_strides[3];              // image, row, column
  int64_t is_bf16, weight_is_bf16, gelu, residual, threads;
};

constexpr int COLUMNS = 4;                           // outputs that share the numbers of a window's rows
constexpr int64_t BAND = 8;                          // rows of a task

// Outputs of one row for the channels from c on, V's width. rows[m]: the input's row i + m - SIDE / 2, or null.
template <class V, class S, class T, int SIDE>
void convolve(const S* const* rows, int64_t step, const float* weight, const float* bias, const T* add,
              int64_t add_step, T* y, int64_t width, int64_t channels, int64_t c) {
  constexpr int HALF = SIDE / 2;
  const V b = load<V>(bias + c);
  auto finish = [&](V sum, int64_t j) __attribute__((always_inline)) {
    if (add) sum += load<V>(add + j * add_step + c);
    store(y + j * channels + c, sum);
  };
  auto one = [&](int64_t j) {
    V sum = b;
    for (int m = 0; m < SIDE; m++)
      for (int n = 0; n < SIDE && rows[m]; n++)
        if (j + n >= HALF && j + n < width + HALF)
          sum += load<V>(weight + (m * SIDE + n) * channels + c) * load<V>(rows[m] + (j + n - HALF) * step + c);
    finish(sum, j);
  };
  int64_t j = 0;
  for (; j < std::min<int64_t>(HALF, width); j++) one(j);
  for (; j + COLUMNS + HALF <= width; j += COLUMNS) {
    V sums[COLUMNS];
    for (int u = 0; u < COLUMNS; u++) sums[u] = b;
    for (int m = 0; m < SIDE; m++) {
      if (!rows[m]) continue;
      V in[SIDE + COLUMNS - 1];
      for (int n = 0; n < SIDE + COLUMNS - 1; n++) in[n] = load<V>(rows[m] + (j + n - HALF) * step + c);
      for (int n = 0; n < SIDE; n++) {
        V w = load<V>(weight + (m * SIDE + n) * channels + c);
        for (int u = 0; u < COLUMNS; u++) sums[u] += w * in[n + u];
      }
    }
    for (int u = 0; u < COLUMNS; u++) finish(sums[u], j + u);
  }
  for (; j < width; j++) one(j);
}

template <class T> void activate(const T* x, int64_t count, float* out) {
  int64_t c = 0;
  for (; c + LANES <= count; c += LANES) store(out + c, gelu(load<vec>(x + c)));
  for (; c < count; c++) out[c] = gelu(vec{} + load<float>(x + c))[0];
}

template <class T, int SIDE> int run(const Convolution& s) {
  constexpr int64_t HALF = SIDE / 2;
  const int64_t H = s.height, W = s.width, C = s.channels, bands = (H + BAND - 1) / BAND, window = SIDE * SIDE;
  const int64_t scratch = s.gelu ? (std::min(BAND, H) + 2 * HALF) * W * C : 0;
  const int64_t threads = std::min(s.threads, std::max<int64_t>(1, s.batch * H * W * C / 16384));
  Memory memory(round_up((window + 1) * C, 16) + threads * round_up(scratch, 16));
  if (!memory.data) return 2;
  float *weight = memory.data, *bias = weight + window * C;
  auto number = [&](const void* p, int64_t at) {
    return s.weight_is_bf16 ? load<float>((const bf16*)p + at) : ((const float*)p)[at];
  };
  for (int64_t c = 0; c < C; c++) {
    for (int64_t n = 0; n < window; n++)
      weight[n * C + c] = number(s.weight, c * window + n) + (s.residual && n == window / 2);
    bias[c] = number(s.bias, c);
  }
  parallel(s.batch * bands, threads, [&](int64_t task, int64_t worker) {
    const int64_t image = task / bands, begin = task % bands * BAND, end = std::min(H, begin + BAND);
    const T* x = (const T*)s.x + image * s.x_strides[0];
    float* active = memory.data + round_up((window + 1) * C, 16) + worker * round_up(scratch, 16);
    const int64_t top = std::max<int64_t>(0, begin - HALF), bottom = std::min(H, end + HALF);
    if (s.gelu)
      for (int64_t i = top; i < bottom; i++) {
        const T* row = x + i * s.x_strides[1];
        float* to = active + (i - top) * W * C;
        if (s.x_strides[2] == C) activate(row, W * C, to);
        else for (int64_t j = 0; j < W; j++) activate(row + j * s.x_strides[2], C, to + j * C);
      }
    for (int64_t i = begin; i < end; i++) {
      T* y = (T*)s.y + (image * H + i) * W * C;
      const T* add = s.add ? (const T*)s.add + image * s.add_strides[0] + i * s.add_strides[1] : nullptr;
      auto all = [&](auto* first, int64_t row_step, int64_t step) {        // first: row `top`
        using S = std::remove_reference_t<decltype(*first)>;
        const S* rows[SIDE];
        for (int64_t m = 0; m < SIDE; m++) {
          int64_t r = i + m - HALF;
          rows[m] = r >= 0 && r < H ? first + (r - top) * row_step : nullptr;
        }
        int64_t c = 0;
        for (; c + LANES <= C; c += LANES)
          convolve<vec, S, T, SIDE>(rows, step, weight, bias, add, s.add_strides[2], y, W, C, c);
        for (; c < C; c++) convolve<float, S, T, SIDE>(rows, step, weight, bias, add, s.add_strides[2], y, W, C, c);
      };
      if (s.gelu) all((const float*)active, W * C, C);
      else all(x + top * s.x_strides[1], s.x_strides[1], s.x_strides[2]);
    }
  });
  return 0;
}

template <class T> int choose(const Convolution& s) {
  return s.side == 1 ? run<T, 1>(s) : s.side == 3 ? run<T, 3>(s) : s.side == 5 ? run<T, 5>(s) : run<T, 7>(s);
}

}  // namespace

extern "C" int SUBQUAD_NAME(depthwise_conv)(const Convolution* s) {
  return s->is_bf16 ? choose<bf16>(*s) : choose<float>(*s);
}
