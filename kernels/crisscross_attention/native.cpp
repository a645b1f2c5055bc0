// Criss-cross attention: weights within columns and within rows, chained on one or both paths. The own logit is the
// reference of each softmax, so that no sum of weights is below 1.
#include "../native/attention.h"

namespace {

constexpr int QUERIES = 4;
constexpr int64_t LARGE = 1 << 22;                   // floats

// The length of an axis' lines, and the same in whole vectors.
struct Axis {
  int64_t length, padded;
};

// What a group of one image and head works with.
struct Group {
  const Attention& a;
  int64_t dim = round_up(a.dim, LANES), value_dim = round_up(a.value_dim, LANES);
  Axis rows{a.width, round_up(a.width, LANES)};
  Axis columns{a.height, round_up(a.height, LANES)};
  // Tokens: q, k (N, dim); pair (N, 2 value_dim): v beside P_h v; along (N, 2 value_dim): P_w of both.
  float *q, *k, *pair, *along, *down_weights, *sa, *sb;

  int64_t size() const {
    return a.tokens() * (2 * dim + 4 * value_dim + columns.padded) + a.height * 2 * rows.padded;
  }
  int64_t line_size() const {
    int64_t longest = std::max(rows.padded, columns.padded);
    return longest * (a.dim + 2) + a.width * rows.padded + QUERIES * 2 * value_dim;
  }
  void place(float* memory) {
    const int64_t N = a.tokens();
    q = memory;
    k = q + N * dim;
    pair = k + N * dim;
    along = pair + N * 2 * value_dim;
    down_weights = along + N * 2 * value_dim;
    sa = down_weights + N * columns.padded;
    sb = sa + a.height * rows.padded;
  }
};

template <class T> void prepare(const Group& s, int64_t g, int64_t i) {
  const Attention& a = s.a;
  for (int64_t n = i * a.width; n < (i + 1) * a.width; n++) {
    const float* table = a.table ? a.table + n * a.dim : nullptr;
    read(head((const T*)a.q, a.q_strides, a, g) + n * a.q_strides[2], a.dim, s.dim, table, LOG2E, s.q + n * s.dim);
    read(head((const T*)a.k, a.k_strides, a, g) + n * a.k_strides[2], a.dim, s.dim, table, float(a.scale),
         s.k + n * s.dim);
    read(head((const T*)a.v, a.v_strides, a, g) + n * a.v_strides[2], a.value_dim, s.value_dim, nullptr, 1.f,
         s.pair + n * 2 * s.value_dim);
  }
}

// The vectors of a line's tokens, `step` floats apart, and their sums of steps in base 2.
struct Line {
  int64_t length, padded, dim;
  const float *q, *k, *sums;
  int64_t step, sums_step;
};

// The weights of Q queries of a line from position i on, in p (Q, padded). keys: (dim, padded).
template <int Q, bool MULTIPLICATIVE>
bool weigh_line(const Line& s, const float* keys, const float* sums, const float* inside, int64_t i, float* p) {
  const int64_t P = s.padded;
  float vectors[Q * 512], self[Q];
  vec total[Q] = {};
  for (int x = 0; x < Q; x++) {
    std::memcpy(vectors + x * 512, s.q + (i + x) * s.step, 4 * s.dim);
    self[x] = 0;
    for (int64_t d = 0; d < s.dim; d++) self[x] += vectors[x * 512 + d] * keys[d * P + i + x];
  }
  for_logits<Q>(vectors, 512, keys, P, s.dim, [&](int64_t l, const vec(&products)[Q]) __attribute__((always_inline)) {
    for (int x = 0; x < Q; x++) {
      vec decay = absolute(load<vec>(sums + l) - sums[i + x]), logit = products[x] - self[x];
      vec e = exp2(MULTIPLICATIVE ? logit : logit - decay) * load<vec>(inside + l);
      total[x] += e;
      store(p + x * P + l, MULTIPLICATIVE ? e * exp2(-decay) : e);
    }
  });
  bool finite = true;
  for (int x = 0; x < Q; x++) {
    float f = sum(total[x]);
    finite &= std::isfinite(f);
    for (int64_t l = 0; l < P; l += LANES) store(p + x * P + l, load<vec>(p + x * P + l) * (1.f / f));
  }
  return finite;
}

// All weights of a line, p (length, padded). scratch: (dim + 2, padded).
template <bool MULTIPLICATIVE> bool line_weights(const Line& s, float* scratch, float* p) {
  const int64_t L = s.length, P = s.padded;
  float *keys = scratch, *own = keys + s.dim * P, *inside = own + P;
  for (int64_t l = 0; l < P; l++) {                       // the last key fills up, with a weight of 0
    int64_t at = std::min(l, L - 1);
    own[l] = s.sums[at * s.sums_step];
    inside[l] = l < L;
    for (int64_t d = 0; d < s.dim; d++) keys[d * P + l] = s.k[at * s.step + d];
  }
  bool finite = true;
  int64_t i = 0;
  for (; i + QUERIES <= L; i += QUERIES)
    finite &= weigh_line<QUERIES, MULTIPLICATIVE>(s, keys, own, inside, i, p + i * P);
  for (; i < L; i++) finite &= weigh_line<1, MULTIPLICATIVE>(s, keys, own, inside, i, p + i * P);
  return finite;
}

// y = p v on a line, for `channels` channels; tokens of v and of y are `ldv` and `ldy` apart.
void apply_line(const Axis& axis, const float* p, const float* v, int64_t ldv, int64_t channels, float* y,
                int64_t ldy) {
  int64_t i = 0;
  for (; i + QUERIES <= axis.length; i += QUERIES)
    weigh_all<QUERIES>(p + i * axis.padded, axis.padded, v, ldv, axis.length, channels, y + i * ldy, ldy);
  for (; i < axis.length; i++)
    weigh_all<1>(p + i * axis.padded, axis.padded, v, ldv, axis.length, channels, y + i * ldy, ldy);
}

template <class T, bool MULTIPLICATIVE> int run(const Attention& a) {
  const int64_t G = a.groups(), H = a.height, W = a.width;
  const int64_t size = round_up(Group{a}.size(), 16), line_size = round_up(Group{a}.line_size(), 16);
  // One thread for each group, or all threads for each: large groups, one at a time, need less memory.
  const bool many = G >= 2 * a.threads && size < LARGE;
  const int64_t outer = many ? a.threads : 1, inner = many ? 1 : a.threads;
  const int64_t worker_size = size + inner * line_size;
  Memory memory(outer * worker_size);
  if (!memory.data) return NO_MEMORY;
  std::atomic<bool> finite{true};
  parallel(G, outer, [&](int64_t g, int64_t worker) {
    Group s{a};
    float* own = memory.data + worker * worker_size;
    s.place(own);
    const int64_t D = s.value_dim, two = 2 * D, PH = s.columns.padded, PW = s.rows.padded;
    auto scratch = [&](int64_t w) { return own + size + w * line_size; };
    sums(a, g, PW, s.sa, s.sb);
    parallel(H, inner, [&](int64_t i, int64_t) { prepare<T>(s, g, i); });
    parallel(W, inner, [&](int64_t j, int64_t w) {                        // within columns: P_h, and P_h v
      float* p = s.down_weights + j * H * PH;
      const Line line{H, PH, a.dim, s.q + j * s.dim, s.k + j * s.dim, s.sb + j, W * s.dim, PW};
      if (!line_weights<MULTIPLICATIVE>(line, scratch(w), p)) finite = false;
      if (a.paths != H2V) apply_line(s.columns, p, s.pair + j * two, W * two, D, s.pair + j * two + D, W * two);
    });
    parallel(H, inner, [&](int64_t i, int64_t w) {                        // within rows: P_w [v, P_h v]
      float *work = scratch(w), *p = work + (a.dim + 2) * std::max(PH, PW);
      const Line line{W, PW, a.dim, s.q + i * W * s.dim, s.k + i * W * s.dim, s.sa + i * PW, s.dim, 1};
      if (!line_weights<MULTIPLICATIVE>(line, work, p)) finite = false;
      const int64_t from = a.paths == V2H ? D : 0, channels = a.paths == BOTH ? two : D;
      apply_line(s.rows, p, s.pair + i * W * two + from, two, channels, s.along + i * W * two + from, two);
    });
    T* y = head((T*)a.y, a.y_strides, a, g);
    parallel(W, inner, [&](int64_t j, int64_t w) {                        // within columns: P_h (P_w v), and the mean
      float* result = s.pair + j * two;                                   // v and P_h v are no longer needed
      if (a.paths != V2H)
        apply_line(s.columns, s.down_weights + j * H * PH, s.along + j * two, W * two, D, result, W * two);
      for (int64_t i = 0; i < H; i++) {
        float *x = result + i * W * two, *down = s.along + (i * W + j) * two + D;
        if (a.paths == BOTH)
          for (int64_t d = 0; d < D; d += LANES) store(x + d, 0.5f * (load<vec>(x + d) + load<vec>(down + d)));
        write(a.paths == V2H ? down : x, a.value_dim, y + (i * W + j) * a.y_strides[2]);
      }
    });
  });
  return finite ? DONE : OUT_OF_RANGE;
}

// ---- training: gradients of q, k, v and of the sums of steps, in additive mode

// Gradients of a line's logits, given those of its weights as products of two vectors each, left (length, channels) and
// right (length, channels); what they give to q, k and the sums is added. dl: scratch (QUERIES, padded).
struct Gradients {
  const float *left, *right;
  int64_t channels;                                       // a multiple of LANES
  float *dq, *dk, *dsums;                                 // (length, dim) dense, (length,)
};

template <int Q>
void differentiate(const Line& s, const float* p, const float* transposed, const Gradients& g, int64_t i, float* dl) {
  const int64_t L = s.length, P = s.padded, D = s.step;
  vec total[Q] = {};
  for_logits<Q>(g.left + i * g.channels, g.channels, transposed, P, g.channels,
                [&](int64_t l, const vec(&products)[Q]) __attribute__((always_inline)) {
    for (int x = 0; x < Q; x++) {
      total[x] += products[x] * load<vec>(p + (i + x) * P + l);
      store(dl + x * P + l, products[x]);
    }
  });
  for (int x = 0; x < Q; x++) {
    const float mean = sum(total[x]);
    vec own{};
    for (int64_t l = 0; l < P; l += LANES) {
      const vec d = load<vec>(p + (i + x) * P + l) * (load<vec>(dl + x * P + l) - mean);
      const vec of_sum = d * signs(i + x, l);             // the log decay is sign(i - l) (S[i] - S[l])
      store(dl + x * P + l, d);
      store(g.dsums + l, load<vec>(g.dsums + l) - of_sum);
      own += of_sum;
    }
    g.dsums[i + x] += sum(own);
  }
  weigh_all<Q>(dl, P, s.k, D, L, D, g.dq + i * D, D);
  spread<Q>(dl, P, L, s.q + i * D, D, g.dk);
}

void differentiate_line(const Line& s, const float* p, const Gradients& g, float* scratch) {
  const int64_t L = s.length, P = s.padded;
  float *transposed = scratch, *dl = scratch + g.channels * P;
  for (int64_t l = 0; l < P; l++)
    for (int64_t d = 0; d < g.channels; d++) transposed[d * P + l] = g.right[std::min(l, L - 1) * g.channels + d];
  int64_t i = 0;
  for (; i + QUERIES <= L; i += QUERIES) differentiate<QUERIES>(s, p, transposed, g, i, dl);
  for (; i < L; i++) differentiate<1>(s, p, transposed, g, i, dl);
}

// out += p' x on a line, for dense x and out (length, channels).
void apply_transposed(const Axis& axis, const float* p, const float* x, int64_t channels, float* out) {
  int64_t i = 0;
  for (; i + QUERIES <= axis.length; i += QUERIES)
    spread<QUERIES>(p + i * axis.padded, axis.padded, axis.length, x + i * channels, channels, out);
  for (; i < axis.length; i++) spread<1>(p + i * axis.padded, axis.padded, axis.length, x + i * channels, channels, out);
}

// Tensors of a group and of its transposed grid, both line by line.
struct TrainingGroup {
  const Training& t;
  int64_t N = t.height * t.width, dim = round_up(t.dim, LANES), value_dim = round_up(t.value_dim, LANES);
  Axis axes[2] = {{t.width, round_up(t.width, LANES)}, {t.height, round_up(t.height, LANES)}};
  int64_t lines[2] = {t.height, t.width};
  // For rows, then for columns. Values of the other axis in pairs: v and the result of the other axis.
  float *q[2], *k[2], *v[2], *g[2], *sums[2], *p[2], *applied[2], *passed[2], *dq[2], *dk[2], *dv[2], *dsums[2];
  float *left, *right, *scratch;

