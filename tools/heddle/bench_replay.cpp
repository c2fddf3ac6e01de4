#include "bench_replay.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include "bench_kernels.hpp"
#include "group/cuda_driver.hpp"
#include "heddle/error.hpp"

namespace heddle::tool {

using cuda::check;

Lanes::Lanes(std::vector<int> devices, std::chrono::milliseconds deadline) : devices_(std::move(devices)), deadline_(deadline) {
  for (const int device : devices_) {
    const cuda::DeviceScope scope(device);
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
    streams_.push_back(stream);
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
    second_.push_back(stream);
  }
  check(cudaHostAlloc(reinterpret_cast<void**>(&gate_), sizeof *gate_, cudaHostAllocPortable | cudaHostAllocMapped), "gate");
  *gate_ = 0;
  check(cudaDeviceGetAttribute(&sms_, cudaDevAttrMultiProcessorCount, devices_.front()), "number of SMs");
}

Lanes::~Lanes() {
  for (cudaStream_t stream : streams_) cudaStreamDestroy(stream);
  for (cudaStream_t stream : second_) cudaStreamDestroy(stream);
  cudaFreeHost(gate_);
}

void Lanes::close_gate() {
  ++number_;
  for (std::size_t gpu = 0; gpu < gpus(); ++gpu) {
    const cuda::DeviceScope scope(device(gpu));
    launch_gate(gate_, number_, stream(gpu));
  }
}

void Lanes::open_gate() { std::atomic_ref<std::uint32_t>(*gate_).store(number_, std::memory_order_release); }

void Lanes::settle(const std::function<void()>& give_up) {
  const auto since = std::chrono::steady_clock::now();
  // Kernels of the library end by themselves at the deadline; twice that is for those of others.
  const auto patience = 2 * deadline_ + std::chrono::seconds(1);
  for (std::size_t gpu = 0; gpu < gpus(); ++gpu) {
    const cuda::DeviceScope scope(device(gpu));
    for (cudaStream_t one : {stream(gpu), second(gpu)}) {
      for (cudaError_t status = cudaStreamQuery(one); status != cudaSuccess; status = cudaStreamQuery(one)) {
        if (status != cudaErrorNotReady) check(status, "work on the GPU");
        if (std::chrono::steady_clock::now() - since > patience) {
          if (give_up) give_up();
          throw Error(ErrorKind::fault,
                      fmt::format("GPU {} is not done after {} s", device(gpu), std::chrono::duration<double>(patience).count()));
        }
        std::this_thread::yield();
      }
    }
  }
}

Event make_event() {
  cudaEvent_t event = nullptr;
  check(cudaEventCreate(&event), "event");
  return Event(event);
}

LaneEvents::LaneEvents(const Lanes& lanes) {
  for (const int device : lanes.devices()) {
    const cuda::DeviceScope scope(device);
    events_.push_back(make_event());
  }
}

void LaneEvents::record(std::size_t gpu, cudaStream_t stream) const { check(cudaEventRecord(of(gpu), stream), "event"); }

void LaneEvents::hold(std::size_t gpu, cudaStream_t stream) const {
  check(cudaStreamWaitEvent(stream, of(gpu)), "wait for an event");
}

void LaneEvents::order(std::size_t gpu, cudaStream_t before, cudaStream_t after) const {
  record(gpu, before);
  hold(gpu, after);
}

double slowest_us(const LaneEvents& from, const LaneEvents& to) {
  double slowest = 0;
  for (std::size_t gpu = 0; gpu < from.gpus(); ++gpu) {
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, from.of(gpu), to.of(gpu)), "time between events");
    slowest = std::max(slowest, 1e3 * static_cast<double>(milliseconds));
  }
  return slowest;
}

Marks::Marks(const Lanes& lanes) : lanes_(lanes), marked_(lanes.gpus(), 0) {}

void Marks::mark_all() {
  for (std::size_t gpu = 0; gpu < lanes_.gpus(); ++gpu) mark(gpu, cudaEventRecordDefault);
}

void Marks::mark(std::size_t gpu, unsigned flags) {
  const std::size_t mark = marked_[gpu]++;
  if (mark == events_.size()) events_.emplace_back(lanes_);
  const cuda::DeviceScope scope(lanes_.device(gpu));
  check(cudaEventRecordWithFlags(events_[mark].of(gpu), lanes_.stream(gpu), flags), "mark");
}

namespace {

int kernels_of(cudaGraph_t graph) {
  std::size_t count = 0;
  check(cudaGraphGetNodes(graph, nullptr, &count), "nodes of a graph");
  std::vector<cudaGraphNode_t> nodes(count);
  if (count > 0) check(cudaGraphGetNodes(graph, nodes.data(), &count), "nodes of a graph");
  return static_cast<int>(std::count_if(nodes.begin(), nodes.end(), [](cudaGraphNode_t node) {
    cudaGraphNodeType type = cudaGraphNodeTypeEmpty;
    check(cudaGraphNodeGetType(node, &type), "nodes of a graph");
    return type == cudaGraphNodeTypeKernel;
  }));
}

struct Captured {
  std::vector<Graph> graphs;  ///< a GPU
  std::vector<int> kernels;   ///< in each
};
using StreamOf = cudaStream_t (Lanes::*)(std::size_t) const;

/// A graph a GPU of what `work` queues on `stream`.
Captured captured(const Lanes& lanes, StreamOf stream, const std::function<void()>& work) {
  for (std::size_t gpu = 0; gpu < lanes.gpus(); ++gpu) {
    const cuda::DeviceScope scope(lanes.device(gpu));
    check(cudaStreamBeginCapture((lanes.*stream)(gpu), cudaStreamCaptureModeRelaxed), "capture");
  }
  std::exception_ptr failed;
  try {
    work();
  } catch (...) {
    failed = std::current_exception();
  }
  Captured captured;
  for (std::size_t gpu = 0; gpu < lanes.gpus(); ++gpu) {
    const cuda::DeviceScope scope(lanes.device(gpu));
    cudaGraph_t graph = nullptr;
    const cudaError_t status = cudaStreamEndCapture((lanes.*stream)(gpu), &graph);
    if (failed) {
      cudaGetLastError();
      if (graph != nullptr) cudaGraphDestroy(graph);
      continue;
    }
    check(status, "end of the capture");
    captured.kernels.push_back(kernels_of(graph));
    cudaGraphExec_t executable = nullptr;
    check(cudaGraphInstantiate(&executable, graph, 0), "graph");
    check(cudaGraphDestroy(graph), "graph");
    captured.graphs.emplace_back(executable);
  }
  if (failed) std::rethrow_exception(failed);
  return captured;
}

}  // namespace

