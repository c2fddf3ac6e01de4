// What the GPU tests share: ways over one workspace on the GPUs of this machine, with seats for all ranks, and a
// whole round trip whose experts run on the host.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "gpu/arrivals.hpp"
#include "gpu/stand_ins.hpp"
#include "heddle/device.hpp"

namespace heddle {

/// Every mode of every way that GPUs have.
inline std::vector<ExchangeOptions> every_way_on_gpus(int hidden, int experts, int ranks, int topk, int cap) {
  std::vector<ExchangeOptions> all = every_way(hidden, experts, ranks, topk, cap);
  std::erase_if(all, [](const ExchangeOptions& options) { return options.gather == GatherMode::tensor_parallel; });
  return all;
}

/// One rank's buffers, with room for the largest of the ways.
struct Seat {
  Buffer<int> tokens;
  Buffer<bf16> hidden;
  Buffer<std::int32_t> ids;
  Buffer<float> weights;
  Buffer<bf16> shared, out;
  Buffer<float> factors;
  std::vector<Buffer<std::byte>> extra;

  void expect_guards(const std::string& whose) const {
    tokens.expect_guards(whose + ", number of tokens");
    hidden.expect_guards(whose + ", hidden states");
    ids.expect_guards(whose + ", ids");
    weights.expect_guards(whose + ", weights");
    shared.expect_guards(whose + ", rows of the shared expert");
    factors.expect_guards(whose + ", factors of the shared expert");
    out.expect_guards(whose + ", outputs");
    for (const auto& payload : extra) payload.expect_guards(whose + ", a payload");
  }
};

/// Ways that share a workspace: an exchange a way and GPU, a stream a GPU, a seat a rank. Calls below drive way 0;
/// `exchange`, `inputs` and `outputs` serve all.
class DeviceRun {
 public:
  DeviceRun(const Case& c, int gpus, std::chrono::milliseconds deadline = std::chrono::seconds(20))
      : DeviceRun(std::vector<Case>{c}, gpus, deadline) {}
  DeviceRun(std::vector<Case> cases, int gpus, std::chrono::milliseconds deadline = std::chrono::seconds(20),
            const DeviceExchangeOptions& device = {})
      : cases_(std::move(cases)),
        memory_(memory_of(cases_)),
        workspace_({ranks(), devices(gpus), deadline}, memory_.heap_bytes(ranks())) {
    poison_heap();
    exchanges_.resize(cases_.size());
    for (std::size_t gpu = 0; gpu < workspace_.gpus(); ++gpu) {
      const cuda::DeviceScope scope(workspace_.device(gpu));
      load_test_kernels();
      for (std::size_t way = 0; way < cases_.size(); ++way)
        exchanges_[way].push_back(create_device_exchange(workspace_, gpu, cases_[way].options, memory_, device));
      cudaStream_t stream = nullptr;
      check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
      streams_.push_back(stream);
      for (int local = 0; local < workspace_.ranks_on(gpu); ++local) seats_.push_back(make_seat(workspace_.device(gpu)));
    }
    settle();
  }
  ~DeviceRun() {
    for (cudaStream_t stream : streams_) cudaStreamDestroy(stream);
  }

  DeviceWorkspace& workspace() { return workspace_; }
  const ExchangeMemory& memory() const { return memory_; }
  const Case& the_case(std::size_t way = 0) const { return cases_[way]; }
  int ranks() const { return cases_[0].ranks(); }
  const Seat& seat(int rank) const { return seats_[static_cast<std::size_t>(rank)]; }
  int first_rank(std::size_t gpu) const { return workspace_.first_rank(gpu); }
  cudaStream_t stream(std::size_t gpu) const { return streams_[gpu]; }
  DeviceExchange& exchange(std::size_t way, std::size_t gpu) const { return *exchanges_[way][gpu]; }
  /// Way 0 of a GPU made anew.
  void remake(std::size_t gpu, const DeviceExchangeOptions& device) {
    exchanges_[0][gpu] = create_device_exchange(workspace_, gpu, cases_[0].options, memory_, device);
  }
  std::size_t gpu_of(int rank) const {
    std::size_t gpu = 0;
    while (gpu + 1 < workspace_.gpus() && workspace_.first_rank(gpu + 1) <= rank) ++gpu;
    return gpu;
  }
  int device_of(int rank) const { return workspace_.device(gpu_of(rank)); }

