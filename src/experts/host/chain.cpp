#include "experts/host/chain.hpp"

#include <algorithm>
#include <chrono>

#include "experts/activation/activation.hpp"
#include "experts/host/tile.hpp"
#include "trace/recorder.hpp"

namespace heddle {
namespace {

/// Adds the time of its life to a phase.
class PhaseTimer {
 public:
  explicit PhaseTimer(double& phase) : phase_(phase), start_(Clock::now()) {}
  ~PhaseTimer() { phase_ += std::chrono::duration<double>(Clock::now() - start_).count(); }
  PhaseTimer(const PhaseTimer&) = delete;
  PhaseTimer& operator=(const PhaseTimer&) = delete;

 private:
  using Clock = std::chrono::steady_clock;
  double& phase_;
  Clock::time_point start_;
};

/// Calls compute(expert, first pair, pairs) for pieces that are packed and multiplied together.
template <class Compute>
void for_pieces(const PairList& pairs, int row_block, const Compute& compute) {
  int begin = 0;
  for (std::size_t expert = 0; expert < pairs.masked_m.size(); ++expert) {
    const int count = pairs.masked_m[expert];
    const int piece = count == 0 ? 0 : tile::piece_rows(row_block, count);
    for (int done = 0; done < count; done += piece) {
      compute(static_cast<int>(expert), begin + done, std::min(piece, count - done));
    }
    begin += count;
  }
}

/// Records pieces of a product as tasks, numbered from 0.
class PieceRecord {
 public:
  PieceRecord(trace::Product product, int first_expert) : product_(product), first_expert_(first_expert) {}
  trace::Recorded next(int expert, int rows) {
    return trace::Recorded(trace::Kind::products, {product_, first_expert_ + expert, number_++, 0, rows});
  }

 private:
  trace::Product product_;
  int first_expert_;
  int number_ = 0;
};

RowView from_row(RowView view, int row) {
  view.values += static_cast<std::size_t>(row) * view.value_stride;
  view.scales = view.scales == nullptr ? nullptr : view.scales + static_cast<std::size_t>(row) * view.scale_stride;
  return view;
}

ActivationStep activation_step(const ExpertSet& set, ExpertWorkspace& workspace) {
  ActivationStep step;
  step.intermediate = set.intermediate;
  step.weights = workspace.pairs.weights.empty() ? nullptr : workspace.pairs.weights.data();
  step.clamp = set.options.clamp;
  step.format = set.options.activation;
  step.quantisation = set.options.quantisation;
  const auto pairs = static_cast<std::size_t>(workspace.pairs.count());
  step.gate_up = workspace.gate_up.resize(pairs * 2 * static_cast<std::size_t>(set.intermediate));
  step.values = workspace.activated.resize(pairs * step.value_bytes());
  step.scales = workspace.scales.resize(pairs * step.scale_bytes());
  return step;
}

void run_activation(const ExpertSet& set, const PairList& pairs, const ActivationStep& step, ExpertReport& report) {
  const GridCounts counts = set.options.activation_grid == ActivationGrid::padded
                                ? run_padded(step, pairs.masked_m, pairs.most_rows)
                                : run_persistent(step, pairs.masked_m, set.options.activation_slots, pairs.most_rows);
  report.activation_blocks += counts.blocks;
  report.empty_blocks += counts.empty;
  report.scans += counts.scans;
}

}  // namespace

void run_chain(const ExpertSet& set, int first, const RowView& rows, ExpertWorkspace& workspace, const GemmOutput& out,
               ExpertReport& report) {
  const PairList& pairs = workspace.pairs;
  const ExpertOptions& options = set.options;
  const auto width = static_cast<std::size_t>(set.intermediate);
  const ActivationStep step = activation_step(set, workspace);
  report.rows += pairs.count();
  {
    const PhaseTimer timer(report.gemm1);
    PieceRecord record(trace::Product::gemm1, first);
    for_pieces(pairs, options.row_block, [&](int expert, int begin, int count) {
      const trace::Recorded recorded = record.next(expert, count);
      const ExpertWeights& weights = set.experts[static_cast<std::size_t>(first + expert)];
      bf16* gate = workspace.gate_up.data() + static_cast<std::size_t>(begin) * 2 * width;
      workspace.operand.pack(rows, pairs.source.data() + begin, count, set.hidden, options.activation, options.quantisation);
      report.row_blocks +=
          workspace.engine.multiply(workspace.operand, weights.gate, options.row_block, {gate, 2 * width, nullptr});
      workspace.engine.multiply(workspace.operand, weights.up, options.row_block, {gate + width, 2 * width, nullptr});
    });
  }
  {
    const PhaseTimer timer(report.activation);
    const trace::Recorded recorded(trace::Kind::activation);
    run_activation(set, pairs, step, report);
  }
  const PhaseTimer timer(report.gemm2);
  PieceRecord record(trace::Product::gemm2, first);
  for_pieces(pairs, options.row_block, [&](int expert, int begin, int count) {
    const trace::Recorded recorded = record.next(expert, count);
    const ExpertWeights& weights = set.experts[static_cast<std::size_t>(first + expert)];
    workspace.operand.pack(from_row(step.view(), begin), nullptr, count, set.intermediate, options.activation,
                           options.quantisation);
    workspace.engine.multiply(workspace.operand, weights.down, options.row_block,
                              {out.values, out.stride, pairs.target.data() + begin});
  });
}

}  // namespace heddle
