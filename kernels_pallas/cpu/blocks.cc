// Copies rows (KV blocks, state rows) of all layers' pools into one array per cache, and back, as
// an XLA FFI custom call.
//
// A chunk is a run of rows of one pool, or part of a row, big enough to be worth a claim. Rows
// taken out are written with plain stores, so that whoever puts them elsewhere finds them in the
// cache; rows put into a pool are written past it.
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "ffi.h"
#include "job.h"

namespace deepinfer {
namespace {

constexpr int64_t CHUNK_BYTES = 128 << 10;

struct Rows {  // of one pool: row ids[i] of the pool lies at i * stride of the other array
  char* pool;
  char* other;
  int64_t pool_rows, row_bytes, stride;
  int64_t first_chunk, rows_per_chunk, chunks_per_row;  // one of the latter two is 1
};

#if defined(__AVX512F__)
using Line = __m512i;
inline Line load(const char* p) { return _mm512_loadu_si512(p); }
inline void stream(char* p, Line v) { _mm512_stream_si512(reinterpret_cast<Line*>(p), v); }
#elif defined(__AVX__)
using Line = __m256i;
inline Line load(const char* p) { return _mm256_loadu_si256(reinterpret_cast<const Line*>(p)); }
inline void stream(char* p, Line v) { _mm256_stream_si256(reinterpret_cast<Line*>(p), v); }
#elif defined(__x86_64__)
using Line = __m128i;
inline Line load(const char* p) { return _mm_loadu_si128(reinterpret_cast<const Line*>(p)); }
inline void stream(char* p, Line v) { _mm_stream_si128(reinterpret_cast<Line*>(p), v); }
#endif

// Writes past the cache: saves reading lines that are overwritten whole.
inline void copy_streaming(char* to, const char* from, int64_t n) {
#if defined(__x86_64__)
  const int64_t head = std::min<int64_t>(n, -reinterpret_cast<intptr_t>(to) & (sizeof(Line) - 1));
  std::memcpy(to, from, head);
  int64_t i = head;
  for (; i + 4 * static_cast<int64_t>(sizeof(Line)) <= n; i += 4 * sizeof(Line)) {
    const Line a = load(from + i), b = load(from + i + sizeof(Line)),
               c = load(from + i + 2 * sizeof(Line)), d = load(from + i + 3 * sizeof(Line));
    stream(to + i, a), stream(to + i + sizeof(Line), b), stream(to + i + 2 * sizeof(Line), c),
        stream(to + i + 3 * sizeof(Line), d);
  }
  std::memcpy(to + i, from + i, n - i);
#else
  std::memcpy(to, from, n);
#endif
}

struct CopyBlocks : Job {
  std::vector<Rows> parts;
  const int32_t* ids;
  int64_t count, chunks = 0;
  bool put;
  explicit CopyBlocks(int64_t threads) : Job(1, threads) {}

