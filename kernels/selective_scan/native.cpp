// A selective scan along paths over a grid, token by token. A thread walks all paths with some channels of an image, so
// that it alone adds to their outputs. Tokens are read where they lie, in the order of the path.
#include <algorithm>
#include <cstring>
#include "../native/parallel.h"
#include "../native/vectors.h"

namespace {

// Channels of a task, and tokens whose factors exist at a time.
constexpr int64_t WIDTH = 2 * LANES, PIECE = 256;

struct Rows {
  const void* data;                                  // channels are dense
  int64_t batch, token, path;                        // strides count elements
};

// The fields in the order in which `native.py` packs them.
struct SelectiveScan {
  int64_t batch, height, width, channels, states, paths, columns_first, reversed, is_bf16, threads;   // a bit per path
  Rows u, delta, b, c;
  const float *a, *skip, *bias;                      // (paths, states, channels) in base 2, and (paths, channels)
  void* y;                                           // dense (batch, height, width, channels)
};

// The places of a path's tokens in the image, one after the other.
struct Walk {
  int64_t at, step, jump, length, inner = 0;

  Walk(const SelectiveScan& s, int64_t path) {
    const int64_t tokens = s.height * s.width, sign = s.reversed >> path & 1 ? -1 : 1;
    const bool columns = s.columns_first >> path & 1;
    at = sign > 0 ? 0 : tokens - 1;
    step = sign * (columns ? s.width : 1);
    jump = sign * (columns ? 1 - tokens : 0);        // from the end of a column to the next one
    length = columns ? s.height : s.width;
  }
  int64_t next() {
    const int64_t here = at;
    at += step;
    if (++inner == length) inner = 0, at += jump;
    return here;
  }
};

// `count` channels from x on; zeros fill up to WIDTH.
template <class T> void read(const T* x, int64_t count, vec (&out)[2]) {
  if (count == WIDTH) {
    for (int v = 0; v < 2; v++) out[v] = load<vec>(x + v * LANES);
    return;
  }
  float all[WIDTH] = {};
  for (int64_t d = 0; d < count; d++) all[d] = load<float>(x + d);
  for (int v = 0; v < 2; v++) out[v] = load<vec>(all + v * LANES);
}

// What a thread works with: outputs (tokens, WIDTH); of PIECE tokens their places, delta, delta u, b and c; a and the
// memory (states, WIDTH).
struct Work {
  float *y, *delta, *x, *b, *c, *a, *h;
  int64_t* at;

