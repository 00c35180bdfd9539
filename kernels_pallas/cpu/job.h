// Work that the threads of XLA's intra-op pool do together.
//
// A job is a list of phases, a phase a number of chunks that threads claim one by one; a phase
// starts when the one before is done. Each thread starts at a place of its own, its lane, and goes
// on from there, so that its chunks lie side by side in memory. The calling thread works too and
// nobody waits for a helper that has not started, only for chunks already begun: a busy machine
// costs no more than the helpers' share, and calls of many devices at once cannot block each other.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>

#include "stream.h"
#include "xla/ffi/api/c_api.h"

namespace deepinfer {

constexpr int MAX_LANES = 8;

struct alignas(64) Lane {  // a run of a phase's chunks
  std::atomic<int64_t> next{0};
  int64_t begin = 0, end = 0;
};

struct alignas(64) Phase {
  int64_t chunks = 0, lanes = 1;
  const void* context = nullptr;
  void (*run)(const void* context, int64_t chunk) = nullptr;
  void (*last)(const void* context) = nullptr;  // once all chunks are done, before anybody goes on
  // What a chunk reads from memory, a stretch at a time from part 0 on; false: there is no such
  // part.
  bool (*reads)(const void* context, int64_t chunk, int64_t part, const char** from,
                int64_t* bytes) = nullptr;
  alignas(64) std::atomic<int64_t> done{0};
  std::atomic<bool> ready{false};
  Lane lane[MAX_LANES];
};

class Job {
 public:
  // At most `capacity` phases, done by up to `threads` threads.
  Job(int64_t capacity, int64_t threads)
      : phases_(new Phase[capacity]),
        lanes_(std::min<int64_t>(std::max<int64_t>(threads, 1), MAX_LANES)) {}
  virtual ~Job() = default;

  // context.METHOD(chunk) for each chunk, then context.LAST(); context.READS(chunk, ...) as
  // Phase::reads; the context must live as long as the job.
  template <auto METHOD, auto LAST = nullptr, auto READS = nullptr, typename C> void add(
      const C* context, int64_t chunks) {
    if (chunks <= 0) return;
    Phase& p = phases_[count_++];
    p.chunks = chunks, p.context = context, p.lanes = std::min(lanes_, chunks);
    p.run = [](const void* c, int64_t i) { (static_cast<const C*>(c)->*METHOD)(i); };
    if constexpr (LAST != nullptr)
      p.last = [](const void* c) { (static_cast<const C*>(c)->*LAST)(); };
    if constexpr (READS != nullptr)
      p.reads = [](const void* c, int64_t i, int64_t part, const char** from, int64_t* bytes) {
        return (static_cast<const C*>(c)->*READS)(i, part, from, bytes);
      };
    for (int64_t i = 0; i < p.lanes; i++) {
      p.lane[i].begin = chunks * i / p.lanes, p.lane[i].end = chunks * (i + 1) / p.lanes;
      p.lane[i].next.store(p.lane[i].begin, std::memory_order_relaxed);
    }
    widest_ = std::max(widest_, chunks);
  }

