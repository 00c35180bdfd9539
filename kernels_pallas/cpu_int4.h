// One or two rows of x times int4 weights, at the speed of the memory rather than of unpacking.
//
// 64 bytes of weights are read as 16 integers of eight weights each. A shift brings one nibble of each to the top of a float's
// mantissa: with 1.0's exponent set that is 1 + q / 16, in two instructions for 16 weights; what is wrong with it, a constant,
// comes off each group's sum by way of the sum of its inputs. The 16 weights of a shift are not neighbours: x is laid out to
// match, once per chunk. Needs AVX-512 (whose registers hold the integers of 128 weights); elsewhere products take the common path.
#pragma once

#include "cpu_product.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define DEEPINFER_INT4_FEW_ROWS 2

namespace deepinfer {

constexpr int64_t STEP = 128;  // weights per 64 bytes

inline int64_t padded_inputs(int64_t k) { return (k + STEP - 1) / STEP * STEP; }

// Vector j of a step holds, for integer l, the input of nibble j: byte 4 l + j / 2, whose high nibble is 32 inputs on.
inline void lay_out(const float* x, int64_t k, float* to) {
  for (int64_t at = 0; at < k; at += STEP, to += STEP) {
    const __mmask16 live = k - at >= STEP ? 0xffff : 0;
    UNROLL for (int high = 0; high < 2; high++) {
      const float* p = x + at + high * GROUP;
      const __m512 a0 = _mm512_loadu_ps(p), a1 = _mm512_loadu_ps(p + 16);
      const __m512 b0 = _mm512_maskz_loadu_ps(live, p + 2 * GROUP), b1 = _mm512_maskz_loadu_ps(live, p + 2 * GROUP + 16);
      UNROLL for (int i = 0; i < 4; i++) {
        const __m512i every4 = _mm512_add_epi32(_mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28), _mm512_set1_epi32(i));
        const __m512 a = _mm512_permutex2var_ps(a0, every4, a1), b = _mm512_permutex2var_ps(b0, every4, b1);
        _mm512_storeu_ps(to + (2 * i + high) * 16, _mm512_mask_blend_ps(0xff00, a, b));
      }
    }
  }
}

// sums [groups padded to 16]: of each group's inputs, times what every weight of it is off by.
inline void group_sums(const float* x, int64_t groups, float* sums) {
  for (int64_t g = 0; g < groups; g++) sums[g] = 1.5f * sum(load<F>(x + g * GROUP) + load<F>(x + g * GROUP + LANES));
  for (int64_t g = groups; g % 16; g++) sums[g] = 0.f;
}

// Nibble J of each integer as 1 + q / 16.
template <int J> INLINE F weights_at(__m512i v) {
  const __m512i shifted = J < 5 ? _mm512_slli_epi32(v, J < 5 ? 19 - 4 * J : 0) : _mm512_srli_epi32(v, J < 5 ? 0 : 4 * J - 19);
  return (F)_mm512_ternarylogic_epi32(shifted, _mm512_set1_epi32(0x780000), _mm512_set1_epi32(0x3f800000), 0xea);  // (a & b) | c
}

template <int M, int J> INLINE void add_nibbles(__m512i v, const float* x, int64_t ldx, F* low, F* high) {
  const F even = weights_at<J>(v), odd = weights_at<J + 1>(v);
  UNROLL for (int m = 0; m < M; m++) {
    low[m] += even * load<F>(x + m * ldx + J * 16);
    high[m] += odd * load<F>(x + m * ldx + J * 16 + 16);
  }
  if constexpr (J < 6) add_nibbles<M, J + 2>(v, x, ldx, low, high);
}

// y[m, n..n + R] for M rows of x as `lay_out` leaves them, ldx apart, each followed by its `group_sums`.
template <int M, int R>
INLINE void int4_tile(const float* x, int64_t ldx, const Weights& w, int64_t n, float* y, int64_t ldy) {
  const __m512i even = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 2, 2, 2, 2, 2, 2, 2, 2), one = _mm512_set1_epi32(1);
  const int64_t inputs = w.k, groups = inputs / GROUP, row_bytes = inputs / 2;
  const uint8_t* data = static_cast<const uint8_t*>(w.data) + n * row_bytes;
  const int8_t* factor = static_cast<const int8_t*>(w.group) + n * groups;
  const float* sums = x + padded_inputs(inputs);
  F acc[M][R] = {};
  for (int64_t k = 0; k < inputs; k += 4 * STEP, factor += 16, sums += 16) {  // 16 groups, whose factors fill a vector
    F factors[R];
    const int64_t end = std::min(k + 4 * STEP, inputs);
    const __mmask16 mask = static_cast<__mmask16>((1u << (end - k) / GROUP) - 1);
    UNROLL for (int r = 0; r < R; r++) {
      factors[r] = (F)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(mask, factor + r * groups)));
      UNROLL for (int m = 0; m < M; m++) acc[m][r] -= factors[r] * load<F>(sums + m * ldx);
    }
    __m512i index = even;
    for (int64_t i = k; i < end; i += STEP, data += STEP / 2, index = _mm512_add_epi32(index, _mm512_set1_epi32(4))) {
      const __mmask16 live = end - i >= STEP ? 0xffff : 0xff;
      UNROLL for (int r = 0; r < R; r++) {
        const __m512i v = _mm512_maskz_loadu_epi32(live, data + r * row_bytes);
        F low[M] = {}, high[M] = {};
        add_nibbles<M, 0>(v, x + i, ldx, low, high);
        const F first = (F)_mm512_permutexvar_ps(index, (__m512)factors[r]);
        const F second = (F)_mm512_permutexvar_ps(_mm512_add_epi32(index, one), (__m512)factors[r]);
        UNROLL for (int m = 0; m < M; m++) {
          acc[m][r] += low[m] * first;
          acc[m][r] += high[m] * second;
        }
      }
    }
  }
  UNROLL for (int m = 0; m < M; m++) {
    float total[R];
    sum_lanes<R>(acc[m], total);
    UNROLL for (int r = 0; r < R; r++) y[m * ldy + n + r] = total[r] * (16 * w.scale[n + r]);
  }
}

template <int M> INLINE void int4_rows(const Weights& w, const float* x, float* y, int64_t n0, int64_t n1) {
  static thread_local Scratch scratch;
  const int64_t inputs = padded_inputs(w.k), ldx = inputs + (w.k / GROUP + 15) / 16 * 16;
  float* laid = scratch.get(M * ldx);
  for (int m = 0; m < M; m++) {
    lay_out(x + m * w.k, w.k, laid + m * ldx);
    group_sums(x + m * w.k, w.k / GROUP, laid + m * ldx + inputs);
  }
  int64_t n = n0;
  for (; n + ROWS <= n1; n += ROWS) {
    prefetch_rows<Int4>(w, n, n + ROWS, AHEAD);
    int4_tile<M, ROWS>(laid, ldx, w, n, y, w.n);
  }
  for (; n < n1; n++) int4_tile<M, 1>(laid, ldx, w, n, y, w.n);
}

}  // namespace deepinfer
#endif
