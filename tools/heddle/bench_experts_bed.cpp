#include "bench_experts_bed.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "bench_kernels.hpp"
#include "experts/sm90/host_weights.hpp"
#include "experts/sm90/weights_kernels.hpp"
#include "group/cuda_driver.hpp"
#include "heddle/error.hpp"

namespace heddle::tool {

namespace {

using cuda::check;

/// Three times the L2 of an H200.
constexpr double evicting_bytes = 180e6;
/// Small matrices are not multiplied without end: their weights may be found in the L2.
constexpr int most_layers = 32;
constexpr int most_samples = 64;

std::size_t size(int value) { return static_cast<std::size_t>(value); }
std::size_t round_up(std::size_t value, std::size_t unit) { return (value + unit - 1) / unit * unit; }

}  // namespace

int RowCounts::touched() const {
  return static_cast<int>(std::count_if(rows.begin(), rows.end(), [](int count) { return count > 0; }));
}
int RowCounts::total() const { return std::accumulate(rows.begin(), rows.end(), 0); }
int RowCounts::most() const { return rows.empty() ? 0 : *std::max_element(rows.begin(), rows.end()); }

double flops(const ProductShape& shape, const RowCounts& counts) { return 2.0 * counts.total() * shape.rows() * shape.cols(); }

struct ProductBed::Layer {
  Layer(const ProductShape& shape, int device)
      : format{shape.kind, shape.rows(), shape.cols(), ScaleFormat::f32},
        values(device, size(shape.experts) * format.value_bytes()),
        scales(device, size(shape.experts) * format.scale_bytes()),
        plan{shape.kind, !shape.down, false, shape.rows(), shape.cols()},
        expert_stride(round_up(plan.bytes(), 256)),
        chunks(device, size(shape.experts) * expert_stride),
        row_scales(device, size(shape.experts) * size(plan.row_scales()) * sizeof(float)),
        ordered{plan, chunks.as<std::byte>(), expert_stride, plan.row_scales() == 0 ? nullptr : row_scales.as<float>()} {
    stored.kind = shape.kind;
    stored.experts = shape.experts;
    stored.rows = shape.rows();
    stored.cols = shape.cols();
    stored.values = values.as<std::byte>();
    stored.scales = scales.as<std::byte>();
    stored.value_pitch = format.value_pitch();
    stored.scale_pitch = format.scale_pitch();
    if (shape.kind == WeightKind::nvfp4) stored.tensor_scale = 0x1p-7f;
  }

  /// The stored matrices of an expert: one twice, or gate's rows and up's.
  sm90::WeightSource source(int expert, bool paired) const {
    sm90::WeightSource both;
    for (int half = 0; half < 2; ++half) {
      const std::size_t begin = paired && half == 1 ? size(stored.rows / 2) : 0;
      const std::size_t scale_begin = stored.kind == WeightKind::fp8_block ? begin / 128 : begin;
      both.half[half] = {ScaleFormat::f32,
                         stored.tensor_scale,
                         stored.values + size(expert) * stored.values_an_expert() + begin * stored.value_pitch,
                         stored.value_pitch,
                         stored.scales + size(expert) * stored.scales_an_expert() + scale_begin * stored.scale_pitch,
                         stored.scale_pitch,
                         0,
                         0};
    }
    return both;
  }

