// gather whose rows and sums NCCL moves, host side. Nothing of it lies in the heap but faults, so it may follow other ways on one
// workspace: it neither reads nor writes their areas and words, and leaves the epoch as it is on all ranks alike.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "exchange/cuda_exchange.hpp"
#include "exchange/cuda_nccl.hpp"
#include "exchange/gather/by_nccl.hpp"

namespace heddle {

namespace {

std::string names_of(const cuda::DeviceMap& map) {
  std::vector<std::string> names;
  for (std::size_t part = 0; part < map.parts.size(); ++part) names.push_back(map.name_of(part));
  return fmt::format("{}", fmt::join(names, ", "));
}

bool are_same(const cuda::DeviceMap& one, const cuda::DeviceMap& other) {
  return std::equal(one.parts.begin(), one.parts.end(), other.parts.begin(), other.parts.end(),
                    [](const cuda::Part& a, const cuda::Part& b) { return a.process == b.process && a.device == b.device; });
}

}  // namespace

std::string refused_by_nccl(const ExchangeOptions& options, const cuda::DeviceMap& group, const cuda::DeviceMap& of_nccl) {
  if (options.way != Way::gather)
    return fmt::format("NCCL serves gather; way {} has kernels of its own, leave DeviceExchangeOptions::nccl empty",
                       name(options.way));
  if (group.nodes > 1) return fmt::format("gather by NCCL knows one node, the group has {}; take way elastic", group.nodes);
  if (options.gather != GatherMode::padded)
    return "gather by NCCL has blocks of one size: take GatherMode::padded, or gather's own kernels";
  if (options.combine_wire != Wire::bf16)
    return "gather by NCCL returns bf16 sums: take Wire::bf16 for the combine, or gather's own kernels";
  const int ranks = group.ranks();
  if (ranks != static_cast<int>(group.parts.size())) {
    return fmt::format("{} ranks share {} GPUs; NCCL needs a GPU for each rank, gather's own kernels do not", ranks,
                       group.parts.size());
  }
  if (options.placement.ranks() != ranks)
    return fmt::format("the placement is for {} ranks, the group has {}", options.placement.ranks(), ranks);
  if (!are_same(group, of_nccl))
    return fmt::format("NCCL's communicators are for {}; the group's ranks are on {}", names_of(of_nccl), names_of(group));
  return "";
}

std::string refused_while_masked(const std::vector<bool>& live) {
  const auto dead = std::find(live.begin(), live.end(), false);
  if (dead == live.end()) return "";
  return fmt::format("rank {} is masked; gather by NCCL needs all ranks, gather's own kernels do not", dead - live.begin());
}

namespace {

class GatherByNccl final : public DeviceExchange {
 public:
  GatherByNccl(DeviceWorkspace& workspace, std::size_t gpu, const ExchangeOptions& options,
               const DeviceExchangeOptions& device_options)
      : workspace_(workspace), gpu_(gpu), options_(options), communicators_(device_options.nccl), device_(workspace.device(gpu)) {
    const cuda::DeviceScope scope(device_);
    int sms = 0;
    cuda::check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device_), "number of SMs");
    counters_ = DeviceArray<TeamCounters>(device_, 1);
    call_.team = workspace.impl().team(gpu, counters_.share());
    call_.wire = wire_format(options);
    call_.rank = workspace.first_rank(gpu);
    call_.ranks = workspace.ranks();
    call_.topk = options.topk;
    call_.ctas = device_options.sms > 0 ? std::min(device_options.sms, sms) : sms;
    allocate();
  }

  void dispatch_send(std::span<const DeviceInput> inputs, const Step& step, DeviceStream stream) override {
    take(inputs, step);
    order_.dispatch(is_captured(stream));
    const cuda::DeviceScope scope(device_);
    pack_records(call_, stream);
    communicators_->impl().all_gather(gpu_, call_.records, call_.gathered,
                                      static_cast<std::size_t>(call_.max_tokens) * call_.record_bytes(), stream);
  }
  void dispatch_receive(DeviceStream stream) override {
    const cuda::DeviceScope scope(device_);
    list_gathered(call_, stream);
  }
  void combine_send(std::span<const bf16* const> results, DeviceStream stream) override {
    order_.need_dispatch(is_captured(stream), "gather by NCCL");
    want_one(results.size(), "results");
    const cuda::DeviceScope scope(device_);
    const std::size_t values = static_cast<std::size_t>(call_.max_tokens) * static_cast<std::size_t>(options_.hidden);
    communicators_->impl().reduce_scatter(gpu_, results[0], call_.reduced, values, stream);
  }
  void combine_receive(std::span<const DeviceOutput> outputs, DeviceStream stream) override {
    const bool captured = is_captured(stream);
    order_.need_dispatch(captured, "gather by NCCL");
    want_own(outputs);
    order_.combine(captured);
    call_.output = outputs[0];
    const cuda::DeviceScope scope(device_);
    finish_sums(call_, stream);
  }
  void dispatch(std::span<const DeviceInput> inputs, const Step& step, DeviceStream stream) override {
    dispatch_send(inputs, step, stream);
    dispatch_receive(stream);
  }
  void combine(std::span<const bf16* const> results, std::span<const DeviceOutput> outputs, DeviceStream stream) override {
    want_own(outputs);
    combine_send(results, stream);
    combine_receive(outputs, stream);
  }

