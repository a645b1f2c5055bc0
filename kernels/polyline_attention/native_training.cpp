// Polyline attention of training, in additive mode, from tables of log decays: a is row (H, W, W), b is column (H, H, W).
// As in native.cpp, one exponential serves both masks; see there for the factors and the padding.
//     P = w / sum(w),   dP = g v' (halved for two masks),   dL = P (dP - sum(P dP))   for each mask
#include "../native/attention.h"

namespace {

constexpr int QUERIES = 4;

struct Group {
  const Training& t;
  int64_t tokens = t.height * t.width, padded = round_up(t.width, LANES), count = t.height * padded,
          dim = round_up(t.dim, LANES), value_dim = round_up(t.value_dim, LANES);
  // Keys and values of the padded grid, as they are and transposed; factors; gradients; weights of QUERIES queries.
  float *k, *kt, *v, *vt, *row, *column, *dk, *dv, *drow, *dcolumn, *p1, *p2, *dp, *q, *g, *dq;

  int64_t place(float* memory) {
    float* next = memory;
    auto take = [&](int64_t size) { float* at = next; next += round_up(size, 16); return at; };
    k = take(count * dim), kt = take(count * t.dim), v = take(count * value_dim), vt = take(count * t.value_dim);
    row = take(tokens * padded), column = take(count * t.height);
    dk = take(count * dim), dv = take(count * value_dim);
    drow = take(tokens * padded), dcolumn = take(count * t.height);
    p1 = take(QUERIES * count), p2 = take(QUERIES * count), dp = take(QUERIES * count);
    q = take(QUERIES * dim), g = take(QUERIES * value_dim), dq = take(QUERIES * std::max(dim, value_dim));
    return next - memory;
  }
};

void prepare(const Group& s, int64_t group, bool backward) {
  const Training& t = s.t;
  const int64_t H = t.height, W = t.width, P = s.padded;
  const float *k = t.k + group * s.tokens * t.dim, *v = t.v + group * s.tokens * t.value_dim;
  const float *row = t.a + group * s.tokens * W, *column = t.b + group * H * s.tokens;
  for (int64_t i = 0; i < H; i++)
    for (int64_t l = 0; l < P; l++) {
      const int64_t n = i * W + std::min(l, W - 1), m = i * P + l;
      read(k + n * t.dim, t.dim, s.dim, nullptr, 1.f, s.k + m * s.dim);
      read(v + n * t.value_dim, t.value_dim, s.value_dim, nullptr, 1.f, s.v + m * s.value_dim);
      for (int64_t d = 0; d < t.dim; d++) s.kt[d * s.count + m] = s.k[m * s.dim + d];
      if (backward)
        for (int64_t d = 0; d < t.value_dim; d++) s.vt[d * s.count + m] = s.v[m * s.value_dim + d];
    }
  auto factors = [&](const float* logs, int64_t lines, float* out, float filling) {
    for (int64_t n = 0; n < lines; n++) {
      float* to = out + n * P;
      for (int64_t l = 0; l < P; l++) to[l] = l < W ? logs[n * W + l] : 0;
      for (int64_t l = 0; l < P; l += LANES) store(to + l, exp2(load<vec>(to + l) * LOG2E));
      for (int64_t l = W; l < P; l++) to[l] = filling;
    }
  };
  factors(row, s.tokens, s.row, 0);
  factors(column, H * H, s.column, 1);
}

// Weights of Q queries from token n on in p1 and p2, divided by their sums. False if a sum is not finite.
template <int Q, int PATHS> bool weigh_queries(const Group& s, int64_t n) {
  const Training& t = s.t;
  const int64_t M = s.count, P = s.padded, H = t.height, W = t.width;
  float self[Q];
  const float *row[Q], *column[Q];
  int64_t js[Q];
  vec total[Q] = {}, other[Q] = {};
  for (int x = 0; x < Q; x++) {
    int64_t i = (n + x) / W, j = js[x] = (n + x) % W;
    row[x] = s.row + (n + x) * P;
    column[x] = s.column + i * H * P;
    self[x] = 0;
    for (int64_t d = 0; d < t.dim; d++) self[x] += s.q[x * s.dim + d] * s.kt[d * M + i * P + j];
  }
  int64_t k = 0, l = 0;
  for_logits<Q>(s.q, s.dim, s.kt, M, t.dim, [&](int64_t m, const vec(&products)[Q]) __attribute__((always_inline)) {
    for (int x = 0; x < Q; x++) {
      vec e = exp2(products[x] - self[x]);
      if (PATHS != H2V) {
        vec w = e * load<vec>(row[x] + l) * load<vec>(column[x] + k * P + l);
        total[x] += w;
        store(s.p1 + x * M + m, w);
      }
      if (PATHS != V2H) {
        vec w = e * (load<vec>(s.row + (k * W + js[x]) * P + l) * column[x][k * P + js[x]]);
        other[x] += w;
        store(s.p2 + x * M + m, w);
      }
    }
    if ((l += LANES) == P) l = 0, k++;
  });
  bool finite = true;
  auto divide = [&](float* p, float by) {
    finite &= std::isfinite(by);
    for (int64_t m = 0; m < M; m += LANES) store(p + m, load<vec>(p + m) * (1.f / by));
  };
  for (int x = 0; x < Q; x++) {
    if (PATHS != H2V) divide(s.p1 + x * M, sum(total[x]));
    if (PATHS != V2H) divide(s.p2 + x * M, sum(other[x]));
  }
  return finite;
}

template <int Q, int PATHS> bool attend(const Group& s, int64_t group, int64_t n, bool backward) {
  const Training& t = s.t;
  const int64_t M = s.count, P = s.padded, H = t.height, W = t.width, at = group * s.tokens + n;
  constexpr float PART = PATHS == BOTH ? 0.5f : 1.f;
  for (int x = 0; x < Q; x++) read(t.q + (at + x) * t.dim, t.dim, s.dim, nullptr, LOG2E, s.q + x * s.dim);
  if (!weigh_queries<Q, PATHS>(s, n)) return false;
  auto mean = [&](float* out) {                        // of both weights
    const float *a = PATHS == H2V ? s.p2 : s.p1, *b = s.p2;
    for (int64_t m = 0; m < Q * M; m += LANES)
      store(out + m, PATHS == BOTH ? 0.5f * (load<vec>(a + m) + load<vec>(b + m)) : load<vec>(a + m));
  };
  if (!backward) {
    mean(s.dp);
    weigh_all<Q>(s.dp, M, s.v, s.value_dim, M, s.value_dim, s.dq, s.value_dim);
    for (int x = 0; x < Q; x++) write(s.dq + x * s.value_dim, t.value_dim, t.y + (at + x) * t.value_dim);
    return true;
  }
  for (int x = 0; x < Q; x++)
    read(t.grad + (at + x) * t.value_dim, t.value_dim, s.value_dim, nullptr, 1.f, s.g + x * s.value_dim);
  mean(s.dp);
  spread<Q>(s.dp, M, M, s.g, s.value_dim, s.dv);
  vec sums1[Q] = {}, sums2[Q] = {};
  for_logits<Q>(s.g, s.value_dim, s.vt, M, t.value_dim, [&](int64_t m, const vec(&products)[Q])
                    __attribute__((always_inline)) {
    for (int x = 0; x < Q; x++) {
      vec d = PART * products[x];
      store(s.dp + x * M + m, d);
      if (PATHS != H2V) sums1[x] += d * load<vec>(s.p1 + x * M + m);
      if (PATHS != V2H) sums2[x] += d * load<vec>(s.p2 + x * M + m);
    }
  });
  for (int x = 0; x < Q; x++) {
    const int64_t i = (n + x) / W, j = (n + x) % W;
    const float first = sum(sums1[x]), second = sum(sums2[x]);
    float* drow = s.drow + (n + x) * P;
    for (int64_t k = 0, m = x * M; k < H; k++) {
      float *dcolumn = s.dcolumn + (i * H + k) * P, *drow_k = s.drow + (k * W + j) * P;
      vec along{};
      for (int64_t l = 0; l < P; l += LANES, m += LANES) {
        vec d = load<vec>(s.dp + m), dlogit{};
        if (PATHS != H2V) {
          vec dl = load<vec>(s.p1 + m) * (d - first);
          store(drow + l, load<vec>(drow + l) + dl);
          store(dcolumn + l, load<vec>(dcolumn + l) + dl);
          dlogit += dl;
        }
        if (PATHS != V2H) {
          vec dl = load<vec>(s.p2 + m) * (d - second);
          store(drow_k + l, load<vec>(drow_k + l) + dl);
          along += dl;
          dlogit += dl;
        }
        store(s.dp + m, dlogit);
      }
      if (PATHS != V2H) dcolumn[j] += sum(along);
    }
  }
  weigh_all<Q>(s.dp, M, s.k, s.dim, M, s.dim, s.dq, s.dim);
  for (int x = 0; x < Q; x++) write(s.dq + x * s.dim, t.dim, t.dq + (at + x) * t.dim);
  spread<Q>(s.dp, M, M, s.q, s.dim, s.dk);                 // q is in units of LOG2E
  return true;
}

// The gradients of a group's tensors, from those of its padded grid. The padding has weights, and gradients, of 0.
void write_gradients(const Group& s, int64_t group) {
  const Training& t = s.t;
  const int64_t H = t.height, W = t.width, P = s.padded;
  for (int64_t n = 0; n < s.tokens; n++) {
    const int64_t m = n / W * P + n % W, at = group * s.tokens + n;
    for (int64_t d = 0; d < t.dim; d++) t.dk[at * t.dim + d] = s.dk[m * s.dim + d] * (1 / LOG2E);
    write(s.dv + m * s.value_dim, t.value_dim, t.dv + at * t.value_dim);
    write(s.drow + n * P, W, t.da + at * W);
  }
  for (int64_t line = 0; line < H * H; line++) write(s.dcolumn + line * P, W, t.db + (group * H * H + line) * W);
}

template <int PATHS> int run(const Training& t, bool backward) {
  Group sizes{t};
  const int64_t size = sizes.place(nullptr), threads = std::min(t.threads, t.groups);
  Memory memory(threads * size);
  if (!memory.data) return NO_MEMORY;
  std::atomic<bool> finite{true};
  parallel(t.groups, threads, [&](int64_t group, int64_t worker) {
    Group s{t};
    s.place(memory.data + worker * size);
    prepare(s, group, backward);
    if (backward) std::memset(s.dk, 0, 4 * (s.p1 - s.dk));
    int64_t n = 0;
    bool good = true;
    for (; n + QUERIES <= s.tokens; n += QUERIES) good &= attend<QUERIES, PATHS>(s, group, n, backward);
    for (; n < s.tokens; n++) good &= attend<1, PATHS>(s, group, n, backward);
    if (backward) write_gradients(s, group);
    if (!good) finite = false;
  });
  return finite ? DONE : OUT_OF_RANGE;
}

int choose(const Training& t, bool backward) {
  return t.paths == BOTH ? run<BOTH>(t, backward) : t.paths == V2H ? run<V2H>(t, backward) : run<H2V>(t, backward);
}

}  // namespace

extern "C" int SUBQUAD_NAME(polyline_attention_training)(const Training* t) { return choose(*t, t->grad != nullptr); }
