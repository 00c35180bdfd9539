// Matrix products y[M, N] = x[M, K] . w[N, K]^T for float32, bfloat16, int8 and int4 weights, one
// chunk of the work at a time.
//
// Decode reads every weight once for a handful of rows, so its speed limit is the memory. Weights
// are widened to float32 in registers, a group of ROWS weight rows at a time, and multiplied with
// up to MAX_TILE rows of x at a time; more rows widen them again, from the first-level cache, which
// measured faster than widening into a buffer. Activations stay float32 throughout; sums run over K
// in lanes, then across lanes.
//
// Written with GCC/Clang vector extensions: the compiler picks the instructions for the machine it
// runs on.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#include "stream.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace deepinfer {

#if defined(__AVX512F__)
constexpr int LANES = 16, MAX_TILE = 6;
#elif defined(__AVX2__)
constexpr int LANES = 8, MAX_TILE = 2;
#else
constexpr int LANES = 4, MAX_TILE = 4;
#endif
constexpr int ROWS = 4;  // weight rows per register tile
constexpr int WIDE_ROWS = 12;  // and per tile of wide.h,
// which takes products with at least so many rows of x.
constexpr int64_t WIDE_FROM = LANES == 16 ? 12 : INT64_MAX;
constexpr int COLUMNS = 32;  // results of a row gathered before they are written out
// Up to so many rows of x weights are read as a stream; tiles with more ask for the next one's.
constexpr int STREAMED_ROWS = 2;
// Rows whose scales are part of the stream; those of later rows are asked for by these.
constexpr int64_t FIRST_ROWS = 64;
constexpr int GROUP = 32;  // weights per int4 scale
constexpr int64_t CACHE_BYTES = 512 << 10;  // what a panel of x may take of the second-level cache

typedef float F __attribute__((vector_size(LANES * 4)));
typedef int32_t I __attribute__((vector_size(LANES * 4)));

#define INLINE inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

template <typename V> INLINE V load(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
// LANES integers widened to 32 bits, and int32 to float32. Compilers make scalar code of
// __builtin_convertvector here.
#if defined(__AVX512F__)
INLINE I widen(const int8_t* p) {
  return (I)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
}
INLINE I widen(const uint8_t* p) {
  return (I)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
}
INLINE I widen(const uint16_t* p) {
  return (I)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
}
INLINE F to_float(I v) { return (F)_mm512_cvtepi32_ps((__m512i)v); }
#elif defined(__AVX2__)
INLINE I widen(const int8_t* p) {
  return (I)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
}
INLINE I widen(const uint8_t* p) {
  return (I)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
}
INLINE I widen(const uint16_t* p) {
  return (I)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
}
INLINE F to_float(I v) { return (F)_mm256_cvtepi32_ps((__m256i)v); }
#else
template <typename T> INLINE I widen(const T* p) {
  I v = {};
  UNROLL for (int i = 0; i < LANES; i++)
    v[i] = p[i];
  return v;
}
INLINE F to_float(I v) { return __builtin_convertvector(v, F); }
#endif

#if defined(__AVX512F__)
INLINE __m256 half(F v) {
  return _mm256_add_ps(_mm512_castps512_ps256((__m512)v),
                       _mm256_castpd_ps(_mm512_extractf64x4_pd((__m512d)v, 1)));
}
#elif defined(__AVX2__)
INLINE __m256 half(F v) { return (__m256)v; }
#endif

// out[r] = the sum of the lanes of v[r].
template <int R> INLINE void sum_lanes(const F* v, float* out) {
#if defined(__AVX2__)
  if constexpr (R == 4) {
    const __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(half(v[0]), half(v[1])),
                                        _mm256_hadd_ps(half(v[2]), half(v[3])));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
    return;
  }
#endif
  for (int r = 0; r < R; r++) {
    float lanes[LANES];
    std::memcpy(lanes, &v[r], sizeof lanes);
    for (int step = LANES / 2; step; step /= 2)
      for (int i = 0; i < step; i++) lanes[i] += lanes[i + step];
    out[r] = lanes[0];
  }
}

INLINE float sum(F v) {
  float total;
  sum_lanes<1>(&v, &total);
  return total;
}

