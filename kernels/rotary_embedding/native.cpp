// Rotary embedding of queries and keys by the angles of a table, in one pass over both.
#include "../native/parallel.h"
#include "../native/vectors.h"

namespace {

// The fields in the order in which `__init__.py` packs them. Strides count elements; channels lie side by
// side.
struct Rotation {
  const void *q, *k;
  void *q_out, *k_out;
  const float* table;                                // cosines and sines (tokens, dim / 2, 2), dense
  int64_t batch, heads, tokens, dim;
  int64_t q_strides[3], k_strides[3], out_strides[3];                     // image, head, token
  int64_t is_bf16, inverse, threads;
  double scale;                                      // of k
};

constexpr int64_t BLOCK = 64;                        // tokens of a task
typedef uint64_t pairs __attribute__((vector_size(4 * LANES)));           // two floats in each
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the first float of a pair is its low half");

// The heads of a token: y = x cos + (the pairs of x, swapped) sin, the first sine of each pair with a minus.
template <class T> void rotate(const Rotation& r, int64_t image, int64_t n) {
  const T *q = (const T*)r.q + image * r.q_strides[0] + n * r.q_strides[2];
  const T *k = (const T*)r.k + image * r.k_strides[0] + n * r.k_strides[2];
  const int64_t out = image * r.out_strides[0] + n * r.out_strides[2];
  T *q_out = (T*)r.q_out + out, *k_out = (T*)r.k_out + out;
  const float *table = r.table + n * r.dim, sign = r.inverse ? -1.f : 1.f, scale = float(r.scale);
  vec signs;
  for (int i = 0; i < LANES; i++) signs[i] = i % 2 ? sign : -sign;
  int64_t d = 0;
  for (; d + LANES <= r.dim; d += LANES) {
    const pairs angle = (pairs)load<vec>(table + d), low = angle & 0xffffffffu, high = angle >> 32;
    const vec cosine = (vec)(low | low << 32), sine = (vec)(high | high << 32) * signs;
    auto rotated = [&](vec x) { return x * cosine + (vec)((pairs)x << 32 | (pairs)x >> 32) * sine; };
    for (int64_t h = 0; h < r.heads; h++) {
      store(q_out + h * r.out_strides[1] + d, rotated(load<vec>(q + h * r.q_strides[1] + d)));
      store(k_out + h * r.out_strides[1] + d, rotated(load<vec>(k + h * r.k_strides[1] + d)) * scale);
    }
  }
  for (; d < r.dim; d += 2) {
    auto pair = [&](const T* x, float factor, T* y) {
      const float cosine = table[d] * factor, sine = table[d + 1] * sign * factor;
      const float first = load<float>(x + d), second = load<float>(x + d + 1);
      store(y + d, first * cosine - second * sine);
      store(y + d + 1, first * sine + second * cosine);
    };
    for (int64_t h = 0; h < r.heads; h++) {
      pair(q + h * r.q_strides[1], 1.f, q_out + h * r.out_strides[1]);
      pair(k + h * r.k_strides[1], scale, k_out + h * r.out_strides[1]);
    }
  }
}

template <class T> void run(const Rotation& r) {
  const int64_t tokens = r.batch * r.tokens, tasks = (tokens + BLOCK - 1) / BLOCK;
  const int64_t threads = std::min(r.threads, std::max<int64_t>(1, tokens * r.heads * r.dim / 32768));
  parallel(tasks, threads, [&](int64_t task, int64_t) {
    for (int64_t n = task * BLOCK; n < std::min(tokens, task * BLOCK + BLOCK); n++)
      rotate<T>(r, n / r.tokens, n % r.tokens);
  });
}

}  // namespace

extern "C" int SUBQUAD_NAME(rotary_embedding)(const Rotation* r) {
  r->is_bf16 ? run<bf16>(*r) : run<float>(*r);
  return 0;
}
