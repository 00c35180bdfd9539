// What the CPU custom calls share: reading XLA's call frame, and work that the threads of XLA's intra-op pool do together.
//
// A job is a list of phases, a phase a number of chunks that threads claim one by one; a phase starts when the one before is done.
// Each thread starts at a place of its own and goes on from there, so that its chunks lie side by side in memory. The calling
// thread works too and nobody waits for a helper that has not started, only for chunks already begun: a busy machine costs no more
// than the helpers' share, and calls of many devices at once cannot block each other.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>

#include "xla/ffi/api/c_api.h"

namespace deepinfer {

constexpr int MAX_LANES = 8;

struct alignas(64) Lane {  // a run of a phase's chunks
  std::atomic<int64_t> next{0};
  int64_t end = 0;
};

struct alignas(64) Phase {
  int64_t chunks = 0, lanes = 1;
  const void* context = nullptr;
  void (*run)(const void* context, int64_t chunk) = nullptr;
  void (*last)(const void* context) = nullptr;                      // once all chunks are done, before anybody goes on
  void (*warm)(const void* context, int64_t chunk) = nullptr;       // asks memory for what a chunk begins with
  alignas(64) std::atomic<int64_t> done{0};
  std::atomic<bool> ready{false};
  Lane lane[MAX_LANES];
};

class Job {
 public:
  // At most `capacity` phases, done by up to `threads` threads.
  Job(int64_t capacity, int64_t threads) : phases_(new Phase[capacity]), lanes_(std::min<int64_t>(std::max<int64_t>(threads, 1), MAX_LANES)) {}
  virtual ~Job() = default;

  // context.METHOD(chunk) for each chunk, then context.LAST(); the context must live as long as the job.
  template <auto METHOD, auto LAST = nullptr, auto WARM = nullptr, typename C> void add(const C* context, int64_t chunks) {
    if (chunks <= 0) return;
    Phase& p = phases_[count_++];
    p.chunks = chunks, p.context = context, p.lanes = std::min(lanes_, chunks);
    p.run = [](const void* c, int64_t i) { (static_cast<const C*>(c)->*METHOD)(i); };
    if constexpr (LAST != nullptr) p.last = [](const void* c) { (static_cast<const C*>(c)->*LAST)(); };
    if constexpr (WARM != nullptr) p.warm = [](const void* c, int64_t i) { (static_cast<const C*>(c)->*WARM)(i); };
    for (int64_t i = 0; i < p.lanes; i++) {
      p.lane[i].next.store(chunks * i / p.lanes, std::memory_order_relaxed);
      p.lane[i].end = chunks * (i + 1) / p.lanes;
    }
    widest_ = std::max(widest_, chunks);
  }

  // Does all phases with the pool's threads; the job deletes itself when its last helper is gone.
  void run(XLA_FFI_CallFrame* frame, int64_t threads) {
    const int64_t helpers = std::max<int64_t>(std::min(threads, widest_) - 1, 0);
    references_ = 1 + static_cast<int>(helpers);
    for (int64_t i = 0; i < helpers; i++) {
      XLA_FFI_ThreadPool_Schedule_Args args{XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE, nullptr, frame->ctx, help, this};
      XLA_FFI_Error* error = frame->api->XLA_FFI_ThreadPool_Schedule(&args);
      if (!error) continue;
      XLA_FFI_Error_Destroy_Args destroy{XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, nullptr, error};
      frame->api->XLA_FFI_Error_Destroy(&destroy);
      release();
    }
    work(0);
    release();
  }

