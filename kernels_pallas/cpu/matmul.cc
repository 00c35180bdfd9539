// y[M, N] = x[M, K] . w[N, K]^T on CPU as an XLA FFI custom call; XLA's own CPU dots stay far from
// the memory's speed for anything but float32. The arithmetic is in product.h.
#include "ffi.h"
#include "job.h"
#include "product.h"
#include "weights.h"

namespace deepinfer {
namespace {

struct Matmul : Job {
  Product product;
  explicit Matmul(int64_t threads) : Job(1, threads) {}
  void chunk(int64_t i) const { product.run(product.part(i, product.w.n)); }
  bool reads(int64_t i, int64_t part, const char** from, int64_t* bytes) const {
    const auto p = product.part(i, product.w.n);
    return product.reads(p.n0, p.n1, part, from, bytes);
  }
};

}  // namespace
}  // namespace deepinfer

// Operands: x f32 [M, K]; kernel [N, K] f32, bf16 or s8, or u8 [N, K/2] (int4); for int4, group s8
// [N, K/32]; for s8 and int4, scale f32 [N]. Result: f32 [M, N].
extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* deepinfer_cpu_matmul(
    XLA_FFI_CallFrame* frame) {
  using namespace deepinfer;
  if (answered(frame)) return nullptr;
  if (frame->args.size < 2 || frame->rets.size != 1)
    return fail(frame, "cpu_matmul: expected x, kernel[, scale] -> y");
  const XLA_FFI_Buffer *x = argument(frame, 0), *y = result(frame, 0);
  StoredWeights weights;
  if (x->dtype != XLA_FFI_DataType_F32 || y->dtype != XLA_FFI_DataType_F32 ||
      !weights.read(frame, 1, x->dims[1]) || weights.parts + 1 != frame->args.size) {
    return fail(frame, "cpu_matmul: operand types or shapes do not fit together");
  }
  if (x->dims[0] == 0 || weights.w.n == 0) return nullptr;
  const int64_t threads = pool_threads(frame);
  auto* job = new Matmul(threads);
  weights.plan(job->product, data<const float>(x), data<float>(y), x->dims[0], threads,
               weights.w.n);
  job->add<&Matmul::chunk, nullptr, &Matmul::reads>(job, job->product.chunks);
  job->run(frame, threads);
  return nullptr;
}