  /// A rank's tokens; all else in its seat is poisoned.
  void load(int rank, const RankData& data) {
    Seat& seat = seats_[static_cast<std::size_t>(rank)];
    const auto fill = [](auto& buffer, const auto& values) {
      buffer.poison();
      buffer.write(values);
    };
    fill(seat.tokens, std::vector<int>{static_cast<int>(data.weights.size()) / cases_[0].options.topk});
    fill(seat.hidden, data.hidden);
    fill(seat.ids, data.ids);
    fill(seat.weights, data.weights);
    fill(seat.shared, data.shared);
    fill(seat.factors, data.factors);
    for (std::size_t p = 0; p < data.extra.size(); ++p) fill(seat.extra[p], data.extra[p]);
    seat.out.poison();
  }

  /// What the default streams do is done: the streams of this run do not wait for them.
  void settle() const {
    for (std::size_t gpu = 0; gpu < workspace_.gpus(); ++gpu) {
      const cuda::DeviceScope scope(workspace_.device(gpu));
      check(cudaDeviceSynchronize(), "copies of inputs");
    }
  }

  void send(const Step& step) {
    for (std::size_t gpu = 0; gpu < workspace_.gpus(); ++gpu) exchange(0, gpu).dispatch_send(inputs(gpu), step, streams_[gpu]);
  }
  void receive() {
    for (std::size_t gpu = 0; gpu < workspace_.gpus(); ++gpu) exchange(0, gpu).dispatch_receive(streams_[gpu]);
  }
  void dispatch(const Step& step, bool halves) {
    for (std::size_t gpu = 0; gpu < workspace_.gpus(); ++gpu) {
      // A way whose host waits sends on all GPUs before it waits on any.
      exchange(0, gpu).dispatch_send(inputs(gpu), step, streams_[gpu]);
      if (halves) check(cudaStreamSynchronize(streams_[gpu]), "send half");
    }
    receive();
  }
  /// Both halves on one GPU alone.
  void dispatch_on(std::size_t gpu, const Step& step) {
    exchange(0, gpu).dispatch_send(inputs(gpu), step, streams_[gpu]);
    exchange(0, gpu).dispatch_receive(streams_[gpu]);
  }
  void combine_on(std::size_t gpu, const std::vector<Buffer<bf16>>& results) {
    exchange(0, gpu).combine(of_gpu(gpu, pointers(results)), outputs(gpu, Shared::none), streams_[gpu]);
  }
  void dispatch_fused(const Step& step) {
    for (std::size_t gpu = 0; gpu < workspace_.gpus(); ++gpu) exchange(0, gpu).dispatch(inputs(gpu), step, streams_[gpu]);
  }
  void combine(const std::vector<const bf16*>& results, Shared shared, bool fused) {
    for (std::size_t gpu = 0; gpu < workspace_.gpus(); ++gpu) {
      const std::vector<const bf16*> mine = of_gpu(gpu, results);
      if (fused) {
        exchange(0, gpu).combine(mine, outputs(gpu, shared), streams_[gpu]);
      } else {
        exchange(0, gpu).combine_send(mine, streams_[gpu]);
        exchange(0, gpu).combine_receive(outputs(gpu, shared), streams_[gpu]);
      }
    }
  }
  void combine(const std::vector<const bf16*>& results, bool shared, bool fused) {
    combine(results, shared ? Shared::rows : Shared::none, fused);
  }
  void wait() {
    for (std::size_t gpu = 0; gpu < workspace_.gpus(); ++gpu) check(cudaStreamSynchronize(streams_[gpu]), "exchange");
    workspace_.throw_if_aborted();
  }
  /// Where a rank's results may be made in place, or null.
  bf16* result_rows(int rank) const {
    const std::size_t gpu = gpu_of(rank);
    return exchange(0, gpu).result_rows(rank - workspace_.first_rank(gpu));
  }
  HostArrived arrived(int rank) const {
    const std::size_t gpu = gpu_of(rank);
    const ExchangeOptions& options = cases_[0].options;
    const auto local_experts = static_cast<int>(options.placement.experts_of(rank).size());
    return fetch(exchange(0, gpu).arrived(rank - workspace_.first_rank(gpu)), options, local_experts);
  }

