// The fused layer as the explorer runs it: its own protocol and order of tasks, workers in two roles that are under way at once,
// and products that are replaced by a function of row and expert. A row, weight or activation of another token, block, step,
// generation of the ring or call shows in the outputs.
#pragma once

#include <numeric>

#include "explorer/round_trip.hpp"
#include "formats/rows.hpp"
#include "mega/tasks.hpp"

namespace heddle::explorer {

/// A problem's workers are those with tasks; so many more dispatch.
struct MegaProblem {
  Problem batches;
  int dispatchers = 1;
  int block_rows = 1;
  int ring_blocks = 2;  ///< at least the lag, 1, and one more
  bool shared = false;
  bool adds = false;        ///< results are added to their tokens' sums
  bool extra = false;       ///< every rank has one more expert, which all its own tokens choose
  bool alternates = false;  ///< every second call is of another layer, whose regions lie elsewhere
};

/// Makes of a row what Batches expects of an expert, times the weight. Values are codes of one byte, a step's scale tells whose it
/// is.
class MegaProducts {
 public:
  MegaProducts(const MegaLayout& layout, const bf16* tokens, int first_expert)
      : layout_(layout), tokens_(tokens), first_expert_(first_expert) {}

  ArrivedRows arrived(int rows) {
    rows_.resize(at(rows) * layout_.wire.row_bytes());
    weights_.resize(at(rows));
    return {rows_.data(), weights_.data()};
  }
  RowView gemm1(int expert, int part, int rows) {
    std::vector<float> values(at(layout_.wire.hidden));
    begin_step(layout_.activated, part, rows, 1 + expert);
    for (int i = 0; i < rows; ++i) {
      widen_row(rows_.data() + at(i) * layout_.wire.row_bytes(), layout_.wire, values.data());
      for (int j = 0; j < columns_; ++j)
        step_[at(i * columns_ + j)] =
            code(weights_[at(i)] * (values[at(part * step_columns + j)] + float(first_expert_ + expert + 1)));
    }
    return made();
  }
  RowView shared_gemm1(int first_token, int part, int rows) {
    begin_step(layout_.shared, part, rows, shared_tag);
    for (int i = 0; i < rows * columns_; ++i) {
      const int column = part * step_columns + i % columns_;
      step_[at(i)] = code(to_float(tokens_[(first_token + i / columns_) * layout_.wire.hidden + column]) + shared_addend);
    }
    return made();
  }
  StepRows activations(const StepFormat& format, int rows) {
    activations_.resize(at(rows) * format.row_bytes());
    activation_scales_.resize(at(rows) * format.scale_row_bytes());
    return {activations_.data(), format.row_bytes(), activation_scales_.data(), format.scale_row_bytes()};
  }
  const bf16* gemm2(int expert, int part, int rows) { return results(layout_.activated, 1 + expert, part, rows); }
  const bf16* shared_gemm2(int part, int rows) { return results(layout_.shared, shared_tag, part, rows); }

  static constexpr float shared_addend = 40;

 private:
  static constexpr int shared_tag = 99;
  static std::size_t at(int i) { return static_cast<std::size_t>(i); }
  static std::byte code(float value) { return static_cast<std::byte>(static_cast<int>(value)); }

  void begin_step(const StepFormat& format, int part, int rows, int tag) {
    columns_ = format.columns(part);
    step_.assign(at(rows * columns_), std::byte{0});
    scales_.assign(at(rows) * format.scale_stride(), static_cast<std::byte>(tag));
    scale_stride_ = format.scale_stride();
  }
  RowView made() const { return {Activation::fp8, step_.data(), at(columns_), scales_.data(), scale_stride_}; }

  /// Columns of GEMM 2 are the activations themselves, spoilt where a step's scale is not the expert's.
  const bf16* results(const StepFormat& format, int tag, int part, int rows) {
    const int first = part * task_columns;
    const int columns = std::min(task_columns, layout_.wire.hidden - first);
    results_.clear();
    for (int i = 0; i < rows; ++i) {
      for (int j = first; j < first + columns; ++j) {
        const std::byte scale = activation_scales_[at(i) * format.scale_row_bytes() + at(j / step_columns) * format.scale_stride()];
        const auto value = static_cast<float>(activations_[at(i) * format.row_bytes() + at(j)]);
        results_.push_back(to_bf16(scale == static_cast<std::byte>(tag) ? value : -1.0f));
      }
    }
    return results_.data();
  }

