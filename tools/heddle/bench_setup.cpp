#include "bench_setup.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <thread>

#include "group/cuda_driver.hpp"
#include "heddle/error.hpp"

namespace heddle::tool {

ExchangeOptions options_of(const Configuration& configuration, const Batch& batch) {
  ExchangeOptions options;
  options.way = configuration.way;
  options.hidden = batch.hidden();
  options.topk = batch.topk();
  options.cap = configuration.tokens;
  options.placement = Placement::contiguous(configuration.experts, batch.ranks());
  options.wire = configuration.wire;
  options.combine_wire = configuration.combine_wire;
  options.arrived = configuration.arrived;
  options.cpu_sync = configuration.cpu_sync;
  options.tagged_tokens = std::min(configuration.tagged, configuration.tokens);
  return options;
}

Setup::Setup(const Configuration& configuration, Batch& batch, Lanes& lanes)
    : lanes_(lanes),
      batch_(batch),
      options_(options_of(configuration, batch)),
      bulk_bytes_(configuration.bulk),
      counters_(configuration.counters),
      nccl_(configuration.nccl),
      memory_(exchange_memory(options_)),
      workspace_(batch.workspace(memory_.heap_bytes(batch.ranks()))),
      step_{configuration.tokens, Phase::decode},
      inputs_(lanes.gpus()),
      outputs_(lanes.gpus()),
      results_(lanes.gpus()) {
  batch.set_tokens(configuration.tokens);
  for (std::size_t gpu = 0; gpu < lanes.gpus(); ++gpu) {
    for (int local = 0; local < workspace_.ranks_on(gpu); ++local) {
      inputs_[gpu].push_back(batch.input(workspace_.first_rank(gpu) + local));
      outputs_[gpu].push_back(batch.output(workspace_.first_rank(gpu) + local));
    }
  }
  make_exchanges(configuration.sms);
  first_round_trip();
}

void Setup::make_exchanges(int sms) {
  exchanges_.clear();
  for (std::size_t gpu = 0; gpu < lanes_.gpus(); ++gpu) {
    const cuda::DeviceScope scope(lanes_.device(gpu));
    DeviceExchangeOptions device_options;
    device_options.sms = sms;
    device_options.bulk_bytes = bulk_bytes_;
    device_options.counters = counters_;
    device_options.nccl = nccl_;
    exchanges_.push_back(create_device_exchange(workspace_, gpu, options_, memory_, device_options));
  }
}

void Setup::change_sms(int sms) {
  make_exchanges(sms);
  first_round_trip();
}

Counted Setup::counted() const {
  Counted all;
  std::vector<ExchangeCounters::Count> experts;
  std::uint64_t combines = 0;
  for (std::size_t gpu = 0; gpu < exchanges_.size(); ++gpu) {
    for (int local = 0; local < workspace_.ranks_on(gpu); ++local) {
      const ExchangeCounters one = exchanges_[gpu]->counters(local);
      combines += one.combines;
      all.dispatch_wait += static_cast<double>(one.dispatch_wait.sum) * 1e-3;
      all.combine_wait += static_cast<double>(one.combine_wait.sum) * 1e-3;
      experts.insert(experts.end(), one.experts.begin(), one.experts.end());
    }
  }
  all.calls = combines / static_cast<std::uint64_t>(workspace_.ranks());
  all.dispatch_wait /= static_cast<double>(std::max<std::uint64_t>(combines, 1));
  all.combine_wait /= static_cast<double>(std::max<std::uint64_t>(combines, 1));
  all.experts_over_mean = imbalance(experts).sum;
  return all;
}

std::function<void()> Setup::give_up() const {
  if (nccl_ == nullptr) return {};
  return [nccl = nccl_] { nccl->abort(); };
}

/// After a dispatch: results for the rows that it brought, in place where the way has one for them.
const bf16* Setup::results_of(std::size_t gpu, int local) {
  const int rank = workspace_.first_rank(gpu) + local;
  const auto room = static_cast<std::size_t>(exchanges_[gpu]->arrived(local).room);
  bf16* in_place = exchanges_[gpu]->result_rows(local);
  if (in_place == nullptr) return batch_.results(rank, room);
  batch_.fill_results(rank, in_place, room);
  return in_place;
}

void Setup::first_round_trip() {
  batch_.poison_outputs();
  // A way whose host waits sends on all GPUs before it waits on any.
  for (std::size_t gpu = 0; gpu < lanes_.gpus(); ++gpu) dispatch_send(gpu);
  for (std::size_t gpu = 0; gpu < lanes_.gpus(); ++gpu) dispatch_receive(gpu);
  lanes_.settle(give_up());
  check();
  for (std::size_t gpu = 0; gpu < lanes_.gpus(); ++gpu) {
    results_[gpu].clear();
    for (int local = 0; local < workspace_.ranks_on(gpu); ++local) results_[gpu].push_back(results_of(gpu, local));
  }
  for (std::size_t gpu = 0; gpu < lanes_.gpus(); ++gpu) combine(gpu);
  lanes_.settle(give_up());
  check();
  if (const unsigned long long bad = batch_.bad_outputs(step_.max_tokens); bad != 0) {
    throw Error(ErrorKind::check, fmt::format("way {}: {} of {} outputs were not written or are not finite", name(options_.way),
                                              bad, static_cast<long long>(batch_.ranks()) * step_.max_tokens * options_.hidden));
  }
}

std::vector<double> time_round_trips(Setup& setup, int round_trips, int replays) {
  Replay replay(setup.lanes(), [&] {
    for (std::size_t gpu = 0; gpu < setup.lanes().gpus(); ++gpu) {
      for (int trip = 0; trip < round_trips; ++trip) {
        setup.dispatch(gpu);
        setup.combine(gpu);
      }
    }
  });
  std::vector<double> samples = replay.run(
      replays, [&] { setup.check(); }, setup.give_up());
  for (double& sample : samples) sample /= round_trips;
  return samples;
}

Times time_replays(Setup& setup, int round_trips, int replays) {
  Times times;
  times.round_trips = time_round_trips(setup, round_trips, replays);
  Marks marks(setup.lanes());
  Replay replay(setup.lanes(), [&] {
    for (std::size_t gpu = 0; gpu < setup.lanes().gpus(); ++gpu) {
      marks.mark(gpu);
      for (int trip = 0; trip < round_trips; ++trip) {
        setup.dispatch(gpu);
        marks.mark(gpu);
        setup.combine(gpu);
        marks.mark(gpu);
      }
    }
  });
  const auto take = [&] {
    for (std::size_t trip = 0; trip < static_cast<std::size_t>(round_trips); ++trip) {
      times.dispatch.push_back(marks.between(2 * trip, 2 * trip + 1));
      times.combine.push_back(marks.between(2 * trip + 1, 2 * trip + 2));
    }
  };
  replay.run(
      std::min(replays, 10), [&] { setup.check(); }, setup.give_up(), take);
  return times;
}

namespace {

/// One GPU's eager calls, by a host thread of its own.
class EagerCalls {
 public:
  EagerCalls(Setup& setup, std::size_t gpu, int calls) : setup_(setup), gpu_(gpu), host_blocked_(static_cast<std::size_t>(calls)) {
    const cuda::DeviceScope scope(setup.lanes().device(gpu));
    for (int i = 0; i < 3 * calls; ++i) events_.push_back(make_event());
  }