// ---- weight formats: row(n) prepares a row, at(k) gives LANES float32 weights from k on, one(k) a
// single one ----------

struct Weights {
  const void *data, *group;
  const float* scale;
  int64_t n, k, stride;  // stride: elements from row to row (k where the rows lie together)
};

struct Float32 {
  static constexpr int bits = 32;
  static constexpr bool scaled_rows = false;
  const float* p;
  Float32() = default;
  INLINE Float32(const Weights& w, int64_t n)
      : p(static_cast<const float*>(w.data) + n * w.stride) {}
  INLINE F at(int64_t k) const { return load<F>(p + k); }
  INLINE float one(int64_t k) const { return p[k]; }
};

struct BFloat16 {
  static constexpr int bits = 16;
  static constexpr bool scaled_rows = false;
  const uint16_t* p;
  BFloat16() = default;
  INLINE BFloat16(const Weights& w, int64_t n)
      : p(static_cast<const uint16_t*>(w.data) + n * w.stride) {}
  INLINE F at(int64_t k) const { return reinterpret_cast<F>(widen(p + k) << 16); }
  INLINE float one(int64_t k) const {
    uint32_t bits = uint32_t{p[k]} << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
  }
};

struct Int8 {  // the scale of a row multiplies its finished sum
  static constexpr int bits = 8;
  static constexpr bool scaled_rows = true;
  const int8_t* p;
  Int8() = default;
  INLINE Int8(const Weights& w, int64_t n) : p(static_cast<const int8_t*>(w.data) + n * w.k) {}
  INLINE F at(int64_t k) const { return to_float(widen(p + k)); }
  INLINE float one(int64_t k) const { return p[k]; }
};

const struct FactorTable {
  float values[256];
  FactorTable() {
    for (int i = 0; i < 256; i++) values[i] = static_cast<int8_t>(i);
  }
} factors;

// Each run of 64 weights is 32 bytes: its first group of 32 in the low nibbles, the second in the
// high ones.
struct Int4 {
  static constexpr int bits = 4;
  static constexpr bool scaled_rows = true;
  const uint8_t *p, *group;
  Int4() = default;
  INLINE Int4(const Weights& w, int64_t n)
      : p(static_cast<const uint8_t*>(w.data) + n * w.k / 2),
        group(static_cast<const uint8_t*>(w.group) + n * (w.k / GROUP)) {}
  INLINE I bytes(int64_t k) const { return widen(p + k / (2 * GROUP) * GROUP + k % GROUP); }
  static INLINE F low(I bytes) {  // the weights in the low four bits, without the group's factor
#if defined(__AVX512F__)
    const F table = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
    return (F)_mm512_permutexvar_ps((__m512i)bytes,
                                    (__m512)table);  // only the low four bits of an index count
#else
    return to_float((bytes & 15) - 8);
#endif
  }
  static INLINE F high(I bytes) { return low(bytes >> 4); }
  INLINE F nibbles(int64_t k) const {
    return k % (2 * GROUP) < GROUP ? low(bytes(k)) : high(bytes(k));
  }
  INLINE float factor(int64_t k) const { return factors.values[group[k / GROUP]]; }
  INLINE F at(int64_t k) const { return nibbles(k) * factor(k); }
  INLINE float one(int64_t) const { return 0; }  // K is a multiple of 2 * GROUP
};

// ---- tiles
// ------------------------------------------------------------------------------------------------------------

