// Causal attention of packed prompt rows over paged keys and values on CPU as an XLA FFI custom
// call. The arithmetic is in attention.h. A chunk is up to MAX_ROWS (token, query head) rows of one
// sequence that share a key/value head; chunks of one head follow each other, so that its keys and
// values stay in the cache.
#include <vector>

#include "attention.h"
#include "ffi.h"
#include "job.h"

namespace deepinfer {
namespace {

struct RaggedPrefill : Job {
  Pools pools;
  const int32_t* tables;
  std::shared_ptr<int32_t[]> lens;
  std::vector<int64_t> starts;
  const float *q, *sinks;  // sinks: one per query head, or null
  float* out;
  int64_t pages, heads, window;  // window 0: none
  float scale;
  std::vector<int64_t> first_chunk;  // per sequence, and how many there are in all
  explicit RaggedPrefill(int64_t threads) : Job(1, threads) {}

  int64_t group() const { return heads / pools.kv_heads; }
  int64_t rows_of(int64_t sequence) const {
    return (starts[sequence + 1] - starts[sequence]) * group();
  }
  int64_t blocks_of(int64_t sequence) const {
    return (rows_of(sequence) + MAX_ROWS - 1) / MAX_ROWS;
  }

  void plan(int64_t sequences, const int32_t* given, int64_t tokens) {
    for (int64_t s = 0; s <= sequences; s++)
      starts.push_back(std::clamp<int64_t>(given[s], s ? starts[s - 1] : 0, tokens));
    first_chunk.assign(1, 0);
    for (int64_t s = 0; s < sequences; s++)
      first_chunk.push_back(first_chunk.back() + blocks_of(s) * pools.kv_heads);
  }

  void chunk(int64_t i) const {
    static thread_local Scratch scratch;
    const int64_t s =
        std::upper_bound(first_chunk.begin(), first_chunk.end(), i) - first_chunk.begin() - 1;
    const int64_t head = (i - first_chunk[s]) / blocks_of(s),
                  row = (i - first_chunk[s]) % blocks_of(s) * MAX_ROWS;
    const int64_t d = pools.d, dv = pools.dv,
                  before = lens[s] - (starts[s + 1] - starts[s]);  // keys older than these rows
    float* scaled = scratch.get(MAX_ROWS * (d + 2 + dv));
    float* rest = scaled + MAX_ROWS * d;
    const Partial p{rest, rest + MAX_ROWS, rest + 2 * MAX_ROWS};
    Rows rows{std::min<int64_t>(MAX_ROWS, rows_of(s) - row), scaled, {}, {}};
    int64_t begin = lens[s], end = 0, place[MAX_ROWS];
    for (int64_t r = 0; r < rows.count; r++) {
      const int64_t token = (row + r) / group(), query = head * group() + (row + r) % group();
      place[r] = (starts[s] + token) * heads + query;
      for (int64_t c = 0; c < d; c++) scaled[r * d + c] = q[place[r] * d + c] * scale;
      rows.high[r] = before + token + 1;
      rows.low[r] = window ? std::max<int64_t>(rows.high[r] - window, 0) : 0;
      begin = std::min(begin, rows.low[r]), end = std::max(end, rows.high[r]);
      p.top[r] = sinks ? sinks[query] : NOTHING;
      p.total[r] = sinks != nullptr;
    }
    std::fill(p.acc, p.acc + rows.count * dv, 0.f);
    if (begin < end) attend(rows, pools, tables + s * pages, head, begin, end, p);
    for (int64_t r = 0; r < rows.count; r++) finish(p, r, dv, out + place[r] * dv);
  }
};

}  // namespace
}  // namespace deepinfer

// Operands: q f32 [T, H, D]; block_tables s32 [S, P]; kv_lens s32 [S]; q_starts s32 [S + 1]; sinks
// f32 [H] or [0]; pools f32 or bf16 of keys [N, bs, KH, D] and, unless values are part of the keys,
// of values [N, bs, KH, Dv]. Attributes: scale f32, window s64 (0: none). Result: f32 [T, H, Dv],
// zeros in rows of no sequence. D and Dv are multiples of 16; ids, lengths and starts outside the
// pool, the table and q count as the nearest ones inside.
extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* deepinfer_cpu_ragged_prefill(
    XLA_FFI_CallFrame* frame) {
  using namespace deepinfer;
  if (answered(frame)) return nullptr;
  if ((frame->args.size != 6 && frame->args.size != 7) || frame->rets.size != 1)
    return fail(frame,
                "cpu_ragged_prefill: expected q, block_tables, kv_lens, q_starts, sinks, keys[, "
                "values] -> out");
  const XLA_FFI_Buffer *q = argument(frame, 0), *tables = argument(frame, 1),
                       *starts = argument(frame, 3), *sinks = argument(frame, 4);
  const XLA_FFI_Buffer *keys = argument(frame, 5),
                       *values = frame->args.size == 7 ? argument(frame, 6) : nullptr,
                       *out = result(frame, 0);
  if (!paged_operands_fit(q, keys, values, out))
    return fail(frame, "cpu_ragged_prefill: operand types or shapes do not fit together");
  const int64_t threads = pool_threads(frame), sequences = tables->dims[0];
  auto* job = new RaggedPrefill(threads);
  job->pools = paged_pools(keys, values, out->dims[2]);
  job->q = data<const float>(q), job->out = data<float>(out);
  job->tables = data<const int32_t>(tables),
  job->lens = lengths(argument(frame, 2), tables->dims[1], job->pools);
  job->sinks = sinks->dims[0] ? data<const float>(sinks) : nullptr;
  job->pages = tables->dims[1], job->heads = q->dims[1];
  job->window = attribute<int64_t>(frame, "window", 0),
  job->scale = attribute<float>(frame, "scale", 1.f);
  job->plan(sequences, data<const int32_t>(starts), q->dims[0]);
  const int64_t width = out->dims[1] * out->dims[2], used = job->starts[sequences];
  std::fill(job->out + used * width, job->out + q->dims[0] * width, 0.f);
  job->add<&RaggedPrefill::chunk>(job, job->first_chunk.back());
  job->run(frame, threads);
  return nullptr;
}
