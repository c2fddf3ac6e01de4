// The chain with experts on the host: dispatch, rows for the runner, experts, shared expert, combine.
#include <algorithm>
#include <utility>

#include "layer/arrived_rows.hpp"
#include "layer/body.hpp"
#include "layer/expert_bytes.hpp"
#include "layer/expert_slices.hpp"
#include "trace/recorder.hpp"

namespace heddle {

namespace {

void add_traffic(PhaseReport& phase, const ExchangeTraffic& traffic) {
  phase.remote_bytes += traffic.remote_bytes;
  phase.between_bytes += traffic.between_bytes;
  phase.local_bytes += traffic.local_bytes;
}

class Chain final : public LayerBody {
 public:
  Chain(LayerSeat seat, LayerWeights given, const LayerOptions& options)
      : LayerBody(seat.rank, seat.refuse, std::move(given), options),
        exchange_(std::move(seat.exchange)),
        fail_(std::move(seat.fail)),
        routed_count_(static_cast<int>(weights_.experts.size())),
        experts_(make_experts()),
        rows_(weights_.shape.hidden, weights_.shape.topk, routed_count_, exchange_options_.wire, arithmetic().activation,
              options.quantisation) {
    if (weights_.shared && !fused()) {
      shared_.emplace(std::vector<ExpertWeights>{weights_.shared->weights}, weights_.shape.hidden, weights_.shared->intermediate,
                      arithmetic());
    }
  }

 private:
  void run(const LayerInput& own, const Step& step, CombineOutput output) override;
  HostExperts& experts() override { return experts_; }

  bool fused() const { return weights_.shared && options_.shared == SharedMode::fused; }

  HostExperts make_experts() {
    int intermediate = weights_.shape.intermediate;
    if (options_.expert_slices) {
      const SliceRange slice = slice_of_rank(intermediate, rank_, weights_.placement.ranks());
      slices_.emplace(weights_.experts, slice);
      weights_.experts = slices_->views();
      intermediate = slice.count;
    }
    std::vector<ExpertWeights> all = weights_.experts;
    if (fused()) all.push_back(weights_.shared->weights);
    return HostExperts(std::move(all), weights_.shape.hidden, intermediate, arithmetic());
  }

  /// Arrived rows as the products take them; those of a fused shared expert behind them.
  RowView prepare_rows(const Arrived& arrived, const bf16* own, int tokens, std::size_t first) {
    const trace::Recorded recorded(trace::Kind::regroup);
    return rows_.prepare(arrived, own, tokens, first);
  }

  bf16* reserve_results(std::size_t rows_needed) {
    if (rows_needed > results_room_) {
      results_ = Array<bf16>(rows_needed * hidden());
      results_room_ = rows_needed;
    }
    return results_.data();
  }

  /// Runs the experts over what arrived. With a fused shared expert the own tokens follow behind the
  /// arrived rows, as rows of one more expert; returns the shared results, or null.
  const bf16* run_experts(const Arrived& arrived, const LayerInput& own);
  const bf16* run_by_expert(const Arrived& arrived, const LayerInput& own);
  const bf16* run_routed(const Arrived& arrived, const LayerInput& own);
  const bf16* run_shared(const LayerInput& own);
  void compute(const Arrived& arrived, const LayerInput& own, CombineOutput& output);
  Arrived dispatch(const LayerInput& own, const Step& step);
  void combine(const CombineOutput& output);
  void note_experts(const Arrived& arrived, const ExpertReport& done);
  void note_expert_bytes(const Arrived& arrived);

