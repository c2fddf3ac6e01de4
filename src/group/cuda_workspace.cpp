#include "group/cuda_workspace.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>

#include "group/agreement.hpp"
#include "group/cuda_kernels.hpp"
#include "heddle/device_nodes.hpp"
#include "signal/fault.hpp"

namespace heddle {

using cuda::check;

namespace {

Word load(Word& word) { return std::atomic_ref<Word>(word).load(std::memory_order_acquire); }

/// On all processes of a node alike.
cuda::DeviceMap mapped(Group& processes, const DeviceGroupOptions& mine) {
  cuda::DeviceMap map = cuda::map_ranks(processes, mine);
  step_together(processes, "look at the link between nodes", [&] {
    if (map.nodes > 1 && mine.nodes.link->ranks() != map.ranks()) {
      throw InputError(fmt::format("the link between nodes is for {} ranks; {} nodes of {} ranks are {}", mine.nodes.link->ranks(),
                                   map.nodes, map.ranks_a_node(), map.ranks()));
    }
  });
  return map;
}

}  // namespace

DeviceWorkspace::Impl::Impl(std::unique_ptr<Group> alone_group, Group& group, const DeviceGroupOptions& mine,
                            std::size_t bytes_a_rank)
    : alone(std::move(alone_group)),
      processes(group),
      nodes(mine.nodes),
      map(mapped(group, mine)),
      bytes(std::max(bytes_a_rank, heap_header_bytes)),
      heap(std::make_unique<cuda::Heap>(group, map, bytes)),
      live(static_cast<std::size_t>(map.ranks()), true) {
  settings.deadline_nanoseconds = static_cast<std::uint64_t>(std::chrono::nanoseconds(mine.deadline).count());
  std::fill_n(settings.live, map.ranks(), static_cast<unsigned char>(1));
  step_together(processes, "creation of the device workspace", [this] { make_board(); });
}

void DeviceWorkspace::Impl::make_board() {
  faults = {live.size(), "pinned memory for faults"};
  for (std::size_t gpu = 0; gpu < map.gpus; ++gpu) {
    const cuda::DeviceScope scope(map.own(gpu).device);
    OwnGpu& here = own.emplace_back();
    check(cudaMalloc(reinterpret_cast<void**>(&here.settings), sizeof settings), "memory for settings");
    check(cudaStreamCreateWithFlags(&here.stream, cudaStreamNonBlocking), "cudaStreamCreate");
  }
  write_settings();
}

// Others may still work on this process's memory: they hold it through mappings of their own.
DeviceWorkspace::Impl::~Impl() {
  int before = 0;  // the caller's device is current again afterwards
  const bool known = cudaGetDevice(&before) == cudaSuccess;
  for (std::size_t gpu = 0; gpu < own.size(); ++gpu) {
    if (cudaSetDevice(map.own(gpu).device) == cudaSuccess) cudaDeviceSynchronize();
    if (own[gpu].stream != nullptr) cudaStreamDestroy(own[gpu].stream);
    cudaFree(own[gpu].settings);
  }
  if (known) cudaSetDevice(before);
}

void DeviceWorkspace::Impl::write_settings() {
  for (std::size_t gpu = 0; gpu < own.size(); ++gpu) {
    const cuda::DeviceScope scope(map.own(gpu).device);
    check(cudaMemcpy(own[gpu].settings, &settings, sizeof settings, cudaMemcpyHostToDevice), "writing of settings");
  }
}

DeviceTeam DeviceWorkspace::Impl::team(std::size_t gpu, const std::shared_ptr<TeamCounters>& words) {
  keep_zeroed(gpu, words, sizeof(TeamCounters) * static_cast<std::size_t>(map.own(gpu).ranks));
  return {heap->view(gpu), own[gpu].settings, faults.data() + map.own(gpu).first_rank, words.get()};
}

void DeviceWorkspace::Impl::keep_zeroed(std::size_t gpu, const std::shared_ptr<void>& memory, std::size_t memory_bytes) {
  zeroed.push_back({gpu, memory, memory_bytes});
  zero(zeroed.back());
}

void DeviceWorkspace::Impl::zero(const Zeroed& which) const {
  const auto memory = which.memory.lock();
  if (memory == nullptr) return;  // its exchange is gone
  const cuda::DeviceScope scope(map.own(which.gpu).device);
  check(cudaMemset(memory.get(), 0, which.bytes), "zeroing of an exchange's counters");
  check(cudaDeviceSynchronize(), "zeroing of an exchange's counters");
}

std::size_t DeviceWorkspace::Impl::gpu_of(int rank) const {
  for (std::size_t gpu = 0; gpu < map.gpus; ++gpu) {
    const cuda::Part& part = map.own(gpu);
    if (rank >= part.first_rank && rank < part.first_rank + part.ranks) return gpu;
  }
  throw InputError(fmt::format("rank {} does not live in this process", rank));
}

void DeviceWorkspace::Impl::give_up(int rank, const FaultRecord& record) {
  const std::size_t gpu = gpu_of(rank);
  const cuda::DeviceScope scope(map.own(gpu).device);
  DeviceTeam team{heap->view(gpu), own[gpu].settings, faults.data() + rank, nullptr};
  team.heap.rank = rank;
  check(cuda::launch_give_up(team, record, own[gpu].stream), "giving up");
  check(cudaStreamSynchronize(own[gpu].stream), "giving up");
}

void DeviceWorkspace::Impl::settle() const {
  for (std::size_t gpu = 0; gpu < map.gpus; ++gpu) {
    const cuda::DeviceScope scope(map.own(gpu).device);
    check(cudaDeviceSynchronize(), "waiting for kernels before a reset");
  }
}

/// A process goes on while one of its ranks does; one that calls is there.
std::vector<bool> DeviceWorkspace::Impl::live_processes() const {
  std::vector<bool> going_on(static_cast<std::size_t>(processes.ranks()), false);
  for (const cuda::Part& part : map.parts) {
    for (int rank = part.first_rank; rank < part.first_rank + part.ranks; ++rank) {
      if (live[static_cast<std::size_t>(rank)]) going_on[static_cast<std::size_t>(part.process)] = true;
    }
  }
  going_on[static_cast<std::size_t>(map.process)] = true;
  return going_on;
}

/// The highest epoch of any rank of a live process.
Word DeviceWorkspace::Impl::agree_on_epoch() {
  Word epoch = 0;
  for (std::size_t gpu = 0; gpu < map.gpus; ++gpu) {
    const cuda::DeviceScope scope(map.own(gpu).device);  // another GPU may not reach this one's memory
    const HeapView view = heap->view(gpu);
    for (int local = 0; local < map.own(gpu).ranks; ++local) {
      HeapHeader header;
      check(cudaMemcpy(&header, view.at<HeapHeader>(view.rank + local, 0), sizeof header, cudaMemcpyDeviceToHost),
            "reading of epochs");
      epoch = std::max(epoch, header.epoch);
    }
  }
  for (const std::string& text : processes.exchange(fmt::format("{}", epoch), "agreement on the epoch")) {
    if (!text.empty()) epoch = std::max<Word>(epoch, std::stoull(text));
  }
  return epoch;
}

namespace {

/// Compared before anything is made; what is a process's own matter (its GPUs, its ranks) may differ.
Group& compared(Group& processes, const DeviceNodes& nodes, std::size_t bytes, const std::string& configuration) {
  const std::string all = configuration + fmt::format("heap_bytes={}\nnode={}\nnodes={}\n", bytes, nodes.node, nodes.nodes);
  compare_configurations(processes, all, "process");
  return processes;
}

}  // namespace

DeviceWorkspace::DeviceWorkspace(const DeviceGroupOptions& options, std::size_t bytes_a_rank) {
  auto alone = std::move(create_thread_group(1, {options.deadline}).front());
  Group& processes = *alone;
  impl_ = std::make_unique<Impl>(std::move(alone), processes, options, bytes_a_rank);
}
DeviceWorkspace::DeviceWorkspace(Group& processes, const DeviceGroupOptions& mine, std::size_t bytes_a_rank,
                                 const std::string& configuration)
    : impl_(std::make_unique<Impl>(nullptr, compared(processes, mine.nodes, bytes_a_rank, configuration), mine, bytes_a_rank)) {}
DeviceWorkspace::~DeviceWorkspace() = default;

int DeviceWorkspace::ranks() const { return impl_->map.ranks(); }
std::size_t DeviceWorkspace::gpus() const { return impl_->map.gpus; }
int DeviceWorkspace::device(std::size_t gpu) const { return impl_->map.own(gpu).device; }
int DeviceWorkspace::first_rank(std::size_t gpu) const { return impl_->map.own(gpu).first_rank; }
int DeviceWorkspace::ranks_on(std::size_t gpu) const { return impl_->map.own(gpu).ranks; }
std::size_t DeviceWorkspace::bytes() const { return impl_->bytes; }
HeapView DeviceWorkspace::view(std::size_t gpu) const { return impl_->heap->view(gpu); }
const std::vector<bool>& DeviceWorkspace::live() const { return impl_->live; }

int DeviceWorkspace::process_of(int rank) const {
  for (const cuda::Part& part : impl_->map.parts) {
    if (rank >= part.first_rank && rank < part.first_rank + part.ranks) return part.process;
  }
  throw InputError(fmt::format("rank {} is outside of a group of {} ranks", rank, ranks()));
}

void DeviceWorkspace::throw_if_aborted() const {
  for (int rank = 0; rank < ranks(); ++rank) {
    HostFault& fault = impl_->faults.data()[rank];
    if (load(fault.raised) == 1) throw FaultError(describe(fault.record));
  }
}

void DeviceWorkspace::set_deadline(std::chrono::nanoseconds deadline) {
  // Others may look: what waits for other nodes does.
  std::atomic_ref(impl_->settings.deadline_nanoseconds).store(static_cast<std::uint64_t>(deadline.count()));
  impl_->write_settings();
}

void DeviceWorkspace::set_delays(std::chrono::nanoseconds longest, std::uint32_t seed) {
  impl_->settings.delay_nanoseconds = static_cast<std::uint32_t>(longest.count());
  impl_->settings.delay_seed = seed;
  impl_->write_settings();
}

void DeviceWorkspace::reset(const std::vector<bool>& live) {
  Impl& own = *impl_;
  if (own.map.nodes > 1)
    throw InputError("a group over several nodes cannot go on after a fault; start it again with the nodes that are left");
  if (live.size() != own.live.size())
    throw InputError(fmt::format("reset with {} live flags for {} ranks", live.size(), own.live.size()));
  own.settle();
  own.live = live;
  for (std::size_t rank = 0; rank < live.size(); ++rank) own.settings.live[rank] = live[rank] ? 1 : 0;
  own.settings.all_live = std::find(live.begin(), live.end(), false) == live.end() ? 1 : 0;
  own.processes.reset(own.live_processes());  // from here on no live process has a kernel of this workspace running
  HeapHeader fresh;
  fresh.epoch = own.agree_on_epoch() + 2;  // one more than any call that was under way
  fresh.call = fresh.epoch;
  for (std::size_t gpu = 0; gpu < own.map.gpus; ++gpu) {
    const cuda::DeviceScope scope(own.map.own(gpu).device);
    const HeapView view = own.heap->view(gpu);
    for (int rank = view.rank; rank < view.rank + own.map.own(gpu).ranks; ++rank) {
      check(cudaMemcpy(view.at<HeapHeader>(rank, 0), &fresh, sizeof fresh, cudaMemcpyHostToDevice), "writing of headers");
      own.faults.data()[rank] = {};
    }
  }
  for (const Impl::Zeroed& which : own.zeroed) own.zero(which);
  own.write_settings();
  own.settle();  // copies from ordinary memory may still be under way when they return
  own.processes.barrier("reset of the device workspace");
}

void DeviceWorkspace::reset() { reset(std::vector<bool>(impl_->live)); }

}  // namespace heddle
