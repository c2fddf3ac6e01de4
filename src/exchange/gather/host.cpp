#include "exchange/gather/tagged.hpp"
#include "exchange/host_exchange.hpp"

namespace heddle {

namespace {

class GatherExchange final : public HostExchange {
 public:
  GatherExchange(Workspace& workspace, const ExchangeOptions& options, const ExchangeMemory& memory)
      : HostExchange(workspace, options, memory),
        layout_(make_layout<GatherLayout>(options, areas_of(memory, ranks()))),
        tagged_(tagged_of(options, memory, ranks())) {
    const auto k = static_cast<std::size_t>(options.topk);
    counts_ = Array<std::int32_t>(static_cast<std::size_t>(ranks()));
    local_ids_ = Array<std::int32_t>(layout_.all_rows() * k);
    weights_ = Array<float>(layout_.all_rows() * k);
    zeros_.resize(layout_.record_bytes());
    sums_.resize(layout_.record_bytes() * static_cast<std::size_t>(options.workers));
    if (mode() == GatherMode::tensor_parallel) {
      own_rows_ = Array<std::byte>(layout_.all_rows() * layout_.wire.row_bytes());
      slice_ = Array<bf16>(layout_.all_rows() * static_cast<std::size_t>(options.hidden));
    }
  }

  void dispatch_send(const ExchangeInput& input, const Step& step) override {
    accept(input, step);
    switch (mode()) {
      case GatherMode::padded:
        block_ = step.max_tokens;
        first_ = rank() * block_;
        rows_ = ranks() * block_;
        run_send();
        break;
      case GatherMode::uneven:
        lay_out_exactly();
        run_send();
        break;
      case GatherMode::zero_filled:
        lay_out_exactly();
        run(CallPart::dispatch_send, [this](HostWorker& w) {
          std::byte* sum = sums_.data() + layout_.record_bytes() * static_cast<std::size_t>(w.index());
          return gather_all_reduce(w, layout_, static_cast<std::size_t>(rows_), static_cast<std::size_t>(first_), input_,
                                   zeros_.data(), sum);
        });
        break;
      case GatherMode::tensor_parallel:
        // No row travels, but without this rendezvous a rank could offer its next sums while another,
        // in the combine of another way, still pulls the last ones.
        exchange_counts();
        rows_ = input.tokens;
        break;
    }
    count_dispatch();
  }

  Arrived dispatch_receive() override {
    if (mode() == GatherMode::tensor_parallel) return take_own_tokens();
    const ArrivedRouting routing{options_.topk, local_ids_.data(), weights_.data()};
    if (are_tagged()) {
      run(CallPart::dispatch_receive, [&](HostWorker& w) {
        return gather_take_tagged(w, layout_, tagged_, block_, input_, placement_, counts_.data(), routing);
      });
      return describe_arrival(workspace_.view().mine<std::byte>(layout_.record(0)), layout_.record_bytes());
    }
    if (mode() != GatherMode::zero_filled)
      run(CallPart::dispatch_receive, [this](HostWorker& w) { return gather_hear(w, layout_, counts_.data()) != nullptr; });
    run(CallPart::dispatch_receive, [&](HostWorker& w) {
      gather_list(w, layout_, rows_, placement_, routing, [this](int row) { return is_padding(row); });
      return true;
    });
    return describe_arrival(workspace_.view().mine<std::byte>(layout_.record(0)), layout_.record_bytes());
  }

  void combine_send(const bf16* results) override {
    accept_results();
    run(CallPart::combine, [&](HostWorker& w) {
      if (are_tagged()) return gather_return_tagged(w, layout_, tagged_, block_, counts_.data(), results);
      return gather_offer(w, layout_, rows_, results);
    });
  }

  void combine_receive(const CombineOutput& output) override {
    accept(output);
    if (mode() == GatherMode::tensor_parallel) {
      share_sums(output);
    } else {
      run(CallPart::combine, [&](HostWorker& w) {
        if (are_tagged()) return gather_collect_tagged(w, layout_, tagged_, input_.tokens, shared_rows(output), output.out);
        return gather_pull(w, layout_, static_cast<std::size_t>(first_), input_.tokens, shared_rows(output), output.out);
      });
      for (int d = 0; d < ranks(); ++d) count_rows(d, input_.tokens, layout_.returned.reported_bytes());
    }
    share_outputs(output);
  }

 private:
  GatherMode mode() const { return options_.gather; }
  /// Do this call's rows travel as words? The same on all ranks: the step says so.
  bool are_tagged() const { return tagged_.takes(step_.max_tokens); }

  bool is_padding(int row) const {
    return mode() == GatherMode::padded && row % block_ >= counts_[static_cast<std::size_t>(row / block_)];
  }

