// Separable attention and its gradients: one context vector for each group of tokens.
#include "../native/parallel.h"
#include "../native/vectors.h"

namespace {

// The fields in the order in which `native.py` packs them. Strides count elements; channels of keys, values and
// gradients lie side by side. All tensors of results are dense.
struct Separable {
  const void *query, *key, *value;
  const void *key_weight, *key_bias;                 // (dim, key_dim) and (dim,), or null
  const float* statistics;                           // mean and 1 / deviation of the keys of images, or null
  float *scores, *context;                           // (batch, height, width, latents), (batch, groups, dim)
  void* y;
  const void* grad;                                  // of y; null in the forward pass
  void *dquery, *dkey, *dvalue;
  int64_t batch, height, width, value_height, value_width, latents, key_dim, dim;
  int64_t patch_height, patch_width, pixel;
  int64_t query_strides[4], key_strides[3], value_strides[3], grad_strides[3];      // image, row, column (, latent)
  int64_t is_bf16, threads;
};

constexpr int64_t BLOCK = 64;                        // channels of a task
constexpr int64_t RUN = 128;                         // tokens whose sum is rounded before it is added to the others

// The places of the groups along an axis: every `count`-th token, or `side` neighbours.
struct Axis {
  Axis(int64_t length, int64_t places, bool pixel)
      : length(length), places(places), side((length + places - 1) / places), pixel(pixel),
        count(pixel ? std::min(places, length) : (length + side - 1) / side) {}
  int64_t length, places, side;
  bool pixel;
  int64_t count;                                     // places that have tokens
  int64_t group(int64_t n) const { return pixel ? n % places : n / side; }
  int64_t begin(int64_t group) const { return pixel ? group : group * side; }
  int64_t end(int64_t group) const { return pixel ? length : std::min(length, (group + 1) * side); }
  int64_t step() const { return pixel ? places : 1; }
};

// Call f(row, column) for the tokens of a group.
template <class F> void for_tokens(const Axis& rows, const Axis& columns, int64_t group, F&& f) {
  const int64_t r = group / columns.count, c = group % columns.count;
  for (int64_t i = rows.begin(r); i < rows.end(r); i += rows.step())
    for (int64_t j = columns.begin(c); j < columns.end(c); j += columns.step()) f(i, j);
}

template <class T> const T* token(const void* x, const int64_t* strides, int64_t image, int64_t i, int64_t j) {
  return (const T*)x + image * strides[0] + i * strides[1] + j * strides[2];
}

// Call f(one, c) for channels [begin, end), with `one` a vector or, for the rest, a number.
template <class F> void for_channels(int64_t begin, int64_t end, F&& f) {
  for (; begin + LANES <= end; begin += LANES) f(vec{}, begin);
  for (; begin < end; begin++) f(0.f, begin);
}

template <class V> V relu(V x) { return x < 0.f ? V{} : x; }          // NaN stays NaN

// softmax(x) for `count` numbers, in place; x is padded to vectors.
void softmax(float* x, int64_t count) {
  const vec least = vec{} - __builtin_inff();
  for (int64_t n = count; n < round_up(count, LANES); n++) x[n] = -__builtin_inff();
  vec most = least, sums = {};
  for (int64_t n = 0; n < count; n += LANES) {
    vec v = load<vec>(x + n);
    most = v > most ? v : most;
  }
  float largest = most[0];
  for (int i = 1; i < LANES; i++) largest = std::max(largest, most[i]);
  for (int64_t n = 0; n < count; n += LANES) {
    vec v = load<vec>(x + n), e = exp2((v - largest) * LOG2E);
    e = v == least && largest > least[0] ? vec{} : e;
    store(x + n, e);
    sums += e;
  }
  const vec scale = vec{} + 1.f / sum(sums);
  for (int64_t n = 0; n < count; n += LANES) store(x + n, load<vec>(x + n) * scale);
}

template <class T> int forward(const Separable& s) {
  const Axis rows(s.height, s.patch_height, s.pixel), columns(s.width, s.patch_width, s.pixel);
  const Axis value_rows(s.value_height, s.patch_height, s.pixel), value_columns(s.value_width, s.patch_width, s.pixel);
  const int64_t groups = rows.count * columns.count, C = s.key_dim, D = s.dim, L = s.latents;
  const int64_t blocks = (C + BLOCK - 1) / BLOCK;
  const int64_t line = round_up(s.height * s.width, 16);
  const int64_t table = s.key_weight ? round_up(s.batch * groups * C, 16) : 0;
  Memory memory(s.threads * line + table);
  if (!memory.data) return NO_MEMORY;
  float* summed = s.key_weight ? memory.data + s.threads * line : s.context;

  parallel(s.batch * groups, s.threads, [&](int64_t task, int64_t worker) {
    const int64_t image = task / groups, group = task % groups;
    float *logits = memory.data + worker * line, *scores = s.scores + image * s.height * s.width * L;
    for (int64_t l = 0; l < L; l++) {
      int64_t n = 0;
      for_tokens(rows, columns, group, [&](int64_t i, int64_t j) {
        logits[n++] = load<float>(token<T>(s.query, s.query_strides, image, i, j) + l * s.query_strides[3]);
      });
      softmax(logits, n);
      n = 0;
      for_tokens(rows, columns, group, [&](int64_t i, int64_t j) { scores[(i * s.width + j) * L + l] = logits[n++]; });
    }
  });

  parallel(s.batch * groups * blocks, s.threads, [&](int64_t task, int64_t) {      // the mean over latent tokens
    const int64_t at = task / blocks, image = at / groups, c0 = task % blocks * BLOCK, c1 = std::min(C, c0 + BLOCK);
    float total[BLOCK] = {}, part[BLOCK] = {};
    auto flush = [&] {
      for (int64_t c = 0; c < BLOCK; c++) total[c] += part[c], part[c] = 0;
    };
    int64_t n = 0;
    for_tokens(rows, columns, at % groups, [&](int64_t i, int64_t j) {
      const float* score = s.scores + ((image * s.height + i) * s.width + j) * L;
      float weight = score[0];
      for (int64_t l = 1; l < L; l++) weight += score[l];
      const T* key = token<T>(s.key, s.key_strides, image, i, j);
      for_channels(c0, c1, [&](auto one, int64_t c) {
        using V = decltype(one);
        store(part + c - c0, load<V>(part + c - c0) + weight * load<V>(key + c));
      });
      if (++n % RUN == 0) flush();
    });
    flush();
    for (int64_t c = c0; c < c1; c++) {
      const float x = total[c - c0] / float(L);
      summed[at * C + c] = s.statistics ? (x - s.statistics[2 * image]) * s.statistics[2 * image + 1] : x;
    }
  });

  if (s.key_weight)
    parallel(s.batch * groups, s.threads, [&](int64_t at, int64_t) {
      for (int64_t d = 0; d < D; d++) {
        const T* weight = (const T*)s.key_weight + d * C;
        vec sums = {};
        float rest = s.key_bias ? load<float>((const T*)s.key_bias + d) : 0;
        for_channels(0, C, [&](auto one, int64_t c) {
          using V = decltype(one);
          const V product = load<V>(weight + c) * load<V>(summed + at * C + c);
          if constexpr (sizeof(V) == sizeof(vec)) sums += product;
          else rest += product;
        });
        s.context[at * D + d] = rest + sum(sums);
      }
    });

  parallel(s.batch * s.value_height, s.threads, [&](int64_t task, int64_t) {
    const int64_t image = task / s.value_height, i = task % s.value_height;
    for (int64_t j = 0; j < s.value_width; j++) {
      const int64_t group = value_rows.group(i) * columns.count + value_columns.group(j);
      const float* context = s.context + (image * groups + group) * D;
      const T* value = token<T>(s.value, s.value_strides, image, i, j);
      T* y = (T*)s.y + (task * s.value_width + j) * D;
      for_channels(0, D, [&](auto one, int64_t c) {
        using V = decltype(one);
        store(y + c, relu(load<V>(value + c)) * load<V>(context + c));
      });
    }
  });
  return 0;
}

// For keys without a map: key_dim = dim.
template <class T> int backward(const Separable& s) {
  const Axis rows(s.height, s.patch_height, s.pixel), columns(s.width, s.patch_width, s.pixel);
  const Axis value_rows(s.value_height, s.patch_height, s.pixel), value_columns(s.value_width, s.patch_width, s.pixel);
  const int64_t groups = rows.count * columns.count, D = s.dim, L = s.latents, tokens = s.height * s.width;
  Memory memory(s.batch * groups * D + s.batch * tokens);
  if (!memory.data) return NO_MEMORY;
  float *dcontext = memory.data, *products = memory.data + s.batch * groups * D;

  const int64_t blocks = (D + BLOCK - 1) / BLOCK;
  parallel(s.batch * groups * blocks, s.threads, [&](int64_t task, int64_t) {
    const int64_t at = task / blocks, image = at / groups, group = at % groups, c0 = task % blocks * BLOCK;
    const int64_t c1 = std::min(D, c0 + BLOCK), r = group / columns.count, c = group % columns.count;
    const float* context = s.context + at * D;
    float total[BLOCK] = {}, part[BLOCK] = {};
    auto flush = [&] {
      for (int64_t k = 0; k < BLOCK; k++) total[k] += part[k], part[k] = 0;
    };
    int64_t n = 0;
    // Values of a smaller grid lack the last groups of keys.
    if (r < value_rows.count && c < value_columns.count)
      for_tokens(value_rows, value_columns, r * value_columns.count + c, [&](int64_t i, int64_t j) {
        const T* value = token<T>(s.value, s.value_strides, image, i, j);
        const T* grad = token<T>(s.grad, s.grad_strides, image, i, j);
        T* dvalue = (T*)s.dvalue + ((image * s.value_height + i) * s.value_width + j) * D;
        for_channels(c0, c1, [&](auto one, int64_t k) {
          using V = decltype(one);
          const V v = load<V>(value + k), dy = load<V>(grad + k);
          store(part + k - c0, load<V>(part + k - c0) + dy * relu(v));
          store(dvalue + k, v <= 0.f ? V{} : dy * load<V>(context + k));
        });
        if (++n % RUN == 0) flush();
      });
    flush();
    for (int64_t k = c0; k < c1; k++) dcontext[at * D + k] = total[k - c0];
  });

  parallel(s.batch * groups, s.threads, [&](int64_t at, int64_t) {
    const int64_t image = at / groups, group = at % groups;
    const float *dc = dcontext + at * D, *scores = s.scores + image * tokens * L;
    float* product = products + image * tokens;
    for_tokens(rows, columns, group, [&](int64_t i, int64_t j) {
      const int64_t n = i * s.width + j;
      float weight = 0, rest = 0;
      for (int64_t l = 0; l < L; l++) weight += scores[n * L + l];
      weight /= float(L);
      const T* key = token<T>(s.key, s.key_strides, image, i, j);
      T* dkey = (T*)s.dkey + (image * tokens + n) * D;
      vec sums = {};
      for_channels(0, D, [&](auto one, int64_t c) {
        using V = decltype(one);
        const V d = load<V>(dc + c), p = load<V>(key + c) * d;
        if constexpr (sizeof(V) == sizeof(vec)) sums += p;
        else rest += p;
        store(dkey + c, d * weight);
      });
      product[n] = (rest + sum(sums)) / float(L);
    });
    for (int64_t l = 0; l < L; l++) {
      double mean = 0;
      for_tokens(rows, columns, group, [&](int64_t i, int64_t j) {
        const int64_t n = i * s.width + j;
        mean += double(scores[n * L + l]) * product[n];
      });
      for_tokens(rows, columns, group, [&](int64_t i, int64_t j) {
        const int64_t n = i * s.width + j;
        store((T*)s.dquery + (image * tokens + n) * L + l, scores[n * L + l] * (product[n] - float(mean)));
      });
    }
  });
  return 0;
}

}  // namespace

extern "C" int SUBQUAD_NAME(separable_attention)(const Separable* s) {
  return s->grad ? (s->is_bf16 ? backward<bf16>(*s) : backward<float>(*s))
                 : (s->is_bf16 ? forward<bf16>(*s) : forward<float>(*s));
}