  std::unique_ptr<Exchange> exchange_;
  std::function<void()> fail_;
  int routed_count_;
  std::optional<ExpertSlices> slices_;  ///< what the weights view with expert_slices
  HostExperts experts_;
  std::optional<HostExperts> shared_;
  ActivationRows rows_;
  Array<bf16> results_;
  std::size_t results_room_ = 0;
  std::vector<bf16> shared_results_;
  std::vector<int> begins_, counts_, local_ids_;
  std::vector<float> row_weights_;
};

const bf16* Chain::run_by_expert(const Arrived& arrived, const LayerInput& own) {
  const auto room = static_cast<std::size_t>(arrived.room);
  const auto local = static_cast<std::size_t>(routed_count_);
  ExpertReport done;
  if (!fused()) {
    const RowView view = prepare_rows(arrived, nullptr, 0, 0);
    report_.regroup.seconds += watch_.lap();
    const ResultRows out{reserve_results(room), 0};
    if (arrived.layout == ArrivedLayout::masked) {
      experts_.masked(view, arrived.block_rows, {arrived.counts, local}, arrived.row_weights, out, &done);
    } else {
      experts_.contiguous(view, {arrived.begins, local}, {arrived.counts, local}, arrived.row_weights, out, &done);
    }
    note_experts(arrived, done);
    return nullptr;
  }
  // Masked blocks are runs as well: one call covers both, with the own tokens as the last expert's run.
  const RowView view = prepare_rows(arrived, own.hidden, own.tokens, room);
  begins_.assign(arrived.begins, arrived.begins + local);
  counts_.assign(arrived.counts, arrived.counts + local);
  begins_.push_back(arrived.room);
  counts_.push_back(own.tokens);
  row_weights_.resize(room + static_cast<std::size_t>(own.tokens));
  for (std::size_t e = 0; e < local; ++e) {
    std::copy_n(arrived.row_weights + begins_[e], counts_[e], row_weights_.begin() + begins_[e]);
  }
  std::fill(row_weights_.begin() + static_cast<std::ptrdiff_t>(room), row_weights_.end(), 1.0f);
  report_.regroup.seconds += watch_.lap();
  bf16* out = reserve_results(room + static_cast<std::size_t>(own.tokens));
  experts_.contiguous(view, begins_, counts_, row_weights_.data(), {out, 0}, &done);
  note_experts(arrived, done);
  return out + room * hidden();
}

const bf16* Chain::run_routed(const Arrived& arrived, const LayerInput& own) {
  const auto room = static_cast<std::size_t>(arrived.room);
  const auto k = static_cast<std::size_t>(weights_.shape.topk);
  const auto extra = fused() ? static_cast<std::size_t>(own.tokens) : 0;
  const RowView view = prepare_rows(arrived, fused() ? own.hidden : nullptr, own.tokens, room);
  const std::int32_t* ids = arrived.local_ids;
  const float* pair_weights = arrived.weights;
  if (fused()) {
    local_ids_.assign(arrived.local_ids, arrived.local_ids + room * k);
    row_weights_.assign(arrived.weights, arrived.weights + room * k);
    local_ids_.resize((room + extra) * k, -1);
    row_weights_.resize((room + extra) * k, 1.0f);
    for (std::size_t i = 0; i < extra; ++i) local_ids_[(room + i) * k] = routed_count_;
    ids = local_ids_.data();
    pair_weights = row_weights_.data();
  }
  report_.regroup.seconds += watch_.lap();
  const std::size_t rows_a_token = arrived.slots_wanted ? k : 1;
  bf16* out = reserve_results((room + extra) * rows_a_token);
  ExpertReport done;
  experts_.routed(view, static_cast<int>(room + extra), weights_.shape.topk, ids, pair_weights,
                  arrived.slots_wanted ? RoutedOutput::slots : RoutedOutput::sum, {out, 0}, &done);
  note_experts(arrived, done);
  if (!fused()) return nullptr;
  if (rows_a_token == 1) return out + room * hidden();
  shared_results_.resize(extra * hidden());  // slot 0 of each own row
  for (std::size_t i = 0; i < extra; ++i) {
    std::copy_n(out + (room + i) * rows_a_token * hidden(), hidden(),
                shared_results_.begin() + static_cast<std::ptrdiff_t>(i * hidden()));
  }
  return shared_results_.data();
}

const bf16* Chain::run_experts(const Arrived& arrived, const LayerInput& own) {
  return arrived.layout == ArrivedLayout::routed ? run_routed(arrived, own) : run_by_expert(arrived, own);
}

const bf16* Chain::run_shared(const LayerInput& own) {
  shared_results_.resize(static_cast<std::size_t>(own.tokens) * hidden());
  const RowFormat plain{Wire::bf16, weights_.shape.hidden, {}, 1.0f};
  const RowView view = view_of(reinterpret_cast<const std::byte*>(own.hidden), plain.row_bytes(), plain);
  shared_->dense(view, own.tokens, {shared_results_.data(), 0});
  return shared_results_.data();
}

void Chain::note_experts(const Arrived& arrived, const ExpertReport& done) {
  watch_.lap();
  report_.layout = arrived.layout;
  report_.host_waited = arrived.host_waited;
  report_.rows_received = static_cast<std::uint64_t>(arrived.received);
  report_.rows_real = static_cast<std::uint64_t>(arrived.real);
  report_.rows_room = static_cast<std::uint64_t>(arrived.room);
  report_.gemm1.seconds = done.gemm1;
  report_.activation.seconds = done.activation;
  report_.gemm2.seconds = done.gemm2;
  report_.combine.seconds += done.sum;
  note_expert_bytes(arrived);
}

void Chain::note_expert_bytes(const Arrived& arrived) {
  const auto k = static_cast<std::size_t>(weights_.shape.topk);
  std::vector<bool> touched(static_cast<std::size_t>(routed_count_), false);
  if (arrived.layout == ArrivedLayout::routed) {
    for (std::size_t pair = 0; pair < static_cast<std::size_t>(arrived.room) * k; ++pair) {
      if (arrived.local_ids[pair] >= 0) touched[static_cast<std::size_t>(arrived.local_ids[pair])] = true;
    }
  } else {
    for (std::size_t e = 0; e < touched.size(); ++e) touched[e] = arrived.counts[e] > 0;
  }
  add_expert_bytes(report_, weights_, arithmetic(), experts_.intermediate(), touched);
}

/// The experts over what arrived and the shared expert over the own tokens; fills in what combine adds last.
void Chain::compute(const Arrived& arrived, const LayerInput& own, CombineOutput& output) {
  output.shared = run_experts(arrived, own);
  if (!weights_.shared) return;
  watch_.lap();
  const trace::Recorded recorded(trace::Kind::shared);
  if (!fused()) output.shared = run_shared(own);
  output.shared_factors = gate_shared(own);
  report_.shared_seconds = watch_.lap();
}

Arrived Chain::dispatch(const LayerInput& own, const Step& step) {
  const trace::Recorded recorded(trace::Kind::dispatch);
  return exchange_->dispatch({own.tokens, own.hidden, own.ids, own.weights, {}}, step);
}

void Chain::combine(const CombineOutput& output) {
  const trace::Recorded recorded(trace::Kind::combine);
  exchange_->combine(results_.data(), output);
}

void Chain::run(const LayerInput& own, const Step& step, CombineOutput output) {
  const Arrived arrived = dispatch(own, step);
  report_.regroup.seconds = arrived.regroup_seconds;
  report_.dispatch.seconds = watch_.lap() - arrived.regroup_seconds;
  const ExchangeTraffic dispatched = exchange_->take_traffic();
  add_traffic(report_.dispatch, dispatched);
  report_.rows_sent = dispatched.remote_rows + dispatched.local_rows;
  try {
    compute(arrived, own, output);
  } catch (...) {
    fail_();  // nobody shall wait for this rank's results
    throw;
  }
  combine(output);
  report_.combine.seconds += watch_.lap();
  add_traffic(report_.combine, exchange_->take_traffic());
}

}  // namespace

std::unique_ptr<LayerBody> make_chain(LayerSeat seat, LayerWeights weights, const LayerOptions& options) {
  return std::make_unique<Chain>(std::move(seat), std::move(weights), options);
}

}  // namespace heddle
