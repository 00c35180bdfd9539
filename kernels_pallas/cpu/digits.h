// A few rows of x times int8 or int4 weights, in integers, at the speed of the memory rather than
// of unpacking.
//
// A row of x becomes three signed base-254 digits, x = step * (d0 + d1 / 254 + d2 / 254^2), as
// models/layers/quant.py does for XLA: no less exact than float32. Weights are made unsigned by
// adding 128, as the CPU's byte products want them, 64 of them in one instruction for int8; for
// int4 a table per pair of group factors, (q - 8) * factor + 128, turns nibbles into them by a
// shuffle. What 128 is too much, 128 times the digits' sum, is where the sums begin. They are
// exact, so results depend neither on the tile nor on the rows beside them. A NaN makes its whole
// row of results NaN. Needs AVX-512 VNNI; elsewhere products take the common path.
#pragma once

#include <cmath>

#include "product.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__BMI2__)
#define DEEPINFER_DIGITS

namespace deepinfer {

constexpr int DIGITS = 3;
constexpr float BASE = 254.f;
constexpr float LEAST_STEP = 1e-37f;  // whose reciprocal is still a number
constexpr int64_t DIGIT_ROWS = 8;  // rows of x that take this way
// With as many no sum overflows.
constexpr int64_t MAX_DIGIT_INPUTS = (int64_t{1} << 31) / (4 * 255 * 127) * 64;

// How a 64-byte vector of stored weights becomes unsigned ones.
struct Bytes {
  static constexpr int64_t weights = 64;
  static constexpr int parts = 1;
  static int64_t place(int64_t k) { return k; }
};
struct Nibbles {  // bytes 0..31: low nibbles inputs 0..31, high ones 32..63; bytes 32..63:
                  // inputs 64..127 likewise
  static constexpr int64_t weights = 128;
  static constexpr int parts = 2;
  static int64_t place(int64_t k) {
    return k / 128 * 128 + k / 32 % 2 * 64 + k / 64 % 2 * 32 + k % 32;
  }
};

// A row of x: digits [DIGITS][padded] in the order of the weights, where each digit's sums begin,
// and the step.
struct DigitRow {
  alignas(64) int32_t start[DIGITS][16];
  float step;
};

template <typename Layout> INLINE int64_t padded_inputs(int64_t k) {
  return (k + Layout::weights - 1) / Layout::weights * Layout::weights;
}

template <typename Layout> INLINE void make_digits(const float* x, int64_t k, int8_t* digits,
                                                   DigitRow& row) {
  const int64_t padded = padded_inputs<Layout>(k);
  __m512 top = _mm512_setzero_ps();
  __mmask16 broken = 0;
  for (int64_t i = 0; i < k; i += 16) {
    const __mmask16 live = k - i >= 16 ? 0xffff : static_cast<__mmask16>((1u << (k - i)) - 1);
    const __m512 v = _mm512_maskz_loadu_ps(live, x + i);
    top = _mm512_max_ps(top, _mm512_abs_ps(v));
    broken |= _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  }
  row.step = broken ? NAN : std::max(_mm512_reduce_max_ps(top) / 127.f, LEAST_STEP);
  const __m512 by = _mm512_set1_ps(1.f / row.step), base = _mm512_set1_ps(BASE);
  for (int64_t i = 0; i < padded; i += 16) {
    const __mmask16 live = k - i >= 16 ? 0xffff
                           : k <= i    ? 0
                                       : static_cast<__mmask16>((1u << (k - i)) - 1);
    __m512 rest = _mm512_mul_ps(_mm512_maskz_loadu_ps(live, x + i), by);
    int8_t* to = digits + Layout::place(i);
    UNROLL for (int d = 0; d < DIGITS; d++) {
      const __m512 digit =
          _mm512_roundscale_ps(rest, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + d * padded),
                       _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(digit)));
      rest = _mm512_mul_ps(_mm512_sub_ps(rest, digit), base);
    }
  }
  const __m512i much = _mm512_set1_epi8(-128);
  UNROLL for (int d = 0; d < DIGITS; d++) {
    __m512i sums = _mm512_setzero_si512();
    for (int64_t i = 0; i < padded; i += 64)
      sums = _mm512_dpbusd_epi32(sums, much, _mm512_load_si512(digits + d * padded + i));
    _mm512_store_si512(row.start[d], _mm512_sub_epi32(_mm512_setzero_si512(), sums));
  }
}