 private:
  static void help(void* data) {
    Job* job = static_cast<Job*>(data);
    job->work(job->workers_.fetch_add(1, std::memory_order_relaxed));
    job->release();
  }
  void release() {
    if (references_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
  }
  void work(int64_t worker) {
    for (int64_t i = 0; i < count_; i++) {
      Phase& p = phases_[i];
      if (p.ready.load(std::memory_order_acquire)) continue;
      for (int64_t l = 0; l < p.lanes; l++) claim(p, p.lane[(worker + l) % p.lanes]);
      const Phase* next = i + 1 < count_ ? &phases_[i + 1] : nullptr;
      if (next && next->warm) next->warm(next->context, next->lane[worker % next->lanes].next.load(std::memory_order_relaxed));
      if (worker == 0 || next) wait(p);
    }
  }
  static void claim(Phase& p, Lane& lane) {
    if (lane.next.load(std::memory_order_relaxed) >= lane.end) return;
    for (int64_t chunk; (chunk = lane.next.fetch_add(1, std::memory_order_relaxed)) < lane.end;) {
      p.run(p.context, chunk);
      if (p.done.fetch_add(1, std::memory_order_acq_rel) + 1 < p.chunks) continue;
      if (p.last) p.last(p.context);
      p.ready.store(true, std::memory_order_release);
    }
  }
  // Microseconds, unless the machine gave the core of a chunk's thread to someone else.
  static void wait(const Phase& p) {
    for (int spins = 0; !p.ready.load(std::memory_order_acquire); spins++) {
      if (spins > 2000) {
        sched_yield();
        continue;
      }
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
  }

  std::unique_ptr<Phase[]> phases_;
  int64_t count_ = 0, widest_ = 0, lanes_;
  std::atomic<int> references_{1};
  std::atomic<int64_t> workers_{1};
};

inline int64_t pool_threads(XLA_FFI_CallFrame* frame) {
  int64_t threads = 1;
  XLA_FFI_ThreadPool_NumThreads_Args args{XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE, nullptr, frame->ctx, &threads};
  XLA_FFI_Error* error = frame->api->XLA_FFI_ThreadPool_NumThreads(&args);
  if (!error) return threads;
  XLA_FFI_Error_Destroy_Args destroy{XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, nullptr, error};
  frame->api->XLA_FFI_Error_Destroy(&destroy);
  return 1;
}

inline XLA_FFI_Error* fail(const XLA_FFI_CallFrame* frame, const char* message) {
  XLA_FFI_Error_Create_Args args{XLA_FFI_Error_Create_Args_STRUCT_SIZE, nullptr, message, XLA_FFI_Error_Code_INVALID_ARGUMENT};
  return frame->api->XLA_FFI_Error_Create(&args);
}

// Whether this call asks for anything but execution; then it is answered, and the handler returns nullptr.
inline bool answered(XLA_FFI_CallFrame* frame) {
  if (frame->extension_start && frame->extension_start->type == XLA_FFI_Extension_Metadata) {
    auto* metadata = reinterpret_cast<XLA_FFI_Metadata_Extension*>(frame->extension_start)->metadata;
    metadata->api_version.major_version = XLA_FFI_API_MAJOR;
    metadata->api_version.minor_version = XLA_FFI_API_MINOR;
    metadata->traits = 0;
    return true;
  }
  return frame->stage != XLA_FFI_ExecutionStage_EXECUTE;
}

inline const XLA_FFI_Buffer* argument(const XLA_FFI_CallFrame* frame, int64_t i) {
  return static_cast<const XLA_FFI_Buffer*>(frame->args.args[i]);
}
inline const XLA_FFI_Buffer* result(const XLA_FFI_CallFrame* frame, int64_t i) {
  return static_cast<const XLA_FFI_Buffer*>(frame->rets.rets[i]);
}
template <typename T> T* data(const XLA_FFI_Buffer* buffer) { return static_cast<T*>(buffer->data); }

// The scalar attribute of this name and type; `fallback` if there is none.
template <typename T> T attribute(const XLA_FFI_CallFrame* frame, const char* name, T fallback) {
  for (int64_t i = 0; i < frame->attrs.size; i++) {
    const XLA_FFI_ByteSpan* found = frame->attrs.names[i];
    if (frame->attrs.types[i] != XLA_FFI_AttrType_SCALAR || found->len != std::strlen(name) || std::memcmp(found->ptr, name, found->len)) continue;
    std::memcpy(&fallback, static_cast<XLA_FFI_Scalar*>(frame->attrs.attrs[i])->value, sizeof(T));
  }
  return fallback;
}

}  // namespace deepinfer
