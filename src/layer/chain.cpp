// The chain with experts on the host: dispatch, rows for the runner, experts, shared expert, combine.
#include "heddle/layer.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "layer/arrived_rows.hpp"
#include "layer/expert_bytes.hpp"
#include "layer/expert_slices.hpp"
#include "layer/options.hpp"
#include "signal/fault.hpp"

namespace heddle {

namespace {

class Stopwatch {
 public:
  double lap() {
    const auto now = std::chrono::steady_clock::now();
    return std::chrono::duration<double>(now - std::exchange(last_, now)).count();
  }

 private:
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

void add_traffic(PhaseReport& phase, const ExchangeTraffic& traffic) {
  phase.remote_bytes += traffic.remote_bytes;
  phase.local_bytes += traffic.local_bytes;
}

/// A rank of the host engine.
LayerSeat seat_of(Workspace& workspace, const ExchangeMemory& memory, const ExchangeOptions& options) {
  LayerSeat seat;
  seat.rank = workspace.group().rank();
  seat.exchange = create_exchange(workspace, options, memory);
  seat.refuse = [&workspace](std::uint64_t expected, std::uint64_t seen) { workspace.refuse(expected, seen); };
  seat.fail = [&workspace] { raise_abort(workspace.view(), {{WordKind::failed, -1, -1}, workspace.view().rank, 0, 0}); };
  return seat;
}

}  // namespace

struct MoeLayer::Impl {
  Impl(LayerSeat own_seat, LayerWeights given, const LayerOptions& layer_options)
      : seat(std::move(own_seat)),
        weights(std::move(given)),
        options(layer_options),
        exchange_settings(exchange_options(weights, options)),
        exchange(*seat.exchange),
        rank(seat.rank),
        routed_count(static_cast<int>(weights.experts.size())),
        experts(make_experts()),
        rows(weights.shape.hidden, weights.shape.topk, routed_count, exchange_settings.wire, arithmetic().activation,
             options.quantisation) {
    if (weights.shared && !fused()) {
      shared.emplace(std::vector<ExpertWeights>{weights.shared->weights}, weights.shape.hidden, weights.shared->intermediate,
                     arithmetic());
    }
  }

  bool fused() const { return weights.shared && options.shared == SharedMode::fused; }
  std::size_t hidden() const { return static_cast<std::size_t>(weights.shape.hidden); }

  ExpertOptions arithmetic() const { return expert_options(weights, options); }

  HostExperts make_experts() {
    int intermediate = weights.shape.intermediate;
    if (options.expert_slices) {
      const SliceRange slice = slice_of_rank(intermediate, rank, weights.placement.ranks());
      slices.emplace(weights.experts, slice);
      weights.experts = slices->views();
      intermediate = slice.count;
    }
    std::vector<ExpertWeights> all = weights.experts;
    if (fused()) all.push_back(weights.shared->weights);
    return HostExperts(std::move(all), weights.shape.hidden, intermediate, arithmetic());
  }

  bf16* reserve_results(std::size_t rows_needed) {
    if (rows_needed > results_room) {
      results = Array<bf16>(rows_needed * hidden());
      results_room = rows_needed;
    }
    return results.data();
  }

  /// Runs the experts over what arrived. With a fused shared expert the own tokens follow behind the
  /// arrived rows, as rows of one more expert; returns the shared results, or null.
  const bf16* run_experts(const Arrived& arrived, const LayerInput& own);
  const bf16* run_by_expert(const Arrived& arrived, const LayerInput& own);
  const bf16* run_routed(const Arrived& arrived, const LayerInput& own);
  const bf16* run_shared(const LayerInput& own);
  void gate_shared(const LayerInput& own);
  LayerInput own_part(const LayerInput& input, int begin, int end) const;
  void check_batch(const LayerInput& input, const Step& step, const bf16* out) const;
  void compute(const Arrived& arrived, const LayerInput& own, CombineOutput& output);
  void forward(const LayerInput& input, const Step& step, bf16* out);
  void note_experts(const Arrived& arrived, const ExpertReport& done);
  void note_expert_bytes(const Arrived& arrived);

