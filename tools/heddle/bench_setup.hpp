// One configuration of the benchmark, ready to be called: an exchange a GPU, results of the right size. Configurations share a
// workspace, one after the other, with the GPUs at rest in between.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "bench_batch.hpp"
#include "heddle/device.hpp"

namespace heddle::tool {

struct Configuration {
  /// Does the host wait for counts, so that calls cannot be captured?
  bool is_eager() const { return way == Way::normal || cpu_sync; }

  Way way = Way::one_sided;
  Wire wire = Wire::bf16;
  Wire combine_wire = Wire::bf16;
  ArrivedLayout arrived = ArrivedLayout::routed;
  int tokens = 1;  ///< of every rank; also the cap
  int experts = 0;
  int sms = 0;                              ///< 0: by the library's rule
  int bulk = 0;                             ///< DeviceExchangeOptions::bulk_bytes
  int tagged = 0;                           ///< ExchangeOptions::tagged_tokens
  bool counters = false;                    ///< DeviceExchangeOptions::counters
  bool cpu_sync = false;                    ///< ExchangeOptions::cpu_sync
  std::shared_ptr<NcclCommunicators> nccl;  ///< gather by NCCL; null: own kernels
};

ExchangeOptions options_of(const Configuration& configuration, const Batch& batch);

/// Of all ranks together.
struct Counted {
  std::uint64_t calls = 0;   ///< round trips of a rank
  double dispatch_wait = 0;  ///< microseconds that a rank waited in a call, the mean over calls and ranks
  double combine_wait = 0;
  double experts_over_mean = 0;  ///< rows of the fullest expert over the mean
};

class Setup {
 public:
  /// Makes everything and does one round trip, whose outputs must be finite. Throws InputError or Error, also for lack of memory.
  Setup(const Configuration& configuration, Batch& batch, Lanes& lanes);

  /// The same workspace with another number of CTAs a GPU.
  void change_sms(int sms);

  void dispatch_send(std::size_t gpu) { exchanges_[gpu]->dispatch_send(inputs_[gpu], step_, lanes_.stream(gpu)); }
  void dispatch_receive(std::size_t gpu) { exchanges_[gpu]->dispatch_receive(lanes_.stream(gpu)); }
  void combine_send(std::size_t gpu) { exchanges_[gpu]->combine_send(results_[gpu], lanes_.stream(gpu)); }
  void combine_receive(std::size_t gpu) { exchanges_[gpu]->combine_receive(outputs_[gpu], lanes_.stream(gpu)); }
  void dispatch(std::size_t gpu) { exchanges_[gpu]->dispatch(inputs_[gpu], step_, lanes_.stream(gpu)); }
  void combine(std::size_t gpu) { exchanges_[gpu]->combine(results_[gpu], outputs_[gpu], lanes_.stream(gpu)); }

  /// Throws the FaultError of a rank that gave up.
  void check() const { workspace_.throw_if_aborted(); }
  /// Ends waits that know no deadline: those of NCCL.
  std::function<void()> give_up() const;
  /// After calls of one GPU failed: the workspace can be used again.
  void recover() { workspace_.reset(); }
  const ExchangeOptions& options() const { return options_; }
  /// What the exchanges have counted since they were made. Throws InputError if they do not count.
  Counted counted() const;
  /// Do experts make their results where combine wants them?
  bool results_in_place() const { return exchanges_[0]->result_rows(0) != nullptr; }
  std::size_t heap_bytes() const { return memory_.heap_bytes(batch_.ranks()); }
  Lanes& lanes() const { return lanes_; }

 private:
  void make_exchanges(int sms);
  void first_round_trip();
  const bf16* results_of(std::size_t gpu, int local);

  Lanes& lanes_;
  Batch& batch_;
  ExchangeOptions options_;
  int bulk_bytes_ = 0;
  bool counters_ = false;
  std::shared_ptr<NcclCommunicators> nccl_;
  ExchangeMemory memory_;
  DeviceWorkspace& workspace_;
  Step step_;
  std::vector<std::unique_ptr<DeviceExchange>> exchanges_;
  std::vector<std::vector<DeviceInput>> inputs_;  ///< a GPU
  std::vector<std::vector<DeviceOutput>> outputs_;
  std::vector<std::vector<const bf16*>> results_;
};

/// Times of one configuration in microseconds, of the slower GPU.
struct Times {
  std::vector<double> round_trips;  ///< dispatch and combine, one sample a replay
  std::vector<double> dispatch, combine;
  std::vector<double> host_blocked;  ///< ways whose host waits: how long it did, in dispatch_receive
};

/// Round trips as graph replays, then once more with marks between dispatch and combine.
Times time_replays(Setup& setup, int round_trips, int replays);
/// The round trips alone.
std::vector<double> time_round_trips(Setup& setup, int round_trips, int replays);
/// Eager calls, a host thread a GPU: for ways whose host waits.
Times time_eager(Setup& setup, int calls);

}  // namespace heddle::tool