  void run() {
    try {
      cuda::check(cudaSetDevice(setup_.lanes().device(gpu_)), "cudaSetDevice");
      for (std::size_t call = 0; call < host_blocked_.size(); ++call) one(call);
    } catch (...) {
      failed_ = std::current_exception();
    }
  }
  const std::exception_ptr& failed() const { return failed_; }
  double host_blocked(std::size_t call) const { return host_blocked_[call]; }
  /// 0: before the call, 1: after dispatch, 2: after combine.
  double between(std::size_t call, std::size_t from, std::size_t to) const {
    float milliseconds = 0;
    cuda::check(cudaEventElapsedTime(&milliseconds, events_[3 * call + from].get(), events_[3 * call + to].get()), "event");
    return 1e3 * static_cast<double>(milliseconds);
  }

 private:
  void one(std::size_t call) {
    const auto mark = [&](std::size_t which) {
      cuda::check(cudaEventRecord(events_[3 * call + which].get(), setup_.lanes().stream(gpu_)), "event");
    };
    mark(0);
    setup_.dispatch_send(gpu_);
    const auto since = std::chrono::steady_clock::now();
    setup_.dispatch_receive(gpu_);
    host_blocked_[call] = std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - since).count();
    mark(1);
    setup_.combine(gpu_);
    mark(2);
  }

  Setup& setup_;
  std::size_t gpu_;
  std::vector<double> host_blocked_;
  std::vector<Event> events_;
  std::exception_ptr failed_;
};

/// Where one GPU's calls failed by themselves, those of the others end in a fault that says less.
void throw_first_failure(Setup& setup, const std::vector<std::unique_ptr<EagerCalls>>& gpus) {
  std::exception_ptr fault;
  for (const auto& gpu : gpus) {
    if (!gpu->failed()) continue;
    try {
      std::rethrow_exception(gpu->failed());
    } catch (const FaultError&) {
      fault = gpu->failed();
    } catch (...) {
      setup.recover();
      throw;
    }
  }
  if (fault) std::rethrow_exception(fault);
}

}  // namespace

Times time_eager(Setup& setup, int calls) {
  constexpr int warm_up = 5;
  std::vector<std::unique_ptr<EagerCalls>> gpus;
  for (std::size_t gpu = 0; gpu < setup.lanes().gpus(); ++gpu)
    gpus.push_back(std::make_unique<EagerCalls>(setup, gpu, warm_up + calls));
  std::vector<std::thread> threads;
  for (const auto& gpu : gpus) threads.emplace_back([&gpu] { gpu->run(); });
  for (std::thread& thread : threads) thread.join();
  throw_first_failure(setup, gpus);
  setup.lanes().settle();
  setup.check();
  Times times;
  for (std::size_t call = warm_up; call < static_cast<std::size_t>(warm_up + calls); ++call) {
    double slowest[4] = {};
    for (const auto& gpu : gpus) {
      slowest[0] = std::max(slowest[0], gpu->between(call, 0, 2));
      slowest[1] = std::max(slowest[1], gpu->between(call, 0, 1));
      slowest[2] = std::max(slowest[2], gpu->between(call, 1, 2));
      slowest[3] = std::max(slowest[3], gpu->host_blocked(call));
    }
    times.round_trips.push_back(slowest[0]);
    times.dispatch.push_back(slowest[1]);
    times.combine.push_back(slowest[2]);
    times.host_blocked.push_back(slowest[3]);
  }
  return times;
}

}  // namespace heddle::tool
