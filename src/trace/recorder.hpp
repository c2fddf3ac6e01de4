// The recorder of the host engine. A thread that is attached to a recorder has a lane of its own, to which it alone writes; all
// others record nothing, for the price of looking at a thread-local pointer.
//
//   Recorder recorder;
//   { const Attached lane(recorder, {rank, Role::rank}); layer.forward(...); }
//   const Trace trace = recorder.take();
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <mutex>

#include "trace/span.hpp"

namespace heddle::trace {

class Recorder {
 public:
  /// A new lane, for one thread. May be called from several threads.
  Lane& open(const LaneName& name);
  /// Likewise one that was recorded elsewhere.
  void add(Lane lane);
  /// Lanes of this GPU are on the host's clock, wrong by this many nanoseconds at most.
  void note_clock(int device, std::int64_t uncertainty);
  /// By GPU; empty where all lanes are the host's own.
  std::map<int, std::int64_t> clocks() const { return clocks_; }
  /// All lanes in the order of their names, times from the first one's begin on; the recorder is empty then. Nobody is attached.
  Trace take();

 private:
  std::mutex opening_;
  std::deque<Lane> lanes_;  ///< stay where they are
  std::map<int, std::int64_t> clocks_;
};

/// Who a thread records for: handed to the threads it starts. Empty: nobody.
struct Context {
  Recorder* recorder = nullptr;
  int rank = 0;
};
Context context();

/// Gives this thread a lane for the time of its life, instead of the one it may have.
class Attached {
 public:
  Attached(Recorder& recorder, const LaneName& name);
  /// In a thread that another one has started: of the same rank. Nothing where that one recorded nothing.
  Attached(const Context& parent, Role role, int number);
  ~Attached();
  Attached(const Attached&) = delete;
  Attached& operator=(const Attached&) = delete;

 private:
  void attach(Recorder& recorder, const LaneName& name);
  Context outer_;
  Lane* outer_lane_;
};

/// A span for the time of its life, in this thread's lane if it has one.
class Recorded {
 public:
  explicit Recorded(Kind kind, const TaskNote& task = {});
  explicit Recorded(const WordName& word);
  ~Recorded();
  Recorded(const Recorded&) = delete;
  Recorded& operator=(const Recorded&) = delete;

 private:
  Lane* lane_;
  Span span_;
};

}  // namespace heddle::trace
