// Quad-tree attention, by tasks of one image and some of its heads. A task computes each level from the one below up to
// the roots, and from the one above down to the leaves, which it reads where they lie. As in `quadtree_solve`, S is a
// pivot, and for each node c with parent p
//     r_p = mean_p + sum_c up_c r_c,      x_c = r_c / S_c + down_c x_p.
#include <cmath>
#include "../native/parallel.h"
#include "../native/vectors.h"

namespace {

enum Parametrization { LAPLACIAN, SYMMETRIC, SKEW };

// The fields in the order in which `__init__.py` packs them. Strides count elements of images, heads, rows and columns;
// channels lie side by side. What is written is dense, with the heads of a token side by side.
struct Attention {
  const void *q, *k, *v, *gate;                  // q and k are null for static edges, gate for none
  const float* bias;                             // (bias_levels, 2, 2, heads)
  const uint8_t* mask;                           // (batch, height, width), or null
  void* y;
  int64_t batch, heads, height, width, dim, edge_dim, top, left, max_levels, bias_levels;   // max_levels 0: one tree
  int64_t q_strides[4], k_strides[4], v_strides[4], gate_strides[4];
  int64_t is_bf16, parametrization, threads;
  double rho;
};

struct Level {
  int64_t height, width, top, left, first;                      // first: the number of its first cell
  int64_t cell(int64_t i, int64_t j) const { return first + i * width + j; }
};

// The vectors of the heads of a level's cells.
template <class T> struct Vectors {
  T* data;
  int64_t head, row, column;                                    // strides
  T* operator()(int64_t i, int64_t j) const { return data + i * row + j * column; }
};

// Call f(V{}, d) for the channels from d on that a V holds: a vector, or a number at the end.
template <class F> static inline void for_channels(int64_t count, F&& f) {
  int64_t d = 0;
  for (; d + LANES <= count; d += LANES) f(vec{}, d);
  for (; d < count; d++) f(0.f, d);
}

template <class S, class T> static inline float dot(const S* a, const T* b, int64_t count) {
  vec products{};
  float rest = 0;
  int64_t d = 0;
  for (; d + LANES <= count; d += LANES) products += load<vec>(a + d) * load<vec>(b + d);
  for (; d < count; d++) rest += load<float>(a + d) * load<float>(b + d);
  return count < LANES ? rest : sum(products) + rest;
}

struct Tree {
  const Attention& a;
  int64_t b, h, heads;                                          // the image, the first head and the number of heads
  Level levels[64];
  int64_t depth = 0, cells = 0, leaf_cells;
  // For each cell: leaves below it, 1 / leaves. For each cell and head: logit, weight of the edge above, 1 / S, down,
  // and what goes up: S without the weight of the edge above for the Laplacian, else S.
  float *leaves, *inverse, *logit, *weight, *scale, *down, *carried;
  // For each cell but the leaves: sums of v, q and k over its leaves, and r, which becomes x.
  float *v, *q, *k, *x;

  Tree(const Attention& a, int64_t heads) : a(a), heads(heads) {
    Level level{a.height, a.width, a.top, a.left, 0};
    for (;;) {
      level.first = cells;
      cells += level.height * level.width;
      levels[depth++] = level;
      if ((level.height == 1 && level.width == 1) || depth == a.max_levels) break;
      level.height = ((level.top + level.height - 1) >> 1) - (level.top >> 1) + 1;
      level.width = ((level.left + level.width - 1) >> 1) - (level.left >> 1) + 1;
      level.top >>= 1, level.left >>= 1;
    }
    leaf_cells = a.height * a.width;
  }
  int64_t size() const {
    const int64_t scalars = 2 * cells + 5 * (cells * heads + LANES);
    return round_up(scalars + (cells - leaf_cells) * heads * 2 * (a.dim + a.edge_dim), 16);
  }
  void place(float* memory) {
    auto take = [&](int64_t count) { return (memory += count) - count; };
    const int64_t inner = (cells - leaf_cells) * heads;
    for (float** part : {&leaves, &inverse}) *part = take(cells);
    // Vectors at the end of a row reach into those that are computed later.
    for (float** part : {&logit, &weight, &scale, &down, &carried}) *part = take(cells * heads + LANES);
    for (float** part : {&v, &x}) *part = take(inner * a.dim);
    for (float** part : {&q, &k}) *part = take(inner * a.edge_dim);
  }

