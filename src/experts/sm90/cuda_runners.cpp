#include "experts/sm90/cuda_runners.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "formats/row_format.hpp"
#include "heddle/error.hpp"

namespace heddle::sm90 {

using loading::DeviceMemory;
using loading::size;

namespace {

/// CTAs a SM of kernels that move rows.
constexpr int moving_ctas = 4;

int groups(int columns, const Quantisation& quantisation) { return (columns + quantisation.group - 1) / quantisation.group; }
std::size_t scale_bytes(const Quantisation& quantisation) { return quantisation.scale == ScaleFormat::f32 ? sizeof(float) : 1; }

/// The experts of a call as matrices of their own.
OrderedMatrix from_expert(OrderedMatrix matrix, int expert) {
  matrix.chunks += size(expert) * matrix.expert_stride;
  if (matrix.row_scales != nullptr) matrix.row_scales += size(expert) * size(matrix.plan.row_scales());
  return matrix;
}

}  // namespace

int sms_of(int device) {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || device < 0 || device >= count) {
    throw InputError(fmt::format("experts on a GPU: GPU {}; there are {} here", device, count));
  }
  int sms = 0, major = 0, minor = 0;
  cuda::check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device), "number of SMs");
  cuda::check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "compute capability");
  cuda::check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "compute capability");
  if (major != 9 || minor != 0) {
    throw InputError(fmt::format("experts on a GPU: GPU {} has compute capability {}.{}; these kernels are for 9.0 (Hopper)",
                                 device, major, minor));
  }
  return sms;
}

RefusedWord::RefusedWord() {
  void* memory = nullptr;
  cuda::check(cudaHostAlloc(&memory, sizeof *word_, cudaHostAllocPortable | cudaHostAllocMapped), "pinned memory for a count");
  word_ = static_cast<unsigned long long*>(memory);
  *word_ = 0;
  cuda::check(cudaHostGetDevicePointer(&memory, word_, 0), "pinned memory for a count");
  on_device_ = static_cast<unsigned long long*>(memory);
}
RefusedWord::~RefusedWord() { cudaFreeHost(word_); }
unsigned long long RefusedWord::take() { return std::exchange(*const_cast<volatile unsigned long long*>(word_), 0); }

ExpertChain::ExpertChain(const DeviceWeights& weights, const ExpertOptions& options, const DeviceExpertsOptions& device, int sms)
    : weights_(weights),
      options_(options),
      fused_(device.fused_activation),
      row_blocks_(device.row_blocks),
      most_rows_(device.most_rows),
      operand_(weights.gate_up().plan.shape().operand),
      sms_(sms),
      ctas_(device.ctas == 0 ? sms : device.ctas) {
  if (weights.count() == 0) return;
  prepare_products(weights.gate_up().plan.kind);
  prepare_rows();
  const std::size_t rows = size(most_rows_);
  const bool fp8 = options.activation == Activation::fp8;
  if (fp8) rows_ = make_rows(std::max(rows, size(device.most_tokens)), weights.hidden(), "memory for the rows of GEMM 1");
  activated_ = make_rows(rows, weights.intermediate(), "memory for the rows of GEMM 2");
  if (fused_) return;
  gate_up_ = take<bf16>(rows * 2 * size(weights.intermediate()), "memory for gate and up");
  if (fp8 && operand_ == Operand::bf16) codes_ = take<std::byte>(rows * size(weights.intermediate()), "memory for activated rows");
  flat_weights_ = take<float>(rows, "memory for routing weights");
  flat_counts_ = take<int>(size(weights.count()), "memory for counts");
  RunnerCall call;
  call.experts = weights.count();
  call.most_rows = most_rows_;
  if (most_rows_ > 0) slots_ = activation_slots(activation_step(call));
}

template <class T>
DeviceMemory<T> ExpertChain::take(std::size_t count, const char* what) {
  bytes_ += count * sizeof(T);
  return loading::allocate<T>(count, what);
}

OperandRows ExpertChain::make_rows(std::size_t rows, int columns, const char* what) {
  OperandRows made;
  made.rows = static_cast<int>(rows);
  made.value_stride = size(columns) * (operand_ == Operand::e4m3 ? 1 : 2);
  made.values = take<std::byte>(rows * made.value_stride, what);
  if (options_.activation == Activation::fp8) {
    made.scale_stride = RowFormat::padded(size(groups(columns, options_.quantisation)) * scale_bytes(options_.quantisation));
    made.scales = take<std::byte>(rows * made.scale_stride, what);
  }
  return made;
}

RowChange ExpertChain::change_of(const RowView& rows) const {
  if (options_.activation == Activation::bf16) return RowChange::none;
  if (rows.format == Activation::bf16) return operand_ == Operand::e4m3 ? RowChange::quantise : RowChange::quantise_widely;
  return operand_ == Operand::e4m3 ? RowChange::none : RowChange::widen;
}

RowBlocks ExpertChain::blocks_of(const RunnerCall& call) const {
  const int expected = call.expected_rows > 0 ? call.expected_rows : (call.most_rows + call.experts - 1) / call.experts;
  return BlockChoice{row_blocks_, has_medium_blocks(weights_.gate_up().plan.kind)}.choose(expected);
}

RowLimits ExpertChain::limits_of(const RunnerCall& call, bool reports) {
  return {std::min(call.an_expert, call.most_rows), call.most_rows, reports ? refused_.on_device() : nullptr, call.first_expert};
}

