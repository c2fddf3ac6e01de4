#include "mega/sm90/cuda_mega.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "group/cuda_driver.hpp"
#include "layer/options.hpp"
#include "mega/kernel_limits.hpp"
#include "mega/options.hpp"
#include "trace/cuda_arena.hpp"

namespace heddle {

using cuda::check;
using sm90::ActivatedStore;
using sm90::MegaKnown;
using sm90::MegaRank;
using sm90::MegaSource;
using sm90::RowBlocks;
using sm90::TokenRows;

namespace {

std::size_t size(int value) { return static_cast<std::size_t>(value); }

[[noreturn]] void refuse(const std::string& text) { throw InputError("mega on a GPU: " + text); }

/// What only exchanges by themselves do.
void check_device(const DeviceExchangeOptions& device) {
  if (device.counters) refuse("its kernels count nothing; leave DeviceExchangeOptions::counters out");
  if (device.nccl != nullptr) refuse("its kernels move the rows; leave DeviceExchangeOptions::nccl out");
  if (device.bulk_bytes != 0) refuse("rows are fetched by bulk copies anyway; leave DeviceExchangeOptions::bulk_bytes out");
}

}  // namespace

SharedPlace shared_place(const LayerWeights& weights, const LayerOptions& layer, const DeviceLayerOptions& device) {
  if (!weights.shared) return SharedPlace::none;
  if (layer.shared == SharedMode::extra) return SharedPlace::extra_expert;
  if (!device.shared_inside || !weights.shared->gate.empty()) return SharedPlace::module;
  const WeightKind kind = weights.shared->weights.gate.kind;
  return has_fused_kernel(weights.kind, kind) ? SharedPlace::inside : SharedPlace::module;
}

DeviceMega::DeviceMega(DeviceWorkspace& workspace, std::size_t gpu, const ExchangeOptions& options, const ExchangeMemory& memory,
                       const DeviceLayerOptions& device_options, std::span<const LayerWeights> weights, const LayerOptions& layer,
                       MegaWeights loaded)
    : DeviceExchangeBase(workspace, gpu, options, memory, device_options.exchange),
      place_(shared_place(weights.front(), layer, device_options)),
      weights_(std::move(loaded)) {
  const WeightKind kind = weights.front().kind;
  if (const std::string reason = refused_by_kernel(options, kind); !reason.empty()) refuse(reason);
  check_device(device_options.exchange);
  const cuda::DeviceScope scope(device());
  if (place_ == SharedPlace::extra_expert) {
    extended_ = DevicePlacement(device(), mega_placement(options), ranks());
    call_.placement = extended_.view;
  }
  if (weights_.routed.empty()) load_weights(weights, device_options.step_exponents);
  prepare(sm90::mega_announce_kernel());
  prepare(sm90::mega_sum_kernel(options_.combine_wire));
  int sms = 0;
  check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device()), "number of SMs");
  const int wanted = device_options.exchange.sms > 0 ? std::min(device_options.exchange.sms, sms) : sms;
  ctas_ = wanted / local_ranks();
  if (ctas_ < 1) refuse(fmt::format("{} SMs for {} ranks on GPU {}; each needs one", wanted, local_ranks(), device()));
  const DeviceClamp clamp = DeviceClamp::of(clamp_of(weights.front().shape, layer));
  constexpr int least_of_large = 64;  // rows of a block
  const bool can_be_large = options.mega.block_rows >= least_of_large;
  const WeightKind shared = place_ == SharedPlace::inside ? weights.front().shared->weights.gate.kind : kind;
  constexpr int most_of_small = 20;  // an expert's last rows are a block of their own here, not half of two
  // For fp8 block weights at its side a thread of medium blocks would have too few registers: wgmma would wait for wgmma.
  const bool has_medium = sm90::has_medium_blocks(kind) && sm90::has_medium_blocks(shared);
  row_blocks_ = {can_be_large ? device_options.row_blocks : DeviceRowBlocks::small, has_medium, most_of_small};
  for (const RowBlocks blocks : sm90::every_row_blocks) {
    if (row_blocks_.includes(blocks)) variants_[static_cast<int>(blocks)] = make_variant(blocks, kind, shared, clamp);
  }
}

void DeviceMega::load_weights(std::span<const LayerWeights> weights, bool step_exponents) {
  const auto load = [&](std::span<const ExpertWeights> experts, int intermediate) {
    auto on_gpu = std::make_shared<sm90::DeviceWeights>(experts, weights.front().shape.hidden, intermediate,
                                                        sm90::DeviceWeightsOptions{device(), {}, step_exponents});
    loaded_bytes_ += on_gpu->report().device_bytes;
    return on_gpu;
  };
  for (const LayerWeights& one : weights) {
    std::vector<ExpertWeights> experts = one.experts;
    if (place_ == SharedPlace::extra_expert) experts.push_back(one.shared->weights);
    own_.push_back(load(experts, one.shape.intermediate));
    weights_.routed.push_back(own_.back());
  }
  if (place_ != SharedPlace::inside) return;
  const SharedExpert& shared = *weights.front().shared;
  weights_.shared = load({&shared.weights, 1}, shared.intermediate);
}