  const MegaLayout& layout_;
  const bf16* tokens_;
  int first_expert_;
  int columns_ = 0;
  std::size_t scale_stride_ = 0;
  std::vector<std::byte> rows_, step_, scales_, activations_, activation_scales_;
  std::vector<float> weights_;
  std::vector<bf16> results_;
};

template <class W = ExplorerWorker>
class MegaCalls : public Scenario {
 public:
  explicit MegaCalls(const MegaProblem& problem)
      : problem_(problem), batches_(problem.batches), outputs_(static_cast<std::size_t>(problem.batches.ranks)) {
    extend_placement();
    layouts_[0] = layout_of(problem.block_rows, problem.ring_blocks, problem.shared, 1);
    // Its tables lie where the first one's rings and what is behind them lie.
    layouts_[1] = problem.alternates ? layout_of(problem.block_rows + 1, problem.ring_blocks + 1, false, 8) : layouts_[0];
    const auto most = [this](auto bytes) { return std::max(bytes(layouts_[0]), bytes(layouts_[1])); };
    Areas areas = place_areas(ranks(), most([](const MegaLayout& one) { return one.dispatch_bytes(); }),
                              most([](const MegaLayout& one) { return one.combine_bytes(); }), 0);
    areas.mega_sums += align_up(most([](const MegaLayout& one) { return one.word_bytes(); }), 128);
    areas.end = areas.mega_sums + align_up(most([](const MegaLayout& one) { return one.sum_bytes(); }), 128);
    for (MegaLayout& layout : layouts_) layout.areas = areas;
  }

  std::string name() const override {
    return fmt::format("mega ({}, {} more dispatch, blocks of {}, {} in the ring{}{}{})", batches_.problem().name(),
                       problem_.dispatchers, problem_.block_rows, problem_.ring_blocks,
                       problem_.shared  ? ", shared expert"
                       : problem_.extra ? ", extra expert"
                                        : "",
                       problem_.adds ? ", results are added" : "", problem_.alternates ? ", two layers in turn" : "");
  }
  int ranks() const override { return batches_.problem().ranks; }
  int workers_a_rank() const override { return problem_.dispatchers + batches_.problem().workers; }
  int dispatchers() const override { return problem_.dispatchers; }
  bool live(int rank) const override { return batches_.live(rank); }
  std::size_t part_bytes() const override { return layouts_[0].areas.end; }
  std::size_t poisoned() const override { return layouts_[0].areas.dispatch; }
  void begin() override { memory_.assign(static_cast<std::size_t>(ranks()), Memory(layouts_[0])); }

  void work(Machine& machine, int rank, int index) override {
    W w(machine, rank, index);
    std::vector<bf16>& out = outputs_[static_cast<std::size_t>(rank)];
    for (int number = 0; number < batches_.calls(); ++number) {
      w.start();
      if (index == 0) out.assign(static_cast<std::size_t>(batches_.shape().cap * batches_.wire().hidden), bf16{0xFFFF});
      w.end_launch();
      const MegaCall call = call_of(number, rank);
      const bool done = index < problem_.dispatchers ? mega_dispatch(w, call) : run_tasks(w, call, out.data());
      if (!done) machine.violate(fmt::format("rank {} gave up in call {}", rank, w.epoch()));
      w.end_launch();
      if (index == 0) {
        expect_bytes(w, expected(number, rank), out.data(), "the output");
        w.end_call();
      }
      w.end_launch();
    }
  }

  std::string describe(std::size_t offset) const override {
    const Areas& areas = layouts_[0].areas;
    if (offset < areas.words) return fmt::format("header+{}", offset);
    if (offset < areas.dispatch) return fmt::format("word {}", (offset - areas.words) / sizeof(Word));
    if (offset < areas.combine) return fmt::format("dispatch+{}", offset - areas.dispatch);
    if (offset < areas.mega_words) return fmt::format("slots+{}", offset - areas.combine);
    if (offset >= areas.mega_sums) return fmt::format("sums+{}", offset - areas.mega_sums);
    return fmt::format("own word {}", (offset - areas.mega_words) / sizeof(Word));
  }