TokenRows ExpertChain::operand(const RowView& rows, const RowMap& map) const {
  TokenRows tokens;
  tokens.values = rows.values;
  tokens.value_stride = rows.value_stride;
  tokens.map = map;
  tokens.readable = rows.rows;
  if (options_.activation == Activation::bf16) return tokens;
  tokens.scales = rows.scales;
  tokens.scale_stride = rows.scale_stride;
  tokens.scaling = options_.quantisation.group == 32 ? TokenScales::by_32 : TokenScales::by_128;
  tokens.format = options_.quantisation.scale;
  return tokens;
}

/// Step 1: rows as the first product wants them. The chain also has weights and counts in flat order from here.
TokenRows ExpertChain::prepare(const RunnerCall& call, cudaStream_t stream) {
  const RowChange change = change_of(call.rows);
  const bool routed = call.ids != nullptr;
  if (change != RowChange::none || (!fused_ && !routed)) {
    RowsCall rows;
    rows.counts = call.counts;
    rows.experts = call.experts;
    rows.limits = limits_of(call, false);
    rows.map = call.source;
    rows.ids = call.ids;
    rows.tokens = call.tokens;
    rows.topk = call.topk;
    rows.values = call.rows.values;
    rows.value_stride = call.rows.value_stride;
    rows.scales = call.rows.scales;
    rows.scale_stride = call.rows.scale_stride;
    rows.columns = weights_.hidden();
    rows.quantisation = options_.quantisation;
    rows.to = rows_.values.get();
    rows.to_stride = rows_.value_stride;
    rows.to_scales = rows_.scales.get();
    rows.to_scale_stride = rows_.scale_stride;
    if (!fused_ && !routed) {
      rows.weights = call.weights;
      rows.flat_weights = flat_weights_.get();
      rows.flat_counts = flat_counts_.get();
    }
    launch_rows(rows, change, routed ? call.tokens.most : call.most_rows, moving_ctas * sms_, stream);
  }
  if (change == RowChange::none) return operand(call.rows, call.source);
  RowMap map;  // flat, but tokens stay where they are
  if (routed) map = call.source;
  return operand(rows_.view(), map);
}

ProductCall ExpertChain::product(const OrderedMatrix& weights, const RunnerCall& call, const TokenRows& tokens) {
  ProductCall product;
  product.weights = from_expert(weights, call.first_expert);
  product.tokens = tokens;
  product.counts = call.counts;
  product.experts = call.experts;
  product.limits = limits_of(call, weights.plan.paired);
  return product;
}

DeviceActivation ExpertChain::activation_step(const RunnerCall& call) const {
  DeviceActivation step;
  step.experts = call.experts;
  step.intermediate = weights_.intermediate();
  step.gate_up = gate_up_.get();
  step.counts = call.ids != nullptr ? call.counts : flat_counts_.get();
  step.most_rows = call.most_rows;
  step.weights = call.ids != nullptr ? call.flat_weights : call.weights != nullptr ? flat_weights_.get() : nullptr;
  step.clamp = options_.clamp;
  step.format = options_.activation;
  step.group = options_.quantisation.group;
  step.scale_layout.format = options_.quantisation.scale;
  step.scale_layout.groups = step.groups();
  step.scale_layout.row_bytes = static_cast<int>(activated_.scale_stride);
  step.values = codes_ != nullptr ? codes_.get() : activated_.values.get();
  step.scales = activated_.scales.get();
  return step;
}

/// The activation as a kernel of its own; what it made of fp8 codes, as bf16 operands.
void ExpertChain::activate(const RunnerCall& call, cudaStream_t stream) {
  const DeviceActivation step = activation_step(call);
  const bool padded = options_.activation_grid == ActivationGrid::padded;
  launch_activation(step, {padded ? DeviceGrid::padded : DeviceGrid::persistent, slots_, false}, stream);
  if (codes_ == nullptr) return;
  RowsCall rows;
  rows.counts = step.counts;
  rows.experts = call.experts;
  rows.limits = limits_of(call, false);
  rows.values = codes_.get();
  rows.value_stride = size(step.intermediate);
  rows.columns = step.intermediate;
  rows.quantisation = options_.quantisation;
  rows.to = activated_.values.get();
  rows.to_stride = activated_.value_stride;
  launch_rows(rows, RowChange::widen, call.most_rows, moving_ctas * sms_, stream);
}

void ExpertChain::run(const RunnerCall& call, cudaStream_t stream) {
  if (call.experts == 0 || call.most_rows == 0) return;
  ProductCall first = product(weights_.gate_up(), call, prepare(call, stream));
  if (fused_) {
    ActivatedStore& store = first.activated;
    store.format = options_.activation;
    store.quantisation = options_.quantisation;
    store.clamp = DeviceClamp::of(options_.clamp);
    store.weights = call.weights;
    store.map = call.weight_places;
    store.values = activated_.values.get();
    store.value_stride = activated_.value_stride;
    store.scales = activated_.scales.get();
    store.scale_stride = activated_.scale_stride;
  } else {
    const int intermediate = weights_.intermediate();
    first.results = {gate_up_.get(), 2 * size(intermediate), intermediate, {}};
  }
  if (may_start_ahead() && call.ids != nullptr) first.start = ProductStart::ahead;
  launch_product(first, blocks_of(call), fused_, ctas_, stream);
  if (!fused_) activate(call, stream);

  ProductCall second = product(weights_.down(), call, operand(activated_.view(), {}));
  second.results = {call.results, call.result_stride, 0, call.result_places};
  if (may_start_ahead()) second.start = ProductStart::ahead_with_weights;
  launch_product(second, blocks_of(call), false, ctas_, stream);
}

}  // namespace heddle::sm90
