// Softmax attention on lines of tokens, decayed with distance, and its gradients. The own logit is the reference
// of the softmax, so that no sum of weights is below 1.
//     dP = g v',   dL = P (dP - sum(P dP)),   or, with P = U decay in multiplicative mode,   P dP - U sum(P dP)
#include "../native/attention.h"

namespace {

constexpr int QUERIES = 4;

// A tensor of all lines: its first number, and the elements from an image, head, line and token to the next.
struct View {
  void* data;
  int64_t image, head, line, token;
};

// The fields in the order in which `__init__.py` packs them. Without `grad`, y is computed, and otherwise the
// gradients are. The sums of step logs and their gradients are float32.
struct Lines {
  View grad, q, k, v, sums, y, dq, dk, dv, dsums;
  int64_t batch, heads, lines, length, dim, value_dim, is_bf16, multiplicative, threads;

  template <class T> T* at(const View& x, int64_t number, int64_t token = 0) const {
    return (T*)x.data + number / (heads * lines) * x.image + number / heads % lines * x.line +
           number % heads * x.head + token * x.token;
  }
};

// What a worker needs of a line. Tokens (length, dim): as they are and transposed (dim, padded), where the last
// token fills up and has a weight of 0.
struct Work {
  const Lines& s;
  int64_t padded = round_up(s.length, LANES), dim = round_up(s.dim, LANES);
  int64_t value_dim = round_up(s.value_dim, LANES);
  float *k, *kt, *v, *vt, *sums, *inside, *q, *g, *out;   // of QUERIES queries from q on
  float *p, *u, *dl;                                      // weights, without decay, and gradients of logits
  float *dk, *dv, *dsums;

