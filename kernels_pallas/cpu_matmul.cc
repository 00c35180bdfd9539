// y[M, N] = x[M, K] . w[N, K]^T on CPU for float32, bfloat16, int8 and int4 weights, as an XLA FFI custom call.
//
// Decode reads every weight once for a handful of rows, so its speed limit is the memory; XLA's own CPU dots stay far from
// it for anything but float32. Here weights are widened to float32 in registers, a group of ROWS weight rows at a time,
// and multiplied with MAX_TILE rows of x at a time; more rows widen them again, from the first-level cache, which measured faster
// than widening into a buffer. Activations stay float32 throughout; sums run over K in lanes, then across lanes.
//
// Work is cut into chunks of weight rows that threads of XLA's own intra-op pool claim one by one. The calling thread works
// too and never waits for a helper that has not started, so a busy machine costs no more than the helpers' share.
//
// Written with GCC/Clang vector extensions: the compiler picks the instructions for the machine it runs on.
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "xla/ffi/api/c_api.h"

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16, MAX_TILE = 6;
#elif defined(__AVX2__)
constexpr int LANES = 8, MAX_TILE = 2;
#else
constexpr int LANES = 4, MAX_TILE = 4;
#endif
constexpr int AHEAD = 8;           // how many weight rows ahead memory is asked for
constexpr int ROWS = 4;            // weight rows per register tile
constexpr int COLUMNS = 32;         // results of a row gathered before they are written out
constexpr int GROUP = 32;          // weights per int4 scale
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
// LANES integers widened to 32 bits, and int32 to float32. Compilers make scalar code of __builtin_convertvector here.
#if defined(__AVX512F__)
INLINE I widen(const int8_t* p) { return (I)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)); }
INLINE I widen(const uint8_t* p) { return (I)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
INLINE I widen(const uint16_t* p) { return (I)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)); }
INLINE F to_float(I v) { return (F)_mm512_cvtepi32_ps((__m512i)v); }
#elif defined(__AVX2__)
INLINE I widen(const int8_t* p) { return (I)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
INLINE I widen(const uint8_t* p) { return (I)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
INLINE I widen(const uint16_t* p) { return (I)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)); }
INLINE F to_float(I v) { return (F)_mm256_cvtepi32_ps((__m256i)v); }
#else
template <typename T> INLINE I widen(const T* p) {
  I v;
  UNROLL for (int i = 0; i < LANES; i++) v[i] = p[i];
  return v;
}
INLINE F to_float(I v) { return __builtin_convertvector(v, F); }
#endif

#if defined(__AVX512F__)
INLINE __m256 half(F v) { return _mm256_add_ps(_mm512_castps512_ps256((__m512)v), _mm256_castpd_ps(_mm512_extractf64x4_pd((__m512d)v, 1))); }
#elif defined(__AVX2__)
INLINE __m256 half(F v) { return (__m256)v; }
#endif