// For every two factors: (q - 8) * factor + 128 of the 16 values of q, the first factor's twice,
// then the second's.
struct NibbleTables {
  alignas(64) uint8_t of[1 << 10][64];
  NibbleTables() {
    for (int pair = 0; pair < 1 << 10; pair++)
      for (int i = 0; i < 64; i++)
        of[pair][i] = static_cast<uint8_t>((i % 16 - 8) * (i < 32 ? pair & 31 : pair >> 5) + 128);
  }
};
inline const NibbleTables nibble_tables;

INLINE __m512i nibble_table(uint32_t factors, uint32_t which) {
  return _mm512_load_si512(nibble_tables.of[_pext_u32(factors, which)]);
}

// Where a tile's rows are read: row r at `at` + r * stride, its factors at `factors` + r * groups.
struct Cursor {
  const char *at, *factors;
  int64_t stride, stride3, groups, groups3;
  int64_t left;  // weights of a row still to come
  template <typename Layout> static INLINE Cursor make(const Weights& w, int64_t n) {
    const int64_t stride = w.k * 64 / Layout::weights, groups = w.k / GROUP;
    return {static_cast<const char*>(w.data) + n * stride,
            static_cast<const char*>(w.group) + n * groups,
            stride,
            3 * stride,
            groups,
            3 * groups,
            w.k};
  }
  INLINE const char* row(int r) const {
    return r < 2 ? at + r * stride : r == 2 ? at + 2 * stride : at + stride3;
  }
  template <typename T> INLINE uint32_t factors_of(int r) const {
    return load<T>(r < 2    ? factors + r * groups
                   : r == 2 ? factors + 2 * groups
                            : factors + groups3);
  }
  template <typename Layout> INLINE void next() { at += 64, factors += 4, left -= Layout::weights; }
};

// A row's unsigned weights of a step: of a whole one, or of what is left of the row.
template <bool WHOLE> INLINE void unsigned_weights(Bytes, const Cursor& c, int r, __m512i* out) {
  const __m512i v = WHOLE ? _mm512_loadu_si512(c.row(r))
                          : _mm512_maskz_loadu_epi8(~uint64_t{0} >> (64 - c.left), c.row(r));
  out[0] = _mm512_xor_si512(v, _mm512_set1_epi8(-128));
}
template <bool WHOLE> INLINE void unsigned_weights(Nibbles, const Cursor& c, int r, __m512i* out) {
  const uint32_t factors = WHOLE ? c.factors_of<uint32_t>(r)
                                 : c.factors_of<uint16_t>(r);  // of a step's four groups, or of two
  const __m512i mask = _mm512_set1_epi8(15);
  __m512i v = WHOLE ? _mm512_loadu_si512(c.row(r)) : _mm512_maskz_loadu_epi32(0xff, c.row(r));
  asm("" : "+v"(v));  // read once
  out[0] = _mm512_shuffle_epi8(nibble_table(factors, 0x1f001f), _mm512_and_si512(v, mask));
  out[1] = _mm512_shuffle_epi8(nibble_table(factors, 0x1f001f00),
                               _mm512_and_si512(_mm512_srli_epi16(v, 4), mask));
}

// acc += the products of 4 bytes each: as _mm512_dpbusd_epi32, around which GCC 12 copies the sums
// back and forth.
INLINE void add_products(__m512i& acc, __m512i weights, __m512i digits) {
  asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(weights), "v"(digits));
}

template <typename Layout, int M, int R, bool WHOLE>
INLINE void digit_step(const Cursor& c, const int8_t* digits, int64_t padded,
                       __m512i (*acc)[R][DIGITS]) {
  __m512i weights[R][Layout::parts];
  UNROLL for (int r = 0; r < R; r++)
    unsigned_weights<WHOLE>(Layout{}, c, r, weights[r]);
  UNROLL for (int part = 0; part < Layout::parts; part++) UNROLL
    for (int m = 0; m < M; m++) UNROLL
      for (int d = 0; d < DIGITS; d++) {
        const __m512i x = _mm512_load_si512(digits + (m * DIGITS + d) * padded + part * 64);
        UNROLL for (int r = 0; r < R; r++)
          add_products(acc[m][r][d], weights[r][part], x);
      }
}