std::vector<Graph> captured_graphs(const Lanes& lanes, const std::function<void()>& work) {
  return captured(lanes, &Lanes::stream, work).graphs;
}

Replay::Replay(Lanes& lanes, const std::function<void()>& work, const std::function<void()>& beside)
    : lanes_(lanes), begins_(lanes), ends_(lanes), forks_(lanes), joins_(lanes) {
  Captured own = captured(lanes, &Lanes::stream, work);
  graphs_ = std::move(own.graphs);
  kernels_ = std::move(own.kernels);
  if (beside) beside_ = captured(lanes, &Lanes::second, beside).graphs;
}

// The same order on every GPU: even streams that shared a queue would take both graphs one after the other everywhere.
void Replay::launch(std::size_t gpu) {
  cudaStream_t stream = lanes_.stream(gpu);
  if (beside_.empty()) {
    check(cudaGraphLaunch(graphs_[gpu].get(), stream), "replay");
    return;
  }
  cudaStream_t second = lanes_.second(gpu);
  forks_.order(gpu, stream, second);
  check(cudaGraphLaunch(graphs_[gpu].get(), stream), "replay");
  check(cudaGraphLaunch(beside_[gpu].get(), second), "replay beside it");
  joins_.order(gpu, second, stream);
}

double Replay::round(int count, bool gated, const std::function<void()>& give_up) {
  if (gated) lanes_.close_gate();
  for (int replay = 0; replay < count; ++replay) {
    for (std::size_t gpu = 0; gpu < lanes_.gpus(); ++gpu) {
      const cuda::DeviceScope scope(lanes_.device(gpu));
      if (replay == 0) begins_.record(gpu, lanes_.stream(gpu));
      launch(gpu);
      if (replay == count - 1) ends_.record(gpu, lanes_.stream(gpu));
    }
    if (replay == 0) lanes_.open_gate();  // the others are queued while it runs
  }
  lanes_.settle(give_up);
  return slowest_us(begins_, ends_);
}

std::vector<double> Replay::run(int replays, const std::function<void()>& check_calls, const std::function<void()>& give_up,
                                const After& after) {
  std::vector<double> samples;
  for (int replay = -3; replay < replays; ++replay) {
    const double microseconds = round(1, replay > -3, give_up);  // the first launch uploads the graph
    check_calls();
    if (replay < 0) continue;
    samples.push_back(microseconds);
    if (after) after();
  }
  return samples;
}

std::uint64_t steps_that_last(double microseconds, const std::function<double(std::uint64_t)>& time) {
  constexpr std::uint64_t few = 1000, many = 5000;
  const double of_many = time(many), of_few = time(few);  // the longer one first, for the clocks to rise
  const double a_step = std::max(1e-6, (of_many - of_few) / static_cast<double>(many - few));
  return static_cast<std::uint64_t>(std::max(1.0, microseconds / a_step));
}

namespace {

/// Around all that is queued on both streams of every GPU between begin and end.
class Span {
 public:
  explicit Span(const Lanes& lanes) : lanes_(lanes), begins_(lanes), ends_(lanes), joins_(lanes) {}

  void begin() {
    for (std::size_t gpu = 0; gpu < lanes_.gpus(); ++gpu) {
      const cuda::DeviceScope scope(lanes_.device(gpu));
      begins_.order(gpu, lanes_.stream(gpu), lanes_.second(gpu));
    }
  }
  void end() {
    for (std::size_t gpu = 0; gpu < lanes_.gpus(); ++gpu) {
      const cuda::DeviceScope scope(lanes_.device(gpu));
      joins_.order(gpu, lanes_.second(gpu), lanes_.stream(gpu));
      ends_.record(gpu, lanes_.stream(gpu));
    }
  }
  /// Once all streams are at rest.
  double us() const { return slowest_us(begins_, ends_); }

 private:
  const Lanes& lanes_;
  LaneEvents begins_, ends_, joins_;
};

}  // namespace

std::vector<double> time_queued(Lanes& lanes, const std::function<void()>& work, int rounds,
                                const std::function<void()>& check_calls, const std::function<void()>& give_up) {
  Span span(lanes);
  std::vector<double> samples;
  for (int round = -3; round < rounds; ++round) {
    span.begin();
    work();
    span.end();
    lanes.settle(give_up);
    check_calls();
    if (round >= 0) samples.push_back(span.us());
  }
  return samples;
}

Sustained Replay::sustain(double seconds, int together, const std::function<void()>& check_calls,
                          const std::function<void()>& give_up) {
  Sustained all;
  const auto since = std::chrono::steady_clock::now();
  while (all.seconds < seconds) {
    all.samples.push_back(round(together, true, give_up) / together);
    check_calls();
    all.replays += together;
    all.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - since).count();
  }
  return all;
}

}  // namespace heddle::tool