  Arrived arrived(int) const override {
    Arrived arrived;
    arrived.layout = ArrivedLayout::routed;
    arrived.wire = options_.wire;
    arrived.rows = call_.gathered;
    arrived.row_stride = call_.record_bytes();
    arrived.room = call_.ranks * call_.max_tokens;
    arrived.received = -1;
    arrived.real = -1;
    arrived.local_ids = call_.local_ids;
    arrived.weights = call_.weights;
    return arrived;
  }

 private:
  void want_one(std::size_t given, const char* what) const {
    if (given != 1) throw InputError(fmt::format("{} {} for the one rank of GPU {}", given, what, device_));
  }

  void want_own(std::span<const DeviceOutput> outputs) const {
    want_one(outputs.size(), "outputs");
    if (outputs[0].all_out != nullptr)
      throw InputError("gather by NCCL leaves every rank its own outputs; gather's own kernels give all to all (all_out)");
  }

  void take(std::span<const DeviceInput> inputs, const Step& step) {
    workspace_.throw_if_aborted();
    communicators_->throw_if_failed();
    want_one(inputs.size(), "inputs");
    if (step.max_tokens > options_.cap) {
      throw InputError(
          fmt::format("way gather: the step's largest batch is {} rows, the cap is {}; create the layer with a cap of at least {}",
                      step.max_tokens, options_.cap, step.max_tokens));
    }
    if (const std::string reason = refused_while_masked(workspace_.live()); !reason.empty()) throw InputError(reason);
    call_.max_tokens = step.max_tokens;
    call_.input = inputs[0];
  }

  void allocate() {
    const auto cap = static_cast<std::size_t>(options_.cap);
    const std::size_t rows = static_cast<std::size_t>(call_.ranks) * cap;
    const auto k = static_cast<std::size_t>(options_.topk);
    placement_ = DevicePlacement(device_, options_.placement, call_.ranks);
    call_.placement = placement_.view;
    ScratchPlan plan;
    const std::size_t records = plan.take(cap * call_.record_bytes());
    const std::size_t gathered = plan.take(rows * call_.record_bytes());
    const std::size_t local_ids = plan.take(rows * k * sizeof(std::int32_t));
    const std::size_t weights = plan.take(rows * k * sizeof(float));
    const std::size_t reduced = plan.take(cap * static_cast<std::size_t>(options_.hidden) * sizeof(bf16));
    scratch_ = DeviceArray<std::byte>(device_, plan.bytes());
    // Padding of records travels, too.
    cuda::check(cudaMemset(scratch_.data(), 0, plan.bytes()), "zeroing of gather's memory");
    cuda::check(cudaDeviceSynchronize(), "zeroing of gather's memory");
    call_.records = scratch_.data() + records;
    call_.gathered = scratch_.data() + gathered;
    call_.local_ids = reinterpret_cast<std::int32_t*>(scratch_.data() + local_ids);
    call_.weights = reinterpret_cast<float*>(scratch_.data() + weights);
    call_.reduced = reinterpret_cast<bf16*>(scratch_.data() + reduced);
  }

  DeviceWorkspace& workspace_;
  std::size_t gpu_;
  ExchangeOptions options_;
  std::shared_ptr<NcclCommunicators> communicators_;
  CallOrder order_;
  int device_;
  NcclGather call_;
  DeviceArray<TeamCounters> counters_;
  DevicePlacement placement_;
  DeviceArray<std::byte> scratch_;
};

}  // namespace

std::unique_ptr<DeviceExchange> create_device_gather_by_nccl(DeviceWorkspace& workspace, std::size_t gpu,
                                                             const ExchangeOptions& options, const DeviceExchangeOptions& device) {
  const std::string reason = refused_by_nccl(options, workspace.impl().map, device.nccl->impl().map);
  if (!reason.empty()) throw InputError(reason);
  return std::make_unique<GatherByNccl>(workspace, gpu, options, device);
}

}  // namespace heddle
