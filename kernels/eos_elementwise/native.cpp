// The recurrence over lines, and its gradients. The memory of a line, or some of its columns, is a task of a thread.
#include <utility>
#include "../native/parallel.h"
#include "recurrence.h"

namespace {

struct Rows {
  const void* data;                                  // may be null
  int64_t batch, head, token, channel;               // strides count elements
};

// The fields in the order in which `native.py` packs them. Logs, z, the weight, memories and gradients are float32.
struct Recurrence {
  int64_t batch, heads, length, keys, dim, is_bf16, forwards, backwards, z_of_keys, sigmoid, threads;
  double tau;
  Rows i, e, s, log_k, log_d, z, weight, dy;         // of the weight: of heads, keys and columns, without a batch
  const float *state, *dlast;                        // dense memories, or null
  void* y;                                           // dense (batch, length, heads, dim)
  float* last;
  float *di, *de, *ds, *dlog_k, *dlog_d, *dz;        // the same with keys or dim; null without the tensor
  float *dweight, *dstate;                           // (batch, heads, keys, dim)
};

// Read f(x) of the channels from `first` on of all tokens of a line. Without data, all are 1.
template <class T, class F>
void read(const Recurrence& a, const Rows& rows, int64_t g, int64_t first, int64_t channels, int64_t step, float* out,
          F&& f) {
  if (!rows.data) {
    std::fill(out, out + a.length * step, 1.f);
    return;
  }
  const T* x = (const T*)rows.data + g / a.heads * rows.batch + g % a.heads * rows.head + first * rows.channel;
  for (int64_t t = 0; t < a.length; t++, x += rows.token, out += step) {
    if (rows.channel == 1) {
      map(x, channels, out, f);
    } else {
      for (int64_t c = 0; c < step; c++) out[c] = c < channels ? load<float>(x + c * rows.channel) : 0;
      map(out, step, out, f);
    }
  }
}

// The arguments of a line in float32, with `columns` columns from `first` on.
struct Line : Tokens {
  static int64_t size(const Recurrence& a, int64_t width) {
    return a.length * (3 * width + 4 * round_up(a.keys, LANES)) + a.keys * width;
  }