  template <class T> Vectors<T> given(const void* x, const int64_t* s) const {
    return x ? Vectors<T>{(T*)x + b * s[0] + h * s[1], s[1], s[2], s[3]} : Vectors<T>{};
  }
  Vectors<float> inner(float* x, int64_t n, int64_t dim) const {
    return {x + (levels[n].first - leaf_cells) * heads * dim, dim, levels[n].width * heads * dim, heads * dim};
  }

  // Call f(r, s, c, place) for the children (r, s) with leaves of cell (i, j) of level n + 1.
  template <class F> void for_children(int64_t n, int64_t i, int64_t j, F&& f) const {
    const Level &level = levels[n], &above = levels[n + 1];
    const int64_t top = 2 * (i + above.top) - level.top, left = 2 * (j + above.left) - level.left;
    for (int64_t r = std::max<int64_t>(0, top); r < std::min(level.height, top + 2); r++)
      for (int64_t s = std::max<int64_t>(0, left); s < std::min(level.width, left + 2); s++)
        if (leaves[level.cell(r, s)] > 0) f(r, s, level.cell(r, s), 2 * (r - top) + s - left);
  }

  // The sum over the children of a cell.
  template <class T> void add(const Vectors<T>& x, int64_t dim, int64_t n, int64_t i, int64_t j, float* to) const {
    const T* from[4];
    int64_t number = 0;
    for_children(n, i, j, [&](int64_t r, int64_t s, int64_t, int64_t) { from[number++] = x(r, s); });
    const bool dense = x.head == dim;
    for (int64_t g = 0; g < (dense ? 1 : heads); g++)
      for_channels(dense ? heads * dim : dim, [&](auto zero, int64_t d) {
        using V = decltype(zero);
        const int64_t at = g * x.head + d;
        if (number == 4)
          zero = (load<V>(from[0] + at) + load<V>(from[1] + at)) + (load<V>(from[2] + at) + load<V>(from[3] + at));
        else
          for (int64_t m = 0; m < number; m++) zero += load<V>(from[m] + at);
        store(to + g * dim + d, zero);
      });
  }

  // Sums of a row of level n + 1, and the logits of the edges below.
  template <class T>
  void sum(const Vectors<T>& v, const Vectors<T>& q, const Vectors<T>& k, int64_t n, int64_t i) {
    const Vectors<float> vs = inner(this->v, n + 1, a.dim), qs = inner(this->q, n + 1, a.edge_dim),
                         ks = inner(this->k, n + 1, a.edge_dim);
    const float* bias = a.bias + std::min(n, a.bias_levels - 1) * 4 * a.heads + h;
    for (int64_t j = 0; j < levels[n + 1].width; j++) {
      const int64_t p = levels[n + 1].cell(i, j);
      leaves[p] = 0;
      for_children(n, i, j, [&](int64_t, int64_t, int64_t c, int64_t) { leaves[p] += leaves[c]; });
      inverse[p] = 1.f / std::max(leaves[p], 1.f);
      add(v, a.dim, n, i, j, vs(i, j));
      if (a.q) add(q, a.edge_dim, n, i, j, qs(i, j)), add(k, a.edge_dim, n, i, j, ks(i, j));
      for_children(n, i, j, [&](int64_t r, int64_t s, int64_t c, int64_t place) {
        const float factor = a.q ? inverse[c] * inverse[p] / std::sqrt(float(a.edge_dim)) : 0;
        for (int64_t g = 0; g < heads; g++) {
          const float product = a.q ? dot(q(r, s) + g * q.head, ks(i, j) + g * ks.head, a.edge_dim) : 0;
          logit[c * heads + g] = bias[place * a.heads + g] + product * factor;
        }
      });
    }
  }

