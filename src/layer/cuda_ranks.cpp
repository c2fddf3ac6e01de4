#include "layer/cuda_ranks.hpp"

#include <cuda_runtime.h>

#include "group/agreement.hpp"
#include "group/cuda_workspace.hpp"
#include "layer/cuda_seat.hpp"
#include "signal/fault.hpp"

namespace heddle {

namespace {

int own_ranks(const DeviceWorkspace& workspace) {
  int ranks = 0;
  for (std::size_t gpu = 0; gpu < workspace.gpus(); ++gpu) ranks += workspace.ranks_on(gpu);
  return ranks;
}

}  // namespace

DeviceRanks::DeviceRanks(DeviceWorkspace& workspace, const ExchangeOptions& options, const ExchangeMemory& memory,
                         std::chrono::nanoseconds deadline)
    : workspace_(workspace),
      options_(options),
      ranks_(own_ranks(workspace)),
      meeting_(workspace.first_rank(0), ranks_, deadline),
      counts_(options),
      offers_(static_cast<std::size_t>(ranks_)) {
  // Together, so that what one process cannot do (memory, an option) no other waits for.
  step_together(workspace.impl().processes, "creation of the device exchange", [&] {
    for (std::size_t gpu = 0; gpu < workspace.gpus(); ++gpu) {
      exchanges_.push_back(create_device_exchange(workspace, gpu, options, memory));
      const cuda::DeviceScope scope(workspace.device(gpu));
      cudaStream_t stream = nullptr;
      cuda::check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
      streams_.push_back(stream);
    }
  });
}

DeviceRanks::~DeviceRanks() {
  for (DeviceStream stream : streams_) {
    cudaStreamSynchronize(stream);
    cudaStreamDestroy(stream);
  }
}

LayerSeat DeviceRanks::seat(int rank) {
  LayerSeat seat;
  seat.rank = rank;
  seat.exchange = std::make_unique<DeviceSeat>(*this, rank);
  seat.refuse = [this, rank](std::uint64_t expected, std::uint64_t seen) { give_up(rank, WordKind::refused, expected, seen); };
  seat.fail = [this, rank] { give_up(rank, WordKind::failed, 0, 0); };
  return seat;
}

void DeviceRanks::meet(int rank, const std::string& what) {
  meeting_.meet(rank, what, [&] { workspace_.impl().processes.barrier(what); });
}

void DeviceRanks::give_up(int rank, WordKind why, std::uint64_t expected, std::uint64_t seen) {
  const FaultRecord record{{why, -1, -1}, rank, expected, seen};
  meeting_.end(std::make_exception_ptr(FaultError(describe(record))));
  try {
    workspace_.impl().give_up(rank, record);
  } catch (const Error&) {
    // A GPU that does not even run this kernel: the others' deadlines tell them.
  }
}

template <class Launch>
void DeviceRanks::on_every_gpu(Launch launch) {
  for (std::size_t gpu = 0; gpu < exchanges_.size(); ++gpu) {
    const auto first = static_cast<std::size_t>(workspace_.first_rank(gpu) - first_rank());
    const auto count = static_cast<std::size_t>(workspace_.ranks_on(gpu));
    launch(*exchanges_[gpu], std::span<const Offer>(offers_).subspan(first, count), streams_[gpu]);
    ++kernels_launched_;
  }
}

void DeviceRanks::send_dispatch(const Step& step) {
  on_every_gpu([&](DeviceExchange& exchange, std::span<const Offer> offers, DeviceStream stream) {
    std::vector<DeviceInput> inputs;
    for (const Offer& offer : offers) inputs.push_back(offer.input);
    exchange.dispatch_send(inputs, step, stream);
  });
}

void DeviceRanks::receive_dispatch() {
  on_every_gpu([](DeviceExchange& exchange, std::span<const Offer>, DeviceStream stream) { exchange.dispatch_receive(stream); });
  finish();
  share_counts();
}

void DeviceRanks::send_combine() {
  on_every_gpu([](DeviceExchange& exchange, std::span<const Offer> offers, DeviceStream stream) {
    std::vector<const bf16*> results;
    for (const Offer& offer : offers) results.push_back(offer.results);
    exchange.combine_send(results, stream);
  });
}

void DeviceRanks::receive_combine() {
  on_every_gpu([](DeviceExchange& exchange, std::span<const Offer> offers, DeviceStream stream) {
    std::vector<DeviceOutput> outputs;
    for (const Offer& offer : offers) outputs.push_back(offer.output);
    exchange.combine_receive(outputs, stream);
  });
  finish();
}

void DeviceRanks::finish() {
  for (DeviceStream stream : streams_) cuda::check(cudaStreamSynchronize(stream), "exchange");
  workspace_.throw_if_aborted();
}

/// Rows that came from ranks of other processes follow from those ranks' ids.
void DeviceRanks::share_counts() {
  Group& processes = workspace_.impl().processes;
  if (processes.ranks() == 1) return;
  for (const std::string& lines : exchange_texts(processes, counts_.lines(first_rank(), ranks_), "counts of rows")) {
    counts_.take(lines);
  }
}

}  // namespace heddle