  int64_t place(float* memory) {
    float* next = memory;
    auto take = [&](int64_t size) { float* at = next; next += round_up(size, 16); return at; };
    k = take(s.length * dim), kt = take(s.dim * padded), v = take(s.length * value_dim);
    sums = take(padded), inside = take(padded);
    q = take(QUERIES * dim), g = take(QUERIES * value_dim), out = take(QUERIES * std::max(dim, value_dim));
    p = take(QUERIES * padded), u = take(QUERIES * padded);
    if (s.grad.data) {
      dl = take(QUERIES * padded), vt = take(s.value_dim * padded);
      dk = take(s.length * dim), dv = take(s.length * value_dim), dsums = take(padded);
    }
    return next - memory;
  }
};

// Read `count` tokens of a line from `first` on.
template <class T>
void read_tokens(const Lines& s, const View& x, int64_t number, int64_t first, int64_t count, int64_t channels,
                 int64_t padded, float factor, float* out) {
  const T* from = s.at<T>(x, number, first);
  for (int64_t t = 0; t < count; t++, from += x.token) {
    __builtin_prefetch(from + x.head);                      // the next line is that of the next head
    read(from, channels, padded, nullptr, factor, out + t * padded);
  }
}

void transpose(const float* x, int64_t length, int64_t step, int64_t channels, int64_t padded, float* out) {
  for (int64_t t = 0; t < padded; t++)
    for (int64_t d = 0; d < channels; d++) out[d * padded + t] = x[std::min(t, length - 1) * step + d];
}

template <class T> void prepare(const Work& w, int64_t number) {
  const Lines& s = w.s;
  read_tokens<T>(s, s.k, number, 0, s.length, s.dim, w.dim, 1.f, w.k);
  read_tokens<T>(s, s.v, number, 0, s.length, s.value_dim, w.value_dim, 1.f, w.v);
  transpose(w.k, s.length, w.dim, s.dim, w.padded, w.kt);
  for (int64_t t = 0; t < w.padded; t++) {
    w.sums[t] = *s.at<float>(s.sums, number, std::min(t, s.length - 1));
    w.inside[t] = t < s.length;
  }
}

// Weights of Q queries from token i on, which are to be divided by `total`. False if that is not finite.
template <class T, int Q, bool MULTIPLICATIVE>
bool weigh(const Work& w, int64_t number, int64_t i, float* total) {
  const int64_t P = w.padded;
  read_tokens<T>(w.s, w.s.q, number, i, Q, w.s.dim, w.dim, LOG2E, w.q);
  float self[Q];
  vec sums[Q] = {};
  for (int x = 0; x < Q; x++) {
    self[x] = 0;
    for (int64_t d = 0; d < w.s.dim; d++) self[x] += w.q[x * w.dim + d] * w.k[(i + x) * w.dim + d];
  }
  for_logits<Q>(w.q, w.dim, w.kt, P, w.s.dim, [&](int64_t l, const vec(&products)[Q])
                    __attribute__((always_inline)) {
    for (int x = 0; x < Q; x++) {
      const vec distance = absolute(load<vec>(w.sums + l) - w.sums[i + x]), logit = products[x] - self[x];
      const vec e = exp2(MULTIPLICATIVE ? logit : logit - distance * LOG2E) * load<vec>(w.inside + l);
      sums[x] += e;
      if (MULTIPLICATIVE) store(w.u + x * P + l, e);
      store(w.p + x * P + l, MULTIPLICATIVE ? e * exp2(distance * -LOG2E) : e);
    }
  });
  bool finite = true;
  for (int x = 0; x < Q; x++) finite &= std::isfinite(total[x] = sum(sums[x]));
  return finite;
}

template <class T, int Q, bool MULTIPLICATIVE> bool attend(const Work& w, int64_t number, int64_t i) {
  const Lines& s = w.s;
  float total[Q];
  if (!weigh<T, Q, MULTIPLICATIVE>(w, number, i, total)) return false;
  weigh_all<Q>(w.p, w.padded, w.v, w.value_dim, s.length, w.value_dim, w.out, w.value_dim);
  for (int x = 0; x < Q; x++) {
    float* y = w.out + x * w.value_dim;
    for (int64_t d = 0; d < w.value_dim; d += LANES) store(y + d, load<vec>(y + d) * (1.f / total[x]));
    write(y, s.value_dim, s.at<T>(s.y, number, i + x));
  }
  return true;
}

template <class T, int Q, bool MULTIPLICATIVE> bool differentiate(const Work& w, int64_t number, int64_t i) {
  const Lines& s = w.s;
  const int64_t L = s.length, P = w.padded;
  float total[Q];
  if (!weigh<T, Q, MULTIPLICATIVE>(w, number, i, total)) return false;
  for (int x = 0; x < Q; x++)
    for (int64_t l = x * P; l < (x + 1) * P; l += LANES) {
      store(w.p + l, load<vec>(w.p + l) * (1.f / total[x]));
      if (MULTIPLICATIVE) store(w.u + l, load<vec>(w.u + l) * (1.f / total[x]));
    }
  read_tokens<T>(s, s.grad, number, i, Q, s.value_dim, w.value_dim, 1.f, w.g);
  spread<Q>(w.p, P, L, w.g, w.value_dim, w.dv);
  vec means[Q] = {};
  for_logits<Q>(w.g, w.value_dim, w.vt, P, s.value_dim, [&](int64_t l, const vec(&products)[Q])
                    __attribute__((always_inline)) {
    for (int x = 0; x < Q; x++) {
      const vec change = products[x] * load<vec>(w.p + x * P + l);
      means[x] += change;
      store(w.dl + x * P + l, MULTIPLICATIVE ? change : products[x]);
    }
  });
  for (int x = 0; x < Q; x++) {
    const float mean = sum(means[x]);
    vec own{};
    for (int64_t l = 0; l < P; l += LANES) {
      const vec given = load<vec>(w.dl + x * P + l);
      const vec d = MULTIPLICATIVE ? given - load<vec>(w.u + x * P + l) * mean
                                   : load<vec>(w.p + x * P + l) * (given - mean);
      // The log decay is sign(i - l) (S[i] - S[l]).
      const vec of_sum = (MULTIPLICATIVE ? given : d) * signs(i + x, l);
      store(w.dl + x * P + l, d);
      store(w.dsums + l, load<vec>(w.dsums + l) - of_sum);
      own += of_sum;
    }
    w.dsums[i + x] += sum(own);
  }
  weigh_all<Q>(w.dl, P, w.k, w.dim, L, w.dim, w.out, w.dim);
  for (int x = 0; x < Q; x++) write(w.out + x * w.dim, s.dim, s.at<T>(s.dq, number, i + x));
  spread<Q>(w.dl, P, L, w.q, w.dim, w.dk);                  // q is in units of LOG2E
  return true;
}

template <class T> void write_gradients(const Work& w, int64_t number) {
  const Lines& s = w.s;
  for (int64_t t = 0; t < s.length; t++) {
    float* dk = w.dk + t * w.dim;
    for (int64_t d = 0; d < w.dim; d += LANES) store(dk + d, load<vec>(dk + d) * (1 / LOG2E));
    write(dk, s.dim, s.at<T>(s.dk, number, t));
    write(w.dv + t * w.value_dim, s.value_dim, s.at<T>(s.dv, number, t));
    *s.at<float>(s.dsums, number, t) = w.dsums[t];
  }
}

template <class T, bool MULTIPLICATIVE> int run(const Lines& s) {
  const int64_t count = s.batch * s.heads * s.lines, size = Work{s}.place(nullptr);
  const bool backward = s.grad.data;
  // A thread for each line, or for parts of its queries if there are few lines.
  const int64_t parts = backward || !count ? 1 : std::max<int64_t>(1, 2 * s.threads / count);
  const int64_t part = round_up((s.length + parts - 1) / parts, QUERIES);
  const int64_t threads = std::min(s.threads, count * parts);
  Memory memory(threads * size);
  if (!memory.data) return NO_MEMORY;
  std::atomic<bool> finite{true};
  parallel(count * parts, threads, [&](int64_t task, int64_t worker) {
    const int64_t number = task / parts, end = std::min(s.length, (task % parts + 1) * part);
    Work w{s};
    w.place(memory.data + worker * size);
    prepare<T>(w, number);
    if (backward) {
      transpose(w.v, s.length, w.value_dim, s.value_dim, w.padded, w.vt);
      std::memset(w.dk, 0, 4 * (w.dsums + w.padded - w.dk));
    }
    bool good = true;
    int64_t i = task % parts * part;
    auto some = [&](auto queries) {
      constexpr int Q = decltype(queries)::value;
      for (; i + Q <= end; i += Q)
        good &= backward ? differentiate<T, Q, MULTIPLICATIVE>(w, number, i)
                         : attend<T, Q, MULTIPLICATIVE>(w, number, i);
    };
    some(std::integral_constant<int, QUERIES>());
    some(std::integral_constant<int, 2>());
    some(std::integral_constant<int, 1>());
    if (backward) write_gradients<T>(w, number);
    if (!good) finite = false;
  });
  return finite ? DONE : OUT_OF_RANGE;
}

}  // namespace

extern "C" int SUBQUAD_NAME(decay_attention)(const Lines* s) {
  if (s->is_bf16) return s->multiplicative ? run<bf16, true>(*s) : run<bf16, false>(*s);
  return s->multiplicative ? run<float, true>(*s) : run<float, false>(*s);
}