  // Weights of 'symmetric' for the children of a cell: rho / 2 * z / sqrt(1 + sum of z^2), for z of any size.
  void normalize(int64_t n, int64_t i, int64_t j) {
    for (int64_t g = 0; g < heads; g++) {
      float largest = 1, total = 0;
      auto each = [&](auto&& f) {
        for_children(n, i, j, [&](int64_t, int64_t, int64_t c, int64_t) { f(c * heads + g); });
      };
      each([&](int64_t c) { largest = std::abs(logit[c]) <= largest ? largest : std::abs(logit[c]); });
      each([&](int64_t c) { total += logit[c] / largest * (logit[c] / largest); });
      const float factor = float(a.rho) / 2 / largest / std::sqrt(total + 1 / largest * (1 / largest));
      each([&](int64_t c) { weight[c] = logit[c] * factor; });
    }
  }

  // Weights, 1 / S and `down` of the edges between a row of level n + 1 and the level below, and what goes up.
  void eliminate(int64_t n, int64_t i) {
    const Level &level = levels[n], &above = levels[n + 1];
    const bool laplacian = a.parametrization == LAPLACIAN;
    const float growth = std::ldexp(1.f, int(2 * n));
    if (a.parametrization == SYMMETRIC)
      for (int64_t j = 0; j < above.width; j++) normalize(n, i, j);
    const int64_t top = 2 * (i + above.top) - level.top;
    const int64_t begin = std::max<int64_t>(0, top), end = std::min(level.height, top + 2);
    for (int64_t c = level.cell(begin, 0) * heads; c < level.cell(end, 0) * heads; c += LANES) {
      vec w = load<vec>((a.parametrization == SYMMETRIC ? weight : logit) + c), own = load<vec>(carried + c);
      if (laplacian) w = softplus(w) * growth;
      vec s = 1.f / (laplacian ? own + w : own);
      store(weight + c, w);
      store(scale + c, s);
      store(down + c, laplacian ? w * s : -(w * s));
    }
    const float sign = a.parametrization == SKEW ? -1 : 1;
    const float* factor = laplacian ? carried : weight;
    for (int64_t j = 0; j < above.width; j++) {
      float* to = carried + above.cell(i, j) * heads;
      for (int64_t g = 0; g < heads; g++) to[g] = 1;
      for_children(n, i, j, [&](int64_t, int64_t, int64_t c, int64_t) {
        for (int64_t g = 0; g < heads; g++) to[g] += sign * down[c * heads + g] * factor[c * heads + g];
      });
    }
  }

  // r of a row of level n + 1: its means, and what its children push.
  template <class T> void push(const Vectors<T>& r, int64_t n, int64_t i) const {
    const Vectors<float> sums = inner(v, n + 1, a.dim), to = inner(x, n + 1, a.dim);
    const float sign = a.parametrization == SKEW ? -1 : 1;
    for (int64_t j = 0; j < levels[n + 1].width; j++) {
      const float own = inverse[levels[n + 1].cell(i, j)], *factors[4];
      const T* from[4];
      int64_t number = 0;
      for_children(n, i, j, [&](int64_t row, int64_t column, int64_t c, int64_t) {
        factors[number] = down + c * heads;
        from[number++] = r(row, column);
      });
      for (int64_t g = 0; g < heads; g++)
        for_channels(a.dim, [&](auto total, int64_t d) {
          using V = decltype(total);
          total = load<V>(sums(i, j) + g * a.dim + d) * own;
          for (int64_t m = 0; m < number; m++) total += sign * factors[m][g] * load<V>(from[m] + g * r.head + d);
          store(to(i, j) + g * a.dim + d, total);
        });
    }
  }

  // Call f(g, d, x) for the heads and channels of cell (i, j) of level n, given its r and x of its parent.
  template <class T, class F> void pull(const Vectors<T>& r, int64_t n, int64_t i, int64_t j, F&& f) const {
    const Level &level = levels[n], &above = levels[n + 1];
    const int64_t row = ((i + level.top) >> 1) - above.top, column = ((j + level.left) >> 1) - above.left;
    const float* parent = inner(x, n + 1, a.dim)(row, column);
    const int64_t c = level.cell(i, j) * heads;
    for (int64_t g = 0; g < heads; g++)
      for_channels(a.dim, [&](auto zero, int64_t d) {
        using V = decltype(zero);
        f(g, d, load<V>(r(i, j) + g * r.head + d) * scale[c + g] + load<V>(parent + g * a.dim + d) * down[c + g]);
      });
  }

