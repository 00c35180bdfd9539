// A decode step's dense decoder layers on CPU as one XLA FFI custom call: norm, q/k/v, rotation,
// cache write, attention, output product, norm, SwiGLU. One call instead of dozens per layer keeps
// the threads together (a phase costs them well under a microsecond) and activations in the cache.
// Products and attention are those of product.h and attention.h; activations are float32 from the
// first layer to the last whatever the weights' format.
#include <cmath>
#include <cstdio>
#include <utility>
#include <vector>

#include "attention.h"
#include "ffi.h"
#include "job.h"
#include "weights.h"

namespace deepinfer {
namespace {

struct Vector {  // a norm weight or a bias, float32 or bfloat16
  const void* data = nullptr;
  bool half = false;
  explicit operator bool() const { return data; }
  INLINE F at(int64_t k) const {
    if (!half) return load<F>(static_cast<const float*>(data) + k);
    BFloat16 row;
    row.p = static_cast<const uint16_t*>(data);
    return row.at(k);
  }
};

// out [n] = x / sqrt(mean(x^2) + eps) * weight
INLINE void rms_norm(const float* x, const Vector& weight, int64_t n, float eps, float* out) {
  F squares = {};
  for (int64_t i = 0; i < n; i += LANES) squares += load<F>(x + i) * load<F>(x + i);
  const float by = 1.f / std::sqrt(sum(squares) / n + eps);
  for (int64_t i = 0; i < n; i += LANES) {
    const F v = load<F>(x + i) * by * weight.at(i);
    std::memcpy(out + i, &v, sizeof v);
  }
}

// Channel i of the first 2 * half is rotated with channel i + half.
INLINE void rotate(float* x, const float* cos, const float* sin, int64_t half) {
  for (int64_t i = 0; i < half; i++) {
    const float a = x[i], b = x[i + half];
    x[i] = a * cos[i] - b * sin[i];
    x[i + half] = b * cos[i] + a * sin[i];
  }
}

// What all layers of a call share: [M, ...] buffers, the rotation, where rows are written.
struct Step {
  int64_t m, hidden, rotated;
  float eps;
  const float *cos, *sin;
  const int32_t* slots;
  float *x, *normed, *qkv, *attended, *gate_up, *inner, *added;
};

struct Layer {
  const Step* step;
  Vector attn_norm, mlp_norm, bias, q_norm, k_norm;
  Product qkv, out, gate_up, down;
  Decode decode;

  const Vector* next_norm;  // of the layer that follows, or the last one
  float* next_normed;       // where its result goes

  void norm(const Vector& weight, int64_t i, float* to) const {
    rms_norm(step->x + i * step->hidden, weight, step->hidden, step->eps, to + i * step->hidden);
  }
  void norm_first(int64_t i) const { norm(attn_norm, i, step->normed); }
  void norm_mlp(int64_t i) const { norm(mlp_norm, i, step->normed); }
  void norm_next(int64_t i) const { norm(*next_norm, i, next_normed); }
  void norm_mlp_all() const {
    for (int64_t i = 0; i < step->m; i++) norm_mlp(i);
  }
  void norm_next_all() const {
    for (int64_t i = 0; i < step->m; i++) norm_next(i);
  }
  bool reads_qkv(int64_t i, int64_t part, const char** from, int64_t* bytes) const {
    return reads(qkv, i, part, from, bytes);
  }
  bool reads_out(int64_t i, int64_t part, const char** from, int64_t* bytes) const {
    return reads(out, i, part, from, bytes);
  }
  bool reads_down(int64_t i, int64_t part, const char** from, int64_t* bytes) const {
    return reads(down, i, part, from, bytes);
  }
  static bool reads(const Product& product, int64_t i, int64_t part, const char** from,
                    int64_t* bytes) {
    const auto p = product.part(i, product.w.n);
    return product.reads(p.n0, p.n1, part, from, bytes);
  }
  bool reads_gate_up(int64_t i, int64_t part, const char** from, int64_t* bytes) const {
    const int64_t inner = gate_up.w.n / 2, first = part < 3 ? 0 : inner;
    const auto p = gate_up.part(i, inner);
    return gate_up.reads(first + p.n0, first + p.n1, part < 3 ? part : part - 3, from, bytes);
  }
  void project(int64_t i) const { qkv.run(qkv.part(i, qkv.w.n)); }
  void project_out(int64_t i) const { add(out, i); }
  void project_down(int64_t i) const { add(down, i); }