  void run_send() {
    run(CallPart::dispatch_send, [this](HostWorker& w) {
      if (are_tagged()) return gather_send_tagged(w, layout_, tagged_, block_, input_);
      return gather_send(w, layout_, static_cast<std::size_t>(first_), input_);
    });
  }
  void exchange_counts() {
    run(CallPart::dispatch_send,
        [&](HostWorker& w) { return gather_exchange_counts(w, layout_, input_.tokens, counts_.data()) != nullptr; });
  }

  /// Offsets after the counts of all ranks: nothing is padded.
  void lay_out_exactly() {
    exchange_counts();
    first_ = 0;
    rows_ = 0;
    for (int s = 0; s < ranks(); ++s) {
      const int tokens = workspace_.live()[static_cast<std::size_t>(s)] ? counts_[static_cast<std::size_t>(s)] : 0;
      if (s < rank()) first_ += tokens;
      rows_ += tokens;
    }
  }

  /// Tensor-parallel attention: the tokens are here; only their ids become local (article, section 2.1).
  Arrived take_own_tokens() {
    run(CallPart::dispatch_receive, [this](HostWorker& w) {
      for (int token = w.index(); token < rows_; token += w.count()) {
        const auto row = static_cast<std::size_t>(token);
        const bf16* hidden = input_.hidden + row * static_cast<std::size_t>(options_.hidden);
        w.complete(w.quantise_row(own_rows_.data() + row * layout_.wire.row_bytes(), hidden, layout_.wire));
        for (int choice = 0; choice < options_.topk; ++choice) {
          const auto pair = row * static_cast<std::size_t>(options_.topk) + static_cast<std::size_t>(choice);
          local_ids_[pair] = placement_.local_id(input_.ids[pair], rank());
          weights_[pair] = input_.weights[pair];
        }
      }
      w.complete_all();
      return true;
    });
    return describe_arrival(own_rows_.data(), layout_.wire.row_bytes());
  }

  Arrived describe_arrival(const std::byte* rows, std::size_t stride) const {
    Arrived arrived;
    arrived.layout = ArrivedLayout::routed;
    arrived.wire = options_.wire;
    arrived.rows = rows;
    arrived.row_stride = stride;
    arrived.room = rows_;
    for (int row = 0; row < rows_; ++row) arrived.received += mode() == GatherMode::tensor_parallel || !is_padding(row) ? 1 : 0;
    arrived.local_ids = local_ids_.data();
    arrived.weights = weights_.data();
    arrived.real = count_pairs(arrived, options_.topk);
    return arrived;
  }

  /// All-reduce: each live rank sums a slice of the tokens, then all slices go to all ranks.
  void share_sums(const CombineOutput& output) {
    const LiveShare live = live_share(worker());
    const auto all = static_cast<std::size_t>(rows_);
    const int begin = static_cast<int>(all * live.position / live.count);
    const int end = static_cast<int>(all * (live.position + 1) / live.count);
    SharedRows shared = shared_rows(output);
    if (shared.rows != nullptr) shared.rows += static_cast<std::size_t>(begin) * static_cast<std::size_t>(options_.hidden);
    if (shared.factors != nullptr) shared.factors += begin;
    run(CallPart::combine, [&](HostWorker& w) {
      return gather_pull(w, layout_, static_cast<std::size_t>(begin), end - begin, shared, slice_.data()) && w.team_barrier() &&
             all_gather_rows(w, all_gather_layout(), begin, end - begin, rows_, slice_.data(), output.all_out);
    });
    for (int d = 0; d < ranks(); ++d) {
      count_rows(d, end - begin, layout_.returned.reported_bytes());
      count_rows(d, end - begin, all_gather_layout().row_bytes());
    }
  }

  /// An all-gather pushes the own tokens to all; an all-reduce pulls a share of all rows from all and
  /// pushes the sums to all.
  void count_dispatch() {
    if (mode() == GatherMode::tensor_parallel) return;
    const LiveShare live = live_share(worker());
    const auto all = static_cast<std::size_t>(rows_);
    const auto share = static_cast<std::int64_t>(all / live.count + (live.position < all % live.count ? 1 : 0));
    for (int d = 0; d < ranks(); ++d) {
      count_rows(d, mode() == GatherMode::zero_filled ? 2 * share : input_.tokens, layout_.wire.reported_bytes());
    }
  }

  GatherLayout layout_;
  GatherTagged tagged_;
  Array<std::int32_t> counts_, local_ids_;
  Array<float> weights_;
  std::vector<std::byte> zeros_, sums_;
  Array<std::byte> own_rows_;
  Array<bf16> slice_;
  int block_ = 1;
  int first_ = 0;
  int rows_ = 0;
};

}  // namespace

std::unique_ptr<Exchange> create_gather(Workspace& workspace, const ExchangeOptions& options, const ExchangeMemory& memory) {
  return std::make_unique<GatherExchange>(workspace, options, memory);
}

}  // namespace heddle
