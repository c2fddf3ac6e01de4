#include "bench_studies.hpp"

#include <algorithm>
#include <functional>

#include "bench_kernels.hpp"
#include "group/cuda_driver.hpp"

namespace heddle::tool {

using cuda::check;

namespace {

/// Median of a graph in which every GPU does `trip` so many times, per trip.
double time_trips(Lanes& lanes, int round_trips, int replays, const std::function<void(std::size_t)>& trip,
                  const std::function<void()>& check_calls) {
  Replay replay(lanes, [&] {
    for (std::size_t gpu = 0; gpu < lanes.gpus(); ++gpu) {
      const cuda::DeviceScope scope(lanes.device(gpu));
      for (int i = 0; i < round_trips; ++i) trip(gpu);
    }
  });
  return median(replay.run(replays, check_calls)) / round_trips;
}

const std::function<void()> nothing_to_check = [] {};

/// Other work of a wanted length on every GPU, and events that fork it off to the second stream and join it again.
class OtherWork {
 public:
  OtherWork(Lanes& lanes, int ctas) : lanes_(lanes), ctas_(ctas), forks_(lanes), joins_(lanes) {
    for (const int device : lanes.devices()) sinks_.push_back(std::make_unique<Block>(device, sizeof(float)));
  }

  void last(double microseconds) {
    steps_ = steps_that_last(microseconds, [&](std::uint64_t steps) {
      steps_ = steps;
      return time_trips(
          lanes_, 10, 5, [&](std::size_t gpu) { here(gpu); }, nothing_to_check);
    });
  }
  void here(std::size_t gpu) { launch_work(ctas_, steps_, sinks_[gpu]->as<float>(), lanes_.stream(gpu)); }
  void fork(std::size_t gpu) {
    forks_.order(gpu, lanes_.stream(gpu), lanes_.second(gpu));
    launch_work(ctas_, steps_, sinks_[gpu]->as<float>(), lanes_.second(gpu));
    joins_.record(gpu, lanes_.second(gpu));
  }
  void join(std::size_t gpu) { joins_.hold(gpu, lanes_.stream(gpu)); }

 private:
  Lanes& lanes_;
  int ctas_;
  std::uint64_t steps_ = 1;
  std::vector<std::unique_ptr<Block>> sinks_;
  LaneEvents forks_, joins_;
};

}  // namespace

double time_empty(Lanes& lanes, int ranks_a_gpu, int ctas, bool cluster, int round_trips, int replays) {
  const int ctas_a_rank = std::max(1, ctas / ranks_a_gpu);
  return time_trips(
      lanes, round_trips, replays,
      [&](std::size_t gpu) {
        for (int launch = 0; launch < 2; ++launch) launch_empty(ctas_a_rank, ranks_a_gpu, cluster, lanes.stream(gpu));
      },
      nothing_to_check);
}

ReceiveTimes time_receiving(Setup& setup, double transfer_us, int round_trips, int replays) {
  Lanes& lanes = setup.lanes();
  // GPUs meet in every round trip, so their sends begin and end nearly together; this much later all rows are there.
  const auto pause = static_cast<std::uint64_t>(1000.0 * (50.0 + transfer_us));
  constexpr std::size_t marks_a_trip = 6;
  Marks marks(lanes);
  Replay replay(lanes, [&] {
    for (std::size_t gpu = 0; gpu < lanes.gpus(); ++gpu) {
      const cuda::DeviceScope scope(lanes.device(gpu));
      const auto timed = [&](const std::function<void()>& call) {
        launch_pause(pause, lanes.stream(gpu));
        marks.mark(gpu);
        call();
        marks.mark(gpu);
      };
      for (int trip = 0; trip < round_trips; ++trip) {
        setup.dispatch_send(gpu);
        timed([&] { setup.dispatch_receive(gpu); });
        setup.combine_send(gpu);
        timed([&] { setup.combine_receive(gpu); });
        timed([&] { launch_empty(lanes.sms(), 1, false, lanes.stream(gpu)); });
      }
    }
  });
  std::vector<double> receive, collect, empty;
  replay.run(
      replays, [&] { setup.check(); }, {},
      [&] {
        for (std::size_t trip = 0; trip < static_cast<std::size_t>(round_trips); ++trip) {
          const std::size_t first = marks_a_trip * trip;
          receive.push_back(marks.between(first, first + 1));
          collect.push_back(marks.between(first + 2, first + 3));
          empty.push_back(marks.between(first + 4, first + 5));
        }
      });
  return {median(receive), median(collect), median(empty)};
}

OverlapTimes time_overlap(Setup& setup, double work_us, int ctas, int round_trips, int replays) {
  Lanes& lanes = setup.lanes();
  OtherWork work(lanes, ctas);
  work.last(work_us);
  const auto time = [&](const std::function<void(std::size_t)>& trip) {
    return time_trips(lanes, round_trips, replays, trip, [&] { setup.check(); });
  };
  OverlapTimes times;
  times.work = time([&](std::size_t gpu) {
    work.here(gpu);
    work.here(gpu);
  });
  times.exchange = time([&](std::size_t gpu) {
    setup.dispatch_send(gpu);
    setup.dispatch_receive(gpu);
    setup.combine_send(gpu);
    setup.combine_receive(gpu);
  });
  times.one_stream = time([&](std::size_t gpu) {
    setup.dispatch_send(gpu);
    work.here(gpu);
    setup.dispatch_receive(gpu);
    setup.combine_send(gpu);
    work.here(gpu);
    setup.combine_receive(gpu);
  });
  times.two_streams = time([&](std::size_t gpu) {
    work.fork(gpu);
    setup.dispatch_send(gpu);
    setup.dispatch_receive(gpu);
    work.join(gpu);
    work.fork(gpu);
    setup.combine_send(gpu);
    setup.combine_receive(gpu);
    work.join(gpu);
  });
  return times;
}

std::vector<double> time_sweep(Setup& setup, const std::vector<int>& sms, int round_trips, int replays) {
  std::vector<double> medians;
  for (const int ctas : sms) {
    setup.change_sms(ctas);
    medians.push_back(median(time_round_trips(setup, round_trips, replays)));
  }
  return medians;
}

}  // namespace heddle::tool