// out[r] = the sum of the lanes of v[r].
template <int R> INLINE void sum_lanes(const F* v, float* out) {
#if defined(__AVX2__)
  if constexpr (R == 4) {
    const __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(half(v[0]), half(v[1])), _mm256_hadd_ps(half(v[2]), half(v[3])));
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

// ---- weight formats: row(n) prepares a row, at(k) gives LANES float32 weights from k on, one(k) a single one ----------

struct Weights {
  const void *data, *group;
  const float* scale;
  int64_t n, k;
};

struct Float32 {
  static constexpr int bits = 32;
  static constexpr bool scaled_rows = false;
  const float* p;
  Float32() = default;
  INLINE Float32(const Weights& w, int64_t n) : p(static_cast<const float*>(w.data) + n * w.k) {}
  INLINE F at(int64_t k) const { return load<F>(p + k); }
  INLINE float one(int64_t k) const { return p[k]; }
};

struct BFloat16 {
  static constexpr int bits = 16;
  static constexpr bool scaled_rows = false;
  const uint16_t* p;
  BFloat16() = default;
  INLINE BFloat16(const Weights& w, int64_t n) : p(static_cast<const uint16_t*>(w.data) + n * w.k) {}
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

// Each run of 64 weights is 32 bytes: its first group of 32 in the low nibbles, the second in the high ones.
struct Int4 {
  static constexpr int bits = 4;
  static constexpr bool scaled_rows = true;
  const uint8_t *p, *group;
  Int4() = default;
  INLINE Int4(const Weights& w, int64_t n)
      : p(static_cast<const uint8_t*>(w.data) + n * w.k / 2), group(static_cast<const uint8_t*>(w.group) + n * (w.k / GROUP)) {}
  INLINE F nibbles(int64_t k) const {  // without the group's factor
    I bytes = widen(p + k / (2 * GROUP) * GROUP + k % GROUP);
    I shifted = k % (2 * GROUP) < GROUP ? bytes : bytes >> 4;
#if defined(__AVX512F__)
    const F table = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
    return (F)_mm512_permutexvar_ps((__m512i)shifted, (__m512)table);  // only the low four bits of an index count
#else
    return to_float((shifted & 15) - 8);
#endif
  }
  INLINE float factor(int64_t k) const { return factors.values[group[k / GROUP]]; }
  INLINE F at(int64_t k) const { return nibbles(k) * factor(k); }
  INLINE float one(int64_t) const { return 0; }  // K is a multiple of 2 * GROUP
};

// ---- tiles ------------------------------------------------------------------------------------------------------------

// y[m, n] for M rows of x and R weight rows from n on.
template <typename W, int M, int R>
INLINE void tile(const float* x, const Weights& w, int64_t n, float* y, int64_t ldy) {
  const int64_t K = w.k;
  F acc[M][R] = {};
  W rows[R];
  UNROLL for (int r = 0; r < R; r++) rows[r] = W(w, n + r);
  int64_t k = 0;
  if constexpr (std::is_same_v<W, Int4> && M <= 2) {  // few rows: scale a group's sum rather than its weights
    for (; k < K; k += 2 * GROUP)
      UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int g = 0; g < 2 * GROUP; g += GROUP) {
          F part[M] = {};
          UNROLL for (int i = g; i < g + GROUP; i += LANES) {
            F wv = rows[r].nibbles(k + i);
            UNROLL for (int m = 0; m < M; m++) part[m] += wv * load<F>(x + m * K + k + i);
          }
          UNROLL for (int m = 0; m < M; m++) acc[m][r] += part[m] * rows[r].factor(k + g);
        }
  } else {
    for (; k + LANES <= K; k += LANES) {
      F wv[R];
      UNROLL for (int r = 0; r < R; r++) wv[r] = rows[r].at(k);
      UNROLL for (int m = 0; m < M; m++) {
        F xv = load<F>(x + m * K + k);
        UNROLL for (int r = 0; r < R; r++) acc[m][r] += wv[r] * xv;
      }
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

template <typename W, int R>
INLINE void rows_of_x(int64_t m_count, const float* x, const Weights& w, int64_t n, float* y, int64_t ldy) {
  int64_t m = 0;
  for (; m + MAX_TILE <= m_count; m += MAX_TILE) tile<W, MAX_TILE, R>(x + m * w.k, w, n, y + m * ldy, ldy);
  x += m * w.k;
  y += m * ldy;
  switch (m_count - m) {
    case 1: tile<W, 1, R>(x, w, n, y, ldy); break;
    case 2: if constexpr (MAX_TILE > 2) tile<W, 2, R>(x, w, n, y, ldy); break;
    case 3: if constexpr (MAX_TILE > 3) tile<W, 3, R>(x, w, n, y, ldy); break;
    case 4: if constexpr (MAX_TILE > 4) tile<W, 4, R>(x, w, n, y, ldy); break;
    case 5: if constexpr (MAX_TILE > 5) tile<W, 5, R>(x, w, n, y, ldy); break;
  }
}

// ---- one call -----------------------------------------------------------------------------------------------------------

struct Call {
  const float* x;
  float* y;
  Weights w;
  int64_t m, panel, rows_per_chunk, n_chunks, chunks;
  void (*run)(const Call&, int64_t m0, int64_t m1, int64_t n0, int64_t n1);
  std::atomic<int64_t> next{0}, done{0};
  std::atomic<int> references{0};
};

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

// Weight rows are short streams: the hardware prefetcher starts anew on each, so ask for those to come next.
template <typename W>
INLINE void prefetch_rows(const Weights& w, int64_t n0, int64_t n1) {
  const int64_t row_bytes = w.k * W::bits / 8;
  const char* p = static_cast<const char*>(w.data);
  for (int64_t i = n0 * row_bytes; i < std::min(n1, w.n) * row_bytes; i += 64) __builtin_prefetch(p + i);
}

// Rows n0..n1 (at most ROWS) of the weights times all of x; column 0 of out is row n0.
template <typename W>
INLINE void run_rows(const Call& c, int64_t m_count, const float* x, int64_t n0, int64_t n1, float* out, int64_t ldo) {
  prefetch_rows<W>(c.w, n0 + AHEAD, n1 + AHEAD);
  out -= n0;  // tiles index the result by weight row
  if (n1 - n0 == ROWS) return rows_of_x<W, ROWS>(m_count, x, c.w, n0, out, ldo);
  for (int64_t n = n0; n < n1; n++) rows_of_x<W, 1>(m_count, x, c.w, n, out, ldo);
}

template <typename W>
void run_block(const Call& c, int64_t m0, int64_t m1, int64_t n0, int64_t n1) {
  static thread_local Scratch results;
  const float* x = c.x + m0 * c.w.k;
  const int64_t rows = m1 - m0, ldy = c.w.n;
  float* y = c.y + m0 * ldy;
  if (rows <= MAX_TILE) {
    for (int64_t n = n0; n < n1; n += ROWS) run_rows<W>(c, rows, x, n, std::min(n + ROWS, n1), y + n, ldy);
    return;
  }
  // Results pass through a small buffer: written ROWS at a time, rows that lie a multiple of 4 KiB apart would evict
  // each other's half-filled lines from the cache.
  float* out = results.get(rows * COLUMNS);
  for (int64_t n = n0; n < n1; n += COLUMNS) {
    const int64_t end = std::min<int64_t>(n + COLUMNS, n1);
    for (int64_t i = n; i < end; i += ROWS) run_rows<W>(c, rows, x, i, std::min(i + ROWS, end), out + i - n, COLUMNS);
    for (int64_t m = 0; m < rows; m++) std::memcpy(y + m * ldy + n, out + m * COLUMNS, (end - n) * sizeof(float));
  }
}

void work(Call& c) {
  for (int64_t i; (i = c.next.fetch_add(1, std::memory_order_relaxed)) < c.chunks;) {
    const int64_t m0 = i / c.n_chunks * c.panel, n0 = i % c.n_chunks * c.rows_per_chunk;
    c.run(c, m0, std::min(m0 + c.panel, c.m), n0, std::min(n0 + c.rows_per_chunk, c.w.n));
    c.done.fetch_add(1, std::memory_order_release);
  }
}

void release(Call* c) {
  if (c->references.fetch_sub(1, std::memory_order_acq_rel) == 1) delete c;
}

void helper(void* data) {
  Call* c = static_cast<Call*>(data);
  work(*c);
  release(c);
}

XLA_FFI_Error* fail(const XLA_FFI_Api* api, const char* message) {
  XLA_FFI_Error_Create_Args args{XLA_FFI_Error_Create_Args_STRUCT_SIZE, nullptr, message, XLA_FFI_Error_Code_INVALID_ARGUMENT};
  return api->XLA_FFI_Error_Create(&args);
}

int64_t pool_threads(XLA_FFI_CallFrame* frame) {
  int64_t threads = 1;
  XLA_FFI_ThreadPool_NumThreads_Args args{XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE, nullptr, frame->ctx, &threads};
  XLA_FFI_Error* error = frame->api->XLA_FFI_ThreadPool_NumThreads(&args);
  if (!error) return threads;
  XLA_FFI_Error_Destroy_Args destroy{XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, nullptr, error};
  frame->api->XLA_FFI_Error_Destroy(&destroy);
  return 1;
}

void start_helpers(XLA_FFI_CallFrame* frame, Call* c, int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    XLA_FFI_ThreadPool_Schedule_Args args{XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE, nullptr, frame->ctx, helper, c};
    XLA_FFI_Error* error = frame->api->XLA_FFI_ThreadPool_Schedule(&args);
    if (!error) continue;
    XLA_FFI_Error_Destroy_Args destroy{XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, nullptr, error};
    frame->api->XLA_FFI_Error_Destroy(&destroy);
    release(c);
  }
}

// Waits for helpers to finish the chunks they hold: microseconds, unless the machine gave their core to someone else.
void wait(const Call& c) {
  for (int spins = 0; c.done.load(std::memory_order_acquire) < c.chunks; spins++) {
    if (spins > 2000) {
      sched_yield();
      continue;
    }
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
}

}  // namespace

// Operands: x f32 [M, K]; kernel [N, K] f32, bf16 or s8, or u8 [N, K/2] (int4); for int4, group s8 [N, K/32]; for s8 and
// int4, scale f32 [N]. Result: f32 [M, N].
extern "C" XLA_FFI_Error* deepinfer_cpu_matmul(XLA_FFI_CallFrame* frame) {
  if (frame->extension_start && frame->extension_start->type == XLA_FFI_Extension_Metadata) {
    auto* metadata = reinterpret_cast<XLA_FFI_Metadata_Extension*>(frame->extension_start)->metadata;
    metadata->api_version.major_version = XLA_FFI_API_MAJOR;
    metadata->api_version.minor_version = XLA_FFI_API_MINOR;
    metadata->traits = 0;
    return nullptr;
  }
  if (frame->stage != XLA_FFI_ExecutionStage_EXECUTE) return nullptr;
  if (frame->args.size < 2 || frame->rets.size != 1) return fail(frame->api, "cpu_matmul: expected x, kernel[, scale] -> y");
  auto arg = [&](int i) { return static_cast<XLA_FFI_Buffer*>(frame->args.args[i]); };
  const XLA_FFI_Buffer *x = arg(0), *kernel = arg(1), *y = static_cast<XLA_FFI_Buffer*>(frame->rets.rets[0]);
  const bool packed = kernel->dtype == XLA_FFI_DataType_U8, scaled = packed || kernel->dtype == XLA_FFI_DataType_S8;
  if (frame->args.size != 2 + packed + scaled || x->dtype != XLA_FFI_DataType_F32 || y->dtype != XLA_FFI_DataType_F32 ||
      kernel->dims[1] * (packed ? 2 : 1) != x->dims[1] || (packed && x->dims[1] % (2 * GROUP))) {
    return fail(frame->api, "cpu_matmul: operand types or shapes do not fit together");
  }
  Call* c = new Call;
  c->x = static_cast<const float*>(x->data);
  c->y = static_cast<float*>(y->data);
  c->m = x->dims[0];
  c->w = {kernel->data, packed ? arg(2)->data : nullptr, scaled ? static_cast<const float*>(arg(2 + packed)->data) : nullptr,
          kernel->dims[0], x->dims[1]};
  switch (kernel->dtype) {
    case XLA_FFI_DataType_F32: c->run = run_block<Float32>; break;
    case XLA_FFI_DataType_BF16: c->run = run_block<BFloat16>; break;
    case XLA_FFI_DataType_S8: c->run = run_block<Int8>; break;
    case XLA_FFI_DataType_U8: c->run = run_block<Int4>; break;
    default: c->run = nullptr;
  }
  if (!c->run || c->m == 0 || c->w.n == 0) {
    const bool known = c->run != nullptr;
    delete c;
    return known ? nullptr : fail(frame->api, "cpu_matmul: kernels are f32, bf16, s8 or u8 (int4)");
  }
  // Panels of x that stay in the second-level cache; chunks small enough to share out evenly, at least 16 KiB of weights.
  const int64_t threads = pool_threads(frame);
  c->panel = std::max<int64_t>(MAX_TILE, CACHE_BYTES / (c->w.k * 4) / MAX_TILE * MAX_TILE);
  const int64_t panels = (c->m + c->panel - 1) / c->panel;
  const int64_t per_thread = std::max<int64_t>(1, 8 / std::max<int64_t>(1, panels));
  int64_t rows = (c->w.n + threads * per_thread - 1) / (threads * per_thread);
  if (c->m < MAX_TILE) rows = std::max<int64_t>(rows, (16 << 10) / std::max<int64_t>(1, c->w.k));
  c->rows_per_chunk = (rows + ROWS - 1) / ROWS * ROWS;
  c->n_chunks = (c->w.n + c->rows_per_chunk - 1) / c->rows_per_chunk;
  c->chunks = panels * c->n_chunks;
  const int64_t helpers = std::min(threads, c->chunks) - 1;
  c->references = 1 + static_cast<int>(std::max<int64_t>(helpers, 0));
  start_helpers(frame, c, helpers);
  work(*c);
  wait(*c);
  release(c);
  return nullptr;
}