  LayerSeat seat;
  LayerWeights weights;
  LayerOptions options;
  ExchangeOptions exchange_settings;
  Exchange& exchange;
  int rank;
  int routed_count;
  std::optional<ExpertSlices> slices;  ///< what the weights view with expert_slices
  HostExperts experts;
  std::optional<HostExperts> shared;
  ActivationRows rows;
  Array<bf16> results;
  std::size_t results_room = 0;
  std::vector<bf16> shared_results, slice_out;
  std::vector<float> shared_factors;
  std::vector<int> begins, counts, local_ids;
  std::vector<float> row_weights;
  LayerReport report;
  Stopwatch watch;
};

const bf16* MoeLayer::Impl::run_by_expert(const Arrived& arrived, const LayerInput& own) {
  const auto room = static_cast<std::size_t>(arrived.room);
  const auto local = static_cast<std::size_t>(routed_count);
  ExpertReport done;
  if (!fused()) {
    const RowView view = rows.prepare(arrived, nullptr, 0, 0);
    report.regroup.seconds += watch.lap();
    const ResultRows out{reserve_results(room), 0};
    if (arrived.layout == ArrivedLayout::masked) {
      experts.masked(view, arrived.block_rows, {arrived.counts, local}, arrived.row_weights, out, &done);
    } else {
      experts.contiguous(view, {arrived.begins, local}, {arrived.counts, local}, arrived.row_weights, out, &done);
    }
    note_experts(arrived, done);
    return nullptr;
  }
  // Masked blocks are runs as well: one call covers both, with the own tokens as the last expert's run.
  const RowView view = rows.prepare(arrived, own.hidden, own.tokens, room);
  begins.assign(arrived.begins, arrived.begins + local);
  counts.assign(arrived.counts, arrived.counts + local);
  begins.push_back(arrived.room);
  counts.push_back(own.tokens);
  row_weights.resize(room + static_cast<std::size_t>(own.tokens));
  for (std::size_t e = 0; e < local; ++e) {
    std::copy_n(arrived.row_weights + begins[e], counts[e], row_weights.begin() + begins[e]);
  }
  std::fill(row_weights.begin() + static_cast<std::ptrdiff_t>(room), row_weights.end(), 1.0f);
  report.regroup.seconds += watch.lap();
  bf16* out = reserve_results(room + static_cast<std::size_t>(own.tokens));
  experts.contiguous(view, begins, counts, row_weights.data(), {out, 0}, &done);
  note_experts(arrived, done);
  return out + room * hidden();
}

const bf16* MoeLayer::Impl::run_routed(const Arrived& arrived, const LayerInput& own) {
  const auto room = static_cast<std::size_t>(arrived.room);
  const auto k = static_cast<std::size_t>(weights.shape.topk);
  const auto extra = fused() ? static_cast<std::size_t>(own.tokens) : 0;
  const RowView view = rows.prepare(arrived, fused() ? own.hidden : nullptr, own.tokens, room);
  const std::int32_t* ids = arrived.local_ids;
  const float* pair_weights = arrived.weights;
  if (fused()) {
    local_ids.assign(arrived.local_ids, arrived.local_ids + room * k);
    row_weights.assign(arrived.weights, arrived.weights + room * k);
    local_ids.resize((room + extra) * k, -1);
    row_weights.resize((room + extra) * k, 1.0f);
    for (std::size_t i = 0; i < extra; ++i) local_ids[(room + i) * k] = routed_count;
    ids = local_ids.data();
    pair_weights = row_weights.data();
  }
  report.regroup.seconds += watch.lap();
  const std::size_t rows_a_token = arrived.slots_wanted ? k : 1;
  bf16* out = reserve_results((room + extra) * rows_a_token);
  ExpertReport done;
  experts.routed(view, static_cast<int>(room + extra), weights.shape.topk, ids, pair_weights,
                 arrived.slots_wanted ? RoutedOutput::slots : RoutedOutput::sum, {out, 0}, &done);
  note_experts(arrived, done);
  if (!fused()) return nullptr;
  if (rows_a_token == 1) return out + room * hidden();
  shared_results.resize(extra * hidden());  // slot 0 of each own row
  for (std::size_t i = 0; i < extra; ++i) {
    std::copy_n(out + (room + i) * rows_a_token * hidden(), hidden(),
                shared_results.begin() + static_cast<std::ptrdiff_t>(i * hidden()));
  }
  return shared_results.data();
}

const bf16* MoeLayer::Impl::run_experts(const Arrived& arrived, const LayerInput& own) {
  return arrived.layout == ArrivedLayout::routed ? run_routed(arrived, own) : run_by_expert(arrived, own);
}

const bf16* MoeLayer::Impl::run_shared(const LayerInput& own) {
  shared_results.resize(static_cast<std::size_t>(own.tokens) * hidden());
  const RowFormat plain{Wire::bf16, weights.shape.hidden, {}, 1.0f};
  const RowView view = view_of(reinterpret_cast<const std::byte*>(own.hidden), plain.row_bytes(), plain);
  shared->dense(view, own.tokens, {shared_results.data(), 0});
  return shared_results.data();
}

void MoeLayer::Impl::gate_shared(const LayerInput& own) {
  const auto values = static_cast<std::size_t>(own.tokens) * hidden();
  shared_factors = router_logits({own.hidden, values}, weights.shared->gate, own.tokens, weights.shape.hidden, 1);
  for (float& value : shared_factors) value = 1.0f / (1.0f + std::exp(-value));
}

void MoeLayer::Impl::note_experts(const Arrived& arrived, const ExpertReport& done) {
  watch.lap();
  report.layout = arrived.layout;
  report.host_waited = arrived.host_waited;
  report.rows_received = static_cast<std::uint64_t>(arrived.received);
  report.rows_real = static_cast<std::uint64_t>(arrived.real);
  report.rows_room = static_cast<std::uint64_t>(arrived.room);
  report.gemm1.seconds = done.gemm1;
  report.activation.seconds = done.activation;
  report.gemm2.seconds = done.gemm2;
  report.combine.seconds += done.sum;
  note_expert_bytes(arrived);
}

void MoeLayer::Impl::note_expert_bytes(const Arrived& arrived) {
  const auto k = static_cast<std::size_t>(weights.shape.topk);
  std::vector<bool> touched(static_cast<std::size_t>(routed_count), false);
  if (arrived.layout == ArrivedLayout::routed) {
    for (std::size_t pair = 0; pair < static_cast<std::size_t>(arrived.room) * k; ++pair) {
      if (arrived.local_ids[pair] >= 0) touched[static_cast<std::size_t>(arrived.local_ids[pair])] = true;
    }
  } else {
    for (std::size_t e = 0; e < touched.size(); ++e) touched[e] = arrived.counts[e] > 0;
  }
  add_expert_bytes(report, weights, arithmetic(), experts.intermediate(), touched);
}

/// All of the input, or with any other way than gather under tensor-parallel attention this rank's slice of it.
LayerInput MoeLayer::Impl::own_part(const LayerInput& input, int begin, int end) const {
  LayerInput own = input;
  own.tokens = end - begin;
  if (input.hidden != nullptr) own.hidden += static_cast<std::size_t>(begin) * hidden();
  if (input.ids != nullptr) own.ids += static_cast<std::ptrdiff_t>(begin) * weights.shape.topk;
  if (input.weights != nullptr) own.weights += static_cast<std::ptrdiff_t>(begin) * weights.shape.topk;
  return own;
}

void MoeLayer::Impl::check_batch(const LayerInput& input, const Step& step, const bf16* out) const {
  if (input.tokens > 0 && out == nullptr) {
    seat.refuse(static_cast<std::uint64_t>(input.tokens), 0);
    throw InputError(fmt::format("rank {} has no memory for the outputs of its {} tokens", rank, input.tokens));
  }
  if (!options.tensor_parallel) return;
  longest_slice(step.max_tokens, weights.placement.ranks(), options.cap);
  if (input.tokens == step.max_tokens) return;
  seat.refuse(static_cast<std::uint64_t>(step.max_tokens), static_cast<std::uint64_t>(input.tokens));
  throw InputError(
      fmt::format("rank {} brings {} tokens, the step says {}; under tensor-parallel attention every rank brings the whole batch",
                  rank, input.tokens, step.max_tokens));
}

/// The experts over what arrived and the shared expert over the own tokens; fills in what combine adds last.
void MoeLayer::Impl::compute(const Arrived& arrived, const LayerInput& own, CombineOutput& output) {
  output.shared = run_experts(arrived, own);
  if (!weights.shared) return;
  watch.lap();
  if (!fused()) output.shared = run_shared(own);
  if (!weights.shared->gate.empty()) {
    gate_shared(own);
    output.shared_factors = shared_factors.data();
  }
  report.shared_seconds = watch.lap();
}

void MoeLayer::Impl::forward(const LayerInput& input, const Step& step, bf16* out) {
  report = {};
  watch.lap();
  check_batch(input, step, out);
  const bool slice = options.tensor_parallel && exchange_settings.gather != GatherMode::tensor_parallel;
  const int ranks = weights.placement.ranks();
  const int first = slice ? slice_begin(input.tokens, rank, ranks) : 0;
  const LayerInput own = own_part(input, first, slice ? slice_begin(input.tokens, rank + 1, ranks) : input.tokens);
  const Step own_step{slice ? longest_slice(step.max_tokens, ranks, options.cap) : step.max_tokens, step.phase};
  const Arrived arrived = exchange.dispatch({own.tokens, own.hidden, own.ids, own.weights, {}}, own_step);
  report.regroup.seconds = arrived.regroup_seconds;
  report.dispatch.seconds = watch.lap() - arrived.regroup_seconds;
  const ExchangeTraffic dispatched = exchange.take_traffic();
  add_traffic(report.dispatch, dispatched);
  report.rows_sent = dispatched.remote_rows + dispatched.local_rows;

  CombineOutput output;
  try {
    compute(arrived, own, output);
    if (slice) slice_out.resize(static_cast<std::size_t>(own.tokens) * hidden());
  } catch (...) {
    seat.fail();  // nobody shall wait for this rank's results
    throw;
  }
  output.out = slice ? slice_out.data() : out;
  // Whether outputs are shared is decided by what all ranks see alike, never by a pointer: without tokens `out` may be null.
  output.all_out = options.tensor_parallel && input.tokens > 0 ? out : nullptr;
  output.first = first;
  output.all_tokens = input.tokens;
  exchange.combine(results.data(), output);
  report.combine.seconds += watch.lap();
  add_traffic(report.combine, exchange.take_traffic());
}

MoeLayer::MoeLayer(Workspace& workspace, const ExchangeMemory& memory, LayerWeights weights, const LayerOptions& options) {
  LayerSeat seat = seat_of(workspace, memory, exchange_options(weights, options));
  impl_ = std::make_unique<Impl>(std::move(seat), std::move(weights), options);
}
MoeLayer::MoeLayer(LayerSeat seat, LayerWeights weights, const LayerOptions& options)
    : impl_(std::make_unique<Impl>(std::move(seat), std::move(weights), options)) {}
MoeLayer::~MoeLayer() = default;
MoeLayer::MoeLayer(MoeLayer&&) noexcept = default;
MoeLayer& MoeLayer::operator=(MoeLayer&&) noexcept = default;

void MoeLayer::forward(const LayerInput& input, const Step& step, bf16* out) { impl_->forward(input, step, out); }

const LayerReport& MoeLayer::report() const { return impl_->report; }

}  // namespace heddle