  void add(const Product& product, int64_t i) const {
    const auto p = product.part(i, product.w.n);
    product.run(p);
    for (int64_t m = p.m0; m < p.m1; m++)
      for (int64_t n = p.n0; n < p.n1; n++)
        step->x[m * step->hidden + n] += product.y[m * step->hidden + n];
  }

  void swiglu(int64_t i) const {
    const int64_t inner = gate_up.w.n / 2;
    const auto p = gate_up.part(i, inner);
    gate_up.run(p);
    gate_up.run(p, inner);
    for (int64_t m = p.m0; m < p.m1; m++) {
      const float *gate = gate_up.y + m * 2 * inner, *up = gate + inner;
      float* to = step->inner + m * inner;
      for (int64_t n = p.n0; n < p.n1; n += LANES) {
        const F g = load<F>(gate + n), v = g / (exponential(-g) + 1.f) * load<F>(up + n);
        std::memcpy(to + n, &v, sizeof v);
      }
    }
  }

  // Head `head` of token t as it goes into attention: bias, norm, rotation.
  void head(int64_t t, int64_t head, const Vector& norm, bool rotated, float* to) const {
    const int64_t d = decode.pools.d;
    const float* from = step->qkv + t * qkv.w.n + head * d;
    for (int64_t c = 0; c < d; c += LANES) {
      const F v = bias ? load<F>(from + c) + bias.at(head * d + c) : load<F>(from + c);
      std::memcpy(to + c, &v, sizeof v);
    }
    if (norm) rms_norm(to, norm, d, step->eps, to);
    if (rotated)
      rotate(to, step->cos + t * step->rotated, step->sin + t * step->rotated, step->rotated);
  }

  template <typename T> void store(T* to, const float* from) const {
    for (int64_t c = 0; c < decode.pools.d; c++) {
      if constexpr (std::is_same_v<T, float>) to[c] = from[c];
      else to[c] = to_bfloat16(from[c]);
    }
  }
  template <typename T> void write(const Decode::Unit& u, float* row) const {
    const int64_t slot = step->slots[u.sequence], bs = decode.pools.block_size,
                  heads = decode.heads;
    if (slot < 0 || slot >= decode.pools.blocks * bs) return;
    head(u.sequence, heads + u.head, k_norm, true, row);
    store(decode.pools.key<T>(slot / bs, slot % bs, u.head), row);
    head(u.sequence, heads + decode.pools.kv_heads + u.head, Vector{}, false, row);
    store(decode.pools.value<T>(slot / bs, slot % bs, u.head), row);
  }

  void attention(int64_t i) const {
    static thread_local Scratch scratch;
    const Decode::Unit u = decode.unit_of(i);
    const int64_t d = decode.pools.d, len = decode.lens[u.sequence], span = decode.span_of(i);
    float *rows = scratch.get(MAX_ROWS * (2 * d + 2)), *rest = rows + MAX_ROWS * d;
    if (len > 0 && (decode.spans == 1 || (len - 1) / decode.span_keys == span))
      decode.pools.half ? write<uint16_t>(u, rows) : write<float>(u, rows);
    for (int64_t r = 0; r < u.count && len > 0; r++) {
      head(u.sequence, u.head * decode.group() + r, q_norm, true, rows + r * d);
      for (int64_t c = 0; c < d; c++) rows[r * d + c] *= decode.scale;
    }
    Partial p = decode.spans > 1 ? decode.partial(i % decode.units, span)
                                 : Partial{rest, rest + MAX_ROWS, rest + 2 * MAX_ROWS};
    const bool any = decode.attend_span(u, span, rows, p);
    if (decode.spans == 1 || !any) finish(u, p, any);
  }
  void merge_all() const {
    for (int64_t i = 0; decode.spans > 1 && i < decode.units; i++) merge(i);
  }
  bool reads_pages(int64_t i, int64_t part, const char** from, int64_t* bytes) const {
    return decode.reads(i, part, from, bytes);
  }
  void merge(int64_t i) const {
    const Decode::Unit u = decode.unit(i);
    if (decode.lens[u.sequence] > 0) finish(u, decode.merge(u, i), true);
  }
  void finish(const Decode::Unit& u, Partial p, bool any) const {
    for (int64_t r = 0; r < u.count; r++) {
      float* to = step->attended + decode.place(u, r) * decode.pools.dv;
      if (any) deepinfer::finish(p, r, decode.pools.dv, to);
      else std::fill(to, to + decode.pools.dv, 0.f);
    }
  }
};

struct Stack : Job {
  Step step;
  Vector last_norm;
  float* out;
  std::vector<Layer> layers;
  Stack(int64_t count, int64_t threads) : Job(8 * count + 1, threads), layers(count) {}
};

// Reads operands in order, and remembers the first that does not fit.
struct Reader {
  XLA_FFI_CallFrame* frame;
  int64_t next;
  bool good = true;