  // Does all phases with the pool's threads; the job deletes itself when its last helper is gone.
  void run(XLA_FFI_CallFrame* frame, int64_t threads) {
    const int64_t helpers = std::max<int64_t>(std::min(threads, widest_) - 1, 0);
    references_ = 1 + static_cast<int>(helpers);
    for (int64_t i = 0; i < helpers; i++) {
      XLA_FFI_ThreadPool_Schedule_Args args{XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE, nullptr,
                                            frame->ctx, help, this};
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
  // The stretches that a worker's own lanes will read, phase after phase.
  struct Ahead {
    const Job* job;
    int64_t worker, phase = -1, chunk = -1,
                    part = 0;  // of the stretch to come; chunk -1: the lane's first

    static bool next(void* of, const char** from, int64_t* bytes) {
      Ahead& a = *static_cast<Ahead*>(of);
      for (; a.phase < a.job->count_; a.skip_to(a.phase + 1)) {
        const Phase& p = a.job->phases_[a.phase];
        if (!p.reads || a.worker >= p.lanes) continue;
        const Lane& lane = p.lane[a.worker];
        if (a.chunk < 0) a.chunk = lane.begin;
        for (; a.chunk < lane.end; a.chunk++, a.part = 0)
          if (p.reads(p.context, a.chunk, a.part, from, bytes)) return a.part++, true;
      }
      return false;
    }
    void skip_to(int64_t to, int64_t first = -1) { phase = to, chunk = first, part = 0; }
  };

  static void help(void* data) {
    Job* job = static_cast<Job*>(data);
    job->work(job->workers_.fetch_add(1, std::memory_order_relaxed));
    job->release();
  }
  void release() {
    if (references_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
  }
  void work(int64_t worker) {
    Stream* const before = &stream();
    Ahead ahead{this, worker};
    Stream own(Ahead::next, &ahead);
    bool lost = false;  // others did what the stream was asked for
    for (int64_t i = 0; i < count_; i++) {
      Phase& p = phases_[i];
      if (p.ready.load(std::memory_order_acquire)) {
        lost = true;
        continue;
      }
      if (lost || ahead.phase < i) ahead.skip_to(i), own.restart();
      lost = false;
      if (worker < p.lanes) claim(i, own, ahead);
      for (int64_t l = worker < p.lanes; l < p.lanes; l++) help_out(i, (worker + l) % p.lanes);
      if (worker == 0 || i + 1 < count_) wait(p, own);
    }
    stream(before);
  }
  // Chunks of the worker's own lane.
  void claim(int64_t phase, Stream& own, Ahead& ahead) {
    Phase& p = phases_[phase];
    Lane& lane = p.lane[ahead.worker];
    stream(&own);
    const int64_t start = own.total();
    int64_t mine = 0;
    for (int64_t chunk; (chunk = lane.next.fetch_add(1, std::memory_order_relaxed)) < lane.end;
         mine++)
      p.run(p.context, chunk);
    count(p, mine);
    if (mine == lane.end - lane.begin) return;
    if (ahead.phase <= phase) ahead.skip_to(phase + 1), own.restart();
    else own.drop(bytes(p, lane) - (own.total() - start));
  }
  // What a lane's chunks read.
  static int64_t bytes(const Phase& p, const Lane& lane) {
    int64_t sum = 0, stretch = 0;
    const char* from = nullptr;
    for (int64_t chunk = lane.begin; p.reads && chunk < lane.end; chunk++)
      for (int64_t part = 0; p.reads(p.context, chunk, part, &from, &stretch); part++)
        sum += stretch;
    return sum;
  }
  // Chunks that their own worker has not come to.
  void help_out(int64_t phase, int64_t l) {
    Phase& p = phases_[phase];
    Lane& lane = p.lane[l];
    if (lane.next.load(std::memory_order_relaxed) >= lane.end) return;
    Ahead ahead{this, l};
    Stream theirs(Ahead::next, &ahead);
    stream(&theirs);
    int64_t mine = 0;
    for (int64_t chunk; (chunk = lane.next.fetch_add(1, std::memory_order_relaxed)) < lane.end;
         mine++) {
      if (!mine) ahead.skip_to(phase, chunk), theirs.restart();
      p.run(p.context, chunk);
    }
    count(p, mine);
  }
  // Counts chunks that are done; once per lane, for the counter travels between the cores.
  static void count(Phase& p, int64_t chunks) {
    if (!chunks || p.done.fetch_add(chunks, std::memory_order_acq_rel) + chunks < p.chunks) return;
    if (p.last) p.last(p.context);
    p.ready.store(true, std::memory_order_release);
  }
  // Microseconds, unless the machine gave the core of a chunk's thread to someone else.
  static void wait(const Phase& p, Stream& own) {
    for (int spins = 0; !p.ready.load(std::memory_order_acquire); spins++) {
      own.idle();
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

}  // namespace deepinfer
