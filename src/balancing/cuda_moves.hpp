// How experts go from GPU to GPU: whoever has one writes it into staging memory of the rank that it comes to, on a stream beside
// the calls'; at the switch that rank's GPU copies it into its cell, on the calls' stream.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "balancing/migration.hpp"
#include "experts/sm90/cuda_stage.hpp"
#include "group/cuda_heap.hpp"
#include "group/cuda_stream.hpp"
#include "heddle/device_balancing.hpp"
#include "heddle/device_layer.hpp"
#include "layer/cuda_shared_expert.hpp"

namespace heddle {

/// Of the GPUs of one process.
class DeviceMoves {
 public:
  /// Collective over the processes of the workspace. `layers`: one a GPU, with experts of one layout on every rank of every process
  /// (InputError). `most_arrivals`: experts that come to a rank in a change.
  DeviceMoves(DeviceWorkspace& workspace, std::span<const DeviceLayer> layers, int most_arrivals);
  ~DeviceMoves();
  DeviceMoves(const DeviceMoves&) = delete;
  DeviceMoves& operator=(const DeviceMoves&) = delete;

  // As BalancingEngine's. Bytes are those that each GPU sends; one whose last ones are still on their way sends no more.
  void plan(const ReplicaMap& from, const ReplicaMap& to, int nodes);
  std::uint64_t copy_some(std::size_t bytes);
  bool has_copied_all() const;
  /// Queued on `streams`, one a GPU.
  std::int64_t put_in_place(std::span<const DeviceStream> streams);
  void forget();

  /// Beside the calls', one a GPU.
  std::vector<DeviceStream> streams() const;
  int most_arrivals() const { return most_arrivals_; }
  DeviceSent sent(std::size_t gpu);
  std::size_t staging_bytes() const { return static_cast<std::size_t>(most_arrivals_) * cell_bytes_; }

 private:
  using Cell = std::array<std::span<std::byte>, 4>;
  /// An expert that goes to a rank, as the one of that number among those that come there.
  struct Departure {
    int from_rank = 0;
    int from_place = 0;
    int to_rank = 0;
    std::size_t arrival = 0;
  };
  struct Gpu {
    std::vector<std::shared_ptr<const sm90::DeviceWeights>> weights;  ///< a local rank
    std::vector<std::vector<Move>> arrivals;                          ///< to a local rank
    std::vector<Departure> departures;
    CellCopies copies{0, 1};  ///< of the departures
    cuda::OwnStream stream;
    DeviceEvent began{true}, sent{true}, placed{false};  ///< the first two: around copies that go together
    bool is_timing = false;                              ///< such copies, of which the time is not in `total` yet
    DeviceSent total;

    /// Takes the time of the last copies if they have ended.
    void take_time();
  };
  Cell cell(std::size_t gpu, int rank, int place) const;
  std::byte* staged(std::size_t gpu, int rank, std::size_t arrival) const;
  void send(std::size_t gpu, const Departure& departure, std::size_t offset, std::size_t bytes) const;
  bool lives_here(int rank) const;

  DeviceWorkspace& workspace_;
  int most_arrivals_;
  std::size_t cell_bytes_ = 0;
  std::deque<Gpu> gpus_;
  std::unique_ptr<cuda::Heap> staging_;  ///< [most arrivals, cell bytes] a rank
};

}  // namespace heddle