  Vector vector(int64_t n) {
    const XLA_FFI_Buffer* b = next < frame->args.size ? argument(frame, next++) : nullptr;
    const bool half = b && b->dtype == XLA_FFI_DataType_BF16;
    good =
        good && b && b->rank == 1 && b->dims[0] == n && (half || b->dtype == XLA_FFI_DataType_F32);
    return good ? Vector{b->data, half} : Vector{};
  }
  StoredWeights weights(int64_t n, int64_t k) {
    StoredWeights w;
    good = good && w.read(frame, next, k) && (n == 0 || w.w.n == n);
    next += w.parts;
    return w;
  }
  const XLA_FFI_Buffer* pool(int64_t head) {
    const XLA_FFI_Buffer* b = next < frame->args.size ? argument(frame, next++) : nullptr;
    good = good && b && b->rank == 4 && b->dims[3] == head &&
           (b->dtype == XLA_FFI_DataType_F32 || b->dtype == XLA_FFI_DataType_BF16);
    return b;
  }
};

bool read_layer(Reader& in, Layer& layer, const Stack& stack, const Decode& decode, int64_t window,
                bool biased, bool normed, int64_t threads) {
  const Step& s = stack.step;
  const int64_t d = decode.pools.d, rows = (decode.heads + 2 * decode.pools.kv_heads) * d;
  layer.step = &s;
  layer.attn_norm = in.vector(s.hidden);
  const StoredWeights qkv = in.weights(rows, s.hidden);
  if (biased) layer.bias = in.vector(rows);
  if (normed) layer.q_norm = in.vector(d), layer.k_norm = in.vector(d);
  const StoredWeights out = in.weights(s.hidden, decode.heads * d);
  layer.mlp_norm = in.vector(s.hidden);
  const StoredWeights gate_up = in.weights(0, s.hidden);
  if (!in.good) return false;
  const int64_t inner = gate_up.w.n / 2;
  const StoredWeights down = in.weights(s.hidden, inner);
  const XLA_FFI_Buffer *keys = in.pool(d), *values = in.pool(d);
  if (!in.good || keys->dtype != values->dtype || inner % LANES) return false;
  if (keys->dims[0] < 1 || keys->dims[1] != decode.pools.block_size) return false;
  if (std::memcmp(keys->dims, values->dims, 4 * sizeof(int64_t))) return false;
  qkv.plan(layer.qkv, s.normed, s.qkv, s.m, threads, rows);
  out.plan(layer.out, s.attended, s.added, s.m, threads, s.hidden);
  gate_up.plan(layer.gate_up, s.normed, s.gate_up, s.m, threads, inner, LANES);
  down.plan(layer.down, s.inner, s.added, s.m, threads, s.hidden);
  layer.decode = decode;
  layer.decode.window = window;
  layer.decode.pools = paged_pools(keys, values, d);
  layer.decode.pools.streamed = layer.qkv.streamed;
  return true;
}

// Up to here, whoever ends a product also does the norm that follows.
constexpr int64_t FEW_ROWS = 4;

void add_phases(Stack& stack) {
  const int64_t m = stack.step.m, count = stack.layers.size();
  for (int64_t i = 0; i < count; i++) {
    Layer& layer = stack.layers[i];
    layer.next_norm = i + 1 < count ? &stack.layers[i + 1].attn_norm : &stack.last_norm;
    layer.next_normed = i + 1 < count ? stack.step.normed : stack.out;
    if (i == 0) stack.add<&Layer::norm_first>(&layer, m);
    stack.add<&Layer::project, nullptr, &Layer::reads_qkv>(&layer, layer.qkv.chunks);
    const int64_t attended = layer.decode.units * layer.decode.spans;
    if (m <= FEW_ROWS) {
      stack.add<&Layer::attention, &Layer::merge_all, &Layer::reads_pages>(&layer, attended);
      stack.add<&Layer::project_out, &Layer::norm_mlp_all, &Layer::reads_out>(&layer,
                                                                              layer.out.chunks);
      stack.add<&Layer::swiglu, nullptr, &Layer::reads_gate_up>(&layer, layer.gate_up.chunks);
      stack.add<&Layer::project_down, &Layer::norm_next_all, &Layer::reads_down>(&layer,
                                                                                 layer.down.chunks);
    } else {
      stack.add<&Layer::attention, nullptr, &Layer::reads_pages>(&layer, attended);
      if (layer.decode.spans > 1) stack.add<&Layer::merge>(&layer, layer.decode.units);
      stack.add<&Layer::project_out, nullptr, &Layer::reads_out>(&layer, layer.out.chunks);
      stack.add<&Layer::norm_mlp>(&layer, m);
      stack.add<&Layer::swiglu, nullptr, &Layer::reads_gate_up>(&layer, layer.gate_up.chunks);
      stack.add<&Layer::project_down, nullptr, &Layer::reads_down>(&layer, layer.down.chunks);
      stack.add<&Layer::norm_next>(&layer, m);
    }
  }
}

}  // namespace
}  // namespace deepinfer

