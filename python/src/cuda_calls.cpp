#include "cuda_calls.hpp"

#include <fmt/format.h>

#include <bit>
#include <numeric>
#include <utility>

#include "group/cuda_workspace.hpp"

namespace heddle::python {

DeviceContext::DeviceContext(std::shared_ptr<RankGroup> group, const DeviceGroupOptions& mine, LayerNeeds needs)
    : group_(std::move(group)), needs_(std::move(needs)) {
  const std::size_t bytes = needs_.memory.heap_bytes(needs_.ranks);
  workspace_ = group_ ? std::make_unique<DeviceWorkspace>(group_->group(), mine, bytes, needs_.configuration)
                      : std::make_unique<DeviceWorkspace>(mine, bytes);
  if (workspace_->ranks() != needs_.ranks) {
    throw InputError(fmt::format("experts are placed on {} ranks, the processes bring {}", needs_.ranks, workspace_->ranks()));
  }
  for (std::size_t gpu = 0; gpu < workspace_->gpus(); ++gpu) places_.emplace_back("GPU", fmt::format("GPU {}", gpu));
}

DeviceContext::Turns DeviceContext::all_turns(const char* what) {
  Turns turns;
  if (group_) turns.of_group = std::make_unique<RankGroup::Turn>(*group_, what);
  for (Place& place : places_) turns.of_gpus.emplace_back(place, what);
  return turns;
}

void DeviceContext::reset(const std::optional<std::vector<bool>>& live) {
  const auto turns = all_turns("reset");
  const nb::gil_scoped_release others_run;
  live ? workspace_->reset(*live) : workspace_->reset();
}

std::size_t DeviceContext::gpu(std::size_t number) const {
  if (number >= workspace_->gpus())
    throw InputError(fmt::format("no GPU number {}: this process has {}", number, workspace_->gpus()));
  return number;
}

std::shared_ptr<DeviceContext> make_context(std::shared_ptr<RankGroup> group, const DeviceGroupOptions& mine, LayerNeeds needs) {
  const auto turn = group ? std::make_unique<RankGroup::Turn>(*group, "a new device workspace") : nullptr;
  const nb::gil_scoped_release others_run;
  return make_shared_unlocked<DeviceContext>(group, mine, std::move(needs));
}

const int* TokenCounts::at(std::int64_t tokens) const {
  for (const Numbers& numbers : made_) {
    if (tokens <= numbers.most) return numbers.there.data() + tokens;
  }
  return nullptr;
}

void TokenCounts::make(int most) {
  std::vector<int> numbers(static_cast<std::size_t>(most) + 1);
  std::iota(numbers.begin(), numbers.end(), 0);
  DeviceArray<int> there(device_, numbers.size());
  const cuda::DeviceScope scope(device_);
  cuda::check(cudaMemcpy(there.data(), numbers.data(), numbers.size() * sizeof(int), cudaMemcpyHostToDevice), "token counts");
  cuda::check(cudaDeviceSynchronize(), "token counts");
  made_.push_back({std::move(there), most});
}

bool is_capturing(DeviceStream stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &status) == cudaSuccess) return status != cudaStreamCaptureStatusNone;
  cudaGetLastError();  // the default stream, while another one captures
  return true;
}

DeviceCalls::DeviceCalls(std::shared_ptr<DeviceContext> context, std::size_t gpu, const CallSizes& sizes)
    : context_(std::move(context)),
      gpu_(context_->gpu(gpu)),
      sizes_(sizes),
      counts_(context_->workspace().device(gpu_), sizes.most) {}

void DeviceCalls::check_ranks(const nb::list& given, const char* what) const {
  if (given.size() == ranks()) return;
  throw InputError(fmt::format("{} of {} ranks: {} live on this GPU", what, given.size(), ranks()));
}

/// Where the number of a batch's rows lies.
const int* DeviceCalls::count_of(std::int64_t rows, DeviceStream stream) {
  if (const int* count = counts_.at(rows)) return count;
  if (!sizes_.splits)
    throw InputError(fmt::format("hidden has {} tokens, a call takes at most {} (the cap)", rows, counts_.most()));
  if (is_capturing(stream)) {
    throw InputError(fmt::format(
        "hidden has {} tokens, captured calls so far at most {}: call once with so many before the capture", rows, counts_.most()));
  }
  if (rows > 1 << 30) throw InputError(fmt::format("hidden has {} tokens, a call takes at most {}", rows, 1 << 30));
  counts_.make(static_cast<int>(std::bit_ceil(static_cast<std::uint32_t>(rows))));
  return counts_.at(rows);
}

DeviceInput DeviceCalls::input_of(const Lent& states, nb::handle ids, nb::handle weights, const int* count) const {
  const int here = device();
  const std::int64_t rows = states.size(0);
  if (sizes_.routes && (ids.is_none() || weights.is_none())) {
    if (ids.is_none() && weights.is_none()) return {count, states.data<const bf16>(), nullptr, nullptr, {}};
    throw InputError("ids and weights: give both, or neither for the layer's own router");
  }
  const Lent choices(ids, {"ids", Element::int32, {rows, sizes_.topk}, Access::read, here});
  const Lent factors(weights, {"weights", Element::float32, {rows, sizes_.topk}, Access::read, here});
  return {count, states.data<const bf16>(), choices.data<const std::int32_t>(), factors.data<const float>(), {}};
}

DeviceCalls::Inputs DeviceCalls::inputs_of(const nb::list& given, DeviceStream stream) {
  check_ranks(given, "inputs");
  Inputs inputs;
  for (const nb::handle rank : given) {
    const auto of = [&](int index) { return nb::object(rank.attr("__getitem__")(index)); };
    const Lent states(of(0), {"hidden", Element::bf16, {"tokens", sizes_.hidden}, Access::read, device(), row_alignment});
    const nb::object tokens = of(3);
    const int* const count = tokens.is_none()
                                 ? count_of(states.size(0), stream)
                                 : Lent(tokens, {"tokens", Element::int32, {1}, Access::read, device()}).data<const int>();
    inputs.of_ranks.push_back(input_of(states, of(1), of(2), count));
    inputs.rows.push_back(states.size(0));
  }
  return inputs;
}

std::vector<bf16*> DeviceCalls::outputs_of(const nb::list& given, const std::vector<std::int64_t>& rows) const {
  check_ranks(given, "outputs");
  std::vector<bf16*> outputs;
  for (std::size_t rank = 0; rank < ranks(); ++rank) {
    const Lent out(given[rank], {"out", Element::bf16, {rows[rank], sizes_.hidden}, Access::write, device(), row_alignment});
    outputs.push_back(out.data<bf16>());
  }
  return outputs;
}

/// As Workspace::refuse, by a small kernel on this rank's GPU. Nothing runs while a graph is captured, so nobody is told then.
void DeviceCalls::tell_refusal(std::uintptr_t stream) noexcept {
  const nb::gil_scoped_release others_run;
  try {
    const cuda::DeviceScope scope(device());
    if (is_capturing(stream_of(stream))) return;
    const int rank = context_->workspace().first_rank(gpu_);
    context_->workspace().impl().give_up(rank, {{WordKind::refused, -1, -1}, rank, 1, 0});
  } catch (const std::exception&) {
    // A GPU that does not even run this kernel: the others' deadlines tell them.
  }
}

void DeviceCalls::refuse(std::uintptr_t stream) {
  const Turn turn(place(), "a call");
  tell_refusal(stream);
}

}  // namespace heddle::python
