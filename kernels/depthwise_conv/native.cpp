// Depthwise convolution of channels-last tokens, with GELU before it, the residual and a sum in the same pass, and its
// gradients. A task copies a chunk of channels, a cache line of each token, with zeros around the grid. So all windows
// lie in the copy, and rows of all channels, whose distance is often a power of two, do not displace each other in the
// cache.
#include "../native/parallel.h"
#include "../native/vectors.h"

namespace {

// Arguments in the order in which `__init__.py` packs them. Strides count elements; channels lie side by side, and y,
// dx, dweight and dbias are dense. Pointers may be null: add, and dx or dweight if they are not wanted. With grad, the
// gradients are computed, and otherwise y.
struct Convolution {
  const void *x, *weight, *bias, *add, *grad;
  void *y, *dx, *dweight, *dbias;
  int64_t add_strides[3], grad_strides[3];                                   // image, row, column
  int64_t batch, height, width, channels, side, x_strides[3];
  int64_t is_bf16, weight_is_bf16, gelu, residual, threads;
};

constexpr int64_t CHUNK = 16;                        // channels of a task
constexpr int COLUMNS = 7;                           // outputs that are summed at a time; it divides 7, 14, 28 and 56
constexpr int64_t BAND = 1 << 16, LEAST_ROWS = 14;   // numbers of a task's rows, which stay in the cache; its rows

struct Shape {
  int64_t height, width, channels, side, half = side / 2, window = side * side, chunks = (channels + CHUNK - 1) / CHUNK;
  int64_t ld = (round_up(width, COLUMNS) + 2 * half) * CHUNK;                // floats of a row of the copy
  int64_t most = std::max(LEAST_ROWS, BAND / std::max<int64_t>(1, width * channels));
  int64_t bands = (height + most - 1) / most, rows = (height + bands - 1) / std::max<int64_t>(1, bands);
  int64_t copied = (rows + 2 * half) * ld;
};

// Call f(image, band, chunk, worker) for all. A task has all chunks of a band, which it reads while they are in the
// cache, or one chunk if there are few bands.
template <class F> void for_chunks(const Convolution& a, const Shape& s, int64_t threads, F&& f) {
  const int64_t groups = a.batch * s.bands >= 2 * threads ? 1 : s.chunks;
  parallel(a.batch * s.bands * groups, threads, [&](int64_t task, int64_t worker) {
    const int64_t at = task / groups, image = at / s.bands, band = at % s.bands;
    const int64_t first = groups == 1 ? 0 : task % groups, last = groups == 1 ? s.chunks : first + 1;
    for (int64_t chunk = first; chunk < last; chunk++) f(image, band, chunk, worker);
  });
}

// A vector of channels of which `count` exist.
template <class T> inline vec load_part(const T* x, int64_t count) {
  if (count >= LANES) return load<vec>(x);
  vec part{};
  for (int64_t c = 0; c < count; c++) part[c] = load<float>(x + c);
  return part;
}
template <class T> inline void store_part(T* y, vec part, int64_t count) {
  if (count >= LANES) return store(y, part);
  for (int64_t c = 0; c < count; c++) store(y + c, part[c]);
}

// Copy rows [begin - half, end + half) of a chunk of `count` channels.
template <class T>
void copy(const Shape& s, const T* x, const int64_t* strides, int64_t begin, int64_t end, int64_t count, bool active,
          float* out) {
  for (int64_t i = begin - s.half; i < end + s.half; i++, out += s.ld) {
    const bool inside = i >= 0 && i < s.height;
    const int64_t left = inside ? s.half * CHUNK : s.ld, right = left + s.width * CHUNK;
    std::memset(out, 0, size_t(left) * 4);
    if (!inside) continue;
    std::memset(out + right, 0, size_t(s.ld - right) * 4);
    for (int64_t j = 0; j < s.width; j++)
      for (int64_t c = 0; c < CHUNK; c += LANES) {
        const vec part = load_part(x + i * strides[1] + j * strides[2] + c, count - c);
        store(out + left + j * CHUNK + c, active ? gelu(part) : part);
      }
  }
}

// Call put(j, c, y) with the outputs of a row from channel c on. Their windows begin at `in`.
template <int SIDE, class F>
void convolve(const Shape& s, const float* in, const float* weight, const float* bias, F&& put) {
  const int64_t side = SIDE ? SIDE : s.side;
  for (int64_t j = 0; j < s.width; j += COLUMNS)
    for (int64_t c = 0; c < CHUNK; c += LANES) {
      vec sums[COLUMNS];
      for (int u = 0; u < COLUMNS; u++) sums[u] = load<vec>(bias + c);
      const float *row = in + j * CHUNK + c, *w = weight + c;
#pragma GCC unroll 1                                                         // constant offsets within a row
      for (int64_t m = 0; m < side; m++, row += s.ld, w += side * CHUNK)
        for (int64_t n = 0; n < side; n++)
          for (int u = 0; u < COLUMNS; u++) sums[u] += load<vec>(w + n * CHUNK) * load<vec>(row + (n + u) * CHUNK);
      for (int u = 0; u < COLUMNS; u++)
        if (j + u < s.width) put(j + u, c, sums[u]);
    }
}

// Add the products of a row's gradients and its inputs at N windows' places to sums (N, CHUNK).
template <int N> void correlate(const float* grad, const float* in, int64_t width, float* sums) {
  for (int64_t c = 0; c < CHUNK; c += LANES) {
    vec even[N] = {}, odd[N] = {};                                           // chains of additions side by side
    int64_t j = 0;
    for (; j + 2 <= width; j += 2) {
      const vec g = load<vec>(grad + j * CHUNK + c), h = load<vec>(grad + (j + 1) * CHUNK + c);
      for (int n = 0; n < N; n++) {
        even[n] += g * load<vec>(in + (j + n) * CHUNK + c);
        odd[n] += h * load<vec>(in + (j + 1 + n) * CHUNK + c);
      }
    }
    for (int n = 0; n < N; n++) {
      vec sum = load<vec>(sums + n * CHUNK + c) + even[n] + odd[n];
      if (j < width) sum += load<vec>(grad + j * CHUNK + c) * load<vec>(in + (j + n) * CHUNK + c);
      store(sums + n * CHUNK + c, sum);
    }
  }
}

float number(const void* p, int64_t at, bool is_bf16) {
  return is_bf16 ? load<float>((const bf16*)p + at) : ((const float*)p)[at];
}

template <class T, int SIDE>
int forward(const Convolution& a, const Shape& s, int64_t threads, const float* weight, const float* bias) {
  Memory memory(threads * s.copied);
  if (!memory.data) return NO_MEMORY;
  for_chunks(a, s, threads, [&](int64_t image, int64_t band, int64_t chunk, int64_t worker) {
    const int64_t first = chunk * CHUNK, count = std::min(CHUNK, s.channels - first);
    const int64_t begin = band * s.rows, end = std::min(s.height, begin + s.rows);
    float* in = memory.data + worker * s.copied;
    copy(s, (const T*)a.x + image * a.x_strides[0] + first, a.x_strides, begin, end, count, a.gelu, in);
    for (int64_t i = begin; i < end; i++, in += s.ld) {
      const T* add = a.add ? (const T*)a.add + image * a.add_strides[0] + i * a.add_strides[1] + first : nullptr;
      T* y = (T*)a.y + (image * s.height + i) * s.width * s.channels + first;
      convolve<SIDE>(s, in, weight + first * s.window, bias + first, [&](int64_t j, int64_t c, vec sum) {
        if (add) sum += load_part(add + j * a.add_strides[2] + c, count - c);
        store_part(y + j * s.channels + c, sum, count - c);
      });
    }
  });
  return 0;
}

// Gradients: `weight` is turned by half a circle, and `bias` is zero.
template <class T, int SIDE>
int backward(const Convolution& a, const Shape& s, int64_t threads, const float* weight, const float* bias) {
  const int64_t sums = (s.window + 1) * CHUNK, parts = a.batch * s.bands;
  Memory memory(threads * 2 * s.copied + parts * s.chunks * sums);
  if (!memory.data) return NO_MEMORY;
  float* partial = memory.data + threads * 2 * s.copied;                     // (parts, chunks, window + 1, CHUNK)
  for_chunks(a, s, threads, [&](int64_t image, int64_t band, int64_t chunk, int64_t worker) {
    const int64_t first = chunk * CHUNK, count = std::min(CHUNK, s.channels - first);
    const int64_t begin = band * s.rows, end = std::min(s.height, begin + s.rows);
    const T* x = (const T*)a.x + image * a.x_strides[0] + first;
    float *grad = memory.data + worker * 2 * s.copied, *in = grad + s.copied;
    copy(s, (const T*)a.grad + image * a.grad_strides[0] + first, a.grad_strides, begin, end, count, false, grad);
    if (a.dx)
      for (int64_t i = begin; i < end; i++) {
        const T* row = x + i * a.x_strides[1];
        T* to = (T*)a.dx + (image * s.height + i) * s.width * s.channels + first;
        convolve<SIDE>(s, grad + (i - begin) * s.ld, weight + first * s.window, bias, [&](int64_t j, int64_t c, vec dx) {
          if (a.gelu) dx *= gelu_gradient(load_part(row + j * a.x_strides[2] + c, count - c));
          store_part(to + j * s.channels + c, dx, count - c);
        });
      }
    if (!a.dweight) return;
    float* sum = partial + ((image * s.bands + band) * s.chunks + chunk) * sums;
    copy(s, x, a.x_strides, begin, end, count, a.gelu, in);
    std::memset(sum, 0, size_t(sums) * 4);
    for (int64_t i = 0; i < end - begin; i++) {
      const float* g = grad + (i + s.half) * s.ld + s.half * CHUNK;
      for (int64_t m = 0; m < s.side; m++)
        for (int64_t n = 0; n < s.side; n += SIDE ? SIDE : 1)
          correlate<SIDE ? SIDE : 1>(g, in + (i + m) * s.ld + n * CHUNK, s.width, sum + (m * s.side + n) * CHUNK);
      for (int64_t j = 0; j < s.width; j++)
        for (int64_t c = 0; c < CHUNK; c++) sum[s.window * CHUNK + c] += g[j * CHUNK + c];
    }
  });
  if (!a.dweight) return 0;
  for (int64_t c = 0; c < s.channels; c++)
    for (int64_t n = 0; n <= s.window; n++) {
      double total = 0;
      for (int64_t part = 0; part < parts; part++)
        total += partial[((part * s.chunks + c / CHUNK) * (s.window + 1) + n) * CHUNK + c % CHUNK];
      void* to = n < s.window ? a.dweight : a.dbias;
      const int64_t at = n < s.window ? c * s.window + n : c;
      if (a.weight_is_bf16) store((bf16*)to + at, float(total));
      else ((float*)to)[at] = float(total);
    }
  return 0;
}

template <class T, int SIDE> int run(const Convolution& a) {
  const Shape s{a.height, a.width, a.channels, a.side};
  Memory memory(s.chunks * CHUNK * (s.window + 1));
  if (!memory.data) return NO_MEMORY;
  float *weight = memory.data, *bias = weight + s.chunks * CHUNK * s.window;  // (chunks, window, CHUNK), (chunks, CHUNK)
  std::memset(weight, 0, size_t(s.chunks * CHUNK * (s.window + 1)) * 4);
  for (int64_t c = 0; c < s.channels; c++) {
    for (int64_t n = 0; n < s.window; n++)
      weight[(c / CHUNK * s.window + (a.grad ? s.window - 1 - n : n)) * CHUNK + c % CHUNK] =
          number(a.weight, c * s.window + n, a.weight_is_bf16) + (a.residual && n == s.window / 2);
    if (!a.grad) bias[c] = number(a.bias, c, a.weight_is_bf16);
  }
  const int64_t threads = std::min(a.threads, std::max<int64_t>(1, a.batch * s.height * s.width * s.channels / 16384));
  return (a.grad ? backward<T, SIDE> : forward<T, SIDE>)(a, s, threads, weight, bias);
}

template <class T> int choose(const Convolution& a) {
  return a.side == 3 ? run<T, 3>(a) : a.side == 5 ? run<T, 5>(a) : a.side == 7 ? run<T, 7>(a) : run<T, 0>(a);
}

}  // namespace

extern "C" int SUBQUAD_NAME(depthwise_conv)(const Convolution* a) {
  return a->is_bf16 ? choose<bf16>(*a) : choose<float>(*a);
}