  int64_t place(float* memory) {
    float* next = memory;
    auto take = [&](int64_t size) { float* at = next; next += round_up(size, 16); return at; };
    const int64_t longest = std::max(axes[0].padded, axes[1].padded);
    for (int n = 0; n < 2; n++) {
      q[n] = take(N * dim), k[n] = take(N * dim), v[n] = take(N * value_dim), g[n] = take(N * value_dim);
      sums[n] = take(N), p[n] = take(N * axes[n].padded);
      applied[n] = take(N * value_dim), passed[n] = take(N * value_dim);
      dq[n] = take(N * dim), dk[n] = take(N * dim), dv[n] = take(N * value_dim), dsums[n] = take(N + LANES);
    }
    left = take(longest * 2 * value_dim), right = take(longest * 2 * value_dim);
    scratch = take((std::max(t.dim + 2, 2 * value_dim + QUERIES)) * longest);
    return next - memory;
  }
  // The place of token n of the grid, read row by row, among the tokens of an axis.
  int64_t at(int axis, int64_t n) const { return axis ? n % t.width * t.height + n / t.width : n; }
  Line line(int axis, int64_t number) const {
    const int64_t first = number * axes[axis].length;
    return {axes[axis].length, axes[axis].padded, t.dim, q[axis] + first * dim, k[axis] + first * dim,
            sums[axis] + first, dim, 1};
  }
};

// to (tokens of one axis) from (tokens of the other one).
void transpose(const TrainingGroup& s, int axis, const float* from, float* to, int64_t channels) {
  for (int64_t n = 0; n < s.N; n++)
    std::memcpy(to + s.at(axis, n) * channels, from + s.at(1 - axis, n) * channels, 4 * channels);
}

bool train(TrainingGroup& s, int64_t group) {
  const Training& t = s.t;
  const int64_t V = s.value_dim, first = group * s.N;
  const bool from_rows = t.paths != V2H, from_columns = t.paths != H2V;        // P_h (P_w v), P_w (P_h v)
  const float part = t.paths == BOTH ? 0.5f : 1.f;
  bool good = true;
  for (int axis = 0; axis < 2; axis++) {
    const float* sums = axis ? t.b : t.a;
    for (int64_t n = 0; n < s.N; n++) {
      const int64_t m = s.at(axis, n);
      read(t.q + (first + n) * t.dim, t.dim, s.dim, nullptr, LOG2E, s.q[axis] + m * s.dim);
      read(t.k + (first + n) * t.dim, t.dim, s.dim, nullptr, 1.f, s.k[axis] + m * s.dim);
      read(t.v + (first + n) * t.value_dim, t.value_dim, V, nullptr, 1.f, s.v[axis] + m * V);
      if (t.grad) read(t.grad + (first + n) * t.value_dim, t.value_dim, V, nullptr, part, s.g[axis] + m * V);
      s.sums[axis][m] = sums[first + n] * LOG2E;
    }
    const Axis& a = s.axes[axis];
    for (int64_t l = 0; l < s.lines[axis]; l++) {
      float* p = s.p[axis] + l * a.length * a.padded;
      good &= line_weights<false>(s.line(axis, l), s.scratch, p);
      apply_line(a, p, s.v[axis] + l * a.length * V, V, V, s.applied[axis] + l * a.length * V, V);
    }
  }
  if (!good) return false;
  const bool used[2] = {from_rows, from_columns};         // whether what an axis applied passes through the other one
  if (!t.grad) {
    std::memset(s.dv[0], 0, 4 * s.N * V);
    for (int axis = 0; axis < 2; axis++) {                // the axis that comes second
      if (!used[1 - axis]) continue;
      const Axis& a = s.axes[axis];
      transpose(s, axis, s.applied[1 - axis], s.passed[axis], V);
      for (int64_t l = 0; l < s.lines[axis]; l++)
        apply_line(a, s.p[axis] + l * a.length * a.padded, s.passed[axis] + l * a.length * V, V, V,
                   s.g[axis] + l * a.length * V, V);
      for (int64_t n = 0; n < s.N; n++)
        for (int64_t d = 0; d < V; d += LANES)
          store(s.dv[0] + n * V + d, load<vec>(s.dv[0] + n * V + d) + part * load<vec>(s.g[axis] + s.at(axis, n) * V + d));
    }
    for (int64_t n = 0; n < s.N; n++) write(s.dv[0] + n * V, t.value_dim, t.y + (first + n) * t.value_dim);
    return true;
  }
  // What the gradient gives to the tokens that each axis passes on, P' g, in the order of the other axis.
  for (int axis = 0; axis < 2; axis++) {
    const Axis& a = s.axes[axis];
    float* given = s.dv[axis];
    std::memset(given, 0, 4 * s.N * V);
    if (used[1 - axis])
      for (int64_t l = 0; l < s.lines[axis]; l++)
        apply_transposed(a, s.p[axis] + l * a.length * a.padded, s.g[axis] + l * a.length * V, V,
                         given + l * a.length * V);
    transpose(s, 1 - axis, given, s.passed[1 - axis], V);
  }
  for (int axis = 0; axis < 2; axis++) {
    const Axis& a = s.axes[axis];
    transpose(s, axis, s.applied[1 - axis], s.dv[axis], V);
    std::memset(s.dq[axis], 0, 4 * s.N * s.dim);
    std::memset(s.dk[axis], 0, 4 * s.N * s.dim);
    std::memset(s.dsums[axis], 0, 4 * s.N);
    for (int64_t l = 0; l < s.lines[axis]; l++) {
      const int64_t from = l * a.length;
      for (int64_t i = 0; i < a.length; i++)              // dP = (P' g of the other axis) v' + g (P v of the other axis)'
        for (int64_t d = 0, m = (from + i) * V; d < V; d++, m++) {
          float *left = s.left + i * 2 * V + d, *right = s.right + i * 2 * V + d;
          left[0] = used[axis] ? s.passed[axis][m] : 0;
          right[0] = s.v[axis][m];
          left[V] = used[1 - axis] ? s.g[axis][m] : 0;
          right[V] = s.dv[axis][m];
        }
      const Gradients g{s.left, s.right, 2 * V, s.dq[axis] + from * s.dim, s.dk[axis] + from * s.dim,
                        s.dsums[axis] + from};
      differentiate_line(s.line(axis, l), s.p[axis] + from * a.padded, g, s.scratch);
    }
    std::memset(s.dv[axis], 0, 4 * s.N * V);
    if (used[axis])
      for (int64_t l = 0; l < s.lines[axis]; l++)
        apply_transposed(a, s.p[axis] + l * a.length * a.padded, s.passed[axis] + l * a.length * V, V,
                         s.dv[axis] + l * a.length * V);
  }
  for (int64_t n = 0; n < s.N; n++) {
    const int64_t m = s.at(1, n), at = first + n;
    for (int64_t d = 0; d < t.dim; d++) {
      t.dq[at * t.dim + d] = s.dq[0][n * s.dim + d] + s.dq[1][m * s.dim + d];
      t.dk[at * t.dim + d] = (s.dk[0][n * s.dim + d] + s.dk[1][m * s.dim + d]) * (1 / LOG2E);
    }
    for (int64_t d = 0; d < t.value_dim; d++)
      t.dv[at * t.value_dim + d] = s.dv[0][n * V + d] + s.dv[1][m * V + d];
    t.da[at] = s.dsums[0][n];
    t.db[at] = s.dsums[1][m];
  }
  return true;
}

int train_all(const Training& t) {
  const int64_t size = TrainingGroup{t}.place(nullptr), threads = std::min(t.threads, t.groups);
  Memory memory(threads * size);
  if (!memory.data) return NO_MEMORY;
  std::atomic<bool> finite{true};
  parallel(t.groups, threads, [&](int64_t group, int64_t worker) {
    TrainingGroup s{t};
    s.place(memory.data + worker * size);
    if (!train(s, group)) finite = false;
  });
  return finite ? DONE : OUT_OF_RANGE;
}

}  // namespace

extern "C" int SUBQUAD_NAME(crisscross_attention)(const Attention* a) {
  if (a->is_bf16) return a->multiplicative ? run<bf16, true>(*a) : run<bf16, false>(*a);
  return a->multiplicative ? run<float, true>(*a) : run<float, false>(*a);
}

extern "C" int SUBQUAD_NAME(crisscross_attention_training)(const Training* t) { return train_all(*t); }