// y[m, n] for M rows of x and R weight rows from n on. Meanwhile asks memory for as many bytes from
// `ahead` on.
template <typename W, int M, int R>
INLINE void tile(const float* x, const Weights& w, int64_t n, float* y, int64_t ldy,
                 const char* ahead) {
  const int64_t K = w.k;
  F acc[M][R] = {};
  W rows[R];
  UNROLL for (int r = 0; r < R; r++)
    rows[r] = W(w, n + r);
  int64_t k = 0;
  for (; k + LANES <= K; k += LANES) {
    if constexpr (M > 2) {
      constexpr int bytes = R * LANES * W::bits / 8;
      UNROLL for (int i = 0; i < bytes; i += 64)
        __builtin_prefetch(ahead + i);
      ahead += bytes;
    }
    F wv[R];
    UNROLL for (int r = 0; r < R; r++)
      wv[r] = rows[r].at(k);
    UNROLL for (int m = 0; m < M; m++) {
      F xv = load<F>(x + m * K + k);
      UNROLL for (int r = 0; r < R; r++)
        acc[m][r] += wv[r] * xv;
    }
  }
  UNROLL for (int m = 0; m < M; m++) {
    float total[R];
    sum_lanes<R>(acc[m], total);
    UNROLL for (int r = 0; r < R; r++) {
      for (int64_t i = k; i < K; i++) total[r] += rows[r].one(i) * x[m * K + i];
      y[m * ldy + n + r] = W::scaled_rows ? total[r] * w.scale[n + r] : total[r];
    }
  }
}

// All rows of x, in tiles of as equal a size as they allow.
template <typename W, int R>
INLINE void rows_of_x(int64_t m_count, const float* x, const Weights& w, int64_t n, float* y,
                      int64_t ldy, const char* ahead) {
  for (int64_t tiles = (m_count + MAX_TILE - 1) / MAX_TILE; tiles; tiles--) {
    const int64_t rows = (m_count + tiles - 1) / tiles;
    switch (rows) {
      case 1: tile<W, 1, R>(x, w, n, y, ldy, ahead); break;
      case 2: tile<W, 2, R>(x, w, n, y, ldy, ahead); break;
      case 3:
        if constexpr (MAX_TILE >= 3) tile<W, 3, R>(x, w, n, y, ldy, ahead);
        break;
      case 4:
        if constexpr (MAX_TILE >= 4) tile<W, 4, R>(x, w, n, y, ldy, ahead);
        break;
      case 5:
        if constexpr (MAX_TILE >= 5) tile<W, 5, R>(x, w, n, y, ldy, ahead);
        break;
      case 6:
        if constexpr (MAX_TILE >= 6) tile<W, 6, R>(x, w, n, y, ldy, ahead);
        break;
    }
    m_count -= rows;
    x += rows * w.k;
    y += rows * ldy;
  }
}

// ---- one product, cut into chunks
// ----------------------------------------------------------------------------------------

// A buffer that a thread keeps between calls.
struct Scratch {
  float* data = nullptr;
  int64_t capacity = 0;
  float* get(int64_t size) {
    if (size > capacity) {
      std::free(data);
      capacity = (size + 31) / 32 * 32;
      data = static_cast<float*>(std::aligned_alloc(128, capacity * sizeof(float)));
    }
    return data;
  }
  ~Scratch() { std::free(data); }
};

// Rows n0..n1 (at most ROWS) of the weights times all of x; column 0 of out is row n0. Weight rows
// are short, the hardware prefetcher starts anew on each: memory is asked for them ahead of time.
template <typename W>
INLINE void run_rows(const Weights& w, int64_t m_count, const float* x, int64_t n0, int64_t n1,
                     float* out, int64_t ldo) {
  const int64_t bytes = w.k * W::bits / 8;
  if (m_count <= STREAMED_ROWS) stream().used((n1 - n0) * bytes);
  out -= n0;  // tiles index the result by weight row
  const int64_t next = n0 + 2 * ROWS <= w.n ? n0 + ROWS : n0;
  const char* ahead = static_cast<const char*>(w.data) + next * bytes;
  if (n1 - n0 == ROWS) return rows_of_x<W, ROWS>(m_count, x, w, n0, out, ldo, ahead);
  for (int64_t n = n0; n < n1; n++) rows_of_x<W, 1>(m_count, x, w, n, out, ldo, ahead);
}

