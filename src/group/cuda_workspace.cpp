#include "group/cuda_workspace.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>

#include "signal/fault.hpp"

namespace heddle {

using cuda::check;

DeviceWorkspace::Impl::Impl(const DeviceGroupOptions& options, std::size_t bytes_a_rank)
    : map(cuda::spread_ranks(options.ranks, options.devices)),
      bytes(std::max(bytes_a_rank, heap_header_bytes)),
      heap(std::make_unique<cuda::Heap>(map, bytes)),
      live(static_cast<std::size_t>(options.ranks), true) {
  if (options.ranks > static_cast<int>(sizeof settings.live)) {
    throw InputError(fmt::format("{} ranks; at most {} are possible", options.ranks, sizeof settings.live));
  }
  settings.deadline_nanoseconds = static_cast<std::uint64_t>(std::chrono::nanoseconds(options.deadline).count());
  std::fill_n(settings.live, options.ranks, static_cast<unsigned char>(1));
  check(cudaHostAlloc(reinterpret_cast<void**>(&faults), sizeof(HostFault) * static_cast<std::size_t>(options.ranks),
                      cudaHostAllocPortable | cudaHostAllocMapped),
        "pinned memory for fault records");
  std::fill_n(faults, options.ranks, HostFault{});
  for (const int device : map.devices) {
    const cuda::DeviceScope scope(device);
    DeviceSettings* settings_there = nullptr;
    check(cudaMalloc(reinterpret_cast<void**>(&settings_there), sizeof settings), "memory for settings");
    on_device.push_back(settings_there);
  }
  write_settings();
}

DeviceWorkspace::Impl::~Impl() {
  for (DeviceSettings* settings_there : on_device) cudaFree(settings_there);
  cudaFreeHost(faults);
}

void DeviceWorkspace::Impl::write_settings() {
  for (std::size_t gpu = 0; gpu < on_device.size(); ++gpu) {
    const cuda::DeviceScope scope(map.devices[gpu]);
    check(cudaMemcpy(on_device[gpu], &settings, sizeof settings, cudaMemcpyHostToDevice), "writing of settings");
  }
}

DeviceTeam DeviceWorkspace::Impl::team(std::size_t gpu, const std::shared_ptr<TeamCounters>& words) {
  counters.push_back({gpu, words});
  zero(counters.back());
  return {heap->view(gpu), on_device[gpu], faults + map.first_ranks[gpu], words.get()};
}

void DeviceWorkspace::Impl::zero(const Counters& which) const {
  const auto words = which.words.lock();
  if (words == nullptr) return;  // its exchange is gone
  const cuda::DeviceScope scope(map.devices[which.gpu]);
  check(cudaMemset(words.get(), 0, sizeof(TeamCounters) * static_cast<std::size_t>(map.ranks_on(which.gpu))),
        "zeroing of team counters");
  check(cudaDeviceSynchronize(), "zeroing of team counters");
}

DeviceWorkspace::DeviceWorkspace(const DeviceGroupOptions& options, std::size_t bytes_a_rank)
    : impl_(std::make_unique<Impl>(options, bytes_a_rank)) {}
DeviceWorkspace::~DeviceWorkspace() = default;

int DeviceWorkspace::ranks() const { return impl_->map.ranks(); }
std::size_t DeviceWorkspace::gpus() const { return impl_->map.devices.size(); }
int DeviceWorkspace::device(std::size_t gpu) const { return impl_->map.devices[gpu]; }
int DeviceWorkspace::first_rank(std::size_t gpu) const { return impl_->map.first_ranks[gpu]; }
int DeviceWorkspace::ranks_on(std::size_t gpu) const { return impl_->map.ranks_on(gpu); }
std::size_t DeviceWorkspace::bytes() const { return impl_->bytes; }
HeapView DeviceWorkspace::view(std::size_t gpu) const { return impl_->heap->view(gpu); }
const std::vector<bool>& DeviceWorkspace::live() const { return impl_->live; }

void DeviceWorkspace::throw_if_aborted() const {
  for (int rank = 0; rank < ranks(); ++rank) {
    HostFault& fault = impl_->faults[rank];
    if (std::atomic_ref<Word>(fault.raised).load(std::memory_order_acquire) != 0) throw FaultError(describe(fault.record));
  }
}

void DeviceWorkspace::set_deadline(std::chrono::nanoseconds deadline) {
  impl_->settings.deadline_nanoseconds = static_cast<std::uint64_t>(deadline.count());
  impl_->write_settings();
}

void DeviceWorkspace::set_delays(std::chrono::nanoseconds longest, std::uint32_t seed) {
  impl_->settings.delay_nanoseconds = static_cast<std::uint32_t>(longest.count());
  impl_->settings.delay_seed = seed;
  impl_->write_settings();
}

void DeviceWorkspace::reset(const std::vector<bool>& live) {
  if (live.size() != impl_->live.size())
    throw InputError(fmt::format("reset with {} live flags for {} ranks", live.size(), impl_->live.size()));
  for (const int device : impl_->map.devices) {
    const cuda::DeviceScope scope(device);
    check(cudaDeviceSynchronize(), "waiting for kernels before a reset");
  }
  impl_->live = live;
  for (std::size_t rank = 0; rank < live.size(); ++rank) impl_->settings.live[rank] = live[rank] ? 1 : 0;
  impl_->settings.all_live = std::find(live.begin(), live.end(), false) == live.end() ? 1 : 0;
  Word epoch = 0;
  std::vector<HeapHeader> headers(live.size());
  for (int rank = 0; rank < ranks(); ++rank) {
    auto& header = headers[static_cast<std::size_t>(rank)];
    check(cudaMemcpy(&header, view(0).at<HeapHeader>(rank, 0), sizeof header, cudaMemcpyDeviceToHost), "reading of epochs");
    epoch = std::max(epoch, header.epoch);
  }
  for (int rank = 0; rank < ranks(); ++rank) {
    HeapHeader fresh;
    fresh.epoch = epoch + 2;  // one more than any call that was under way
    check(cudaMemcpy(view(0).at<HeapHeader>(rank, 0), &fresh, sizeof fresh, cudaMemcpyHostToDevice), "writing of headers");
    impl_->faults[rank] = {};
  }
  for (const Impl::Counters& which : impl_->counters) impl_->zero(which);
  impl_->write_settings();
}

void DeviceWorkspace::reset() { reset(std::vector<bool>(impl_->live)); }

}  // namespace heddle