  std::vector<DeviceInput> inputs(std::size_t gpu) const {
    std::vector<DeviceInput> all;
    for (int local = 0; local < workspace_.ranks_on(gpu); ++local) {
      const Seat& own = seat(workspace_.first_rank(gpu) + local);
      all.push_back({own.tokens.data(), own.hidden.data(), own.ids.data(), own.weights.data(), {}});
      for (std::size_t p = 0; p < own.extra.size(); ++p) all.back().extra[p] = own.extra[p].data();
    }
    return all;
  }
  std::vector<DeviceOutput> outputs(std::size_t gpu, Shared shared) const {
    std::vector<DeviceOutput> all;
    for (int local = 0; local < workspace_.ranks_on(gpu); ++local) {
      const Seat& own = seat(workspace_.first_rank(gpu) + local);
      all.push_back({own.out.data(), shared == Shared::none ? nullptr : own.shared.data(),
                     shared == Shared::gated ? own.factors.data() : nullptr});
    }
    return all;
  }
  /// Those of the ranks on one GPU.
  std::vector<const bf16*> of_gpu(std::size_t gpu, const std::vector<const bf16*>& all) const {
    const auto first = all.begin() + workspace_.first_rank(gpu);
    return {first, first + workspace_.ranks_on(gpu)};
  }
  static std::vector<const bf16*> pointers(const std::vector<Buffer<bf16>>& buffers) {
    std::vector<const bf16*> all;
    for (const auto& buffer : buffers) all.push_back(buffer.data());
    return all;
  }

 private:
  static ExchangeMemory memory_of(const std::vector<Case>& cases) {
    ExchangeMemory memory = exchange_memory(cases[0].options);
    for (const Case& c : cases) memory.include(exchange_memory(c.options));
    return memory;
  }
  /// NaNs and ids out of range for whoever reads in the heap what nobody has written.
  void poison_heap() {
    const Areas areas = areas_of(memory_, ranks());
    for (int rank = 0; rank < ranks(); ++rank) {
      const cuda::DeviceScope scope(device_of(rank));
      check(cudaMemset(workspace_.view(gpu_of(rank)).at<std::byte>(rank, areas.dispatch), 0xFF, areas.end - areas.dispatch),
            "poisoning of the heap");
    }
    settle();
  }
  Seat make_seat(int device) const {
    std::size_t rows = 0, values = 0, pairs = 0;
    std::vector<std::size_t> payloads;
    for (const Case& c : cases_) {
      const auto cap = static_cast<std::size_t>(c.tensor_parallel() ? c.ranks() * c.options.cap : c.options.cap);
      rows = std::max(rows, cap);
      values = std::max(values, cap * static_cast<std::size_t>(c.options.hidden));
      pairs = std::max(pairs, cap * static_cast<std::size_t>(c.options.topk));
      payloads.resize(std::max(payloads.size(), c.options.extra_payloads.size()), 0);
      for (std::size_t p = 0; p < c.options.extra_payloads.size(); ++p)
        payloads[p] = std::max(payloads[p], cap * c.options.extra_payloads[p]);
    }
    Seat seat{Buffer<int>(device, 1),
              Buffer<bf16>(device, values),
              Buffer<std::int32_t>(device, pairs),
              Buffer<float>(device, pairs),
              Buffer<bf16>(device, values),
              Buffer<bf16>(device, values),
              Buffer<float>(device, rows),
              {}};
    for (const std::size_t bytes : payloads) seat.extra.emplace_back(device, bytes);
    return seat;
  }

