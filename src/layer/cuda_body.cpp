#include "layer/cuda_body.hpp"

#include <cuda_runtime.h>
#include <fmt/format.h>

#include <algorithm>

#include "layer/options.hpp"
#include "signal/fault.hpp"
#include "trace/cuda_arena.hpp"

namespace heddle {

namespace {

void mark(const CallMarks* marks, int point, DeviceStream stream) {
  if (marks != nullptr) marks->at[point].record(stream);
}

}  // namespace

void LayerParts::give_up(DeviceStream stream) const {
  try {
    if (is_captured(stream)) return;  // nobody waits while a graph is made
    for (int local = 0; local < local_ranks(); ++local) {
      workspace.impl().give_up(rank_of(local), {{WordKind::failed, -1, -1}, rank_of(local), 0, 0});
    }
  } catch (const Error&) {
    // A GPU that does not even run this kernel: the others' deadlines tell them.
  }
}

DeviceBody::DeviceBody(LayerParts& parts, const LayerOptions& options, const ExchangeMemory& memory,
                       std::span<const LayerWeights> weights, const DeviceLayerOptions& device, MegaWeights loaded)
    : parts_(parts),
      settings_(exchange_options(weights.front(), options)),
      host_waits_(settings_.way == Way::normal || (settings_.way == Way::elastic && settings_.cpu_sync)),
      gathers_(settings_.way == Way::gather && settings_.gather == GatherMode::tensor_parallel),
      slices_batch_(options.tensor_parallel && !gathers_),
      wants_shared_(weights.front().shared.has_value()) {
  if (settings_.way != Way::mega) {
    exchange_ = create_device_exchange(parts.workspace, parts.gpu, settings_, memory, device.exchange);
    return;
  }
  auto mega =
      std::make_unique<DeviceMega>(parts.workspace, parts.gpu, settings_, memory, device, weights, options, std::move(loaded));
  fused_ = mega.get();
  exchange_ = std::move(mega);
  wants_shared_ = shared_place(weights.front(), options, device) == SharedPlace::module;
}

Chain DeviceBody::chain() const { return {settings_, exchange_->result_rows(0) != nullptr}; }

/// Where a rank's slice of this call's batch begins.
int DeviceBody::first_token(int rank) const { return slice_begin(batch_.max_tokens, rank, parts_.workspace.ranks()); }

std::vector<DeviceInput> DeviceBody::own_slices(std::span<const DeviceInput> inputs, DeviceStream stream) {
  static_assert(NumbersCall::most >= max_local_ranks);
  NumbersCall numbers;
  numbers.to = parts_.slice_tokens.data();
  numbers.count = parts_.local_ranks();
  std::vector<DeviceInput> own;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const int rank = parts_.rank_of(static_cast<int>(i));
    const int first = first_token(rank);
    numbers.values[i] = first_token(rank + 1) - first;
    own.push_back(parts_.sizes.from(inputs[i], first));
    own.back().tokens = parts_.slice_tokens.data() + i;
  }
  launch_numbers(numbers, stream);
  return own;
}

void DeviceBody::begin(std::span<const DeviceInput> inputs, const Step& given, DeviceStream stream, const CallMarks* marks) {
  batch_ = given;
  step_ = given;
  mark(marks, 0, stream);
  std::vector<DeviceInput> own(inputs.begin(), inputs.end());
  if (slices_batch_) {
    step_.max_tokens = longest_slice(given.max_tokens, parts_.workspace.ranks(), settings_.cap);
    own = own_slices(inputs, stream);
  }
  if (wants_shared_) parts_.shared->fork(stream);
  trace::name_launches("dispatch");
  // First, so that it finds free SMs: its peers wait for it.
  if (host_waits_) {
    exchange_->dispatch_send(own, step_, stream);
  } else {
    exchange_->dispatch(own, step_, stream);
  }
  if (!wants_shared_) return;
  trace::name_launches("shared gemm1", "shared gemm2", parts_.rank_of(0));
  try {
    parts_.shared->run(own, step_.max_tokens, marks != nullptr);
  } catch (...) {
    parts_.give_up(stream);
    throw;
  }
}

std::vector<const bf16*> DeviceBody::run_experts(DeviceStream stream) {
  const long long tokens = gathers_ ? step_.max_tokens : static_cast<long long>(parts_.workspace.ranks()) * step_.max_tokens;
  const int expected =
      std::max(1, static_cast<int>(tokens * static_cast<long long>(parts_.sizes.topk) / settings_.placement.experts()));
  std::vector<const bf16*> results;
  for (int local = 0; local < parts_.local_ranks(); ++local) {
    RankExperts& mine = parts_.experts[static_cast<std::size_t>(local)];
    if (!parts_.workspace.live()[static_cast<std::size_t>(parts_.rank_of(local))]) {
      results.push_back(exchange_->result_rows(local));  // masked: what lies there is of an earlier call, and nobody reads it
      continue;
    }
    trace::name_launches("gemm1", "gemm2", parts_.rank_of(local));
    results.push_back(mine.run(exchange_->arrived(local), exchange_->result_rows(local), expected, stream));
  }
  return results;
}

std::vector<DeviceOutput> DeviceBody::places_of(std::span<bf16* const> outputs) const {
  std::vector<DeviceOutput> places(outputs.size());
  for (std::size_t i = 0; i < places.size(); ++i) {
    const int local = static_cast<int>(i);
    DeviceOutput& place = places[i];
    if (wants_shared_) parts_.shared->add_to(place, local);
    if (gathers_) {
      place.all_out = outputs[i];
    } else if (slices_batch_) {
      place.out = parts_.slice_outputs(local);
      place.all_out = batch_.max_tokens > 0 ? outputs[i] : nullptr;
      place.first = first_token(parts_.rank_of(local));
      place.all_tokens = batch_.max_tokens;
    } else {
      place.out = outputs[i];
    }
  }
  return places;
}

/// Its time is that of the experts. It sums a shared expert of its own last, so another one has to be there.
void DeviceBody::run_fused(std::span<bf16* const> outputs, DeviceStream stream, const CallMarks* marks) {
  if (wants_shared_) parts_.shared->join(stream);
  mark(marks, 1, stream);
  fused_->run(places_of(outputs), stream);
  mark(marks, 2, stream);
  fused_->share(stream);
}

void DeviceBody::end(std::span<bf16* const> outputs, DeviceStream stream, const CallMarks* marks) {
  trace::name_launches("dispatch");
  if (host_waits_) exchange_->dispatch_receive(stream);
  try {
    if (fused_ != nullptr) {
      run_fused(outputs, stream, marks);
    } else {
      mark(marks, 1, stream);
      const std::vector<const bf16*> results = run_experts(stream);
      mark(marks, 2, stream);
      if (wants_shared_) parts_.shared->join(stream);
      trace::name_launches("combine");
      exchange_->combine(results, places_of(outputs), stream);
    }
  } catch (...) {
    parts_.give_up(stream);
    throw;
  }
  mark(marks, 3, stream);
}

}  // namespace heddle
