// Linear attention with rotated queries and keys (MLLA), without gradients.
//   q, k = elu(qk) + 1,   q', k' = rotated q, k,   y_i = q'_i (sum_j k'_j v_j') / (q_i . sum_j k_j + N eps)
#include "parallel.h"
#include "vectors.h"

namespace {

// The fields in the order in which `linear_attention.py` packs them. All tensors are dense.
struct LinearAttention {
  const float *qk;                                   // (batch, tokens, 2 channels)
  const float *v;                                    // (batch, tokens, channels)
  const float *table;                                // (tokens, channels / 2, 2): cosines and sines
  float *y;                                          // as v
  int64_t batch, tokens, channels, heads, threads;
  double eps;
};

constexpr int GROUP = 4;                             // tokens that share a load of the sums

// The channels of a head for a group of tokens, filled up with zeros.
struct Group {
  float *plain, *turned, *values;                    // (GROUP, width) each
};

// Read elu(x) + 1, and what the table turns it into, of `count` tokens; x and table have `row` numbers a token.
void read(const float* x, int64_t x_row, const float* table, int64_t table_row, int64_t count, int64_t dim,
          int64_t width, const Group& to) {
  for (int64_t t = 0; t < count; t++) {
    float *plain = to.plain + t * width, *turned = to.turned + t * width;
    std::copy_n(x + t * x_row, dim, plain);
    for (int64_t d = 0; d < dim; d += LANES) {
      const vec z = load<vec>(plain + d);
      store(plain + d, z > 0.f ? z + 1.f : exp2(z * LOG2E));
    }
    std::fill_n(plain + dim, width - dim, 0.f);
    const float* angles = table + t * table_row;
    for (int64_t d = 0; d < dim; d += 2) {
      turned[d] = angles[d] * plain[d] - angles[d + 1] * plain[d + 1];
      turned[d + 1] = angles[d + 1] * plain[d] + angles[d] * plain[d + 1];
    }
  }
  std::fill_n(to.plain + count * width, (GROUP - count) * width, 0.f);
  std::fill_n(to.turned + count * width, (GROUP - count) * width, 0.f);
}

// One head of one image. `memory` has room for the sums of keys and products, and for a group.
void attend(const LinearAttention& s, int64_t image, int64_t head, int64_t dim, int64_t width, float* memory) {
  float *sums = memory, *products = sums + width;    // (width,), (dim, width)
  const Group g{products + dim * width, products + (dim + GROUP) * width, products + (dim + 2 * GROUP) * width};
  std::fill_n(memory, (1 + dim + 3 * GROUP) * width, 0.f);
  const int64_t first = image * s.tokens, channel = head * dim;
  for (int64_t n = 0; n < s.tokens; n += GROUP) {
    const int64_t count = std::min<int64_t>(GROUP, s.tokens - n);
    read(s.qk + ((first + n) * 2 + 1) * s.channels + channel, 2 * s.channels, s.table + n * s.channels + channel,
         s.channels, count, dim, width, g);
    for (int64_t t = 0; t < count; t++) std::copy_n(s.v + (first + n + t) * s.channels + channel, dim, g.values + t * width);
    for (int64_t c = 0; c < width; c += LANES) {
      vec v[GROUP], sum = load<vec>(sums + c);
      for (int t = 0; t < GROUP; t++) v[t] = load<vec>(g.values + t * width + c), sum += load<vec>(g.plain + t * width + c);
      store(sums + c, sum);
      for (int64_t d = 0; d < dim; d++) {
        vec product = load<vec>(products + d * width + c);
        for (int t = 0; t < GROUP; t++) product += g.turned[t * width + d] * v[t];
        store(products + d * width + c, product);
      }
    }
  }
  for (int64_t n = 0; n < s.tokens; n += GROUP) {
    const int64_t count = std::min<int64_t>(GROUP, s.tokens - n);
    read(s.qk + (first + n) * 2 * s.channels + channel, 2 * s.channels, s.table + n * s.channels + channel, s.channels,
         count, dim, width, g);
    float scales[GROUP];
    for (int t = 0; t < GROUP; t++) {
      vec weight = {};
      for (int64_t c = 0; c < width; c += LANES) weight += load<vec>(g.plain + t * width + c) * load<vec>(sums + c);
      scales[t] = 1 / (sum(weight) + float(double(s.tokens) * s.eps));
    }
    for (int64_t c = 0; c < width; c += LANES) {
      vec y[GROUP] = {};
      for (int64_t d = 0; d < dim; d++) {
        const vec product = load<vec>(products + d * width + c);
        for (int t = 0; t < GROUP; t++) y[t] += g.turned[t * width + d] * product;
      }
      for (int64_t t = 0; t < count; t++) {
        store(g.values + c, y[t] * scales[t]);
        std::copy_n(g.values + c, std::min<int64_t>(LANES, dim - c), s.y + (first + n + t) * s.channels + channel + c);
      }
    }
  }
}

}  // namespace

extern "C" int SUBQUAD_NAME(linear_attention)(const LinearAttention* arguments) {
  const LinearAttention& s = *arguments;
  const int64_t dim = s.channels / s.heads, width = round_up(dim, LANES), space = (1 + dim + 3 * GROUP) * round_up(width, 16);
  Memory memory(s.threads * space);
  if (!memory.data) return NO_MEMORY;
  parallel(s.batch * s.heads, s.threads, [&](int64_t task, int64_t worker) {
    attend(s, task / s.heads, task % s.heads, dim, width, memory.data + worker * space);
  });
  return 0;
}
