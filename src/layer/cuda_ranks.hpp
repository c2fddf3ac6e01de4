// Ranks whose rows travel between GPUs while their experts stay on the host: each is a thread that calls an Exchange as on
// the host engine; behind it all ranks of this process meet, one thread launches for all, and what arrived is fetched.
#pragma once

#include <memory>
#include <vector>

#include "heddle/device.hpp"
#include "heddle/layer.hpp"
#include "layer/meeting.hpp"
#include "layer/row_counts.hpp"
#include "signal/words.hpp"

namespace heddle {

class DeviceSeat;

class DeviceRanks {
 public:
  /// All of this process's ranks; every process of the workspace makes one. `deadline`: longest wait for a rank of this process.
  /// Throws InputError for options that GPUs do not have. The workspace outlives it.
  DeviceRanks(DeviceWorkspace& workspace, const ExchangeOptions& options, const ExchangeMemory& memory,
              std::chrono::nanoseconds deadline);
  ~DeviceRanks();
  DeviceRanks(const DeviceRanks&) = delete;
  DeviceRanks& operator=(const DeviceRanks&) = delete;

  int first_rank() const { return workspace_.first_rank(0); }
  int ranks() const { return ranks_; }
  /// What the layer of an own rank takes, once for each; used by one thread. This object outlives it.
  LayerSeat seat(int rank);
  /// All ranks of all processes meet.
  void meet(int rank, const std::string& what);
  /// Nobody shall wait for this rank any more, neither a thread here nor a kernel anywhere.
  void give_up(int rank, WordKind why, std::uint64_t expected, std::uint64_t seen);
  /// After a fault and a reset of the workspace, when no rank is inside a call: layers may be called again.
  void begin_again() { meeting_.begin_again(); }
  /// By the exchange, on all GPUs of this process so far.
  std::uint64_t kernels_launched() const { return kernels_launched_; }

 private:
  friend class DeviceSeat;
  /// What a rank brings to a meeting; pointers into its GPU's memory.
  struct Offer {
    DeviceInput input;
    const bf16* results = nullptr;
    DeviceOutput output;
  };
  void send_dispatch(const Step& step);
  void receive_dispatch();
  void send_combine();
  void receive_combine();
  /// Runs f(exchange, offers of its ranks, stream) for every GPU.
  template <class Launch>
  void on_every_gpu(Launch launch);
  /// All streams, then the fault if there was one.
  void finish();
  void share_counts();

  DeviceWorkspace& workspace_;
  ExchangeOptions options_;
  int ranks_ = 0;
  Meeting meeting_;
  RowCounts counts_;
  std::vector<std::unique_ptr<DeviceExchange>> exchanges_;  ///< a GPU
  std::vector<DeviceStream> streams_;                       ///< a GPU
  std::vector<Offer> offers_;                               ///< an own rank
  std::uint64_t kernels_launched_ = 0;
};

}  // namespace heddle
