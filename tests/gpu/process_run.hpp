// A case over several processes, as one of them runs it: its own GPU with its ranks, filled, called and compared with what
// must come home. Processes are forked before any CUDA call, so the parent makes none.
#pragma once

#include <signal.h>
#include <sys/mman.h>

#include "gpu/device_run.hpp"
#include "processes.hpp"

namespace heddle {

/// What a forked child finds out for a parent that makes no CUDA call: one number.
template <class Ask>
std::size_t ask_a_child(Ask ask) {
  auto* answer = static_cast<std::size_t*>(mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    *answer = ask();
    _exit(0);
  }
  waitpid(child, nullptr, 0);
  const std::size_t found = *answer;
  munmap(answer, 4096);
  return found;
}

inline int gpus_for_processes() {
  static const int count = static_cast<int>(ask_a_child([] { return static_cast<std::size_t>(gpus_here()); }));
  return count;
}

/// Bytes free on all GPUs together.
inline std::size_t free_device_memory() {
  return ask_a_child([] {
    std::size_t sum = 0;
    for (int device = 0; device < gpus_here(); ++device) {
      std::size_t free = 0, total = 0;
      if (cudaSetDevice(device) == cudaSuccess && cudaMemGetInfo(&free, &total) == cudaSuccess) sum += free;
    }
    return sum;
  });
}

/// Leaves the calling process, which has made no CUDA call yet, with the one GPU that is its turn.
inline void see_only_gpu(int gpu) {
  const char* given = std::getenv("CUDA_VISIBLE_DEVICES");
  std::string list = given == nullptr ? "" : given;
  for (int skip = 0; skip < gpu && !list.empty(); ++skip) {
    const auto comma = list.find(',');
    list = comma == std::string::npos ? "" : list.substr(comma + 1);
  }
  const std::string mine = list.empty() ? std::to_string(gpu) : list.substr(0, list.find(','));
  setenv("CUDA_VISIBLE_DEVICES", mine.c_str(), 1);
}

/// One process's share of a case: one GPU, `mine.ranks` ranks.
class ProcessRun {
 public:
  ProcessRun(const Case& c, Group& processes, const DeviceGroupOptions& mine, const DeviceExchangeOptions& device = {})
      : case_(c),
        memory_(exchange_memory(c.options)),
        workspace_(processes, mine, memory_.heap_bytes(c.ranks()), describe(c.options)),
        exchange_(create_device_exchange(workspace_, 0, c.options, memory_, device)) {
    check(cudaSetDevice(workspace_.device(0)), "cudaSetDevice");
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    const int gpu = workspace_.device(0);
    const auto cap = static_cast<std::size_t>(c.options.cap);
    const auto hidden = cap * static_cast<std::size_t>(c.options.hidden);
    const auto k = cap * static_cast<std::size_t>(c.options.topk);
    for (int local = 0; local < count(); ++local) {
      seats_.push_back({Buffer<int>(gpu, 1), Buffer<bf16>(gpu, hidden), Buffer<std::int32_t>(gpu, k), Buffer<float>(gpu, k),
                        Buffer<bf16>(gpu, hidden)});
    }
  }
  ~ProcessRun() { cudaStreamDestroy(stream_); }

  DeviceWorkspace& workspace() { return workspace_; }
  int first() const { return workspace_.first_rank(0); }
  int count() const { return workspace_.ranks_on(0); }
  cudaStream_t stream() const { return stream_; }
  /// Other numbers of tokens from now on, on all processes alike.
  void bring(const std::vector<int>& tokens) { case_.tokens = tokens; }
  bool owns(int rank) const { return rank >= first() && rank < first() + count(); }

  void load(int rank, const RankData& data) {
    OwnSeat& seat = seats_[static_cast<std::size_t>(rank - first())];
    seat.tokens.write({static_cast<int>(data.ids.size()) / case_.options.topk});
    seat.hidden.write(data.hidden);
    seat.ids.write(data.ids);
    seat.weights.write(data.weights);
    check(cudaDeviceSynchronize(), "copies of inputs");
  }
  void load_round(int round) {
    for (int rank = first(); rank < first() + count(); ++rank) load(rank, draw(case_, rank, round));
  }

  /// Queues only, but for normal, whose host waits for counts.
  void dispatch() {
    std::vector<DeviceInput> inputs;
    for (const OwnSeat& seat : seats_)
      inputs.push_back({seat.tokens.data(), seat.hidden.data(), seat.ids.data(), seat.weights.data(), {}});
    exchange_->dispatch(inputs, {case_.most_tokens(), Phase::decode}, stream_);
  }
  void wait() {
    check(cudaStreamSynchronize(stream_), "exchange");
    workspace_.throw_if_aborted();
  }
  HostArrived arrived(int rank) const {
    const auto local_experts = static_cast<int>(case_.options.placement.experts_of(rank).size());
    return fetch(exchange_->arrived(rank - first()), case_.options, local_experts);
  }
  /// The stand-ins for experts, over what arrived; `host` to compare arrivals with, or null.
  void run_own_experts(const std::vector<HostArrived>* host) {
    results_.clear();
    for (int rank = first(); rank < first() + count(); ++rank) {
      const HostArrived here = arrived(rank);
      if (host != nullptr) expect_same_arrival(case_, here, (*host)[static_cast<std::size_t>(rank)]);
      results_.emplace_back(workspace_.device(0), run_experts(case_, here.view, rank));
    }
    check(cudaDeviceSynchronize(), "copies of results");
  }
  void combine() {
    std::vector<const bf16*> results;
    std::vector<DeviceOutput> outputs;
    for (std::size_t local = 0; local < seats_.size(); ++local) {
      results.push_back(results_[local].data());
      outputs.push_back({seats_[local].out.data(), nullptr, nullptr});
    }
    exchange_->combine(results, outputs, stream_);
  }
  void expect_own_outputs(int round, const std::vector<bool>& live) {
    for (int rank = first(); rank < first() + count(); ++rank) {
      const std::vector<bf16> want = expected(case_, draw(case_, rank, round), live);
      const std::vector<bf16> have = read(seats_[static_cast<std::size_t>(rank - first())].out.data(), want.size());
      ASSERT_EQ(differences(want, have.data()), 0) << "rank " << rank << " round " << round;
    }
  }
  void round_trip(int round, bool against_host, const std::vector<bool>& live = {}) {
    load_round(round);
    dispatch();
    wait();
    std::vector<HostArrived> host;
    if (against_host) host = host_arrivals(case_, round);
    run_own_experts(against_host ? &host : nullptr);
    if (testing::Test::HasFatalFailure()) return;
    combine();
    wait();
    expect_own_outputs(round, live);
  }
  /// Of the own ranks' last finished calls.
  std::vector<Word> epochs() const {
    std::vector<Word> found;
    for (int rank = first(); rank < first() + count(); ++rank)
      found.push_back(read(workspace_.view(0).at<HeapHeader>(rank, 0), 1)[0].epoch);
    return found;
  }

 private:
  struct OwnSeat {
    Buffer<int> tokens;
    Buffer<bf16> hidden;
    Buffer<std::int32_t> ids;
    Buffer<float> weights;
    Buffer<bf16> out;
  };
  Case case_;
  ExchangeMemory memory_;
  DeviceWorkspace workspace_;
  std::unique_ptr<DeviceExchange> exchange_;
  cudaStream_t stream_ = nullptr;
  std::vector<OwnSeat> seats_;
  std::vector<Buffer<bf16>> results_;
};

}  // namespace heddle