  void add_rows(char* pool, char* other, int64_t pool_rows, int64_t row_bytes, int64_t stride) {
    if (row_bytes == 0 || pool_rows == 0 || count == 0) return;
    const int64_t together = std::max<int64_t>(1, CHUNK_BYTES / row_bytes),
                  apart = (row_bytes + CHUNK_BYTES - 1) / CHUNK_BYTES;
    parts.push_back({pool, other, pool_rows, row_bytes, stride, chunks, together, apart});
    chunks += together > 1 ? (count + together - 1) / together : count * apart;
  }
  void chunk(int64_t i) const {
    auto part = std::upper_bound(parts.begin(), parts.end(), i,
                                 [](int64_t at, const Rows& r) { return at < r.first_chunk; }) -
                1;
    const int64_t at = i - part->first_chunk;
    const int64_t first = at / part->chunks_per_row * part->rows_per_chunk,
                  last = std::min(count, first + part->rows_per_chunk);
    const int64_t begin = part->row_bytes * (at % part->chunks_per_row) / part->chunks_per_row;
    const int64_t end = part->row_bytes * (at % part->chunks_per_row + 1) / part->chunks_per_row;
    for (int64_t row = first; row < last; row++) copy(*part, row, begin, end - begin);
#if defined(__x86_64__)
    if (put) _mm_sfence();
#endif
  }
  void copy(const Rows& part, int64_t row, int64_t begin, int64_t n) const {
    const int64_t id = ids[row];
    if (id < 0 || id >= part.pool_rows) return;  // a row to drop
    char* pool = part.pool + id * part.row_bytes + begin;
    char* other = part.other + row * part.stride + begin;
    if (put) copy_streaming(pool, other, n);
    else std::memcpy(other, pool, n);
  }
};

int64_t width(XLA_FFI_DataType type) {
  switch (type) {
    case XLA_FFI_DataType_PRED:
    case XLA_FFI_DataType_S8:
    case XLA_FFI_DataType_U8:
    case XLA_FFI_DataType_F8E5M2:
    case XLA_FFI_DataType_F8E4M3FN: return 1;
    case XLA_FFI_DataType_S16:
    case XLA_FFI_DataType_U16:
    case XLA_FFI_DataType_F16:
    case XLA_FFI_DataType_BF16: return 2;
    case XLA_FFI_DataType_S32:
    case XLA_FFI_DataType_U32:
    case XLA_FFI_DataType_F32: return 4;
    case XLA_FFI_DataType_S64:
    case XLA_FFI_DataType_U64:
    case XLA_FFI_DataType_F64:
    case XLA_FFI_DataType_C64: return 8;
    default: return 0;
  }
}

int64_t bytes(const XLA_FFI_Buffer* b, int64_t from) {
  int64_t n = width(b->dtype);
  for (int64_t i = from; i < b->rank; i++) n *= b->dims[i];
  return n;
}

// The pools of one array [size, layers, ...].
bool add_cache(CopyBlocks& job, const XLA_FFI_CallFrame* frame, int64_t first_pool,
               const XLA_FFI_Buffer* other) {
  const int64_t row = bytes(other, 2);
  for (int64_t layer = 0; layer < other->dims[1]; layer++) {
    const XLA_FFI_Buffer* pool = argument(frame, first_pool + layer);
    if (pool->rank < 1 || pool->dtype != other->dtype || bytes(pool, 1) != row) return false;
    job.add_rows(data<char>(pool), data<char>(other) + layer * row, pool->dims[0], row,
                 other->dims[1] * row);
  }
  return true;
}

}  // namespace
}  // namespace deepinfer

// Attribute: put s64 (0: out of the pools, 1: into them). Operands: count s32 [1]; ids s32 [size];
// for each cache its layers' pools [N, ...]; put: then an array [size, layers, ...] per cache.
// Results: these arrays, whose rows from `count` on are left as they are; put: the pools, each in
// its operand's memory. Rows whose id is outside [0, N) are skipped.
extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* deepinfer_cpu_blocks(
    XLA_FFI_CallFrame* frame) {
  using namespace deepinfer;
  if (answered(frame)) return nullptr;
  const bool put = attribute<int64_t>(frame, "put", 0);
  const int64_t pools = put ? frame->rets.size : frame->args.size - 2,
                caches = put ? frame->args.size - 2 - pools : frame->rets.size;
  if (pools < 0 || caches < 0)
    return fail(frame, "cpu_blocks: expected count, ids, pools[, rows] -> rows or pools");
  const int64_t size = argument(frame, 1)->dims[0], threads = pool_threads(frame);
  auto job = std::make_unique<CopyBlocks>(threads);
  job->ids = data<const int32_t>(argument(frame, 1)), job->put = put;
  job->count = std::min<int64_t>(size, std::max(0, *data<const int32_t>(argument(frame, 0))));
  int64_t pool = 0;
  for (int64_t i = 0; i < caches; i++) {
    const XLA_FFI_Buffer* other = put ? argument(frame, 2 + pools + i) : result(frame, i);
    if (other->rank < 2 || other->dims[0] != size || !width(other->dtype) ||
        pool + other->dims[1] > pools || !add_cache(*job, frame, 2 + pool, other))
      return fail(frame, "cpu_blocks: types or shapes of pools and rows do not fit together");
    pool += other->dims[1];
  }
  if (pool != pools) return fail(frame, "cpu_blocks: a pool belongs to no array");
  for (int64_t i = 0; put && i < pools; i++)
    if (result(frame, i)->data != argument(frame, 2 + i)->data)
      return fail(frame, "cpu_blocks: a pool is not written in place");
  job->add<&CopyBlocks::chunk>(job.get(), job->chunks);
  job.release()->run(frame, threads);
  return nullptr;
}
