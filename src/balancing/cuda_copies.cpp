#include <cuda_runtime.h>
#include <fmt/format.h>

#include <algorithm>

#include "balancing/copies_kernel.hpp"
#include "exchange/cuda_exchange.hpp"
#include "heddle/device_balancing.hpp"
#include "heddle/error.hpp"

namespace heddle {

namespace {

std::size_t index(int value) { return static_cast<std::size_t>(value); }

void check_sizes(const ReplicaMap& map) {
  if (map.experts() > most_balanced_experts || map.physical() > most_balanced_copies || map.ranks() > most_balanced_ranks) {
    throw InputError(
        fmt::format("{} copies of {} experts on {} ranks; the kernel that chooses among them takes up to {} of {} on {}",
                    map.physical(), map.experts(), map.ranks(), most_balanced_copies, most_balanced_experts, most_balanced_ranks));
  }
}

/// The table's arrays behind each other, in the order of CopiesTable.
std::vector<int> table_of(const ReplicaMap& map) {
  std::vector<int> table(map.begins().begin(), map.begins().end());
  table.insert(table.end(), map.copies().begin(), map.copies().end());
  for (const int copy : map.copies()) table.push_back(map.placement().rank_of(copy));
  std::vector<int> several(index(map.experts()) + 1, 0);
  for (int expert = 0; expert < map.experts(); ++expert) {
    if (map.copies_of(expert).size() > 1) several[index(++several[0])] = expert;
  }
  table.insert(table.end(), several.begin(), several.end());
  return table;
}

}  // namespace

struct DeviceCopies::Impl {
  int device, first_rank, topk, cap;
  CopyRule rule;
  bool one_source;
  ReplicaMap map;
  DeviceArray<int> table;
  DeviceArray<std::int32_t> ids;           ///< [local ranks, cap, topk]
  DeviceArray<unsigned long long> counts;  ///< [local ranks, experts]: calls of ranks may run at once
  std::size_t locals;

  std::size_t ids_a_rank() const { return index(cap) * index(topk); }

  CopiesTable view() const {
    CopiesTable of;
    of.experts = map.experts();
    of.physical = map.physical();
    of.ranks = map.ranks();
    of.begins = table.data();
    of.copies = of.begins + map.experts() + 1;
    of.ranks_of = of.copies + map.physical();
    of.several = of.ranks_of + map.physical();
    return of;
  }

  void store(DeviceStream stream) {
    const std::vector<int> values = table_of(map);
    cuda::check(cudaMemcpyAsync(table.data(), values.data(), values.size() * sizeof(int), cudaMemcpyHostToDevice, stream),
                "the table of copies");
    cuda::check(cudaStreamSynchronize(stream), "the table of copies");
  }
};

DeviceCopies::DeviceCopies(int device, int first_rank, int local_ranks, const ReplicaMap& map, CopyRule rule, int topk, int cap,
                           bool one_source) {
  check_sizes(map);
  if (local_ranks < 1 || first_rank < 0 || first_rank + local_ranks > map.ranks() || topk < 1 || cap < 1) {
    throw InputError(fmt::format("copies for {} ranks from {} on of {}, top-{} of {} tokens at most", local_ranks, first_rank,
                                 map.ranks(), topk, cap));
  }
  const cuda::DeviceScope scope(device);
  prepare_copies_kernel();
  const std::size_t locals = index(local_ranks), counted = locals * index(map.experts());
  impl_ = std::make_unique<Impl>(Impl{device, first_rank, topk, cap, rule, one_source, map,
                                      DeviceArray<int>(device, table_of(map).size()),
                                      DeviceArray<std::int32_t>(device, locals * index(cap) * index(topk)),
                                      DeviceArray<unsigned long long>(device, counted), locals});
  cuda::check(cudaMemset(impl_->counts.data(), 0, counted * sizeof(unsigned long long)), "counts of pairs");
  impl_->store(nullptr);
}
DeviceCopies::~DeviceCopies() = default;
DeviceCopies::DeviceCopies(DeviceCopies&&) noexcept = default;
DeviceCopies& DeviceCopies::operator=(DeviceCopies&&) noexcept = default;

std::vector<DeviceInput> DeviceCopies::choose(std::span<const DeviceInput> inputs, DeviceStream stream) {
  if (inputs.size() != impl_->locals)
    throw InputError(fmt::format("{} inputs for the {} ranks of GPU {}", inputs.size(), impl_->locals, impl_->device));
  const cuda::DeviceScope scope(impl_->device);
  std::vector<DeviceInput> chosen(inputs.begin(), inputs.end());
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    CopiesCall call;
    call.table = impl_->view();
    call.rule = impl_->rule;
    call.source = impl_->one_source ? 0 : impl_->first_rank + static_cast<int>(i);
    call.ids = inputs[i].ids;
    call.tokens = inputs[i].tokens;
    call.most_tokens = impl_->cap;
    call.topk = impl_->topk;
    call.chosen = impl_->ids.data() + i * impl_->ids_a_rank();
    call.counts = impl_->counts.data() + i * index(impl_->map.experts());
    launch_copies(call, stream);
    chosen[i].ids = call.chosen;
  }
  return chosen;
}

void DeviceCopies::update(const ReplicaMap& map, DeviceStream stream) {
  const ReplicaMap& now = impl_->map;
  if (map.experts() != now.experts() || map.physical() != now.physical() || map.ranks() != now.ranks()) {
    throw InputError(fmt::format("a placement of {} copies of {} experts on {} ranks in the place of {} of {} on {}",
                                 map.physical(), map.experts(), map.ranks(), now.physical(), now.experts(), now.ranks()));
  }
  const cuda::DeviceScope scope(impl_->device);
  impl_->map = map;
  impl_->store(stream);
}

const ReplicaMap& DeviceCopies::map() const { return impl_->map; }

std::vector<std::int64_t> DeviceCopies::take_counts(DeviceStream stream) {
  const cuda::DeviceScope scope(impl_->device);
  const std::size_t experts = index(impl_->map.experts());
  std::vector<unsigned long long> counted(impl_->locals * experts);
  const std::size_t bytes = counted.size() * sizeof(unsigned long long);
  cuda::check(cudaMemcpyAsync(counted.data(), impl_->counts.data(), bytes, cudaMemcpyDeviceToHost, stream), "counts of pairs");
  cuda::check(cudaMemsetAsync(impl_->counts.data(), 0, bytes, stream), "counts of pairs");
  cuda::check(cudaStreamSynchronize(stream), "counts of pairs");
  std::vector<std::int64_t> sums(experts, 0);
  for (std::size_t i = 0; i < counted.size(); ++i) sums[i % experts] += static_cast<std::int64_t>(counted[i]);
  return sums;
}

}  // namespace heddle
