// Decode attention over paged keys and values on CPU as an XLA FFI custom call. The arithmetic is
// in attention.h.
#include "attention.h"
#include "ffi.h"
#include "job.h"

namespace deepinfer {
namespace {

struct PagedDecode : Job {
  Decode decode;
  const float* q;
  float* out;
  explicit PagedDecode(int64_t threads) : Job(2, threads) {}

  void chunk(int64_t i) const {
    static thread_local Scratch scratch;
    const Decode::Unit u = decode.unit_of(i);
    const int64_t d = decode.pools.d, dv = decode.pools.dv;
    float* rows = scratch.get(MAX_ROWS * (d + 2 + dv));
    float* rest = rows + MAX_ROWS * d;
    for (int64_t r = 0; r < u.count; r++)
      for (int64_t c = 0; c < d; c++)
        rows[r * d + c] = q[decode.place(u, r) * d + c] * decode.scale;
    Partial p = decode.spans > 1 ? decode.partial(i % decode.units, decode.span_of(i))
                                 : Partial{rest, rest + MAX_ROWS, rest + 2 * MAX_ROWS};
    const bool any = decode.attend_span(u, decode.span_of(i), rows, p);
    if (decode.spans == 1 || !any) write(u, p, any);
  }
  void merge(int64_t i) const {
    const Decode::Unit u = decode.unit(i);
    if (decode.lens[u.sequence] > 0) write(u, decode.merge(u, i), true);
  }
  void write(const Decode::Unit& u, Partial p, bool any) const {
    const int64_t dv = decode.pools.dv;
    for (int64_t r = 0; r < u.count; r++) {
      float* to = out + decode.place(u, r) * dv;
      if (any) finish(p, r, dv, to);
      else std::fill(to, to + dv, 0.f);
    }
  }
};

}  // namespace
}  // namespace deepinfer

// Operands: q f32 [S * Q, H, D]; block_tables s32 [S, P]; kv_lens s32 [S]; sinks f32 [H] or [0];
// pools f32 or bf16 of keys [N, bs, KH, D] and, unless values are part of the keys, of values [N,
// bs, KH, Dv]. Attributes: scale f32, window s64 (0: none). Result: f32 [S * Q, H, Dv]. D and Dv
// are multiples of 16; block ids and lengths outside the pool and the table count as the nearest
// ones inside.
extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* deepinfer_cpu_paged_decode(
    XLA_FFI_CallFrame* frame) {
  using namespace deepinfer;
  if (answered(frame)) return nullptr;
  if ((frame->args.size != 5 && frame->args.size != 6) || frame->rets.size != 1)
    return fail(
        frame, "cpu_paged_decode: expected q, block_tables, kv_lens, sinks, keys[, values] -> out");
  const XLA_FFI_Buffer *q = argument(frame, 0), *tables = argument(frame, 1),
                       *sinks = argument(frame, 3), *keys = argument(frame, 4);
  const XLA_FFI_Buffer *values = frame->args.size == 6 ? argument(frame, 5) : nullptr,
                       *out = result(frame, 0);
  if (!paged_operands_fit(q, keys, values, out))
    return fail(frame, "cpu_paged_decode: operand types or shapes do not fit together");
  const int64_t sequences = tables->dims[0];
  if (sequences == 0 || q->dims[0] == 0) return nullptr;
  const int64_t threads = pool_threads(frame);
  auto* job = new PagedDecode(threads);
  job->q = data<const float>(q), job->out = data<float>(out);
  Decode& d = job->decode;
  d.pools = paged_pools(keys, values, out->dims[2]);
  d.sinks = sinks->dims[0] ? data<const float>(sinks) : nullptr;
  d.sequences = sequences, d.pages = tables->dims[1], d.heads = q->dims[1],
  d.q_per_seq = q->dims[0] / sequences;
  d.tables = data<const int32_t>(tables), d.lens = lengths(argument(frame, 2), d.pages, d.pools);
  d.window = attribute<int64_t>(frame, "window", 0),
  d.scale = attribute<float>(frame, "scale", 1.f);
  d.plan(threads);
  job->add<&PagedDecode::chunk>(job, d.units * d.spans);
  if (d.spans > 1) job->add<&PagedDecode::merge>(job, d.units);
  job->run(frame, threads);
  return nullptr;
}
