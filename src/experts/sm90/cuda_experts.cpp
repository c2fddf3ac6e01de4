// The experts of one GPU: what is checked, and how each runner's layout becomes a call of the chain.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <limits>
#include <utility>

#include <fmt/format.h>

#include "experts/sm90/cuda_runners.hpp"
#include "heddle/device_experts.hpp"
#include "heddle/error.hpp"

namespace heddle {

namespace {

using sm90::RowMap;
using sm90::RunnerCall;
using sm90::sms_of;
using sm90::loading::size;

constexpr int most_pairs_there_can_be = 1 << 30;

template <class... Values>
void require(bool holds, fmt::format_string<Values...> text, Values&&... values) {
  if (!holds) throw InputError("experts on a GPU: " + fmt::format(text, std::forward<Values>(values)...));
}

bool aligned(const void* pointer, std::size_t bytes) { return reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0; }

void check_options(const ExpertOptions& options, std::span<const ExpertWeights> experts) {
  require(options.quantisation.group == 128 || options.quantisation.group == 32,
          "activation groups of {}; 128 and 32 are supported", options.quantisation.group);
  require(!options.clamp.has_value() || *options.clamp > 0, "clamp {}; it must be above 0", options.clamp.value_or(0.0f));
  if (experts.empty() || options.activation == Activation::fp8) return;
  const WeightKind kind = experts[0].gate.kind;
  require(sm90::slab_shape(kind).operand == sm90::Operand::bf16,
          "bf16 activations, but {} weights are multiplied as e4m3; take fp8 activations",
          kind == WeightKind::mxfp4 ? "mxfp4" : "fp8 block");
}

void check_device_options(const DeviceExpertsOptions& device, std::size_t experts) {
  require(device.most_rows >= 0 && device.most_rows <= most_device_pairs, "most_rows {}; it must be 0 to {}", device.most_rows,
          most_device_pairs);
  require(device.most_tokens >= 0 && device.topk >= 0 && (device.most_tokens == 0 || device.topk > 0),
          "routed calls of {} tokens with {} choices", device.most_tokens, device.topk);
  require(std::int64_t{device.most_tokens} * device.topk <= most_pairs_there_can_be,
          "routed calls of {} tokens with {} choices are more than 2^30 pairs", device.most_tokens, device.topk);
  require(experts <= sm90::most_experts, "{} local experts; at most {}", experts, sm90::most_experts);
}

OwnedExpert owned(sm90::StoredExpert stored) {
  OwnedExpert out;
  sm90::StoredWeights* const from[] = {&stored.gate, &stored.up, &stored.down};
  WeightMatrix* const views[] = {&out.view.gate, &out.view.up, &out.view.down};
  for (int i = 0; i < 3; ++i) {
    *views[i] = from[i]->view;
    out.values[i] = std::move(from[i]->values);
    out.scales[i] = std::move(from[i]->scales);
    views[i]->values = out.values[i];
    views[i]->scales = out.scales[i];
  }
  return out;
}

}  // namespace

struct DeviceExperts::Impl {
  ExpertOptions options;
  DeviceExpertsOptions device;
  std::shared_ptr<sm90::DeviceWeights> weights;
  int sms;
  sm90::ExpertChain chain;

  // Routed calls.
  std::size_t list_bytes = 0;
  sm90::loading::DeviceMemory<int> counts, token_of, pair_of, place_of;
  sm90::loading::DeviceMemory<float> weight_of;
  sm90::loading::DeviceMemory<bf16> results;

  Impl(std::span<const ExpertWeights> experts, int hidden, int intermediate, const ExpertOptions& chosen,
       const DeviceExpertsOptions& on)
      : options(chosen),
        device(on),
        weights(std::make_shared<sm90::DeviceWeights>(
            experts, hidden, intermediate,
            sm90::DeviceWeightsOptions{on.device, {on.slice_first, on.slice_count}, on.step_exponents})),
        sms(sms_of(on.device)),
        chain(*weights, chosen, on, sms) {
    require(on.ctas >= 0 && on.ctas <= sms, "{} CTAs; GPU {} has {} SMs (0: all)", on.ctas, on.device, sms);
    sm90::prepare_rows();
    if (on.most_tokens == 0) return;
    const auto rows = size(on.most_rows);
    counts = take<int>(experts.size(), "memory for counts");
    token_of = take<int>(rows, "memory for lists of pairs");
    pair_of = take<int>(rows, "memory for lists of pairs");
    place_of = take<int>(size(on.most_tokens) * size(on.topk), "memory for lists of pairs");
    if (!on.fused_activation) weight_of = take<float>(rows, "memory for routing weights");
    results = take<bf16>(rows * size(hidden), "memory for the results of pairs");
  }

  template <class T>
  sm90::loading::DeviceMemory<T> take(std::size_t number, const char* what) {
    list_bytes += number * sizeof(T);
    return sm90::loading::allocate<T>(number, what);
  }

  int count() const { return weights->count(); }
  const float* at_activation(const float* row_weights) const {
    return options.weight_at == WeightAt::activation ? row_weights : nullptr;
  }