// y[m, n..n + R] for M rows. Not inlined: GCC 12 then keeps the sums in memory.
template <typename Layout, int M, int R>
__attribute__((noinline)) void digit_tile(const Weights& w, int64_t n, const int8_t* digits,
                                          int64_t padded, const DigitRow* rows, float* y) {
  __m512i acc[M][R][DIGITS];
  UNROLL for (int m = 0; m < M; m++) UNROLL
    for (int d = 0; d < DIGITS; d++) {
      const __m512i start = _mm512_load_si512(rows[m].start[d]);
      UNROLL for (int r = 0; r < R; r++)
        acc[m][r][d] = start;
    }
  Cursor c = Cursor::make<Layout>(w, n);
  for (; c.left >= Layout::weights; c.next<Layout>(), digits += Layout::weights)
    digit_step<Layout, M, R, true>(c, digits, padded, acc);
  if (c.left) digit_step<Layout, M, R, false>(c, digits, padded, acc);
  const __m512 less = _mm512_set1_ps(1.f / BASE);
  UNROLL for (int m = 0; m < M; m++) {
    F sums[R];
    float total[R];
    UNROLL for (int r = 0; r < R; r++) {
      const __m512 low =
          _mm512_fmadd_ps(_mm512_cvtepi32_ps(acc[m][r][2]), less, _mm512_cvtepi32_ps(acc[m][r][1]));
      sums[r] = (F)_mm512_fmadd_ps(low, less, _mm512_cvtepi32_ps(acc[m][r][0]));
    }
    sum_lanes<R>(sums, total);
    UNROLL for (int r = 0; r < R; r++)
      y[m * w.n + n + r] = total[r] * (rows[m].step * w.scale[n + r]);
  }
}

template <typename Layout, int R>
INLINE void digit_rows(const Weights& w, int64_t m, int64_t n, const int8_t* digits, int64_t padded,
                       const DigitRow* rows, float* y) {
  if (m == 1) return digit_tile<Layout, 1, R>(w, n, digits, padded, rows, y);
  digit_tile<Layout, 2, R>(w, n, digits, padded, rows, y);
}

// As run_block, for up to DIGIT_ROWS rows. id: of this x among all products; a thread makes its
// digits once.
template <typename Layout> void run_digits(const Weights& w, int64_t m, const float* x, float* y,
                                           int64_t n0, int64_t n1, int64_t id) {
  static thread_local Scratch scratch;
  static thread_local DigitRow rows[DIGIT_ROWS];
  static thread_local int64_t have = 0;
  const int64_t padded = padded_inputs<Layout>(w.k), row = w.k * 64 / Layout::weights,
                groups = w.group ? w.k / GROUP : 0;
  Stream& ahead = stream();
  int8_t* digits = reinterpret_cast<int8_t*>(scratch.get(m * DIGITS * padded / 4));
  if (have != id) {
    for (int64_t i = 0; i < m; i++)
      make_digits<Layout>(x + i * w.k, w.k, digits + i * DIGITS * padded, rows[i]);
    have = id;
  }
  for (int64_t n = n0; n < n1; n += ROWS) {
    const int64_t end = std::min<int64_t>(n + ROWS, n1);
    ahead.used((end - n) * row);
    __builtin_prefetch(w.scale + n + FIRST_ROWS);
    if (groups) __builtin_prefetch(static_cast<const char*>(w.group) + (n + FIRST_ROWS) * groups);
    if (groups)
      __builtin_prefetch(static_cast<const char*>(w.group) + (n + FIRST_ROWS) * groups + 64);
    for (int64_t i = 0; i < m; i += 2) {
      const int64_t tile = std::min<int64_t>(2, m - i);
      const int8_t* of = digits + i * DIGITS * padded;
      if (end - n == ROWS) digit_rows<Layout, ROWS>(w, tile, n, of, padded, rows + i, y + i * w.n);
      else
        for (int64_t r = n; r < end; r++)
          digit_rows<Layout, 1>(w, tile, r, of, padded, rows + i, y + i * w.n);
    }
  }
}

}  // namespace deepinfer
#endif