 private:
  MegaLayout layout_of(int block_rows, int ring_blocks, bool shared, int caps) const {
    MegaLayout layout;
    layout.shape = batches_.shape();
    layout.shape.cap *= caps;
    if (problem_.extra) {
      layout.extra_expert = true;
      layout.shape.experts += ranks();
      ++layout.shape.max_local_experts;
      ++layout.shape.topk;
    }
    layout.wire = batches_.wire();
    layout.returned = batches_.returned();
    layout.activated = layout.shared = {problem_.batches.hidden, Activation::fp8, {}};
    layout.has_shared = shared;
    layout.adds = problem_.adds;
    layout.block_rows = block_rows;
    layout.ring_blocks = ring_blocks;
    return layout;
  }
  /// The extra experts lie behind all others, and last on their ranks.
  void extend_placement() {
    const PlacementView given = batches_.placement();
    rank_of_.assign(given.rank_of, given.rank_of + given.experts);
    local_index_.assign(given.local_index, given.local_index + given.experts);
    experts_on_.assign(given.experts_on, given.experts_on + ranks());
    for (int rank = 0; problem_.extra && rank < ranks(); ++rank) {
      rank_of_.push_back(rank);
      local_index_.push_back(experts_on_[static_cast<std::size_t>(rank)]++);
    }
  }
  const MegaLayout& layout_in(int number) const { return layouts_[static_cast<std::size_t>(number % 2)]; }

  /// Ordinary memory of one rank.
  struct Memory {
    explicit Memory(const MegaLayout& layout)
        : numbers(static_cast<std::size_t>(layout.shape.cap * layout.shape.topk + 1)),
          totals(static_cast<std::size_t>(layout.shape.experts + 1)),
          before(totals.size()),
          arrived(static_cast<std::size_t>((layout.shape.max_local_experts + 1) * layout.shape.ranks)),
          rows(static_cast<std::size_t>(layout.shape.max_local_experts + 1)),
          ends(rows.size()),
          row_ends(rows.size()) {}
    std::vector<std::int32_t> numbers, totals, before, arrived, rows, ends, row_ends;
  };

  MegaCall call_of(int number, int rank) {
    Memory& own = memory_[static_cast<std::size_t>(rank)];
    return {layout_in(number),
            batches_.input(number, rank),
            {rank_of_.data(), local_index_.data(), experts_on_.data(), static_cast<int>(rank_of_.size())},
            experts_on_[static_cast<std::size_t>(rank)],
            {{own.numbers.data(), own.totals.data(), own.before.data()},
             own.arrived.data(),
             own.rows.data(),
             own.ends.data(),
             own.row_ends.data()}};
  }
  bool run_tasks(W& w, const MegaCall& call, bf16* out) {
    MegaProducts products(call.layout, call.input.hidden, batches_.first_expert(w.heap().rank));
    return MegaTasks(w, call, products).run() && mega_sum(w, call, {}, out);
  }
  std::vector<bf16> expected(int number, int rank) const {
    std::vector<bf16> out = batches_.outputs(number, rank);
    const SendInput input = batches_.input(number, rank);
    const bool extra = layout_in(number).extra_expert;
    const float addend = extra ? static_cast<float>(batches_.first_expert(rank) + experts_on_[static_cast<std::size_t>(rank)])
                               : MegaProducts::shared_addend;
    for (std::size_t i = 0; (layout_in(number).has_shared || extra) && i < out.size(); ++i)
      out[i] = to_bf16(to_float(out[i]) + to_float(input.hidden[i]) + addend);
    return out;
  }

  MegaProblem problem_;
  Batches batches_;
  std::vector<int> rank_of_, local_index_, experts_on_;  ///< the placement, extra experts included
  MegaLayout layouts_[2];
  std::vector<Memory> memory_;
  std::vector<std::vector<bf16>> outputs_;
};

}  // namespace heddle::explorer