  sm90::StoredShape format;
  Block values, scales;
  StoredLayer stored;
  sm90::WeightPlan plan;
  std::size_t expert_stride;
  Block chunks, row_scales;
  sm90::OrderedMatrix ordered;
};

ProductBed::ProductBed(Lanes& lanes, const ProductShape& shape, int most_rows, std::uint64_t seed)
    : lanes_(lanes), shape_(shape), most_rows_(most_rows) {
  const int device = lanes.device(0);
  sm90::prepare_products(shape.kind);
  layers_.push_back(std::make_unique<Layer>(shape, device));
  const int wanted = std::clamp(static_cast<int>(std::ceil(evicting_bytes / (expert_bytes() * shape.experts))), 2, most_layers);
  while (layers() < wanted) layers_.push_back(std::make_unique<Layer>(shape, device));
  for (int layer = 0; layer < wanted; ++layer) draw_layer(*layers_[size(layer)], 4 * seed + 16 * static_cast<unsigned>(layer));

  const std::size_t rows = size(most_rows);
  const std::size_t groups = size(shape.cols() / 128);
  token_values_ = std::make_unique<Block>(device, rows * size(shape.cols()) * (shape.fp8() ? 1 : 2));
  token_scales_ = std::make_unique<Block>(device, rows * round_up(groups, 4));
  token_wide_scales_ = std::make_unique<Block>(device, rows * groups * sizeof(float));
  tokens_ = {shape.fp8(),
             most_rows,
             shape.cols(),
             token_values_->as<std::byte>(),
             token_scales_->as<std::uint8_t>(),
             round_up(groups, 4),
             token_wide_scales_->as<float>()};
  fill_tokens(tokens_, 4 * seed + 1, lanes.stream(0));
  const std::vector<float> ones(rows, 1.0f);
  routing_weights_ = std::make_unique<Block>(device, rows * sizeof(float));
  routing_weights_->write(ones.data(), rows * sizeof(float));
  results_ = std::make_unique<Block>(device, rows * size(shape.rows()) * sizeof(bf16));
  samples_ = std::make_unique<Block>(device, most_samples * sizeof(Sample));
  reference_ = std::make_unique<Block>(device, size(most_samples) * size(shape.rows()) * sizeof(float));
  sums_ = std::make_unique<Block>(device, 4 * sizeof(double));
  lanes.settle();
}
ProductBed::~ProductBed() = default;

void ProductBed::draw_layer(Layer& layer, std::uint64_t seed) {
  cudaStream_t stream = lanes_.stream(0);
  fill_weights(layer.stored, seed, stream);
  const Block fault(lanes_.device(0), sizeof(unsigned));
  check(cudaMemsetAsync(fault.as<unsigned>(), 0xFF, sizeof(unsigned), stream), "survey of the weights");
  for (int expert = 0; expert < shape_.experts; ++expert) {
    const sm90::WeightSource source = layer.source(expert, !shape_.down);
    float* row_scales = layer.row_scales.as<float>() + size(expert) * size(layer.plan.row_scales());
    std::byte* chunks = layer.chunks.as<std::byte>() + size(expert) * layer.expert_stride;
    check(sm90::launch_survey(layer.plan, source, row_scales, fault.as<unsigned>(), stream), "survey of the weights");
    check(sm90::launch_order(layer.plan, source, row_scales, chunks, stream), "order of the weights");
  }
  lanes_.settle();
  unsigned row = 0;
  check(cudaMemcpy(&row, fault.as<unsigned>(), sizeof row, cudaMemcpyDeviceToHost), "survey of the weights");
  if (row != sm90::no_fault)
    throw Error(ErrorKind::fault,
                fmt::format("row {} of the weights drawn here cannot be laid out; they should all be legal", row));
}

double ProductBed::expert_bytes() const {
  const sm90::WeightPlan& plan = layers_.front()->plan;
  return static_cast<double>(plan.bytes()) + 4.0 * plan.row_scales();
}

int ProductBed::first_expert(int call) const {
  const int touched = counts_.touched();
  if (touched == 0 || touched == shape_.experts) return 0;
  return call / layers() * touched % shape_.experts;
}

void ProductBed::set_counts(const RowCounts& counts) {
  counts_ = counts;
  const int touched = std::max(1, counts.touched());
  const int sets = layers() * std::max(1, shape_.experts / touched);
  const int wanted = static_cast<int>(std::ceil(evicting_bytes / (touched * expert_bytes())));
  cycle_ = std::min(sets, static_cast<int>(round_up(size(wanted), layers_.size())));
  std::vector<int> all;
  for (int call = 0; call < cycle_; ++call) {
    const int first = first_expert(call);
    std::vector<int> turned(counts.rows.size());
    for (int expert = 0; expert < shape_.experts; ++expert)
      turned[size((expert + first) % shape_.experts)] = counts.rows[size(expert)];
    all.insert(all.end(), turned.begin(), turned.end());
  }
  counts_memory_ = std::make_unique<Block>(lanes_.device(0), all.size() * sizeof(int));
  counts_memory_->write(all.data(), all.size() * sizeof(int));
  choose_samples();
}

/// First rows, last rows and rows between, expert after expert.
void ProductBed::choose_samples() {
  std::vector<int> begin(counts_.rows.size() + 1, 0);
  std::partial_sum(counts_.rows.begin(), counts_.rows.end(), begin.begin() + 1);
  std::vector<Sample> samples;
  for (int round = 0; round < most_samples && static_cast<int>(samples.size()) < most_samples; ++round) {
    for (int expert = 0; expert < shape_.experts && static_cast<int>(samples.size()) < most_samples; ++expert) {
      const int rows = counts_.rows[size(expert)];
      if (rows == 0) continue;
      const int row = round == 0 ? rows - 1 : round == 1 ? 0 : (round * 37 + expert * 11) % rows;
      samples.push_back({expert, begin[size(expert)] + row});
    }
  }
  sample_count_ = static_cast<int>(samples.size());
  if (sample_count_ == 0) return;
  samples_->write(samples.data(), samples.size() * sizeof(Sample));
  launch_reference(layers_.front()->stored, tokens_, samples_->as<Sample>(), sample_count_, reference_->as<float>(),
                   lanes_.stream(0));
  lanes_.settle();
}

bf16* ProductBed::results() const { return results_->as<bf16>(); }

sm90::ProductCall ProductBed::call_of(int call) const {
  sm90::ProductCall product;
  product.weights = layers_[size(call % layers())]->ordered;
  product.tokens.values = tokens_.values;
  product.tokens.readable = in_boxes ? tokens_.rows : 0;
  product.tokens.value_stride = size(tokens_.cols) * (tokens_.fp8 ? 1 : 2);
  if (tokens_.fp8) {
    product.tokens.scales = reinterpret_cast<const std::byte*>(tokens_.scales);
    product.tokens.scale_stride = tokens_.scale_stride;
    product.tokens.scaling = sm90::TokenScales::by_128;
  }
  product.counts = counts_memory_->as<int>() + size(call % cycle_) * counts_.rows.size();
  product.experts = shape_.experts;
  product.results.values = results();
  product.results.stride = size(shape_.rows());
  product.results.second = shape_.down ? 0 : shape_.intermediate;
  sm90::ActivatedStore& activated = product.activated;
  activated.format = shape_.fp8() ? Activation::fp8 : Activation::bf16;
  activated.clamp = DeviceClamp::of(10.0f);
  activated.weights = routing_weights_->as<float>();
  activated.values = results_->as<std::byte>();
  activated.value_stride = size(shape_.intermediate) * (shape_.fp8() ? 1 : 2);
  activated.scales = results_->as<std::byte>() + size(most_rows_) * activated.value_stride;
  activated.scale_stride = round_up(size(shape_.intermediate / 128), 4);
  return product;
}

void ProductBed::queue_product(int call, sm90::RowBlocks blocks, bool activates, int ctas) {
  sm90::launch_product(call_of(call), blocks, activates, ctas, lanes_.stream(0));
}

void ProductBed::queue_stream(int call, int ctas) {
  const int touched = counts_.touched();
  const int first = first_expert(call % cycle_);
  launch_stream(layers_[size(call % layers())]->ordered, shape_.experts, first, touched, ctas, lanes_.stream(0));
}

const std::byte* ProductBed::stored_weights(int layer, int expert) const {
  const StoredLayer& stored = layers_[size(layer)]->stored;
  return stored.values + size(expert) * stored.values_an_expert();
}

std::vector<GroupedProblem> ProductBed::problems(int call) const {
  std::vector<GroupedProblem> all;
  const StoredLayer& stored = layers_[size(call % layers())]->stored;
  const int shift = first_expert(call % cycle_);
  std::size_t flat = 0;
  for (int expert = 0; expert < shape_.experts; ++expert) {
    const int rows = counts_.rows[size((expert + shape_.experts - shift) % shape_.experts)];
    all.push_back({rows, stored.rows, stored.cols, tokens_.values + flat * size(tokens_.cols),
                   tokens_.wide_scales + flat * size(tokens_.cols / 128), stored_weights(call % layers(), expert),
                   reinterpret_cast<const float*>(stored.scales + size(expert) * stored.scales_an_expert()),
                   results() + flat * size(stored.rows)});
    flat += size(rows);
  }
  return all;
}

double ProductBed::allowed_error(bool activates) const {
  // Quantised rows are compared with rows that are not: a code of three bits is off by 2.6% on average.
  if (activates) return shape_.fp8() ? 5e-2 : 1e-2;
  return shape_.fp8() ? 1.5e-2 : 4e-3;
}

double ProductBed::error_of(bool activates, const std::function<void()>& queue, const std::function<void()>& give_up) {
  cudaStream_t stream = lanes_.stream(0);
  check(cudaMemsetAsync(results_->as<void>(), 0xFF, results_->bytes(), stream), "poisoning of results");
  check(cudaMemsetAsync(sums_->as<void>(), 0, sums_->bytes(), stream), "sums of the check");
  queue();
  const sm90::ProductCall call = call_of(0);
  auto* sums = sums_->as<double>();
  auto* bad = reinterpret_cast<unsigned long long*>(sums + 2);
  const std::size_t rows = size(counts_.total());
  if (activates) {
    compare_activated(call.activated, samples_->as<Sample>(), sample_count_, shape_.intermediate, reference_->as<float>(), sums,
                      stream);
    const std::size_t values = rows * size(shape_.intermediate);
    if (shape_.fp8()) {
      count_nan_codes(call.activated.values, values, bad, stream);
    } else {
      count_not_finite(reinterpret_cast<const bf16*>(call.activated.values), values, bad, stream);
    }
  } else {
    compare_results(call.results, samples_->as<Sample>(), sample_count_, shape_.rows(), reference_->as<float>(), sums, stream);
    count_not_finite(call.results.values, rows * size(shape_.rows()), bad, stream);
  }
  lanes_.settle(give_up);
  double squares[2] = {};
  unsigned long long unwritten = 0;
  check(cudaMemcpy(squares, sums, sizeof squares, cudaMemcpyDeviceToHost), "sums of the check");
  check(cudaMemcpy(&unwritten, bad, sizeof unwritten, cudaMemcpyDeviceToHost), "sums of the check");
  return unwritten > 0 ? std::numeric_limits<double>::quiet_NaN() : std::sqrt(squares[0] / squares[1]);
}

}  // namespace heddle::tool
