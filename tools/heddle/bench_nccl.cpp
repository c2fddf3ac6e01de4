#include "bench_nccl.hpp"

#include <algorithm>
#include <cstdlib>

#include "bench_kernels.hpp"
#include "exchange/areas.hpp"
#include "exchange/cuda_nccl.hpp"
#include "group/cuda_driver.hpp"
#include "heddle/error.hpp"

namespace heddle::tool {

std::shared_ptr<NcclCommunicators> make_communicators(const Lanes& lanes) {
  setenv("NCCL_NVLS_ENABLE", "0", 0);
  return std::make_shared<NcclCommunicators>(lanes.devices());
}

namespace {

/// The buffers of all GPUs and the two collectives over them.
class RoundTrips {
 public:
  RoundTrips(NcclCommunicators& communicators, Lanes& lanes, const Batch& batch, int tokens, bool symmetric)
      : nccl_(communicators.impl()),
        lanes_(lanes),
        record_bytes_(static_cast<std::size_t>(tokens) *
                      (static_cast<std::size_t>(batch.hidden()) * sizeof(bf16) + routing_bytes(batch.topk()))),
        values_(static_cast<std::size_t>(tokens) * static_cast<std::size_t>(batch.hidden())),
        ranks_(static_cast<std::size_t>(batch.ranks())),
        own_(nccl_.allocate(record_bytes_, symmetric)),
        gathered_(nccl_.allocate(ranks_ * record_bytes_, symmetric)),
        partial_(nccl_.allocate(ranks_ * values_ * sizeof(bf16), symmetric)),
        out_(nccl_.allocate(values_ * sizeof(bf16), symmetric)) {
    for (std::size_t rank = 0; rank < ranks_; ++rank) {
      const cuda::DeviceScope scope(lanes.device(rank));
      fill_normal(static_cast<bf16*>((*own_)[rank]), record_bytes_ / sizeof(bf16), 11 + rank, lanes.stream(rank));
      fill_normal(static_cast<bf16*>((*partial_)[rank]), ranks_ * values_, 77 + rank, lanes.stream(rank));
    }
    lanes.settle();
  }

  void dispatch() {
    nccl_.grouped([&] {
      for (std::size_t rank = 0; rank < ranks_; ++rank) {
        const cuda::DeviceScope scope(lanes_.device(rank));
        nccl_.all_gather(rank, (*own_)[rank], (*gathered_)[rank], record_bytes_, lanes_.stream(rank));
      }
    });
  }
  void combine() {
    nccl_.grouped([&] {
      for (std::size_t rank = 0; rank < ranks_; ++rank) {
        const cuda::DeviceScope scope(lanes_.device(rank));
        nccl_.reduce_scatter(rank, static_cast<const bf16*>((*partial_)[rank]), static_cast<bf16*>((*out_)[rank]), values_,
                             lanes_.stream(rank));
      }
    });
  }

 private:
  NcclCommunicators::Impl& nccl_;
  Lanes& lanes_;
  std::size_t record_bytes_, values_, ranks_;
  std::shared_ptr<std::vector<void*>> own_, gathered_, partial_, out_;
};

}  // namespace

NcclTimes time_nccl(NcclCommunicators& communicators, Lanes& lanes, const Batch& batch, int tokens, int round_trips, int replays,
                    bool symmetric) {
  NcclTimes times;
  std::unique_ptr<RoundTrips> trips;
  try {
    trips = std::make_unique<RoundTrips>(communicators, lanes, batch, tokens, symmetric);
  } catch (const Error& error) {  // no windows in this NCCL, or no memory: the other form can still be measured
    times.failed = error.what();
    return times;
  }
  const auto check = [&] { communicators.throw_if_failed(); };
  const auto give_up = [&] { communicators.abort(); };
  const auto measure = [&](const std::function<void()>& work, int count, const std::function<void()>& after) {
    auto replay = std::make_unique<Replay>(lanes, work);
    try {
      return replay->run(count, check, give_up, after);
    } catch (...) {
      // Graphs and memory that aborted communicators knew of must not be touched again; the process ends with the error.
      static_cast<void>(replay.release());
      static_cast<void>(trips.release());
      throw;
    }
  };
  // The first calls of a size set things up; they must not do so while a stream is captured.
  trips->dispatch();
  trips->combine();
  lanes.settle(give_up);
  check();
  const auto plain = [&] {
    for (int trip = 0; trip < round_trips; ++trip) {
      trips->dispatch();
      trips->combine();
    }
  };
  times.round_trips = measure(plain, replays, {});
  for (double& sample : times.round_trips) sample /= round_trips;
  Marks marks(lanes);
  const auto mark = [&] {
    for (std::size_t gpu = 0; gpu < lanes.gpus(); ++gpu) marks.mark(gpu);
  };
  const auto marked = [&] {
    mark();
    for (int trip = 0; trip < round_trips; ++trip) {
      trips->dispatch();
      mark();
      trips->combine();
      mark();
    }
  };
  measure(marked, std::min(replays, 10), [&] {
    for (std::size_t trip = 0; trip < static_cast<std::size_t>(round_trips); ++trip) {
      times.dispatch.push_back(marks.between(2 * trip, 2 * trip + 1));
      times.combine.push_back(marks.between(2 * trip + 1, 2 * trip + 2));
    }
  });
  return times;
}

}  // namespace heddle::tool
