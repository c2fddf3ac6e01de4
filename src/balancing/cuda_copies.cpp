#include <cuda_runtime.h>
#include <fmt/format.h>

#include <algorithm>

#include "balancing/copies_kernel.hpp"
#include "exchange/cuda_exchange.hpp"
#include "group/cuda_pinned.hpp"
#include "heddle/device_balancing.hpp"
#include "heddle/error.hpp"
#include "layer/cuda_shared_expert.hpp"

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

/// Memory of the host that streams copy from and to without it; an event says when they have.
template <class T>
struct Mailed {
  cuda::PinnedArray<T> values;
  DeviceEvent copied;

  explicit Mailed(std::size_t count) : values(count, "pinned memory for copies of experts"), copied(false) {}
  Mailed(const Mailed&) = delete;
  ~Mailed() {
    try {
      copied.wait();
    } catch (const Error&) {
      // A GPU that fails copies nothing any more.
    }
  }
};

}  // namespace

struct DeviceCopies::Impl {
  int device, first_rank, topk, cap;
  CopyRule rule;
  bool one_source;
  ReplicaMap map;
  std::size_t locals;
  DeviceArray<int> table;
  DeviceArray<std::int32_t> ids;           ///< [local ranks, cap, topk]
  DeviceArray<unsigned long long> counts;  ///< [local ranks, experts]: calls of ranks may run at once
  Mailed<int> host_table;
  Mailed<unsigned long long> host_counts;

  Impl(int on, int first, int local_ranks, const ReplicaMap& of, CopyRule by, int choices, int most, bool one)
      : device(on),
        first_rank(first),
        topk(choices),
        cap(most),
        rule(by),
        one_source(one),
        map(of),
        locals(index(local_ranks)),
        table(device, table_of(map).size()),
        ids(device, locals * ids_a_rank()),
        counts(device, locals * index(map.experts())),
        host_table(table_of(map).size()),
        host_counts(locals * index(map.experts())) {
    cuda::check(cudaMemset(counts.data(), 0, host_counts.values.bytes()), "counts of pairs");
    store(nullptr);
    cuda::check(cudaStreamSynchronize(nullptr), "the table of copies");
  }

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
    host_table.copied.wait();  // the update before this one may not have been read yet
    std::ranges::copy(table_of(map), host_table.values.data());
    cuda::check(cudaMemcpyAsync(table.data(), host_table.values.data(), host_table.values.bytes(), cudaMemcpyHostToDevice, stream),
                "the table of copies");
    host_table.copied.record(stream);
  }

  void send_counts(DeviceStream stream) {
    host_counts.copied.wait();
    cuda::check(
        cudaMemcpyAsync(host_counts.values.data(), counts.data(), host_counts.values.bytes(), cudaMemcpyDeviceToHost, stream),
        "counts of pairs");
    cuda::check(cudaMemsetAsync(counts.data(), 0, host_counts.values.bytes(), stream), "counts of pairs");
    host_counts.copied.record(stream);
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
  impl_ = std::make_unique<Impl>(device, first_rank, local_ranks, map, rule, topk, cap, one_source);
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

void DeviceCopies::send_counts(DeviceStream stream) {
  const cuda::DeviceScope scope(impl_->device);
  impl_->send_counts(stream);
}

std::vector<std::int64_t> DeviceCopies::sent_counts() const {
  const Mailed<unsigned long long>& sent = impl_->host_counts;
  sent.copied.wait();
  const std::size_t experts = index(impl_->map.experts());
  std::vector<std::int64_t> sums(experts, 0);
  for (std::size_t i = 0; i < sent.values.size(); ++i) sums[i % experts] += static_cast<std::int64_t>(sent.values.data()[i]);
  return sums;
}

std::vector<std::int64_t> DeviceCopies::take_counts(DeviceStream stream) {
  send_counts(stream);
  return sent_counts();
}

}  // namespace heddle