  int64_t place(const SelectiveScan& s, float* memory) {
    float* next = memory;
    auto take = [&](int64_t size) { float* at = next; next += round_up(size, 16); return at; };
    y = take(s.height * s.width * WIDTH);
    delta = take(PIECE * WIDTH), x = take(PIECE * WIDTH);
    b = take(PIECE * s.states), c = take(PIECE * s.states);
    a = take(s.states * WIDTH), h = take(s.states * WIDTH);
    at = (int64_t*)take(2 * PIECE);
    return next - memory;
  }
};

// K states from k on, of `count` tokens.
template <int K> void recur(const Work& w, int64_t states, int64_t k, int64_t count) {
  vec h[K][2], a[K][2];
  for (int r = 0; r < K; r++)
    for (int v = 0; v < 2; v++) {
      h[r][v] = load<vec>(w.h + (k + r) * WIDTH + v * LANES);
      a[r][v] = load<vec>(w.a + (k + r) * WIDTH + v * LANES);
    }
  for (int64_t n = 0; n < count; n++) {
    const float *b = w.b + n * states + k, *c = w.c + n * states + k;
    float* y = w.y + w.at[n] * WIDTH;
    for (int v = 0; v < 2; v++) {
      const vec delta = load<vec>(w.delta + n * WIDTH + v * LANES), x = load<vec>(w.x + n * WIDTH + v * LANES);
      vec sum = load<vec>(y + v * LANES);
      for (int r = 0; r < K; r++) {
        h[r][v] = exp2(delta * a[r][v]) * h[r][v] + b[r] * x;
        sum += c[r] * h[r][v];
      }
      store(y + v * LANES, sum);
    }
  }
  for (int r = 0; r < K; r++)
    for (int v = 0; v < 2; v++) store(w.h + (k + r) * WIDTH + v * LANES, h[r][v]);
}

template <class T>
void walk_path(const SelectiveScan& s, const Work& w, int64_t image, int64_t p, int64_t first, int64_t count) {
  auto of = [&](const Rows& rows) { return (const T*)rows.data + image * rows.batch + p * rows.path; };
  const T *u = of(s.u) + first, *delta = of(s.delta) + first, *b = of(s.b), *c = of(s.c);
  vec bias[2], skip[2];
  read(s.bias + p * s.channels + first, count, bias);
  read(s.skip + p * s.channels + first, count, skip);
  for (int64_t k = 0; k < s.states; k++) {
    vec a[2];
    read(s.a + (p * s.states + k) * s.channels + first, count, a);
    for (int v = 0; v < 2; v++) store(w.a + k * WIDTH + v * LANES, a[v]);
  }
  std::memset(w.h, 0, size_t(s.states * WIDTH) * 4);
  Walk walk(s, p);
  for (int64_t left = s.height * s.width; left > 0; left -= PIECE) {
    const int64_t tokens = std::min(left, PIECE);
    for (int64_t n = 0; n < tokens; n++) {
      const int64_t t = w.at[n] = walk.next();
      vec value[2], step[2];
      read(u + t * s.u.token, count, value);
      read(delta + t * s.delta.token, count, step);
      for (int v = 0; v < 2; v++) {
        step[v] = softplus(step[v] + bias[v]);
        float* y = w.y + t * WIDTH + v * LANES;
        store(y, load<vec>(y) + skip[v] * value[v]);
        store(w.delta + n * WIDTH + v * LANES, step[v]);
        store(w.x + n * WIDTH + v * LANES, step[v] * value[v]);
      }
      for (int64_t k = 0; k < s.states; k++) {
        w.b[n * s.states + k] = load<float>(b + t * s.b.token + k);
        w.c[n * s.states + k] = load<float>(c + t * s.c.token + k);
      }
    }
    int64_t k = 0;
    for (; k + 4 <= s.states; k += 4) recur<4>(w, s.states, k, tokens);
    for (; k < s.states; k++) recur<1>(w, s.states, k, tokens);
  }
}

template <class T> int run(const SelectiveScan& s) {
  const int64_t tiles = (s.channels + WIDTH - 1) / WIDTH, tokens = s.height * s.width;
  const int64_t work = s.batch * tokens * s.channels * s.paths * s.states;
  const int64_t threads = std::min({s.threads, s.batch * tiles, std::max<int64_t>(1, work / 16384)});
  const int64_t size = Work().place(s, nullptr);
  Memory memory(threads * size);
  if (!memory.data) return NO_MEMORY;
  parallel(s.batch * tiles, threads, [&](int64_t task, int64_t worker) {
    const int64_t image = task / tiles, first = task % tiles * WIDTH, count = std::min(WIDTH, s.channels - first);
    Work w;
    w.place(s, memory.data + worker * size);
    std::memset(w.y, 0, size_t(tokens * WIDTH) * 4);
    for (int64_t p = 0; p < s.paths; p++) walk_path<T>(s, w, image, p, first, count);
    T* y = (T*)s.y + image * tokens * s.channels + first;
    for (int64_t t = 0; t < tokens; t++, y += s.channels) {
      const float* row = w.y + t * WIDTH;
      int64_t d = 0;
      for (; d + LANES <= count; d += LANES) store(y + d, load<vec>(row + d));
      for (; d < count; d++) store(y + d, row[d]);
    }
  });
  return DONE;
}

}  // namespace

extern "C" int SUBQUAD_NAME(selective_scan)(const SelectiveScan* s) {
  return s->is_bf16 ? run<bf16>(*s) : run<float>(*s);
}
