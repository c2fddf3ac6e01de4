#include "balancing/cuda_moves.hpp"

#include <cuda_runtime.h>
#include <fmt/format.h>

#include <algorithm>

#include "balancing/pieces.hpp"
#include "experts/sm90/weights.hpp"
#include "group/agreement.hpp"
#include "group/cuda_workspace.hpp"

namespace heddle {

DeviceMoves::DeviceMoves(DeviceWorkspace& workspace, std::span<const DeviceLayer> layers, int most_arrivals)
    : workspace_(workspace), most_arrivals_(most_arrivals) {
  Group& processes = workspace.impl().processes;
  step_together(processes, "experts that change places", [&] {
    for (std::size_t gpu = 0; gpu < layers.size(); ++gpu) {
      const cuda::DeviceScope scope(workspace.device(gpu));
      Gpu& here = gpus_.emplace_back();
      for (int local = 0; local < workspace.ranks_on(gpu); ++local) here.weights.push_back(layers[gpu].weights(local));
      here.arrivals.resize(here.weights.size());
    }
    cell_bytes_ = bytes_of(gpus_.front().weights.front()->memory(0));
  });
  compare_configurations(processes, fmt::format("expert bytes on a GPU={}\n", cell_bytes_), "process");
  staging_ = std::make_unique<cuda::Heap>(processes, workspace.impl().map, staging_bytes());
}

DeviceMoves::~DeviceMoves() {
  for (const Gpu& gpu : gpus_) cudaStreamSynchronize(gpu.stream);
}

void DeviceMoves::Gpu::take_time() {
  if (!is_timing || !sent.has_happened()) return;
  total.seconds += began.seconds_until(sent);
  is_timing = false;
}

bool DeviceMoves::lives_here(int rank) const { return workspace_.process_of(rank) == workspace_.impl().map.process; }

auto DeviceMoves::cell(std::size_t gpu, int rank, int place) const -> Cell {
  return gpus_[gpu].weights[static_cast<std::size_t>(rank - workspace_.first_rank(gpu))]->memory(place);
}

std::byte* DeviceMoves::staged(std::size_t gpu, int rank, std::size_t arrival) const {
  return staging_->view(gpu).at<std::byte>(rank, arrival * cell_bytes_);
}

/// Every process works out all ranks' moves, and does what its own ranks have to send. Ranks that are masked get theirs, too, if
/// their process goes on: they may be back later.
void DeviceMoves::plan(const ReplicaMap& from, const ReplicaMap& to, int nodes) {
  check_live_copies(from, workspace_.live());
  for (Gpu& gpu : gpus_) gpu.departures.clear();
  for (int rank = 0; rank < from.ranks(); ++rank) {
    if (!workspace_.impl().processes.live()[static_cast<std::size_t>(workspace_.process_of(rank))]) continue;
    const std::vector<Move> moves = moves_of(from, to, rank, nodes, workspace_.live());
    for (std::size_t i = 0; i < moves.size(); ++i) {
      const Move& move = moves[i];
      if (!lives_here(move.from_rank)) continue;
      gpus_[workspace_.impl().gpu_of(move.from_rank)].departures.push_back({move.from_rank, move.from_place, rank, i});
    }
    if (!lives_here(rank)) continue;
    const std::size_t gpu = workspace_.impl().gpu_of(rank);
    gpus_[gpu].arrivals[static_cast<std::size_t>(rank - workspace_.first_rank(gpu))] = moves;
  }
  for (Gpu& gpu : gpus_) {
    // To the own rank first, then to the next ones: not all to the same one at a time.
    const auto distance = [&](const Departure& it) { return (it.to_rank - it.from_rank + from.ranks()) % from.ranks(); };
    std::ranges::stable_sort(gpu.departures, {}, distance);
    gpu.copies = CellCopies(gpu.departures.size(), cell_bytes_);
  }
}

void DeviceMoves::send(std::size_t gpu, const Departure& departure, std::size_t offset, std::size_t bytes) const {
  std::byte* const to = staged(gpu, departure.to_rank, departure.arrival);
  const Cell from = cell(gpu, departure.from_rank, departure.from_place);
  for_runs(from, offset, bytes, [&](const std::byte* at, std::size_t begin, std::size_t count) {
    cuda::check(cudaMemcpyAsync(to + begin, at, count, cudaMemcpyDeviceToDevice, gpus_[gpu].stream), "sending of an expert");
  });
}

std::uint64_t DeviceMoves::copy_some(std::size_t bytes) {
  std::uint64_t copied = 0;
  for (std::size_t gpu = 0; gpu < gpus_.size(); ++gpu) {
    Gpu& here = gpus_[gpu];
    if (here.copies.is_complete() || !here.sent.has_happened()) continue;
    const cuda::DeviceScope scope(workspace_.device(gpu));
    here.take_time();
    here.began.record(here.stream);
    const std::uint64_t count = here.copies.advance(
        bytes, [&](std::size_t i, std::size_t offset, std::size_t part) { send(gpu, here.departures[i], offset, part); });
    here.sent.record(here.stream);
    here.is_timing = true;
    here.total.bytes += count;
    copied += count;
  }
  return copied;
}

bool DeviceMoves::has_copied_all() const {
  return std::ranges::all_of(gpus_, [](const Gpu& gpu) { return gpu.copies.is_complete() && gpu.sent.has_happened(); });
}

DeviceSent DeviceMoves::sent(std::size_t gpu) {
  const cuda::DeviceScope scope(workspace_.device(gpu));
  gpus_[gpu].take_time();
  return gpus_[gpu].total;
}

std::int64_t DeviceMoves::put_in_place(std::span<const DeviceStream> streams) {
  std::int64_t came = 0;
  for (std::size_t gpu = 0; gpu < gpus_.size(); ++gpu) {
    const cuda::DeviceScope scope(workspace_.device(gpu));
    for (int local = 0; local < workspace_.ranks_on(gpu); ++local) {
      const int rank = workspace_.first_rank(gpu) + local;
      std::vector<Move>& moves = gpus_[gpu].arrivals[static_cast<std::size_t>(local)];
      for (std::size_t i = 0; i < moves.size(); ++i) {
        const std::byte* const from = staged(gpu, rank, i);
        for_runs(cell(gpu, rank, moves[i].place), 0, cell_bytes_, [&](std::byte* at, std::size_t begin, std::size_t count) {
          cuda::check(cudaMemcpyAsync(at, from + begin, count, cudaMemcpyDeviceToDevice, streams[gpu]), "an expert into its place");
        });
      }
      came += static_cast<std::int64_t>(moves.size());
      moves.clear();
    }
    // Whoever waits for the own stream, as the end of this object does, has staging memory to itself.
    gpus_[gpu].placed.record(streams[gpu]);
    gpus_[gpu].placed.make_wait(gpus_[gpu].stream);
  }
  return came;
}

void DeviceMoves::forget() {
  for (Gpu& gpu : gpus_) {
    cuda::check(cudaStreamSynchronize(gpu.stream), "copies of experts");
    gpu.departures.clear();
    gpu.copies = CellCopies(0, 1);
    for (std::vector<Move>& moves : gpu.arrivals) moves.clear();
  }
}

std::vector<DeviceStream> DeviceMoves::streams() const {
  std::vector<DeviceStream> all;
  for (const Gpu& gpu : gpus_) all.push_back(gpu.stream);
  return all;
}

}  // namespace heddle
