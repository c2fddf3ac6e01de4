// What the GPU tests share: a case with seats for all its ranks on the GPUs of this machine, arrivals fetched to
// the host and held against the host engine, and a whole round trip.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "exchange_support.hpp"
#include "group/cuda_driver.hpp"
#include "heddle/device.hpp"
#include "ranks.hpp"

namespace heddle {

using cuda::check;

inline int gpus_here() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) count = 0;
  const char* wanted = std::getenv("HEDDLE_GPUS");
  return wanted == nullptr ? count : std::min(count, std::atoi(wanted));
}

#define SKIP_WITHOUT_GPU() \
  if (gpus_here() == 0) GTEST_SKIP() << "no GPU here"

inline std::vector<int> devices(int count) {
  std::vector<int> all;
  for (int i = 0; i < count; ++i) all.push_back(i);
  return all;
}

/// Device memory filled from a vector, or poisoned.
template <class T>
class Buffer {
 public:
  Buffer(int device, std::size_t size) : size_(size) {
    const cuda::DeviceScope scope(device);
    check(cudaMalloc(reinterpret_cast<void**>(&values_), std::max<std::size_t>(size, 1) * sizeof(T)), "cudaMalloc");
    check(cudaMemset(values_, 0xC1, std::max<std::size_t>(size, 1) * sizeof(T)), "cudaMemset");
  }
  Buffer(int device, const std::vector<T>& from) : Buffer(device, from.size()) { write(from); }
  ~Buffer() { cudaFree(values_); }
  Buffer(Buffer&& other) noexcept : values_(std::exchange(other.values_, nullptr)), size_(other.size_) {}
  Buffer& operator=(Buffer&&) = delete;
  void write(const std::vector<T>& from) {
    check(cudaMemcpy(values_, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  T* data() const { return values_; }

 private:
  T* values_ = nullptr;
  std::size_t size_;
};

template <class T>
std::vector<T> read(const T* from, std::size_t size) {
  std::vector<T> values(size);
  check(cudaMemcpy(values.data(), from, size * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
  return values;
}

/// An Arrived with its arrays copied to the host.
struct HostArrived {
  Arrived view;
  std::vector<std::byte> rows;
  std::vector<std::int32_t> begins, counts, local_ids;
  std::vector<float> row_weights, weights;
};

inline HostArrived fetch(const Arrived& device, int local_experts, int topk) {
  HostArrived host;
  host.view = device;
  const auto room = static_cast<std::size_t>(device.room);
  host.rows = read(device.rows, room * device.row_stride);
  host.view.rows = host.rows.data();
  if (device.layout == ArrivedLayout::routed) {
    host.local_ids = read(device.local_ids, room * static_cast<std::size_t>(topk));
    host.weights = read(device.weights, room * static_cast<std::size_t>(topk));
    host.view.local_ids = host.local_ids.data();
    host.view.weights = host.weights.data();
  } else {
    host.begins = read(device.begins, static_cast<std::size_t>(local_experts));
    host.counts = read(device.counts, static_cast<std::size_t>(local_experts));
    host.row_weights = read(device.row_weights, room);
    host.view.begins = host.begins.data();
    host.view.counts = host.counts.data();
    host.view.row_weights = host.row_weights.data();
  }
  return host;
}

/// One rank's buffers for a case.
struct Seat {
  Buffer<int> tokens;
  Buffer<bf16> hidden;
  Buffer<std::int32_t> ids;
  Buffer<float> weights;
  Buffer<bf16> shared, out;
};

/// A case on the GPUs: one exchange a GPU, seats for all ranks with room for the cap.
class DeviceRun {
 public:
  DeviceRun(const Case& c, int gpus, std::chrono::milliseconds deadline = std::chrono::seconds(20),
            const DeviceExchangeOptions& device_options = {})
      : case_(c),
        memory_(exchange_memory(c.options)),
        workspace_({c.ranks(), devices(gpus), deadline}, memory_.heap_bytes(c.ranks())) {
    for (std::size_t gpu = 0; gpu < workspace_.gpus(); ++gpu) {
      exchanges_.push_back(create_device_exchange(workspace_, gpu, c.options, memory_, device_options));
      cudaStream_t stream = nullptr;
      const cuda::DeviceScope scope(workspace_.device(gpu));
      check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
      streams_.push_back(stream);
      for (int local = 0; local < workspace_.ranks_on(gpu); ++local) seats_.push_back(make_seat(workspace_.device(gpu)));
    }
  }
  ~DeviceRun() {
    for (cudaStream_t stream : streams_) cudaStreamDestroy(stream);
  }

  DeviceWorkspace& workspace() { return workspace_; }
  const Seat& seat(int rank) const { return seats_[static_cast<std::size_t>(rank)]; }
  cudaStream_t stream(std::size_t gpu) const { return streams_[gpu]; }

  void load(int rank, const RankData& data) {
    Seat& seat = seats_[static_cast<std::size_t>(rank)];
    seat.tokens.write({static_cast<int>(data.ids.size()) / case_.options.topk});
    seat.hidden.write(data.hidden);
    seat.ids.write(data.ids);
    seat.weights.write(data.weights);
    seat.shared.write(data.shared);
  }

  /// Copies from pageable memory may still be under way when they return, and these streams do not wait
  /// for the default one.
  void settle() const {
    for (std::size_t gpu = 0; gpu < workspace_.gpus(); ++gpu) {
      const cuda::DeviceScope scope(workspace_.device(gpu));
      check(cudaDeviceSynchronize(), "copies of inputs");
    }
  }

  void dispatch(const Step& step, bool halves) {
    for (std::size_t gpu = 0; gpu < workspace_.gpus(); ++gpu) {
      const auto inputs = inputs_of(gpu);
      // A way whose host waits sends on all GPUs before it waits on any.
      exchanges_[gpu]->dispatch_send(inputs, step, streams_[gpu]);
      if (halves) check(cudaStreamSynchronize(streams_[gpu]), "send half");
    }
    for (std::size_t gpu = 0; gpu < workspace_.gpus(); ++gpu) exchanges_[gpu]->dispatch_receive(streams_[gpu]);
  }
  /// Both halves on one GPU alone.
  void dispatch_on(std::size_t gpu, const Step& step) {
    exchanges_[gpu]->dispatch_send(inputs_of(gpu), step, streams_[gpu]);
    exchanges_[gpu]->dispatch_receive(streams_[gpu]);
  }
  void combine_on(std::size_t gpu, const std::vector<Buffer<bf16>>& results) {
    std::vector<const bf16*> mine;
    for (int local = 0; local < workspace_.ranks_on(gpu); ++local) {
      mine.push_back(results[static_cast<std::size_t>(workspace_.first_rank(gpu) + local)].data());
    }
    exchanges_[gpu]->combine(mine, outputs_of(gpu, false), streams_[gpu]);
  }
  void dispatch_fused(const Step& step) {
    for (std::size_t gpu = 0; gpu < workspace_.gpus(); ++gpu) exchanges_[gpu]->dispatch(inputs_of(gpu), step, streams_[gpu]);
  }
  void combine(const std::vector<const bf16*>& results, bool shared, bool fused) {
    for (std::size_t gpu = 0; gpu < workspace_.gpus(); ++gpu) {
      const auto first = static_cast<std::size_t>(workspace_.first_rank(gpu));
      const auto count = static_cast<std::size_t>(workspace_.ranks_on(gpu));
      const auto outputs = outputs_of(gpu, shared);
      const std::span<const bf16* const> mine(results.data() + first, count);
      if (fused) {
        exchanges_[gpu]->combine(mine, outputs, streams_[gpu]);
      } else {
        exchanges_[gpu]->combine_send(mine, streams_[gpu]);
        exchanges_[gpu]->combine_receive(outputs, streams_[gpu]);
      }
    }
  }
  void wait() {
    for (std::size_t gpu = 0; gpu < workspace_.gpus(); ++gpu) check(cudaStreamSynchronize(streams_[gpu]), "exchange");
    workspace_.throw_if_aborted();
  }
  HostArrived arrived(int rank) const {
    std::size_t gpu = 0;
    while (gpu + 1 < workspace_.gpus() && workspace_.first_rank(gpu + 1) <= rank) ++gpu;
    const auto local_experts = static_cast<int>(case_.options.placement.experts_of(rank).size());
    return fetch(exchanges_[gpu]->arrived(rank - workspace_.first_rank(gpu)), local_experts, case_.options.topk);
  }

 private:
  std::vector<DeviceOutput> outputs_of(std::size_t gpu, bool shared) const {
    std::vector<DeviceOutput> outputs;
    for (int local = 0; local < workspace_.ranks_on(gpu); ++local) {
      const Seat& own = seats_[static_cast<std::size_t>(workspace_.first_rank(gpu) + local)];
      outputs.push_back({own.out.data(), shared ? own.shared.data() : nullptr, nullptr});
    }
    return outputs;
  }
  Seat make_seat(int device) const {
    const auto cap = static_cast<std::size_t>(case_.options.cap);
    const auto hidden = static_cast<std::size_t>(case_.options.hidden);
    const auto k = static_cast<std::size_t>(case_.options.topk);
    return {Buffer<int>(device, 1),         Buffer<bf16>(device, cap * hidden), Buffer<std::int32_t>(device, cap * k),
            Buffer<float>(device, cap * k), Buffer<bf16>(device, cap * hidden), Buffer<bf16>(device, cap * hidden)};
  }
  std::vector<DeviceInput> inputs_of(std::size_t gpu) const {
    std::vector<DeviceInput> inputs;
    for (int local = 0; local < workspace_.ranks_on(gpu); ++local) {
      const Seat& seat = seats_[static_cast<std::size_t>(workspace_.first_rank(gpu) + local)];
      inputs.push_back({seat.tokens.data(), seat.hidden.data(), seat.ids.data(), seat.weights.data(), {}});
    }
    return inputs;
  }

  Case case_;
  ExchangeMemory memory_;
  DeviceWorkspace workspace_;
  std::vector<std::unique_ptr<DeviceExchange>> exchanges_;
  std::vector<cudaStream_t> streams_;
  std::vector<Seat> seats_;
};

/// The same dispatch on the host engine: what arrived at every rank.
inline std::vector<HostArrived> host_arrivals(const Case& c, int round) {
  std::vector<HostArrived> all(static_cast<std::size_t>(c.ranks()));
  run_ranks(c.ranks(), {}, [&](Group& group) {
    const ExchangeMemory memory = exchange_memory(c.options);
    Workspace workspace(group, memory.heap_bytes(c.ranks()), describe(c.options));
    const auto exchange = create_exchange(workspace, c.options, memory);
    const RankData data = draw(c, group.rank(), round);
    const Arrived arrived = exchange->dispatch(data.input(c.tokens_of(group.rank())), {c.most_tokens(), Phase::decode});
    HostArrived& mine = all[static_cast<std::size_t>(group.rank())];
    mine.view = arrived;
    const auto room = static_cast<std::size_t>(arrived.room);
    mine.rows.assign(arrived.rows, arrived.rows + room * arrived.row_stride);
    if (arrived.layout == ArrivedLayout::routed) {
      const std::size_t pairs = room * static_cast<std::size_t>(c.options.topk);
      mine.local_ids.assign(arrived.local_ids, arrived.local_ids + pairs);
      mine.weights.assign(arrived.weights, arrived.weights + pairs);
    } else {
      const std::size_t local = c.options.placement.experts_of(group.rank()).size();
      mine.begins.assign(arrived.begins, arrived.begins + local);
      mine.counts.assign(arrived.counts, arrived.counts + local);
      mine.row_weights.assign(arrived.row_weights, arrived.row_weights + room);
    }
    group.barrier("arrivals are copied");
  });
  return all;
}

/// Real rows of both engines have equal bytes, ids, weights and places.
inline void expect_same_arrival(const Case& c, const HostArrived& gpu, const HostArrived& host) {
  const std::size_t row_bytes = wire_format(c.options).row_bytes();
  const auto same_row = [&](std::size_t i, std::size_t j) {
    return std::memcmp(gpu.rows.data() + i * gpu.view.row_stride, host.rows.data() + j * host.view.row_stride, row_bytes) == 0;
  };
  ASSERT_EQ(gpu.view.layout, host.view.layout);
  if (gpu.view.layout != ArrivedLayout::routed) {
    ASSERT_EQ(gpu.counts, host.counts);
    ASSERT_EQ(gpu.begins, host.begins);
    for (std::size_t e = 0; e < gpu.counts.size(); ++e) {
      for (int i = 0; i < gpu.counts[e]; ++i) {
        const auto row = static_cast<std::size_t>(gpu.begins[e] + i);
        ASSERT_TRUE(same_row(row, row)) << "row " << i << " of local expert " << e;
        ASSERT_EQ(gpu.row_weights[row], host.row_weights[row]);
      }
    }
    return;
  }
  const auto k = static_cast<std::size_t>(c.options.topk);
  const std::size_t rows = std::min(gpu.local_ids.size(), host.local_ids.size()) / k;
  for (std::size_t row = 0; row < rows; ++row) {
    for (std::size_t j = 0; j < k; ++j) {
      ASSERT_EQ(gpu.local_ids[row * k + j], host.local_ids[row * k + j]) << "row " << row << " choice " << j;
      if (gpu.local_ids[row * k + j] < 0) continue;
      ASSERT_EQ(gpu.weights[row * k + j], host.weights[row * k + j]);
      ASSERT_TRUE(same_row(row, row)) << "row " << row;
    }
  }
}

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
    std::size_t gpu = 0;
    while (gpu + 1 < run.workspace().gpus() && run.workspace().first_rank(gpu + 1) <= rank) ++gpu;
    const cuda::DeviceScope scope(run.workspace().device(gpu));
    results.emplace_back(run.workspace().device(gpu), run_experts(c, arrived.view, rank));
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
  std::vector<const bf16*> pointers;
  for (const auto& buffer : results) pointers.push_back(buffer.data());
  run.settle();
  run.combine(pointers, shared, !halves);
  run.wait();
  expect_outputs(c, run, round, shared, live);
}

}  // namespace heddle
