// Criss-cross attention: weights within columns and within rows, chained on one or both paths. The own logit is the
// reference of each softmax, so that no sum of weights is below 1.
#include "../native/attention.h"

namespace {

constexpr int QUERIES = 4;

// One axis of the grid: `count` lines of `length` tokens, whose tokens are `step` apart and whose lines are `line`.
struct Axis {
  int64_t count, length, line, step, padded;
};

// What a group of one image and head works with.
struct Group {
  const Attention& a;
  int64_t dim = round_up(a.dim, LANES), value_dim = round_up(a.value_dim, LANES);
  Axis rows{a.height, a.width, a.width, 1, round_up(a.width, LANES)};
  Axis columns{a.width, a.height, 1, a.width, round_up(a.height, LANES)};
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

// The weights of Q queries of a line from position i on, in p (Q, padded). keys: (D, padded).
template <int Q, bool MULTIPLICATIVE>
bool weigh_line(const Group& s, const Axis& axis, const float* q, const float* keys, const float* sums,
                const float* inside, int64_t i, float* p) {
  const int64_t P = axis.padded;
  float vectors[Q * 512], self[Q];
  vec total[Q] = {};
  for (int x = 0; x < Q; x++) {
    std::memcpy(vectors + x * s.dim, q + (i + x) * axis.step * s.dim, 4 * s.dim);
    self[x] = 0;
    for (int64_t d = 0; d < s.a.dim; d++) self[x] += vectors[x * s.dim + d] * keys[d * P + i + x];
  }
  for (int64_t l = 0; l < P; l += LANES) {
    vec acc[Q][1], in = load<vec>(inside + l);
    logits<Q, 1>(vectors, s.dim, keys + l, P, s.a.dim, acc);
    for (int x = 0; x < Q; x++) {
      vec decay = absolute(load<vec>(sums + l) - sums[i + x]), logit = acc[x][0] - self[x];
      vec e = exp2(MULTIPLICATIVE ? logit : logit - decay) * in;
      total[x] += e;
      store(p + x * P + l, MULTIPLICATIVE ? e * exp2(-decay) : e);
    }
  }
  bool finite = true;
  for (int x = 0; x < Q; x++) {
    float f = sum(total[x]);
    finite &= std::isfinite(f);
    for (int64_t l = 0; l < P; l += LANES) store(p + x * P + l, load<vec>(p + x * P + l) * (1.f / f));
  }
  return finite;
}

// All weights of a line, p (length, padded).
template <bool MULTIPLICATIVE>
bool line_weights(const Group& s, const Axis& axis, int64_t line, const float* sums, int64_t sums_step, float* scratch,
                  float* p) {
  const int64_t L = axis.length, P = axis.padded;
  float *keys = scratch, *own = keys + s.a.dim * P, *inside = own + P;
  const float *q = s.q + line * axis.line * s.dim, *k = s.k + line * axis.line * s.dim;
  for (int64_t l = 0; l < P; l++) {                       // the last key fills up, with a weight of 0
    int64_t at = std::min(l, L - 1);
    own[l] = sums[at * sums_step];
    inside[l] = l < L;
    for (int64_t d = 0; d < s.a.dim; d++) keys[d * P + l] = k[at * axis.step * s.dim + d];
  }
  bool finite = true;
  int64_t i = 0;
  for (; i + QUERIES <= L; i += QUERIES)
    finite &= weigh_line<QUERIES, MULTIPLICATIVE>(s, axis, q, keys, own, inside, i, p + i * P);
  for (; i < L; i++) finite &= weigh_line<1, MULTIPLICATIVE>(s, axis, q, keys, own, inside, i, p + i * P);
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
  const bool many = G >= 2 * a.threads;
  const int64_t outer = many ? a.threads : 1, inner = many ? 1 : a.threads;
  const int64_t size = round_up(Group{a}.size(), 16), line_size = round_up(Group{a}.line_size(), 16);
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
      if (!line_weights<MULTIPLICATIVE>(s, s.columns, j, s.sb + j, PW, scratch(w), p)) finite = false;
      if (a.paths != H2V) apply_line(s.columns, p, s.pair + j * two, W * two, D, s.pair + j * two + D, W * two);
    });
    parallel(H, inner, [&](int64_t i, int64_t w) {                        // within rows: P_w [v, P_h v]
      float *work = scratch(w), *p = work + (s.a.dim + 2) * std::max(PH, PW);
      if (!line_weights<MULTIPLICATIVE>(s, s.rows, i, s.sa + i * PW, 1, work, p)) finite = false;
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

}  // namespace

extern "C" int SUBQUAD_NAME(crisscross_attention)(const Attention* a) {
  if (a->is_bf16) return a->multiplicative ? run<bf16, true>(*a) : run<bf16, false>(*a);
  return a->multiplicative ? run<float, true>(*a) : run<float, false>(*a);
}