  void check_rows(const char* runner, const RowView& rows, const ResultRows& out) const {
    require(rows.format == Activation::bf16 || options.activation == Activation::fp8,
            "{} runner: rows arrived as fp8, but the activations are bf16; send bf16 rows", runner);
    require(rows.values != nullptr && aligned(rows.values, 16) && rows.value_stride % 16 == 0,
            "{} runner: rows at {}, {} bytes apart; both must be multiples of 16", runner, fmt::ptr(rows.values),
            rows.value_stride);
    const std::size_t row_bytes = size(weights->hidden()) * (rows.format == Activation::fp8 ? 1 : 2);
    require(rows.value_stride >= row_bytes, "{} runner: rows are {} bytes apart, but have {}", runner, rows.value_stride,
            row_bytes);
    require(rows.format == Activation::bf16 || (rows.scales != nullptr && aligned(rows.scales, 4) && rows.scale_stride % 4 == 0),
            "{} runner: scales at {}, {} bytes apart; both must be multiples of 4", runner, fmt::ptr(rows.scales),
            rows.scale_stride);
    require(out.values != nullptr && aligned(out.values, 16) && out.stride % 8 == 0 && stride_of(out) >= size(weights->hidden()),
            "{} runner: results at {}, {} values apart; the address must be a multiple of 16, the distance one of 8, at least {}",
            runner, fmt::ptr(out.values), out.stride, weights->hidden());
  }
  std::size_t stride_of(const ResultRows& out) const { return out.stride == 0 ? size(weights->hidden()) : out.stride; }

  /// Rows, results and weights at the same places.
  RunnerCall at_places(const RowView& rows, const RowMap& places, const int* row_counts, const float* row_weights,
                       const ResultRows& out, int expected_rows) const {
    RunnerCall call;
    call.rows = rows;
    call.experts = count();
    call.counts = row_counts;
    call.an_expert = device.most_rows;
    call.most_rows = device.most_rows;
    call.expected_rows = expected_rows;
    call.source = places;
    call.weights = at_activation(row_weights);
    call.weight_places = places;
    call.results = out.values;
    call.result_stride = stride_of(out);
    call.result_places = places;
    return call;
  }