void DeviceMega::update_expert(int local, int expert, const ExpertWeights& weights, DeviceStream stream) {
  own_[static_cast<std::size_t>(local)]->update(expert, weights, stream);
}

/// See sm90::Plain.
sm90::KernelCalls DeviceMega::calls() const {
  const auto has_steps = [](const sm90::DeviceWeights& weights) {
    return weights.gate_up().plan.step_exponents || weights.down().plan.step_exponents;
  };
  const bool steps =
      std::any_of(weights_.routed.begin(), weights_.routed.end(), [&](const auto& own) { return has_steps(*own); }) ||
      (weights_.shared && has_steps(*weights_.shared));
  const Quantisation& scales = options_.quantisation;
  const bool usual = options_.mega.activation == Activation::fp8 && scales.group == 128 && scales.scale == ScaleFormat::ue8m0;
  return usual && !steps && options_.combine_wire == Wire::bf16 ? sm90::KernelCalls::plain : sm90::KernelCalls::any;
}

DeviceMega::Variant DeviceMega::make_variant(RowBlocks blocks, WeightKind kind, WeightKind shared, const DeviceClamp& clamp) const {
  Variant variant;
  variant.kernel = sm90::find_mega_kernel(kind, shared, blocks, calls());
  check(cudaFuncSetAttribute(variant.kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(variant.kernel.shared_bytes)),
        "shared memory of the fused kernel");
  int ctas_an_sm = 0;
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&ctas_an_sm, variant.kernel.function, variant.kernel.threads,
                                                      variant.kernel.shared_bytes),
        "occupancy of the fused kernel");
  if (ctas_an_sm < 1) refuse(fmt::format("GPU {} does not hold a CTA of the fused kernel on an SM", device()));
  sm90::MegaKernelCall& call = variant.call;
  MegaLayout& layout = call.layout;
  layout = make_mega_layout(options_, options_.workers, areas());
  layout.has_shared = place_ == SharedPlace::inside;
  layout.activated.scale_unit = layout.shared.scale_unit = 1;
  const int most = std::min(layout.block_rows, variant.kernel.most_tokens);
  const int box = variant.kernel.box_rows;
  layout.block_rows = most < box ? most : most / box * box;
  const ExchangeMemory needed = memory_of(layout);
  if (needed.dispatch > memory_.dispatch || needed.combine > memory_.combine || needed.mega_words > memory_.mega_words ||
      needed.mega_sums > memory_.mega_sums)
    refuse(fmt::format("row blocks of {} rows do not fit the memory of those of {}", layout.block_rows, options_.mega.block_rows));
  // As far ahead as CTAs want it and the ring allows it; the places of smaller blocks are as many.
  layout.lag = std::clamp(lag_of(ctas_, layout.gemm1_tasks()), 1, std::max(1, layout.ring_blocks - 2));
  variant.clamp = clamp;
  if (options_.mega.activation == Activation::fp8)
    call.scaling = options_.quantisation.group == 32 ? sm90::TokenScales::by_32 : sm90::TokenScales::by_128;
  std::vector<MegaRank> parts;
  for (int local = 0; local < local_ranks(); ++local) parts.push_back(part_of(local, variant));
  variant.parts = DeviceArray<MegaRank>(device(), parts.size());
  check(cudaMemcpy(variant.parts.data(), parts.data(), parts.size() * sizeof(MegaRank), cudaMemcpyHostToDevice),
        "copying of what ranks keep");
  call.parts = variant.parts.data();
  return variant;
}

/// But for the weights. `heap`: as the rank sees it.
MegaKnown DeviceMega::known_of(const HeapView& heap, const Variant& variant) const {
  const sm90::MegaKernelCall& call = variant.call;
  const MegaLayout& layout = call.layout;
  MegaKnown known;
  known.call.layout = layout;
  known.call.placement = call_.placement;
  const Placement placement = place_ == SharedPlace::extra_expert ? mega_placement(options_) : options_.placement;
  known.call.local_experts = static_cast<int>(placement.experts_of(heap.rank).size());
  const auto describe = [&](const StepRegion& region, std::size_t token_rows, ActivatedStore& store, TokenRows& tokens,
                            TokenRows& activated) {
    store.format = region.format.activation;
    store.quantisation = region.format.quantisation;
    store.clamp = variant.clamp;
    store.values = heap.mine<std::byte>(region.values(0, 0));
    store.value_stride = region.format.row_bytes();
    store.scales = heap.mine<std::byte>(region.scales(0, 0));
    store.scale_stride = region.format.scale_row_bytes();
    tokens.scales = heap.mine<std::byte>(token_rows) + layout.wire.scale_offset();
    tokens.scale_stride = layout.wire.row_bytes();
    activated.scales = store.scales;
    activated.scale_stride = store.scale_stride;
    tokens.scaling = activated.scaling = call.scaling;
    tokens.format = activated.format = region.format.quantisation.scale;
  };
  describe(layout.intermediate(), layout.arrived(0), known.activated[0], known.rows[0], known.rows[1]);
  describe(layout.shared_intermediate(), layout.row(0), known.activated[1], known.rows[2], known.rows[3]);
  return known;
}

