#include "experts/sm90/cuda_grouped.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "experts/sm90/grouped_layout.hpp"
#include "experts/sm90/weights_kernels.hpp"
#include "group/cuda_stream.hpp"
#include "heddle/error.hpp"

namespace heddle::sm90 {

using namespace loading;

namespace {

using cuda::check;

/// CTAs a SM of the kernel that writes zeros.
constexpr int zeroing_ctas = 4;

template <class... Values>
void require(bool holds, fmt::format_string<Values...> text, Values&&... values) {
  if (!holds) throw InputError("grouped products on a GPU: " + fmt::format(text, std::forward<Values>(values)...));
}

bool aligned_at(const void* pointer, std::size_t bytes) { return reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0; }

void check_matrices(std::span<const WeightMatrix> weights) {
  require(!weights.empty() && weights.size() <= most_experts, "{} matrices; 1 to {} are taken", weights.size(), most_experts);
  for (std::size_t group = 0; group < weights.size(); ++group) {
    const std::string name = fmt::format("group {}", group);
    check_same(weights[group], weights[0], name);
    check_weights(weights[group], weights[0].rows, weights[0].cols, name);
  }
}

/// A host matrix as a source of an ordered one.
WeightSource source_of(const WeightMatrix& matrix, const std::string& name) {
  const StoredMatrix all = stored_part(matrix, {0, matrix.rows}, {0, matrix.cols}, name);
  return {{all, all}};
}

}  // namespace

GroupedProduct::GroupedProduct(std::span<const WeightMatrix> weights, const GroupedOptions& options)
    : options_(options), groups_(static_cast<int>(weights.size())), sms_(0) {
  check_matrices(weights);
  require(options.most_rows >= 0 && options.most_rows <= most_device_pairs, "most_rows {}; it must be 0 to {}", options.most_rows,
          most_device_pairs);
  sms_ = sms_of(options.device);
  const cuda::DeviceScope scope(options.device);
  if (!load(weights, false)) load(weights, true);
  prepare_products(weights[0].kind);
  prepare_rows();
  prepare_layouts();
  refused_ = std::make_unique<RefusedWord>();
  counts_ = allocate<int>(weights.size(), "memory for counts");
  group_of_ = allocate<int>(size(options.most_rows), "memory for the groups of rows");
  row_of_ = allocate<int>(size(options.most_rows), "memory for lists of rows");
  place_of_ = allocate<int>(size(options.most_rows), "memory for lists of rows");
}

/// Lays all matrices out, then looks at what the surveys found. False: only step exponents would hold the weights.
bool GroupedProduct::load(std::span<const WeightMatrix> weights, bool step_exponents) {
  const WeightMatrix& first = weights[0];
  const StoredShape shape{first.kind, first.rows, first.cols, first.block_scale};
  std::vector<WeightSource> sources;
  for (int group = 0; group < groups_; ++group) {
    sources.push_back(source_of(weights[size(group)], fmt::format("group {}", group)));
  }
  matrix_.reset();
  matrix_ = std::make_unique<Matrix>(WeightPlan{first.kind, false, step_exponents, first.rows, first.cols}, size(groups_));
  const WeightPlan& plan = matrix_->view.plan;
  const cuda::OwnStream stream;
  const auto values = allocate<std::byte>(shape.value_bytes(), "memory to lay weights out from");
  const auto scales = allocate<std::byte>(shape.scale_bytes(), "memory to lay weights out from");
  const auto faults = allocate<unsigned>(size(groups_), "memory for a survey of weights");
  std::vector<unsigned> found(size(groups_));
  const std::size_t bytes = found.size() * sizeof(unsigned);
  check(cudaMemsetAsync(faults.get(), 0xFF, bytes, stream), "survey of weights");
  for (int group = 0; group < groups_; ++group) {
    const StoredMatrix& host = sources[size(group)].half[0];
    check(cudaMemcpyAsync(values.get(), host.values, shape.value_bytes(), cudaMemcpyHostToDevice, stream), "copy of weights");
    if (scales != nullptr) {
      check(cudaMemcpyAsync(scales.get(), host.scales, shape.scale_bytes(), cudaMemcpyHostToDevice, stream), "copy of scales");
    }
    StoredMatrix here = host;
    here.values = values.get();
    here.scales = scales.get();
    const WeightSource both{{here, here}};
    float* row_scales = matrix_->row_scales_of(group);
    check(launch_survey(plan, both, row_scales, faults.get() + group, stream), "survey of weights");
    check(launch_order(plan, both, row_scales, matrix_->chunks_of(group), stream), "laying weights out");
  }
  check(cudaMemcpyAsync(found.data(), faults.get(), bytes, cudaMemcpyDeviceToHost, stream), "survey of weights");
  check(cudaStreamSynchronize(stream), "loading weights");
  bool all = true;
  for (int group = 0; group < groups_; ++group) {
    const std::string name = fmt::format("group {}", group);
    all = accepted(plan, sources[size(group)], found[size(group)], {name, name}) && all;
  }
  return all;
}

void GroupedProduct::check_call(const char* layout, const GroupedRows& call) const {
  const RowView& rows = call.rows;
  const bool fp8 = rows.format == Activation::fp8, any = takes_wide_codes();
  const bool taken = any || fp8 == (kind() != WeightKind::bf16);
  require(taken, "{}: {} rows; {} weights are multiplied by {} ones", layout, fp8 ? "fp8" : "bf16",
          fp8 ? "bf16" : "fp8_block and mxfp4", fp8 ? "bf16" : "fp8");
  const std::size_t row_bytes = size(cols()) * (fp8 && !any ? 1 : 2);
  require(rows.values != nullptr && aligned_at(rows.values, 16) && rows.value_stride % 16 == 0 && rows.value_stride >= row_bytes,
          "{}: rows at {}, {} bytes apart; both must be multiples of 16, the distance at least {}", layout, fmt::ptr(rows.values),
          rows.value_stride, row_bytes);
  require(!fp8 || (rows.scales != nullptr && aligned_at(rows.scales, 4) && rows.scale_stride % 4 == 0),
          "{}: scales at {}, {} bytes apart; both must be multiples of 4", layout, fmt::ptr(rows.scales), rows.scale_stride);
  require(!fp8 || call.quantisation.group == 128 || call.quantisation.group == 32,
          "{}: a scale of {} columns; 128 and 32 are supported", layout, call.quantisation.group);
  const ResultRows& out = call.out;
  require(out.values != nullptr && aligned_at(out.values, 16) && out.stride % 8 == 0 &&
              (out.stride == 0 || out.stride >= size(this->rows())),
          "{}: results at {}, {} values apart; the address must be a multiple of 16, the distance one of 8, at least {}", layout,
          fmt::ptr(out.values), out.stride, this->rows());
}

void GroupedProduct::check_contiguous(const GroupedRows& call) const {
  require(call.rows.rows >= 0 && call.rows.rows <= options_.most_rows, "contiguous rows: {} rows; the options allow 0 to {}",
          call.rows.rows, options_.most_rows);
  if (call.rows.rows > 0) check_call("contiguous rows", call);
}

/// Rows and results at the same places.
ProductCall GroupedProduct::product(const GroupedRows& call, const RowMap& places) const {
  ProductCall product;
  product.weights = matrix_->view;
  product.experts = groups_;
  TokenRows& tokens = product.tokens;
  tokens.values = call.rows.values;
  tokens.value_stride = call.rows.value_stride;
  tokens.map = places;
  tokens.readable = call.rows.rows;
  if (call.rows.format == Activation::fp8) {
    tokens.scales = call.rows.scales;
    tokens.scale_stride = call.rows.scale_stride;
    tokens.scaling = call.quantisation.group == 32 ? TokenScales::by_32 : TokenScales::by_128;
    tokens.format = call.quantisation.scale;
  }
  product.results = {call.out.values, call.out.stride == 0 ? size(rows()) : call.out.stride, 0, places};
  return product;
}

void GroupedProduct::launch(const ProductCall& product, const GroupedRows& call, cudaStream_t stream) const {
  const int expected = call.expected_rows > 0 ? call.expected_rows : (call.rows.rows + groups_ - 1) / groups_;
  launch_product(product, BlockChoice{options_.row_blocks, has_medium_blocks(kind())}.choose(expected), false, sms_, stream);
}

void GroupedProduct::contiguous(const GroupedRows& call, const std::int32_t* group_of, NobodysRows nobodys, DeviceStream stream) {
  check_contiguous(call);
  const int count = call.rows.rows;
  if (count == 0) return;
  require(group_of != nullptr, "contiguous rows: group_of is null");
  const cuda::DeviceScope scope(options_.device);
  // A routed call of one choice a token: rows need no order, and no two of a group have to be neighbours.
  ListCall list;
  list.ids = group_of;
  list.tokens.most = count;
  list.topk = 1;
  list.experts = groups_;
  list.most_rows = count;
  list.counts = counts_.get();
  list.token_of = row_of_.get();
  list.pair_of = row_of_.get();  // the same with one choice
  list.place_of = place_of_.get();
  launch_list(list, stream);
  RowMap places;
  places.rows = row_of_.get();
  ProductCall all = product(call, places);
  all.counts = counts_.get();
  all.limits = {count, count, nullptr, 0};
  launch(all, call, stream);
  if (nobodys == NobodysRows::left) return;
  launch_zero_rows({group_of, groups_, count, all.results.values, all.results.stride, rows()}, zeroing_ctas * sms_, stream);
}

void GroupedProduct::ended(const GroupedRows& call, const std::int32_t* ends, int alignment, NobodysRows nobodys,
                           DeviceStream stream) {
  check_contiguous(call);
  require(ends != nullptr && alignment > 0, "groups one behind another: ends at {}, an alignment of {}; it must be above 0",
          fmt::ptr(ends), alignment);
  const cuda::DeviceScope scope(options_.device);
  launch_groups_of_ends({ends, groups_, alignment, call.rows.rows, group_of_.get()}, stream);
  contiguous(call, group_of_.get(), nobodys, stream);
}

void GroupedProduct::masked(const GroupedRows& call, const std::int32_t* counts, DeviceStream stream) {
  const int count = call.rows.rows;
  require(count >= 0 && count % groups_ == 0, "masked blocks: {} rows; they must be as many for each of the {} groups", count,
          groups_);
  if (count == 0) return;
  check_call("masked blocks", call);
  require(counts != nullptr, "masked blocks: counts is null");
  const cuda::DeviceScope scope(options_.device);
  RowMap places;
  places.kind = RowMap::Kind::blocks;
  places.block_rows = count / groups_;
  ProductCall all = product(call, places);
  all.counts = counts;
  all.limits = {places.block_rows, count, refused_->on_device(), 0};
  launch(all, call, stream);
}

void GroupedProduct::throw_if_failed() {
  const unsigned long long word = refused_->take();
  if (word == 0) return;
  const auto refused = RefusedCount::unpack(word);
  throw Error(ErrorKind::fault, fmt::format("grouped products on GPU {}: a call found {} rows for group {} on the device; none may "
                                            "be below 0 or above its block",
                                            options_.device, refused.count, refused.expert));
}

}  // namespace heddle::sm90
