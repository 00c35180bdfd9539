// What a thread is going to read, asked from memory ahead of time.
//
// A decode step on a few rows reads weights at the memory's speed only if memory never waits for
// the threads: not while they wait for each other, normalise, or start on the next weights. So each
// thread has a stream, the stretches of bytes that it will read, in order, across all phases of its
// job: for what it uses it asks for as much further on, and while it waits, for more.
#pragma once

#include <algorithm>
#include <cstdint>

namespace deepinfer {

class Stream {
 public:
  // Bytes ahead while reading, while waiting, and after a restart
  // (docs/decisions/012-cpu-decode-step.md). More is no faster, and much more slower: the
  // first-level cache has to hold them.
  static constexpr int64_t AHEAD = 8 << 10, AHEAD_WAITING = 16 << 10, FIRST = 4 << 10;

  // The next stretch of bytes; false: there is none (for now).
  typedef bool (*Source)(void* of, const char** from, int64_t* bytes);
  Stream() = default;
  Stream(Source source, void* of) : source_(source), of_(of) {}

  // The thread has read so many of the bytes.
  void used(int64_t bytes) {
    ahead_ -= bytes, total_ += bytes;
    ask(bytes + bytes / 4, AHEAD);
  }
  // The thread has nothing better to do.
  void idle() { ask(BURST, AHEAD_WAITING); }
  // What comes next is not what the stream had come to.
  void restart() {
    at_ = end_ = nullptr, ahead_ = 0;
    ask(FIRST, AHEAD);
  }
  // Bytes that were to be read, and will not be by this thread.
  void drop(int64_t bytes) { ahead_ -= bytes; }
  int64_t total() const { return total_; }

 private:
  static constexpr int64_t LINE = 64, BURST = 4 * LINE;

  void ask(int64_t bytes, int64_t most) {
    bytes = std::min(bytes, most - ahead_);
    while (bytes > 0) {
      while (at_ == end_)
        if (!next()) return;
      const int64_t step = std::min<int64_t>(
          BURST, end_ - at_);  // what is counted must be what will be used, to the byte
      for (int64_t i = 0; i < BURST; i += LINE) __builtin_prefetch(at_ + i, 0, 0);
      at_ += step, bytes -= step, ahead_ += step;
    }
  }
  bool next() {
    int64_t bytes = 0;
    if (!source_ || !source_(of_, &at_, &bytes)) return false;
    end_ = at_ + bytes;
    return true;
  }

  Source source_ = nullptr;
  void* of_ = nullptr;
  const char *at_ = nullptr, *end_ = nullptr;
  int64_t ahead_ = 0, total_ = 0;
};

// This thread's stream while it works on a job; one without a source otherwise.
inline Stream& stream(Stream* set = nullptr) {
  static thread_local Stream none;
  static thread_local Stream* current = &none;
  if (set) current = set;
  return *current;
}

}  // namespace deepinfer