// Operands: x f32 [M, hidden]; cos, sin f32 [M, rotated / 2]; block_tables s32 [M, P]; kv_lens s32
// [M]; write_slots s32 [M]; the last norm [hidden]; then per layer norm, qkv, [bias], [q norm, k
// norm], out, norm, gate_up, down (weights: kernel and companions as in matmul.cc), keys and values
// [N, bs, KH, D]. Attributes: heads, inner, biased, normed s64, eps, scale f32, and window_<i> s64
// of the layers that have one. Results: f32 [M, hidden] after the last norm; the pools, aliased to
// the operands.
extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* deepinfer_cpu_decoder(
    XLA_FFI_CallFrame* frame) {
  using namespace deepinfer;
  if (answered(frame)) return nullptr;
  const int64_t count = (frame->rets.size - 1) / 2;
  const bool biased = attribute<int64_t>(frame, "biased", 0),
             normed = attribute<int64_t>(frame, "normed", 0);
  const int64_t heads = attribute<int64_t>(frame, "heads", 0),
                inner = attribute<int64_t>(frame, "inner", 0);
  if (count < 1 || frame->args.size < 7 + 8 * count || heads < 1)
    return fail(frame, "cpu_decoder: operands are missing");
  const XLA_FFI_Buffer *x = argument(frame, 0), *cos = argument(frame, 1),
                       *tables = argument(frame, 3), *pool = result(frame, 1);
  const int64_t m = x->dims[0], hidden = x->dims[1], d = pool->dims[3], kv_heads = pool->dims[2];
  if (m == 0) return nullptr;
  const int64_t threads = pool_threads(frame), width = (heads + 2 * kv_heads) * d;
  auto stack = std::make_unique<Stack>(count, threads);
  static thread_local Scratch
      scratch;  // no helper touches it once the last phase is done, which this thread waits for
  float* at = scratch.get(m * (3 * hidden + width + heads * d + 3 * inner));
  auto take = [&](int64_t n) { return std::exchange(at, at + m * n); };
  Step& step = stack->step;
  step.m = m, step.hidden = hidden, step.rotated = cos->dims[1],
  step.eps = attribute<float>(frame, "eps", 0);
  step.cos = data<const float>(cos), step.sin = data<const float>(argument(frame, 2)),
  step.slots = data<const int32_t>(argument(frame, 5));
  step.x = take(hidden), step.normed = take(hidden), step.added = take(hidden),
  step.qkv = take(width), step.attended = take(heads * d);
  step.gate_up = take(2 * inner), step.inner = take(inner);
  std::memcpy(step.x, x->data, m * hidden * sizeof(float));
  stack->out = data<float>(result(frame, 0));
  Decode decode{};
  decode.pools = {nullptr, nullptr, false, pool->dims[0], pool->dims[1], kv_heads, d, d};
  decode.tables = data<const int32_t>(tables), decode.pages = tables->dims[1];
  decode.lens = lengths(argument(frame, 4), decode.pages, decode.pools), decode.sequences = m,
  decode.heads = heads, decode.q_per_seq = 1;
  decode.scale = attribute<float>(frame, "scale", 1.f);
  decode.plan(threads);
  Reader in{frame, 6};
  stack->last_norm = in.vector(hidden);
  for (int64_t i = 0; i < count; i++) {
    char name[32];
    std::snprintf(name, sizeof name, "window_%d", static_cast<int>(i));
    if (!read_layer(in, stack->layers[i], *stack, decode, attribute<int64_t>(frame, name, 0),
                    biased, normed, threads) ||
        stack->layers[i].gate_up.w.n != 2 * inner)
      return fail(frame, "cpu_decoder: operand types or shapes do not fit together");
  }
  if (in.next != frame->args.size || hidden % LANES || d % LANES || decode.rows() > MAX_ROWS)
    return fail(frame, "cpu_decoder: operand types or shapes do not fit together");
  add_phases(*stack);
  stack.release()->run(frame, threads);
  return nullptr;
}
