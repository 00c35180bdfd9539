// Products with a dozen rows of x and more: rows of x lie in the lanes, weights are broadcast.
//
// A tile is WIDE_ROWS weight rows times up to two vectors of rows of x, which needs no sums across
// lanes and reads x once per WIDE_ROWS weight rows rather than once per ROWS. x is transposed once
// per product and thread; weights that are no float32 are widened into a buffer of WIDE_ROWS rows
// first. AVX-512 only: the tile needs 24 registers for its sums.
#pragma once

#include "product.h"

namespace deepinfer {

// v[i][j] <-> v[j][i]
INLINE void transpose(F* v) {
  typedef int32_t Index __attribute__((vector_size(LANES * 4)));
  UNROLL for (int s = 1; s < LANES; s *= 2) {
    Index first, second;
    for (int l = 0; l < LANES; l++)
      first[l] = l & s ? LANES + l - s : l, second[l] = l & s ? LANES + l : l + s;
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) {
      if (i & s) continue;
      const F a = v[i], b = v[i + s];
      v[i] = __builtin_shuffle(a, b, first);
      v[i + s] = __builtin_shuffle(a, b, second);
    }
  }
}

// to [k][padded]: x [rows, k] transposed, rows padded with zeros.
inline void transpose_rows(const float* x, int64_t rows, int64_t k, float* to, int64_t padded) {
  for (int64_t m = 0; m < padded; m += LANES) {
    int64_t i = 0;
    for (; i + LANES <= k; i += LANES) {
      F v[LANES];
      for (int l = 0; l < LANES; l++) v[l] = m + l < rows ? load<F>(x + (m + l) * k + i) : F{};
      transpose(v);
      for (int l = 0; l < LANES; l++) std::memcpy(to + (i + l) * padded + m, &v[l], sizeof(F));
    }
    for (; i < k; i++)
      for (int l = 0; l < LANES; l++)
        to[i * padded + m + l] = m + l < rows ? x[(m + l) * k + i] : 0.f;
  }
}

// While it computes, a tile asks memory for the bytes from `ahead` on, `step` per input: in one
// burst they would be waited for. sums [R][V * LANES] of R weight rows p, p + stride, ... times V
// vectors of rows of x, xt [k][ldx].
template <int R, int V> INLINE void wide_tile(const float* p, int64_t stride, const float* xt,
                                              int64_t ldx, int64_t k, float* sums,
                                              const char* ahead, int64_t step) {
  F acc[R][V] = {};
  const float* base[(R + 3) / 4];
  UNROLL for (int b = 0; b < (R + 3) / 4; b++)
    base[b] = p + 4 * b * stride;
  const int64_t three = 3 * stride;
  for (int64_t i = 0; i < k; i++, xt += ldx) {
    __builtin_prefetch(ahead + i * step);
    F x[V];
    UNROLL for (int v = 0; v < V; v++)
      x[v] = load<F>(xt + v * LANES);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      const float* q = base[r / 4] + i;
      const float w = r % 4 == 0   ? q[0]
                      : r % 4 == 1 ? q[stride]
                      : r % 4 == 2 ? q[2 * stride]
                                   : q[three];
      UNROLL for (int v = 0; v < V; v++)
        acc[r][v] += w * x[v];
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) UNROLL
    for (int v = 0; v < V; v++) std::memcpy(sums + (r * V + v) * LANES, &acc[r][v], sizeof(F));
}

template <typename W, int R, int V>
INLINE void wide_rows(const Weights& w, const float* p, int64_t stride, int64_t n, const float* xt,
                      int64_t ldx, int64_t rows, float* y) {
  alignas(64) float sums[R * V * LANES];
  const int64_t block = R * w.k * W::bits / 8;
  const bool more = (n + 2 * R) <= w.n;
  wide_tile<R, V>(p, stride, xt, ldx, w.k, sums,
                  static_cast<const char*>(w.data) + (n * w.k * W::bits / 8) + (more ? block : 0),
                  R * W::bits / 8);
  for (int64_t m = 0; m < rows; m++)
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
      y[m * w.n + n + r] =
          W::scaled_rows ? sums[r * V * LANES + m] * w.scale[n + r] : sums[r * V * LANES + m];
}

template <typename W, int R> INLINE void wide_block(const Weights& w, int64_t rows, const float* xt,
                                                    int64_t padded, float* y, int64_t n,
                                                    float* buffer) {
  const float* p;
  if constexpr (std::is_same_v<W, Float32>) {
    p = static_cast<const float*>(w.data) + n * w.k;
  } else {
    for (int r = 0; r < R; r++) {
      const W row(w, n + r);
      int64_t k = 0;
      for (; k + LANES <= w.k; k += LANES) {
        const F v = row.at(k);
        std::memcpy(buffer + r * w.k + k, &v, sizeof v);
      }
      for (; k < w.k; k++) buffer[r * w.k + k] = row.one(k);
    }
    p = buffer;
  }
  for (int64_t m = 0; m < rows; m += 2 * LANES) {
    if (rows - m > LANES)
      wide_rows<W, R, 2>(w, p, w.k, n, xt + m, padded, std::min<int64_t>(rows - m, 2 * LANES),
                         y + m * w.n);
    else wide_rows<W, R, 1>(w, p, w.k, n, xt + m, padded, rows - m, y + m * w.n);
  }
}

// As run_block. id: of this x among all products; a thread transposes it once.
template <typename W>
void run_wide(const Weights& w, int64_t rows, const float* x, float* y, int64_t n0, int64_t n1,
              int64_t id) {
  static thread_local Scratch transposed, widened;
  static thread_local int64_t have = 0;
  static thread_local const float* of = nullptr;
  const int64_t padded = (rows + LANES - 1) / LANES * LANES;
  float *xt = transposed.get(w.k * padded), *buffer = widened.get(WIDE_ROWS * w.k);
  if (have != id || of != x) {
    transpose_rows(x, rows, w.k, xt, padded);
    have = id, of = x;
  }
  int64_t n = n0;
  for (; n + WIDE_ROWS <= n1; n += WIDE_ROWS) {
    wide_block<W, WIDE_ROWS>(w, rows, xt, padded, y, n, buffer);
  }
  for (; n + ROWS <= n1; n += ROWS) wide_block<W, ROWS>(w, rows, xt, padded, y, n, buffer);
  for (; n < n1; n++) wide_block<W, 1>(w, rows, xt, padded, y, n, buffer);
}

}  // namespace deepinfer