MegaRank DeviceMega::part_of(int local, const Variant& variant) const {
  const MegaLayout& layout = variant.call.layout;
  HeapView heap = workspace_.view(gpu_);
  heap.rank = rank_of(local);
  const auto wire_rows = [&](std::size_t begin, std::size_t rows) {
    return sm90::make_row_tensor(heap.mine<std::byte>(begin), layout.wire.row_bytes(), layout.wire.value_bytes(), rows,
                                 variant.kernel.box_rows);
  };
  const auto activations = [&](const StepRegion& region) {
    const StepFormat& format = region.format;
    return sm90::make_row_tensor(heap.mine<std::byte>(region.begin), format.row_bytes(), format.value_bytes(format.width),
                                 region.rows, variant.kernel.box_rows);
  };
  MegaRank part;
  part.known = known_of(heap, variant);
  const auto set = [&](MegaSource source, const sm90::RowTensor& rows, const sm90::OrderedMatrix& weights) {
    part.rows[static_cast<int>(source)] = rows;
    part.known.weights[static_cast<int>(source)] = weights;
  };
  const sm90::DeviceWeights& routed = *weights_.routed[size(local)];
  set(MegaSource::gemm1, wire_rows(layout.arrived(0), layout.ring_rows()), routed.gate_up());
  set(MegaSource::gemm2, activations(layout.intermediate()), routed.down());
  if (place_ == SharedPlace::inside) {
    set(MegaSource::shared_gemm1, wire_rows(layout.row(0), size(layout.shape.cap)), weights_.shared->gate_up());
    set(MegaSource::shared_gemm2, activations(layout.shared_intermediate()), weights_.shared->down());
  }
  return part;
}

Arrived DeviceMega::arrived(int) const {
  Arrived arrived;
  arrived.layout = options_.arrived;
  arrived.wire = options_.wire;
  arrived.received = -1;
  arrived.real = -1;
  return arrived;
}

std::size_t DeviceMega::weight_bytes() const { return loaded_bytes_; }

const DeviceMega::Variant& DeviceMega::variant_for(int max_tokens) const {
  const long long rows = static_cast<long long>(max_tokens) * ranks() * options_.topk / options_.placement.experts();
  return *variants_[static_cast<int>(row_blocks_.choose(static_cast<int>(rows)))];
}

void DeviceMega::run(std::span<const DeviceOutput> outputs, DeviceStream stream) {
  take_outputs(outputs, stream);
  const Variant& variant = variant_for(call_.max_tokens);
  announce_.layout = variant.call.layout;
  trace::name_launches("announce");
  launch(sm90::mega_announce_kernel(), &announce_, {true, false, true}, stream);
  sm90::MegaKernelCall call = variant.call;
  static_cast<DeviceCall&>(call) = call_;
  constexpr int most_spans = 4096;
  trace::name_launches("fused kernel");
  trace::record_launch(call.team,
                       {rank_of(0), local_ranks(), ctas_, variant.kernel.threads, most_spans, call.layout.ring_blocks, false});
  const cuda::DeviceScope scope(device());
  // A single rank's CTAs are resident together once other kernels have left their SMs; until then those that are there say how many
  // are missing. They may come before the announcement has ended, and wait for it; never where SMs were set apart, as they would
  // sit on those of another context meanwhile. CTAs of several ranks must not begin by halves: each half could wait for the other.
  cudaLaunchAttribute attribute;
  if (local_ranks() > 1) {
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
  } else {
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(ctas_), static_cast<unsigned>(local_ranks()));
  config.blockDim = dim3(static_cast<unsigned>(variant.kernel.threads));
  config.dynamicSmemBytes = variant.kernel.shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = local_ranks() > 1 || !has_share_of_sms() ? 1 : 0;
  void* arguments[] = {&call};
  check(cudaLaunchKernelExC(&config, variant.kernel.function, arguments), "launch of the fused kernel");
  trace::name_launches("sum");
  launch(sm90::mega_sum_kernel(options_.combine_wire), &announce_, {false, true, true, true}, stream);
}

}  // namespace heddle
