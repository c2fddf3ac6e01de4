// How the benchmark takes time: the same work captured in a graph a GPU, all graphs let go together, events
// around them or inside (exchange-ways article, section 8.1).
#pragma once

#include <cuda_runtime.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "provenance.hpp"

namespace heddle::tool {

/// Two streams a GPU, and a gate that holds the first ones until the host opens it.
class Lanes {
 public:
  Lanes(std::vector<int> devices, std::chrono::milliseconds deadline);
  ~Lanes();
  Lanes(const Lanes&) = delete;
  Lanes& operator=(const Lanes&) = delete;

  std::size_t gpus() const { return devices_.size(); }
  const std::vector<int>& devices() const { return devices_; }
  int device(std::size_t gpu) const { return devices_[gpu]; }
  cudaStream_t stream(std::size_t gpu) const { return streams_[gpu]; }
  cudaStream_t second(std::size_t gpu) const { return second_[gpu]; }
  int sms() const { return sms_; }  ///< of the first GPU
  std::chrono::milliseconds deadline() const { return deadline_; }

  /// Queues the gate on all streams; `open` lets them go.
  void close_gate();
  void open_gate();
  /// Waits for everything on all streams. Throws Error if that takes more than the deadline, after
  /// having called `give_up`, which makes kernels leave that would wait for ever.
  void settle(const std::function<void()>& give_up = {});

 private:
  std::vector<int> devices_;
  std::chrono::milliseconds deadline_;
  std::vector<cudaStream_t> streams_, second_;
  std::uint32_t* gate_ = nullptr;  ///< pinned
  std::uint32_t number_ = 0;
  int sms_ = 0;
};

struct DestroyEvent {
  void operator()(cudaEvent_t event) const { cudaEventDestroy(event); }
};
using Event = std::unique_ptr<CUevent_st, DestroyEvent>;
/// Of the current GPU.
Event make_event();

/// An event a GPU.
class LaneEvents {
 public:
  explicit LaneEvents(const Lanes& lanes);

  std::size_t gpus() const { return events_.size(); }
  cudaEvent_t of(std::size_t gpu) const { return events_[gpu].get(); }
  /// Behind what has been queued on `stream`, one of this GPU.
  void record(std::size_t gpu, cudaStream_t stream) const;
  /// What is queued on `stream` from now on waits for the event.
  void hold(std::size_t gpu, cudaStream_t stream) const;
  /// What is queued on `after` from now on waits for what has been queued on `before`.
  void order(std::size_t gpu, cudaStream_t before, cudaStream_t after) const;

 private:
  std::vector<Event> events_;
};

/// Once both have been passed: microseconds from the one to the other, of the GPU where it took longest.
double slowest_us(const LaneEvents& from, const LaneEvents& to);

/// Points in time on the lanes' first streams, as many as there are calls to mark them.
class Marks {
 public:
  explicit Marks(const Lanes& lanes);

  /// To be called while the stream is captured: the next mark of this GPU.
  void mark(std::size_t gpu) { mark(gpu, cudaEventRecordExternal); }
  /// Outside of captures: the next mark of every GPU.
  void mark_all();
  /// Once they have been passed: microseconds between marks `from` and `to`, of the GPU where it took longest.
  double between(std::size_t from, std::size_t to) const { return slowest_us(events_[from], events_[to]); }

 private:
  void mark(std::size_t gpu, unsigned flags);

  const Lanes& lanes_;
  std::vector<LaneEvents> events_;   ///< a mark
  std::vector<std::size_t> marked_;  ///< a GPU: how many there are
};

struct DestroyGraph {
  void operator()(cudaGraphExec_t graph) const { cudaGraphExecDestroy(graph); }
};
using Graph = std::unique_ptr<CUgraphExec_st, DestroyGraph>;

/// What `work` queues on the lanes' first streams, as a graph a GPU.
std::vector<Graph> captured_graphs(const Lanes& lanes, const std::function<void()>& work);

/// Replays for some time.
struct Sustained {
  std::vector<double>
      samples;  ///< microseconds a replay on the slowest GPU, one of each round of replays that were queued together
  long long replays = 0;
  double seconds = 0;  ///< of the host, from the first to the end of the last
};

/// What `work` queues on the lanes' first streams, as a graph a GPU, and what `beside` queues on the second ones, as another, which
/// begins with the first and is part of its time: nothing else orders the kernels of the two.
class Replay {
 public:
  Replay(Lanes& lanes, const std::function<void()>& work, const std::function<void()>& beside = {});

  /// Called after each replay but the first ones, which only warm up.
  using After = std::function<void()>;
  /// Microseconds of each replay on the slowest GPU. `check` throws if something went wrong; `give_up` as in settle.
  std::vector<double> run(int replays, const std::function<void()>& check, const std::function<void()>& give_up = {},
                          const After& after = {});
  /// Kernels in the graph of one GPU.
  int kernels(std::size_t gpu) const { return kernels_[gpu]; }
  /// Replays, `together` of them queued at once, for at least `seconds`. `check` is called after each round.
  Sustained sustain(double seconds, int together, const std::function<void()>& check, const std::function<void()>& give_up = {});

 private:
  void launch(std::size_t gpu);
  /// Microseconds of `count` replays on the slowest GPU.
  double round(int count, bool gated, const std::function<void()>& give_up);

  Lanes& lanes_;
  std::vector<Graph> graphs_, beside_;  ///< a GPU; none beside: empty
  std::vector<int> kernels_;            ///< in each of the first
  LaneEvents begins_, ends_, forks_, joins_;
};

/// How many steps of some work last so long, by what two numbers of them take (`time`, microseconds): the launch does not count.
std::uint64_t steps_that_last(double microseconds, const std::function<double(std::uint64_t steps)>& time);

/// Microseconds on the slowest GPU of what `work` queues on the lanes' streams, first and second ones, queued anew each time: for
/// calls in which the host waits, which no graph can hold. Its waiting is part of the time. The first rounds only warm up. `check`
/// and `give_up` as Replay's.
std::vector<double> time_queued(Lanes& lanes, const std::function<void()>& work, int rounds, const std::function<void()>& check,
                                const std::function<void()>& give_up = {});

}  // namespace heddle::tool