  std::vector<Case> cases_;
  ExchangeMemory memory_;
  DeviceWorkspace workspace_;
  std::vector<std::vector<std::unique_ptr<DeviceExchange>>> exchanges_;  ///< [way][GPU]
  std::vector<cudaStream_t> streams_;
  std::vector<Seat> seats_;
};

/// What the host's stand-ins make of what arrived, in device memory.
inline std::vector<Buffer<bf16>> results_of(const Case& c, DeviceRun& run, const std::vector<HostArrived>* host,
                                            const std::vector<bool>& live = {}) {
  std::vector<Buffer<bf16>> results;
  for (int rank = 0; rank < c.ranks(); ++rank) {
    if (!is_live(live, rank)) {
      results.emplace_back(0, std::size_t{0});  // what lies there is of an earlier call
      continue;
    }
    const HostArrived arrived = run.arrived(rank);
    if (host != nullptr) expect_same_arrival(c, arrived, (*host)[static_cast<std::size_t>(rank)]);
    results.emplace_back(run.device_of(rank), run_experts(c, arrived.view, rank));
  }
  return results;
}

inline void expect_outputs(const Case& c, DeviceRun& run, int round, bool shared, const std::vector<bool>& live = {}) {
  for (int rank = 0; rank < c.ranks(); ++rank) {
    if (!is_live(live, rank)) continue;
    const std::vector<bf16> want = expected(c, draw(c, rank, round), live, shared ? Shared::rows : Shared::none);
    const std::vector<bf16> have = read(run.seat(rank).out.data(), want.size());
    ASSERT_EQ(differences(want, have.data()), 0) << "rank " << rank << " round " << round;
  }
}

/// A round trip whose results are made where peers pull them, checked. False if this way offers no such place.
inline bool round_trip_in_place(const Case& c, DeviceRun& run, int round) {
  for (int rank = 0; rank < c.ranks(); ++rank) run.load(rank, draw(c, rank, round));
  run.settle();
  run.dispatch({c.most_tokens(), Phase::decode}, false);
  run.wait();
  std::vector<const bf16*> places;
  for (int rank = 0; rank < c.ranks(); ++rank) {
    bf16* place = run.result_rows(rank);
    if (place == nullptr) return false;
    const std::vector<bf16> results = run_experts(c, run.arrived(rank).view, rank);
    cuda::check(cudaMemcpy(place, results.data(), results.size() * sizeof(bf16), cudaMemcpyHostToDevice), "results");
    places.push_back(place);
  }
  run.settle();
  run.combine(places, round % 2 == 1, round < 2);
  run.wait();
  expect_outputs(c, run, round, round % 2 == 1);
  return true;
}

/// A whole round trip, checked.
inline void round_trip(const Case& c, DeviceRun& run, int round, bool against_host, bool halves, bool shared,
                       const std::vector<bool>& live = {}) {
  for (int rank = 0; rank < c.ranks(); ++rank) run.load(rank, draw(c, rank, round));
  run.settle();
  const Step step{c.most_tokens(), Phase::decode};
  if (halves || c.options.way == Way::normal) {
    run.dispatch(step, halves && c.options.way != Way::gather && c.options.way != Way::normal);
  } else {
    run.dispatch_fused(step);
  }
  run.wait();
  std::vector<HostArrived> host;
  if (against_host) host = host_arrivals(c, round);
  const auto results = results_of(c, run, against_host ? &host : nullptr, live);
  if (testing::Test::HasFatalFailure()) return;
  run.settle();
  run.combine(DeviceRun::pointers(results), shared, !halves);
  run.wait();
  expect_outputs(c, run, round, shared, live);
}

}  // namespace heddle