// y[rows, n0..n1], y and x starting at their row 0.
template <typename W>
void run_block(const Weights& w, int64_t rows, const float* x, float* y, int64_t n0, int64_t n1) {
  static thread_local Scratch results;
  const int64_t ldy = w.n;
  if (rows <= MAX_TILE) {
    for (int64_t n = n0; n < n1; n += ROWS)
      run_rows<W>(w, rows, x, n, std::min(n + ROWS, n1), y + n, ldy);
    return;
  }
  // Results pass through a small buffer: written ROWS at a time, rows that lie a multiple of 4 KiB
  // apart would evict each other's half-filled lines from the cache.
  float* out = results.get(rows * COLUMNS);
  for (int64_t n = n0; n < n1; n += COLUMNS) {
    const int64_t end = std::min<int64_t>(n + COLUMNS, n1);
    for (int64_t i = n; i < end; i += ROWS)
      run_rows<W>(w, rows, x, i, std::min(i + ROWS, end), out + i - n, COLUMNS);
    for (int64_t m = 0; m < rows; m++)
      std::memcpy(y + m * ldy + n, out + m * COLUMNS, (end - n) * sizeof(float));
  }
}

// Chunks are panels of x that stay in the second-level cache times runs of weight rows: small
// enough to share out evenly, at least 16 KiB of weights.
struct Product {
  const float* x;
  float* y;
  Weights w;
  int64_t m, panel, rows_per_chunk, n_chunks, chunks, bits;
  bool streamed;
  int64_t id;  // of x among all products of this process
  void (*block)(const Weights&, int64_t rows, const float* x, float* y, int64_t n0, int64_t n1,
                int64_t id);

  // columns: how many of the N results chunks are made of (fewer than N where a chunk's user
  // computes the others with them); all but the last chunk have a multiple of `unit` of them.
  template <typename Run>
  void plan(const float* x_, float* y_, const Weights& w_, Run* run, int64_t bits_, bool streamed_,
            int64_t m_, int64_t threads, int64_t columns, int64_t unit) {
    x = x_, y = y_, w = w_, m = m_, block = run, bits = bits_, streamed = streamed_;
    static std::atomic<int64_t> ids{0};
    id = ids.fetch_add(1, std::memory_order_relaxed) + 1;
    panel = std::max<int64_t>(MAX_TILE, CACHE_BYTES / (w.k * 4) / MAX_TILE * MAX_TILE);
    const int64_t panels = (m + panel - 1) / panel;
    const int64_t per_thread =
        std::max<int64_t>(1, (m <= 2 ? 4 : 8) / std::max<int64_t>(1, panels));
    int64_t rows = (columns + threads * per_thread - 1) / (threads * per_thread);
    if (m < MAX_TILE) rows = std::max<int64_t>(rows, (16 << 10) / std::max<int64_t>(1, w.k));
    if (m >= WIDE_FROM) unit = unit / ROWS * WIDE_ROWS;
    rows_per_chunk = (rows + unit - 1) / unit * unit;
    n_chunks = (columns + rows_per_chunk - 1) / rows_per_chunk;
    chunks = panels * n_chunks;
  }
  struct Part {
    int64_t m0, m1, n0, n1;
  };
  Part part(int64_t chunk, int64_t columns) const {
    const int64_t m0 = chunk / n_chunks * panel, n0 = chunk % n_chunks * rows_per_chunk;
    return {m0, std::min(m0 + panel, m), n0, std::min(n0 + rows_per_chunk, columns)};
  }
  // What rows n0..n1 of the weights take in memory, as Phase::reads; of scales the first
  // FIRST_ROWS: the rest is asked for on the way.
  bool reads(int64_t n0, int64_t n1, int64_t part, const char** from, int64_t* bytes) const {
    if (!streamed || part > 2) return false;
    const int64_t row = part == 0 ? scale_bytes() : part == 1 ? group_bytes() : w.k * bits / 8;
    const void* data = part == 0 ? w.scale : part == 1 ? w.group : w.data;
    *from = static_cast<const char*>(data) + n0 * row,
    *bytes = (part < 2 ? std::min(n1 - n0, FIRST_ROWS) : n1 - n0) * row;
    return true;
  }
  int64_t scale_bytes() const { return w.scale ? sizeof(float) : 0; }
  int64_t group_bytes() const { return w.group ? w.k / GROUP : 0; }
  void run(const Part& p, int64_t offset = 0) const {
    if (streamed)
      stream().used(std::min(p.n1 - p.n0, FIRST_ROWS) * (scale_bytes() + group_bytes()));
    block(w, p.m1 - p.m0, x + p.m0 * w.k, y + p.m0 * w.n, offset + p.n0, offset + p.n1, id);
  }
};

}  // namespace deepinfer