  template <class T>
  static Line of(const Recurrence& a, T, int64_t g, int64_t first, int64_t columns, float* work) {
    const int64_t step = round_up(a.keys, LANES), width = round_up(columns, LANES);
    auto take = [&](int64_t size) { return std::exchange(work, work + size); };
    float *i = take(a.length * width), *od = take(a.length * width), *zd = take(a.length * width);
    float *e = take(a.length * step), *s = take(a.length * step), *ok = take(a.length * step),
          *zk = take(a.length * step), *weight = take(a.keys * width);
    read<T>(a, a.i, g, first, columns, width, i, same);
    read<T>(a, a.e, g, 0, a.keys, step, e, same);
    read<T>(a, a.s, g, 0, a.keys, step, s, same);
    read<float>(a, a.log_k, g, 0, a.keys, step, ok, decay);
    if (a.log_d.data || a.z.data) read<float>(a, a.log_d, g, first, columns, width, od, decay);
    if (a.z.data) {
      if (a.z_of_keys) read<float>(a, a.z, g, 0, a.keys, step, zk, same);
      else read<float>(a, a.z, g, first, columns, width, zd, same);
      const float* w = (const float*)a.weight.data + g % a.heads * a.weight.head + first * a.weight.channel;
      for (int64_t k = 0; k < a.keys; k++)
        for (int64_t d = 0; d < width; d++)
          weight[k * width + d] = d < columns ? w[k * a.weight.token + d * a.weight.channel] : 0;
    }
    Line line;
    static_cast<Tokens&>(line) = {a.length, a.keys, width, step, i, e, s, ok, od, a.z_of_keys ? zk : nullptr, zd, weight,
                                  nullptr, nullptr, false, bool(a.sigmoid), float(1 / a.tau)};
    return line;
  }
};

// Columns of dense memories (keys, dim) and (keys, width). `from` may be null for zeros.
void load_memory(const float* from, int64_t keys, int64_t dim, int64_t columns, int64_t width, float* to) {
  std::memset(to, 0, size_t(keys * width) * 4);
  if (from)
    for (int64_t k = 0; k < keys; k++) std::memcpy(to + k * width, from + k * dim, size_t(columns) * 4);
}
void store_memory(const float* from, int64_t keys, int64_t dim, int64_t columns, int64_t width, float* to) {
  for (int64_t k = 0; k < keys; k++) std::memcpy(to + k * dim, from + k * width, size_t(columns) * 4);
}
const float* memory_of(const Recurrence& a, const float* memories, int64_t g) {
  return memories ? memories + g * a.keys * a.dim : nullptr;
}

template <class T, Oscillation O> int forward(const Recurrence& a) {
  constexpr int64_t WIDTH = 32;                      // of a task
  const int64_t tiles = (a.dim + WIDTH - 1) / WIDTH, groups = a.batch * a.heads;
  const int64_t most = std::min(WIDTH, round_up(a.dim, LANES));
  const int64_t scratch = round_up(Line::size(a, most) + (a.length + a.keys) * most, 16);
  const int64_t threads = std::min(a.threads, std::max<int64_t>(1, groups * a.length * a.keys * a.dim / 65536));
  Memory memory(std::min(threads, groups * tiles) * scratch);
  if (!memory.data) return NO_MEMORY;
  parallel(groups * tiles, threads, [&](int64_t task, int64_t worker) {
    const int64_t g = task / tiles, first = task % tiles * WIDTH, columns = std::min(WIDTH, a.dim - first);
    float* work = memory.data + worker * scratch;
    Line line = Line::of(a, T{}, g, first, columns, work);
    line.y = work + Line::size(a, line.width);
    line.memory = line.y + a.length * line.width;
    std::memset(line.y, 0, size_t(a.length * line.width) * 4);
    for (bool reverse : {false, true}) {
      if (!(reverse ? a.backwards : a.forwards)) continue;
      const float* state = memory_of(a, a.state, g);
      load_memory(state ? state + first : nullptr, a.keys, a.dim, columns, line.width, line.memory);
      line.reverse = reverse;
      if (reverse && a.forwards) run<O, true>(line);
      else run<O, false>(line);
    }
    if (a.last)
      store_memory(line.memory, a.keys, a.dim, columns, line.width, a.last + g * a.keys * a.dim + first);
    T* y = (T*)a.y + (g / a.heads * a.length * a.heads + g % a.heads) * a.dim + first;
    for (int64_t t = 0; t < a.length; t++, y += a.heads * a.dim) {
      const float* row = line.y + t * line.width;
      int64_t c = 0;
      for (; c + LANES <= columns; c += LANES) store(y + c, load<vec>(row + c));
      for (; c < columns; c++) store(y + c, row[c]);
    }
  });
  return 0;
}

constexpr int64_t BLOCK = 16;                        // tokens whose memories exist at a time

// Gradients of a line, in the order of `Line`.
struct Gradients {
  const float* dy;
  float *i, *od, *zd, *e, *s, *ok, *zk, *weight;     // of ok and od: of their logs
  float* adjoint;                                    // (keys, width): gradient of the memory after the tokens
};

// C vectors of columns of one key. kept: o_t m_{t-1} (count, keys, width).
template <Oscillation O, bool AGAIN, int C>
void adjoint_tile(const Tokens& a, const Gradients& d, const float* kept, int64_t k, int64_t first) {
  vec w[C], dw[C] = {}, adjoint[C];
  const int64_t tile = k * a.width + first;
  for (int c = 0; c < C; c++) {
    adjoint[c] = load<vec>(d.adjoint + tile + c * LANES);
    if (O == GENERATED) w[c] = load<vec>(a.weight + tile + c * LANES);
  }
  for (int64_t n = 0; n < a.count; n++) {
    const int64_t t = a.reverse ? n : a.count - 1 - n, row = t * a.width + first, key = t * a.step + k;
    vec de{}, ds{}, dk{}, dzk{};
    for (int c = 0; c < C; c++) {
      const int64_t at = row + c * LANES;
      const vec x = load<vec>(a.i + at), dy = load<vec>(d.dy + at);
      const vec old = load<vec>(kept + t * a.keys * a.width + tile + c * LANES);
      const vec flow = a.s[key] * dy + adjoint[c], into = AGAIN ? adjoint[c] : flow;
      ds += (AGAIN ? old : old + a.e[key] * x) * dy;
      de += into * x;
      store(d.i + at, load<vec>(d.i + at) + a.e[key] * into);
      vec dlog = old * flow;
      dk += dlog;
      if (O != KEYS) store(d.od + at, load<vec>(d.od + at) + dlog);
      if (O == GENERATED) {
        const vec z = a.zk ? a.zk[key] - vec{} : load<vec>(a.zd + at);
        dlog *= slope(z * w[c], a.sigmoid, a.rate);
        dw[c] += dlog * z;
        if (a.zk) dzk += dlog * w[c];
        else store(d.zd + at, load<vec>(d.zd + at) + dlog * w[c]);
      }
      adjoint[c] = a.oscillation<O>(t, k, first + c * LANES, w[c]) * flow;
    }
    d.e[key] += sum(de);
    d.s[key] += sum(ds);
    d.ok[key] += sum(dk);
    if (O == GENERATED && a.zk) d.zk[key] += sum(dzk);
  }
  for (int c = 0; c < C; c++) {
    store(d.adjoint + tile + c * LANES, adjoint[c]);
    if (O == GENERATED) store(d.weight + tile + c * LANES, load<vec>(d.weight + tile + c * LANES) + dw[c]);
  }
}

// o_t m_{t-1} of all tokens; the memory becomes that after them.
template <Oscillation O> void keep(const Tokens& a, float* kept) {
  for (int64_t k = 0; k < a.keys; k++)
    for (int64_t d = 0; d < a.width; d += LANES) {
      const int64_t tile = k * a.width + d;
      vec m = load<vec>(a.memory + tile), w{};
      if (O == GENERATED) w = load<vec>(a.weight + tile);
      for (int64_t n = 0; n < a.count; n++) {
        const int64_t t = a.reverse ? a.count - 1 - n : n;
        m *= a.oscillation<O>(t, k, d, w);
        if (kept) store(kept + t * a.keys * a.width + tile, m);
        m += a.e[t * a.step + k] * load<vec>(a.i + t * a.width + d);
      }
      store(a.memory + tile, m);
    }
}

// The tokens from `begin` on, and their gradients.
Tokens part(Tokens a, int64_t begin, int64_t count) {
  for (auto* x : {&a.i, &a.od, &a.zd}) *x += begin * a.width;
  for (auto* x : {&a.e, &a.s, &a.ok}) *x += begin * a.step;
  if (a.zk) a.zk += begin * a.step;
  a.count = count;
  return a;
}
Gradients part(Gradients d, const Tokens& a, int64_t begin) {
  d.dy += begin * a.width;
  for (auto* x : {&d.i, &d.od, &d.zd}) *x += begin * a.width;
  for (auto* x : {&d.e, &d.s, &d.ok, &d.zk}) *x += begin * a.step;
  return d;
}

// Add the gradients of one direction.
template <Oscillation O, bool AGAIN>
void adjoint(const Tokens& line, const Gradients& d, float* starts, float* kept) {
  const int64_t size = line.keys * line.width, blocks = (line.count + BLOCK - 1) / BLOCK;
  auto block = [&](int64_t n) {
    const int64_t begin = (line.reverse ? blocks - 1 - n : n) * BLOCK;
    return std::make_pair(begin, part(line, begin, std::min(BLOCK, line.count - begin)));
  };
  for (int64_t n = 0; n < blocks; n++) {
    std::memcpy(starts + n * size, line.memory, size_t(size) * 4);
    if (n + 1 < blocks) keep<O>(block(n).second, nullptr);
  }
  for (int64_t n = blocks - 1; n >= 0; n--) {
    auto [begin, tokens] = block(n);
    const Gradients grads = part(d, line, begin);
    tokens.memory = starts + n * size;
    keep<O>(tokens, kept);
    for (int64_t k = 0; k < line.keys; k++) {
      int64_t c = 0;
      for (; c + 4 * LANES <= line.width; c += 4 * LANES) adjoint_tile<O, AGAIN, 4>(tokens, grads, kept, k, c);
      for (; c < line.width; c += LANES) adjoint_tile<O, AGAIN, 1>(tokens, grads, kept, k, c);
    }
  }
}

template <class T, Oscillation O> int backward(const Recurrence& a) {
  const int64_t width = round_up(a.dim, LANES), step = round_up(a.keys, LANES), groups = a.batch * a.heads;
  const int64_t size = a.keys * width, blocks = (a.length + BLOCK - 1) / BLOCK;
  const int64_t scratch = round_up(2 * Line::size(a, width) + a.length * width + (2 + blocks + BLOCK) * size, 16);
  const int64_t threads = std::min(a.threads, std::max<int64_t>(1, groups * a.length * a.keys * a.dim / 16384));
  Memory memory(std::min(threads, groups) * scratch);
  if (!memory.data) return NO_MEMORY;
  parallel(groups, threads, [&](int64_t g, int64_t worker) {
    float* work = memory.data + worker * scratch;
    auto take = [&](int64_t size) { return std::exchange(work, work + size); };
    Line line = Line::of(a, T{}, g, 0, a.dim, take(Line::size(a, width)));
    const int64_t wide = a.length * width, narrow = a.length * step;
    float *dy = take(wide), *zeros = work;
    Gradients d{dy, take(wide), take(wide), take(wide), take(narrow), take(narrow), take(narrow), take(narrow),
                take(size), take(size)};
    std::memset(zeros, 0, size_t(work - zeros) * 4);
    read<T>(a, a.dy, g, 0, a.dim, width, dy, same);
    float* starts = line.memory = take(size);
    starts = take(blocks * size);
    for (bool reverse : {false, true}) {
      if (!(reverse ? a.backwards : a.forwards)) continue;
      load_memory(memory_of(a, a.state, g), a.keys, a.dim, a.dim, width, line.memory);
      load_memory(memory_of(a, a.dlast, g), a.keys, a.dim, a.dim, width, d.adjoint);
      line.reverse = reverse;
      if (reverse && a.forwards) adjoint<O, true>(line, d, starts, work);
      else adjoint<O, false>(line, d, starts, work);
    }
    auto write = [&](const float* from, int64_t channels, int64_t ld, float* out) {
      if (!out) return;
      out += (g / a.heads * a.length * a.heads + g % a.heads) * channels;
      for (int64_t t = 0; t < a.length; t++)
        std::memcpy(out + t * a.heads * channels, from + t * ld, size_t(channels) * 4);
    };
    write(d.i, a.dim, width, a.di);
    write(d.e, a.keys, step, a.de);
    write(d.s, a.keys, step, a.ds);
    write(d.ok, a.keys, step, a.dlog_k);
    write(d.od, a.dim, width, a.dlog_d);
    if (a.z_of_keys) write(d.zk, a.keys, step, a.dz);
    else write(d.zd, a.dim, width, a.dz);
    const int64_t at = g * a.keys * a.dim;
    if (a.dweight) store_memory(d.weight, a.keys, a.dim, a.dim, width, a.dweight + at);
    if (a.dstate) store_memory(d.adjoint, a.keys, a.dim, a.dim, width, a.dstate + at);
  });
  return 0;
}

template <class T, Oscillation O> int choose(const Recurrence& a) { return a.y ? forward<T, O>(a) : backward<T, O>(a); }
template <class T> int choose(const Recurrence& a) {
  return a.z.data ? choose<T, GENERATED>(a) : a.log_d.data ? choose<T, COLUMNS>(a) : choose<T, KEYS>(a);
}

}  // namespace

// Without y, the gradients are computed.
extern "C" int SUBQUAD_NAME(eos_elementwise)(const Recurrence* a) {
  return a->is_bf16 ? choose<bf16>(*a) : choose<float>(*a);
}