  // x of the roots from r. False if a number is not finite.
  bool solve_roots() const {
    float rest = 0;
    for (int64_t c = levels[depth - 1].first * heads; c < cells * heads; c++)
      for (int64_t d = 0; d < a.dim; d++) {
        float& root = x[(c - leaf_cells * heads) * a.dim + d];
        rest += (root /= carried[c]) * 0;
      }
    return rest == 0;
  }

  // Compute level n + 1 from level n, whose vectors are given.
  template <class T>
  void rise(const Vectors<T>& v, const Vectors<T>& q, const Vectors<T>& k, const Vectors<T>& r, int64_t n) {
    for (int64_t i = 0; i < levels[n + 1].height; i++) {
      sum(v, q, k, n, i);
      eliminate(n, i);
      push(r, n, i);
    }
  }

  // x of all cells but the leaves. False if a number is not finite.
  template <class T> bool solve_inner() {
    const Vectors<const T> v = given<const T>(a.v, a.v_strides);
    for (int64_t c = 0; c < leaf_cells; c++) leaves[c] = inverse[c] = a.mask ? a.mask[b * leaf_cells + c] : 1;
    std::fill(carried, carried + leaf_cells * heads, 1.f);
    if (depth == 1) return true;
    rise(v, given<const T>(a.q, a.q_strides), given<const T>(a.k, a.k_strides), v, 0);
    for (int64_t n = 1; n + 1 < depth; n++)
      rise<float>(inner(this->v, n, a.dim), inner(q, n, a.edge_dim), inner(k, n, a.edge_dim), inner(x, n, a.dim), n);
    const bool finite = solve_roots();
    for (int64_t n = depth - 2; n > 0; n--) {
      const Vectors<float> r = inner(x, n, a.dim);
      for (int64_t i = 0; i < levels[n].height; i++)
        for (int64_t j = 0; j < levels[n].width; j++)
          pull(r, n, i, j, [&](int64_t g, int64_t d, auto y) { store(r(i, j) + g * a.dim + d, y); });
    }
    return finite;
  }

  template <class T> bool forward() {
    const bool finite = solve_inner<T>();
    const Vectors<const T> v = given<const T>(a.v, a.v_strides), gate = given<const T>(a.gate, a.gate_strides);
    for (int64_t i = 0; i < a.height; i++)
      for (int64_t j = 0; j < a.width; j++) {
        const int64_t token = (b * a.height + i) * a.width + j;
        T* y = (T*)a.y + (token * a.heads + h) * a.dim;
        auto write = [&](int64_t g, int64_t d, auto y_d) {
          using V = decltype(y_d);
          store(y + g * a.dim + d, a.gate ? y_d * silu(load<V>(gate(i, j) + g * gate.head + d)) : y_d);
        };
        if (leaves[levels[0].cell(i, j)] == 0)
          std::fill(y, y + heads * a.dim, T{});
        else if (depth > 1)
          pull(v, 0, i, j, write);
        else
          for (int64_t g = 0; g < heads; g++)
            for_channels(a.dim, [&](auto zero, int64_t d) {
              write(g, d, load<decltype(zero)>(v(i, j) + g * v.head + d));
            });
      }
    return finite;
  }
};

template <class T> int run(const Attention& a) {
  const int64_t threads = std::min(a.threads, 1 + a.batch * a.heads * a.height * a.width * a.dim / 16384);
  // All heads of an image read its memory in order; fewer give each thread a task.
  const int64_t groups = std::min(a.heads, (threads + a.batch - 1) / a.batch), heads = (a.heads + groups - 1) / groups;
  const int64_t size = Tree(a, heads).size();
  Memory memory(threads * size);
  if (!memory.data) return NO_MEMORY;
  std::atomic<bool> finite{true};
  parallel(a.batch * groups, threads, [&](int64_t task, int64_t worker) {
    const int64_t h = task % groups * heads;
    if (h >= a.heads) return;
    Tree tree(a, std::min(heads, a.heads - h));
    tree.place(memory.data + worker * size);
    tree.b = task / groups, tree.h = h;
    if (!tree.forward<T>()) finite = false;
  });
  return finite ? DONE : OUT_OF_RANGE;
}

}  // namespace

extern "C" int SUBQUAD_NAME(quadtree_attention)(const Attention* a) {
  return a->is_bf16 ? run<bf16>(*a) : run<float>(*a);
}