  void list(const RunnerCall& call, const float* pair_weights, cudaStream_t stream) {
    sm90::ListCall lists;
    lists.ids = call.ids;
    lists.weights = pair_weights;
    lists.tokens = call.tokens;
    lists.topk = call.topk;
    lists.experts = count();
    lists.most_rows = call.most_rows;
    lists.counts = counts.get();
    lists.token_of = token_of.get();
    lists.pair_of = pair_of.get();
    lists.weight_of = weight_of.get();
    lists.place_of = place_of.get();
    sm90::launch_list(lists, stream);
  }
  void sum(const RunnerCall& call, const float* pair_weights, const ResultRows& out, cudaStream_t stream) const {
    sm90::SumCall sums;
    sums.ids = call.ids;
    sums.weights = options.weight_at == WeightAt::combine ? pair_weights : nullptr;
    sums.tokens = call.tokens;
    sums.topk = call.topk;
    sums.experts = count();
    sums.most_rows = call.most_rows;
    sums.place_of = place_of.get();
    sums.results = results.get();
    sums.columns = weights->hidden();
    sums.out = out.values;
    sums.stride = stride_of(out);
    sm90::launch_sum(sums, 8 * sms, stream);
  }
};

DeviceExperts::DeviceExperts(std::span<const ExpertWeights> experts, int hidden, int intermediate, const ExpertOptions& options,
                             const DeviceExpertsOptions& device) {
  check_options(options, experts);
  check_device_options(device, experts.size());
  sms_of(device.device);
  const cuda::DeviceScope scope(device.device);
  impl_ = std::make_unique<Impl>(experts, hidden, intermediate, options, device);
}
DeviceExperts::~DeviceExperts() = default;
DeviceExperts::DeviceExperts(DeviceExperts&&) noexcept = default;
DeviceExperts& DeviceExperts::operator=(DeviceExperts&&) noexcept = default;

int DeviceExperts::count() const { return impl_->count(); }
int DeviceExperts::hidden() const { return impl_->weights->hidden(); }
int DeviceExperts::intermediate() const { return impl_->weights->intermediate(); }
const ExpertOptions& DeviceExperts::options() const { return impl_->options; }
std::size_t DeviceExperts::buffer_bytes() const { return impl_->chain.bytes() + impl_->list_bytes; }

void DeviceExperts::contiguous(const RowView& rows, const int* row_begin, const int* row_count, const float* row_weights,
                               ResultRows out, DeviceStream stream, int expected_rows) {
  if (count() == 0) return;
  impl_->check_rows("contiguous", rows, out);
  require(row_begin != nullptr && row_count != nullptr, "contiguous runner: {} is null",
          row_begin == nullptr ? "row_begin" : "row_count");
  const cuda::DeviceScope scope(impl_->device.device);
  RowMap places;
  places.kind = RowMap::Kind::listed;
  places.begin = row_begin;
  impl_->chain.run(impl_->at_places(rows, places, row_count, row_weights, out, expected_rows), stream);
}

void DeviceExperts::masked(const RowView& rows, int block_rows, const int* masked_m, const float* row_weights, ResultRows out,
                           DeviceStream stream, int expected_rows) {
  require(block_rows >= 0, "masked runner: blocks of {} rows", block_rows);
  if (count() == 0 || block_rows == 0) return;
  impl_->check_rows("masked", rows, out);
  require(masked_m != nullptr, "masked runner: masked_m is null");
  const cuda::DeviceScope scope(impl_->device.device);
  RowMap places;
  places.kind = RowMap::Kind::blocks;
  places.block_rows = block_rows;
  RunnerCall call = impl_->at_places(rows, places, masked_m, row_weights, out, expected_rows);
  if (call.rows.rows == 0) {
    call.rows.rows = static_cast<int>(std::min<std::int64_t>(std::int64_t{count()} * block_rows, std::numeric_limits<int>::max()));
  }
  call.an_expert = std::min(block_rows, call.most_rows);
  call.most_rows = static_cast<int>(std::min<std::int64_t>(call.most_rows, std::int64_t{count()} * block_rows));
  impl_->chain.run(call, stream);
}

void DeviceExperts::routed(const RowView& rows, int count, int topk, const std::int32_t* local_ids, const float* weights,
                           RoutedOutput mode, ResultRows out, DeviceStream stream, const int* tokens_here, int expected_rows) {
  const DeviceExpertsOptions& device = impl_->device;
  require(count >= 0 && count <= device.most_tokens, "routed runner: {} tokens; the options allow 0 to {}", count,
          device.most_tokens);
  require(topk >= 1 && topk <= device.topk, "routed runner: {} choices a token; the options allow 1 to {}", topk, device.topk);
  if (count == 0) return;
  impl_->check_rows("routed", rows, out);
  require(local_ids != nullptr, "routed runner: local_ids is null");
  const cuda::DeviceScope scope(device.device);
  RunnerCall call = impl_->at_places(rows, {}, impl_->counts.get(), weights, out, expected_rows);
  call.ids = local_ids;
  call.tokens = {count, tokens_here};
  call.topk = topk;
  call.most_rows = static_cast<int>(std::min<std::int64_t>(device.most_rows, std::int64_t{count} * topk));
  call.source.rows = impl_->token_of.get();
  call.weight_places.rows = impl_->pair_of.get();
  call.flat_weights = call.weights != nullptr ? impl_->weight_of.get() : nullptr;
  if (mode == RoutedOutput::slots) {
    call.result_places.rows = impl_->pair_of.get();
  } else {
    call.results = impl_->results.get();
    call.result_stride = size(hidden());
  }
  impl_->list(call, call.weights, stream);
  impl_->chain.run(call, stream);
  if (mode == RoutedOutput::sum) impl_->sum(call, weights, out, stream);
}

void DeviceExperts::dense(const RowView& rows, int count, ResultRows out, DeviceStream stream, int expert, const int* rows_here) {
  require(expert >= 0 && expert < this->count(), "dense runner: expert {}; there are {} local experts", expert, this->count());
  require(count >= 0 && count <= impl_->device.most_rows, "dense runner: {} rows; the options allow 0 to {}", count,
          impl_->device.most_rows);
  if (count == 0) return;
  impl_->check_rows("dense", rows, out);
  const cuda::DeviceScope scope(impl_->device.device);
  RunnerCall call = impl_->at_places(rows, {}, rows_here, nullptr, out, count);
  // Where the number of rows is in memory, those behind it may not exist: then rows are gathered, as long as nobody says more.
  if (rows_here == nullptr) call.rows.rows = count;
  call.first_expert = expert;
  call.experts = 1;
  call.an_expert = count;
  call.most_rows = count;
  impl_->chain.run(call, stream);
}

void DeviceExperts::throw_if_failed() {
  const unsigned long long word = impl_->chain.refused().take();
  if (word == 0) return;
  const auto refused = sm90::RefusedCount::unpack(word);
  throw Error(
      ErrorKind::fault,
      fmt::format("experts on GPU {}: a call found {} rows for local expert {} on the device, which did not fit with those of "
                  "the experts before it: at most {} in all (most_rows), and none below 0 or above a block",
                  impl_->device.device, refused.count, refused.expert, impl_->device.most_rows));
}

void DeviceExperts::update(int expert, const ExpertWeights& weights, DeviceStream stream) {
  impl_->weights->update(expert, weights, stream);
}
OwnedExpert DeviceExperts::read_back(int expert, DeviceStream stream) const {
  return owned(impl_->weights->read_back(expert, stream));
}
const WeightReport& DeviceExperts::report() const { return impl_->weights->report(); }
std::shared_ptr<const sm90::DeviceWeights> DeviceExperts::weights() const { return impl_->weights; }

}  // namespace heddle
