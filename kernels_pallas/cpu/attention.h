// Softmax attention of one sequence's query rows over the pages of one key/value head, keys and
// values read where they lie.
//
// Blocks of up to KEYS keys with an online softmax (Milakov and Gimelshein, 2018); scores are
// products with the pages' key rows as weights. A long sequence is cut into spans whose partial
// results are merged afterwards, so that one sequence feeds all threads.
#pragma once

#include <algorithm>
#include <memory>

#include "ffi.h"
#include "product.h"
#include "stream.h"

namespace deepinfer {

constexpr int KEYS = 128;  // keys per block, which begins at a multiple of them
// Of a row of scores: room before and after for keys of the same page that do not count.
constexpr int STRIDE = KEYS + 2 * LANES;
// Keys per chunk, where sequences are cut: at most, at least, a multiple of.
constexpr int SPAN = 1024, LEAST_SPAN = 64, SPAN_STEP = 32;
constexpr int MAX_ROWS = 16;  // query rows per chunk
constexpr float NOTHING = -1e30f;  // a score that counts for nothing

// e^x (Cephes expf: 2 units in the last place), 0 below -87; NaN stays NaN.
INLINE F exponential(F x) {
  const F small = x, magic = F{} + 12582912.f;
  x = x < -87.f ? F{} - 87.f : x;
  x = x > 88.f ? F{} + 88.f : x;
  const F shifted = x * 1.44269504f + magic, n = shifted - magic;
  const F r = x - n * 0.693359375f + n * 2.12194440e-4f;
  F p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.f;
  const I power = (reinterpret_cast<I>(shifted) - 0x4B400000 + 127) << 23;
  const F value = p * reinterpret_cast<F>(power);
  return small < -87.f ? F{} : value;
}

INLINE uint16_t to_bfloat16(float value) {  // to nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(bits >> 16 | 64);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Pools [blocks, block_size, kv_heads, d or dv]; without values, they are the first dv channels of
// the keys.
struct Pools {
  void *keys, *values;
  bool half;  // bfloat16, else float32
  int64_t blocks, block_size, kv_heads, d, dv;
  bool streamed = false;  // their pages are part of the threads' streams

  // The block of a table's page; an id outside the pool stands for the nearest one in it.
  int64_t block(const int32_t* table, int64_t page) const {
    return std::clamp<int64_t>(table[page], 0, blocks - 1);
  }
  int64_t value_width() const { return values ? dv : d; }
  template <typename T> T* key(int64_t block, int64_t offset, int64_t head) const {
    return static_cast<T*>(keys) + ((block * block_size + offset) * kv_heads + head) * d;
  }
  template <typename T> T* value(int64_t block, int64_t offset, int64_t head) const {
    return static_cast<T*>(values ? values : keys) +
           ((block * block_size + offset) * kv_heads + head) * value_width();
  }
};

// What rows of queries have seen so far: acc [rows, dv] is the sum of weights times values,
// relative to e^top.
struct Partial {
  float *top, *total, *acc;
};

// Rows 0..rows of one chunk. Row r sees keys low[r]..high[r]; q [rows, d] is scaled.
struct Rows {
  int64_t count;
  const float* q;
  int64_t low[MAX_ROWS], high[MAX_ROWS];
};

template <typename W, int R, int V, typename T>
INLINE void add_values(const T* const* values, int64_t count, const float* weights, float* acc,
                       int64_t dv, int64_t c) {
  F sums[R][V];
  UNROLL for (int r = 0; r < R; r++) UNROLL
    for (int v = 0; v < V; v++) sums[r][v] = load<F>(acc + r * dv + c + v * LANES);
  for (int64_t i = 0; i < count; i++) {
    W row;
    row.p = values[i];
    F value[V];
    UNROLL for (int v = 0; v < V; v++)
      value[v] = row.at(c + v * LANES);
    UNROLL for (int r = 0; r < R; r++) {
      const float weight = weights[r * STRIDE + i];
      UNROLL for (int v = 0; v < V; v++)
        sums[r][v] += weight * value[v];
    }
  }
  UNROLL for (int r = 0; r < R; r++) UNROLL
    for (int v = 0; v < V; v++) std::memcpy(acc + r * dv + c + v * LANES, &sums[r][v], sizeof(F));
}

template <typename W, int R, typename T>
INLINE void add_values(const T* const* values, int64_t count, const float* weights, float* acc,
                       int64_t dv) {
  int64_t c = 0;
  for (; c + 4 * LANES <= dv; c += 4 * LANES)
    add_values<W, R, 4>(values, count, weights, acc, dv, c);
  for (; c < dv; c += LANES) add_values<W, R, 1>(values, count, weights, acc, dv, c);
}

// The softmax of one row's scores over a block, in place, and what it does to the row's partial
// result.
INLINE void weigh(float* scores, int64_t count, float& top, float& total, float* acc, int64_t dv) {
  F peak = F{} + top;
  for (int64_t i = 0; i < count; i += LANES) {
    const F s = load<F>(scores + i);
    peak = s > peak ? s : peak;
  }
  float lanes[LANES], new_top = top;
  std::memcpy(lanes, &peak, sizeof lanes);
  for (float lane : lanes) new_top = std::max(new_top, lane);
  F sums = {};
  for (int64_t i = 0; i < count; i += LANES) {
    const F e = exponential(load<F>(scores + i) - new_top);
    sums += e;
    std::memcpy(scores + i, &e, sizeof e);
  }
  const F keep = exponential(F{} + (top - new_top));
  total = total * keep[0] + sum(sums);
  top = new_top;
  for (int64_t i = 0; i < dv; i += LANES) {
    const F a = load<F>(acc + i) * keep;
    std::memcpy(acc + i, &a, sizeof a);
  }
}

// Adds the keys begin..end of a sequence to `out`. Weights of rows that do not see a key are zero;
// no value outside begin..end is read. What a row gets depends on its own position and keys only,
// to the last bit, not on the rows that it shares a chunk with.
template <typename W, typename T>
void attend(const Rows& rows, const Pools& pools, const int32_t* table, int64_t head, int64_t begin,
            int64_t end, Partial out) {
  alignas(64) static thread_local float buffer[MAX_ROWS * STRIDE];
  float* scores = buffer + LANES;
  const T* values[KEYS];
  const int64_t bs = pools.block_size;
  for (int64_t k0 = begin; k0 < end;) {
    const int64_t base = k0 - k0 % KEYS, k1 = std::min(base + KEYS, end), count = k1 - base,
                  padded = (count + LANES - 1) / LANES * LANES;
    const int64_t first = k0 - base;
    for (int64_t key = k0; key < k1;) {
      const int64_t block = pools.block(table, key / bs), offset = key % bs,
                    n = std::min(bs - offset, k1 - key);
      if (pools.streamed) stream().used(n * (pools.d + pools.dv) * static_cast<int64_t>(sizeof(T)));
      const Weights w{pools.key<T>(block, 0, head), nullptr, nullptr, bs, pools.d,
                      pools.kv_heads * pools.d};
      for (int64_t i = 0; i < n; i++) {
        const T* value = values[key - base + i] = pools.value<T>(block, offset + i, head);
        if (pools.values)
          for (int64_t c = 0; c < pools.dv; c += 64 / sizeof(T)) __builtin_prefetch(value + c);
      }
      if (key + n < end) {  // the page to come
        const T* next = pools.key<T>(pools.block(table, (key + n) / bs), 0, head);
        for (int64_t i = 0; i < std::min(bs, end - key - n); i++)
          for (int64_t c = 0; c < pools.d; c += 64 / sizeof(T))
            __builtin_prefetch(next + i * w.stride + c);
      }
      float* to = scores + (key - base) - offset;  // of the page's first key
      const char* ahead = static_cast<const char*>(w.data);
      int64_t i = offset - offset % ROWS;  // always the same tiles of a page, whose scores differ
                                           // from other tiles' in the last bit
      for (; i + ROWS <= bs && i < offset + n; i += ROWS)
        rows_of_x<W, ROWS>(rows.count, rows.q, w, i, to, STRIDE, ahead);
      for (; i < offset + n; i++) rows_of_x<W, 1>(rows.count, rows.q, w, i, to, STRIDE, ahead);
      key += n;
    }
    for (int64_t r = 0; r < rows.count; r++) {
      float* s = scores + r * STRIDE;
      const int64_t low = std::min(std::max(rows.low[r] - base, int64_t{0}), count),
                    high = std::min(rows.high[r] - base, count);
      for (int64_t i = 0; i < low; i++) s[i] = NOTHING;
      for (int64_t i = std::max(high, low); i < padded; i++) s[i] = NOTHING;
      if (low < high) weigh(s, padded, out.top[r], out.total[r], out.acc + r * pools.dv, pools.dv);
      else std::fill(s, s + padded, 0.f);
    }
    for (int64_t r = 0; r < rows.count;) {
      const float* s = scores + r * STRIDE + first;
      float* acc = out.acc + r * pools.dv;
      switch (std::min<int64_t>(rows.count - r, 4)) {
        case 1: add_values<W, 1>(values + first, count - first, s, acc, pools.dv), r += 1; break;
        case 2: add_values<W, 2>(values + first, count - first, s, acc, pools.dv), r += 2; break;
        case 3: add_values<W, 3>(values + first, count - first, s, acc, pools.dv), r += 3; break;
        default: add_values<W, 4>(values + first, count - first, s, acc, pools.dv), r += 4;
      }
    }
    k0 = k1;
  }
}

inline void attend(const Rows& rows, const Pools& pools, const int32_t* table, int64_t head,
                   int64_t begin, int64_t end, Partial out) {
  if (pools.half) return attend<BFloat16, uint16_t>(rows, pools, table, head, begin, end, out);
  attend<Float32, float>(rows, pools, table, head, begin, end, out);
}

// out [dv]: the finished row; zeros where it saw nothing.
inline void finish(Partial p, int64_t r, int64_t dv, float* out) {
  const float by = p.total[r] == 0 ? 0.f : 1.f / p.total[r];
  for (int64_t c = 0; c < dv; c++) out[c] = p.acc[r * dv + c] * by;
}

// q f32 [rows, H, D]; keys, and values unless they are part of the keys, [N, bs, KH, D or Dv]; out
// f32 [rows, H, Dv].
inline bool paged_operands_fit(const XLA_FFI_Buffer* q, const XLA_FFI_Buffer* keys,
                               const XLA_FFI_Buffer* values, const XLA_FFI_Buffer* out) {
  if (values && std::memcmp(keys->dims, values->dims, 3 * sizeof(int64_t))) return false;
  return q->rank == 3 && keys->rank == 4 && keys->dims[0] > 0 && keys->dims[1] > 0 &&
         (keys->dtype == XLA_FFI_DataType_F32 || keys->dtype == XLA_FFI_DataType_BF16) &&
         (!values || values->dtype == keys->dtype) && q->dims[2] % LANES == 0 &&
         out->dims[2] % LANES == 0;
}
inline Pools paged_pools(const XLA_FFI_Buffer* keys, const XLA_FFI_Buffer* values, int64_t dv) {
  const bool half = keys->dtype == XLA_FFI_DataType_BF16;
  return {keys->data,    values ? values->data : nullptr,
          half,          keys->dims[0],
          keys->dims[1], keys->dims[2],
          keys->dims[3], dv};
}

// Numbers of keys, each as far as a table of `pages` can name them.
inline std::shared_ptr<int32_t[]> lengths(const XLA_FFI_Buffer* lens, int64_t pages,
                                          const Pools& pools) {
  const int64_t most = std::min<int64_t>(pages * pools.block_size, INT32_MAX);
  std::shared_ptr<int32_t[]> within(new int32_t[lens->dims[0]]);
  for (int64_t i = 0; i < lens->dims[0]; i++)
    within[i] = std::clamp<int64_t>(data<const int32_t>(lens)[i], 0, most);
  return within;
}

// Decode attention of S sequences, q_per_seq rows each: chunks are (sequence, head, rows, span of
// keys).
struct Decode {
  Pools pools;
  const int32_t* tables;
  std::shared_ptr<int32_t[]> lens;
  const float* sinks;  // one per query head, or null
  int64_t sequences, pages, heads, q_per_seq, window;  // window 0: none
  float scale;
  int64_t row_blocks, units, spans, span_keys;
  std::shared_ptr<float[]>
      partials;  // [units, spans, MAX_ROWS, 2 + dv] where there are several spans

  int64_t group() const { return heads / pools.kv_heads; }
  int64_t rows() const { return group() * q_per_seq; }

  void plan(int64_t threads) {
    row_blocks = (rows() + MAX_ROWS - 1) / MAX_ROWS;
    units = sequences * pools.kv_heads * row_blocks;
    const int64_t longest =
        std::max<int64_t>(1, *std::max_element(lens.get(), lens.get() + sequences));
    spans = std::max<int64_t>(threads, (longest + SPAN - 1) / SPAN);
    spans = units >= 4 * threads
                ? 1
                : std::min<int64_t>(spans, (longest + LEAST_SPAN - 1) / LEAST_SPAN);
    span_keys = ((longest + spans - 1) / spans + SPAN_STEP - 1) / SPAN_STEP * SPAN_STEP;
    spans = (longest + span_keys - 1) / span_keys;
    if (spans > 1) partials.reset(new float[units * spans * MAX_ROWS * (2 + pools.dv)]);
  }

  struct Unit {
    int64_t sequence, head, row, count;
  };
  // Chunks: all units' first spans, then all units' second ones.
  int64_t span_of(int64_t chunk) const { return chunk / units; }
  Unit unit_of(int64_t chunk) const { return unit(chunk % units); }
  Unit unit(int64_t i) const {
    const int64_t row = i % row_blocks * MAX_ROWS;
    return {i / row_blocks / pools.kv_heads, i / row_blocks % pools.kv_heads, row,
            std::min<int64_t>(MAX_ROWS, rows() - row)};
  }
  // Where row r of a unit lies among the rows [sequences * q_per_seq, heads] of queries and
  // results.
  int64_t place(const Unit& u, int64_t r) const {
    const int64_t row = u.row + r;
    return (u.sequence * q_per_seq + row / group()) * heads + u.head * group() + row % group();
  }

  Partial partial(int64_t unit, int64_t span) const {
    float* p = partials.get() + (unit * spans + span) * MAX_ROWS * (2 + pools.dv);
    return {p, p + MAX_ROWS, p + 2 * MAX_ROWS};
  }

  void start(const Unit& u, Partial p, bool first) const {
    for (int64_t r = 0; r < u.count; r++) {
      const bool sink = sinks && first;
      p.top[r] = sink ? sinks[u.head * group() + (u.row + r) % group()] : NOTHING;
      p.total[r] = sink;
    }
    std::fill(p.acc, p.acc + u.count * pools.dv, 0.f);
  }

  // Chunk (unit, span): q [count, d] holds the unit's scaled rows, results go to `p`. False: the
  // sequence is empty.
  bool attend_span(const Unit& u, int64_t span, const float* q, Partial p) const {
    const int64_t len = lens[u.sequence];
    start(u, p, span == 0);
    if (len <= 0) return false;
    Rows rows{u.count, q, {}, {}};
    int64_t begin = len;
    for (int64_t r = 0; r < u.count; r++) {
      const int64_t position = len - q_per_seq + (u.row + r) / group();
      rows.high[r] = position + 1;
      rows.low[r] = window ? std::max<int64_t>(position - window + 1, 0) : 0;
      if (position >= 0) begin = std::min(begin, rows.low[r]);
    }
    int64_t end = len;
    if (spans > 1)
      begin = std::max(begin, span * span_keys), end = std::min(end, (span + 1) * span_keys);
    for (int64_t r = 0; r < u.count; r++) rows.low[r] = std::max(rows.low[r], begin);
    if (begin < end) attend(rows, pools, tables + u.sequence * pages, u.head, begin, end, p);
    return true;
  }

  // Adds the spans of a unit up, into that of its first one.
  Partial merge(const Unit& u, int64_t i) const {
    Partial sum = partial(i, 0);
    for (int64_t span = 1; span < spans; span++) {
      const Partial p = partial(i, span);
      for (int64_t r = 0; r < u.count; r++) {
        if (p.total[r] == 0) continue;  // also what an unseen span leaves behind
        const float top = std::max(sum.top[r], p.top[r]);
        const float keep = exponential(F{} + (sum.top[r] - top))[0],
                    add = exponential(F{} + (p.top[r] - top))[0];
        sum.top[r] = top;
        sum.total[r] = sum.total[r] * keep + p.total[r] * add;
        for (int64_t c = 0; c < pools.dv; c++)
          sum.acc[r * pools.dv + c] =
              sum.acc[r * pools.dv + c] * keep + p.acc[r * pools.dv + c] * add;
      }
    }
    return sum;
  }

  // What a chunk reads, as Phase::reads: its share of each page, cut by bytes rather than by heads,
  // which lie scattered over the page.
  bool reads(int64_t chunk, int64_t part, const char** from, int64_t* bytes) const {
    if (!pools.streamed) return false;
    const Unit u = unit_of(chunk);
    const int64_t bs = pools.block_size, len = lens[u.sequence],
                  end = std::min((span_of(chunk) + 1) * span_keys, len);
    const int64_t begin =
        std::max(span_of(chunk) * span_keys, window ? len - q_per_seq - window + 1 : 0);
    const int64_t page = begin / bs + part / 2, key = std::max(page * bs, begin),
                  keys = std::min((page + 1) * bs, end) - key;
    if (keys <= 0) return false;
    const bool of_keys = part % 2 == 0;
    const int64_t row = (of_keys ? pools.d : pools.dv) * (pools.half ? 2 : 4);
    const char* first = static_cast<const char*>(of_keys ? pools.keys : pools.values);
    first +=
        (pools.block(tables + u.sequence * pages, page) * bs + key % bs) * pools.kv_heads * row;
    *from = first + u.head * keys * row, *bytes = keys * row;
    return true;
  }
};

}  // namespace deepinfer
