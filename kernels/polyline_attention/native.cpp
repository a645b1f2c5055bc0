// Polyline attention, by blocks of QUERIES tokens. With e = exp(q k' - q k_self') and the factors of the two masks,
//     L [(i, j), (k, l)] = row[i, j, l] column[i, k, l],      L~[(i, j), (k, l)] = row[k, j, l] column[i, k, j],
// one exponential serves both masks. A token's own weight is 1, so that no sum of weights is below 1.
#include "../native/attention.h"

namespace {

constexpr int QUERIES = 4;

// What a group of one image and head works with. Each row of keys is padded to whole vectors with its last key, whose
// factor is 0 there.
struct Group {
  const Attention& a;
  int64_t padded = round_up(a.width, LANES), keys_count = a.height * padded, dim = round_up(a.dim, LANES),
          value_dim = round_up(a.value_dim, LANES);
  // (N, dim), (D, keys), (keys, value_dim), (H, W, padded), (H, H, padded), sums, and 1 for keys that are none's copy.
  float *q, *keys, *v, *row, *column, *sa, *sb, *own;

  int64_t size() const {
    return a.tokens() * (dim + padded) + keys_count * (a.dim + value_dim + a.height + 2) + padded;
  }
  int64_t query_size() const { return 2 * QUERIES * keys_count + QUERIES * value_dim; }
  void place(float* memory) {
    q = memory;
    row = q + a.tokens() * dim;
    keys = row + a.tokens() * padded;
    v = keys + keys_count * a.dim;
    column = v + keys_count * value_dim;
    sa = column + keys_count * a.height;
    sb = sa + keys_count;
    own = sb + keys_count;
    for (int64_t l = 0; l < padded; l++) own[l] = l < a.width;
  }
};

// Fill what row i of the grid contributes: rotated queries and keys, values, factors.
template <class T> void prepare(const Group& s, int64_t g, int64_t i) {
  const Attention& a = s.a;
  const int64_t W = a.width, P = s.padded;
  const T *q = head((const T*)a.q, a.q_strides, a, g), *k = head((const T*)a.k, a.k_strides, a, g),
          *v = head((const T*)a.v, a.v_strides, a, g);
  float key[512];
  for (int64_t l = 0; l < P; l++) {
    int64_t n = i * W + std::min(l, W - 1);
    const float* table = a.table ? a.table + n * a.dim : nullptr;
    if (l < W) read(q + n * a.q_strides[2], a.dim, s.dim, table, LOG2E, s.q + n * s.dim);
    read(k + n * a.k_strides[2], a.dim, a.dim, table, float(a.scale), key);
    for (int64_t d = 0; d < a.dim; d++) s.keys[d * s.keys_count + i * P + l] = key[d];
    float* value = s.v + (i * P + l) * s.value_dim;
    if (l < W) read(v + n * a.v_strides[2], a.value_dim, s.value_dim, nullptr, 1.f, value);
    else std::memcpy(value, value - s.value_dim, 4 * s.value_dim);
  }
  for (int64_t j = 0; j < W; j++) {
    float* row = s.row + (i * W + j) * P;
    for (int64_t l = 0; l < P; l += LANES) store(row + l, exp2(-absolute(load<vec>(s.sa + i * P + l) - s.sa[i * P + j])));
    for (int64_t l = W; l < P; l++) row[l] = 0;
  }
  for (int64_t k = 0; k < a.height; k++)
    for (int64_t l = 0; l < P; l += LANES)
      store(s.column + (i * a.height + k) * P + l,
            exp2(-absolute(load<vec>(s.sb + i * P + l) - load<vec>(s.sb + k * P + l))));
}

// The outputs of Q queries from token n on. False if a sum of weights is not finite.
template <class T, int Q, int PATHS, bool MULTIPLICATIVE>
bool attend(const Group& s, int64_t g, int64_t n, float* memory) {
  const Attention& a = s.a;
  const int64_t M = s.keys_count, P = s.padded, H = a.height, W = a.width;
  constexpr bool TWO_SUMS = PATHS == BOTH && !MULTIPLICATIVE;
  float *first = memory, *second = first + QUERIES * M, *result = second + QUERIES * M, self[Q];
  const float *q = s.q + n * s.dim, *row[Q], *column[Q];
  int64_t js[Q];
  vec total[Q] = {}, other[Q] = {};
  for (int x = 0; x < Q; x++) {
    int64_t i = (n + x) / W, j = js[x] = (n + x) % W;
    row[x] = s.row + (i * W + j) * P;
    column[x] = s.column + i * H * P;
    self[x] = 0;
    for (int64_t d = 0; d < a.dim; d++) self[x] += q[x * s.dim + d] * s.keys[d * M + i * P + j];
  }
  int64_t k = 0, l = 0;
  auto weight = [&](int x, vec logit) __attribute__((always_inline)) {
    float *to = first + x * M + k * P + l;
    vec e = exp2(logit - self[x]), v2h{}, h2v{};
    if (PATHS != H2V) v2h = e * load<vec>(row[x] + l) * load<vec>(column[x] + k * P + l);
    if (PATHS != V2H) h2v = e * (load<vec>(s.row + (k * W + js[x]) * P + l) * column[x][k * P + js[x]]);
    if (TWO_SUMS) {
      total[x] += v2h;
      other[x] += h2v;
      store(to, v2h);
      store(second + x * M + k * P + l, h2v);
    } else {
      total[x] += MULTIPLICATIVE ? e * load<vec>(s.own + l) : v2h + h2v;
      store(to, v2h + h2v);
    }
  };
  for_logits<Q>(q, s.dim, s.keys, M, a.dim, [&](int64_t, const vec(&products)[Q]) __attribute__((always_inline)) {
    for (int x = 0; x < Q; x++) weight(x, products[x]);
    if ((l += LANES) == P) l = 0, k++;
  });

  bool finite = true;
  for (int x = 0; x < Q; x++) {
    float *p = first + x * M, one = sum(total[x]), two = TWO_SUMS ? sum(other[x]) : 1.f;
    finite &= std::isfinite(one) && std::isfinite(two);
    float half = TWO_SUMS ? 0.5f : 1.f, c = half / one, d = half / two;
    for (int64_t m = 0; m < M; m += LANES)
      store(p + m, TWO_SUMS ? load<vec>(p + m) * c + load<vec>(second + x * M + m) * d : load<vec>(p + m) * c);
  }
  weigh_all<Q>(first, M, s.v, s.value_dim, M, s.value_dim, result, s.value_dim);
  T* y = head((T*)a.y, a.y_strides, a, g) + n * a.y_strides[2];
  for (int x = 0; x < Q; x++) write(result + x * s.value_dim, a.value_dim, y + x * a.y_strides[2]);
  return finite;
}

template <class T, int PATHS, bool MULTIPLICATIVE> int run(const Attention& a) {
  const int64_t N = a.tokens(), G = a.groups(), blocks = (N + QUERIES - 1) / QUERIES;
  const bool many = G >= 2 * a.threads;         // one thread for each group, or all threads for each group
  const int64_t outer = many ? a.threads : 1, inner = many ? 1 : a.threads;
  const int64_t size = Group{a}.size(), query_size = round_up(Group{a}.query_size(), 16);
  const int64_t worker_size = round_up(size, 16) + inner * query_size;
  Memory memory(outer * worker_size);
  if (!memory.data) return NO_MEMORY;
  std::atomic<bool> finite{true};
  parallel(G, outer, [&](int64_t g, int64_t worker) {
    Group s{a};
    float* own = memory.data + worker * worker_size;
    s.place(own);
    sums(a, g, s.padded, s.sa, s.sb);
    parallel(a.height, inner, [&](int64_t i, int64_t) { prepare<T>(s, g, i); });
    parallel(blocks, inner, [&](int64_t block, int64_t w) {
      float* scratch = own + round_up(size, 16) + w * query_size;
      int64_t n = block * QUERIES, end = std::min(N, n + QUERIES);
      bool good = true;
      if (end - n == QUERIES) {
        good = attend<T, QUERIES, PATHS, MULTIPLICATIVE>(s, g, n, scratch);
      } else {
        for (; n < end; n++) good &= attend<T, 1, PATHS, MULTIPLICATIVE>(s, g, n, scratch);
      }
      if (!good) finite = false;
    });
  });
  return finite ? DONE : OUT_OF_RANGE;
}

template <class T> int choose(const Attention& a) {
  if (a.multiplicative)
    return a.paths == BOTH ? run<T, BOTH, true>(a) : a.paths == V2H ? run<T, V2H, true>(a) : run<T, H2V, true>(a);
  return a.paths == BOTH ? run<T, BOTH, false>(a) : a.paths == V2H ? run<T, V2H, false>(a) : run<T, H2V, false>(a);
}

}  // namespace

extern "C" int SUBQUAD_NAME(polyline_attention)(const Attention* a) {
  return a->is_bf16 ? choose<bf16>(*a) : choose<float>(*a);
}
