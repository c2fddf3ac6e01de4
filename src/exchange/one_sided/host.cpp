#include "exchange/host_exchange.hpp"
#include "exchange/one_sided/protocol.hpp"

namespace heddle {

namespace {

class OneSidedExchange final : public HostExchange {
 public:
  OneSidedExchange(Workspace& workspace, const ExchangeOptions& options, const ExchangeMemory& memory)
      : HostExchange(workspace, options, memory), layout_(make_layout<OneSidedLayout>(options, areas_of(memory, ranks()))) {
    for (const std::size_t bytes : options.extra_payloads) layout_.extra_bytes[layout_.extra_payloads++] = bytes;
    const auto r = static_cast<std::size_t>(ranks());
    const auto k = static_cast<std::size_t>(options.topk);
    sent_ = HostNumbering(static_cast<std::size_t>(options.cap) * r, r);
    arrived_ = Array<std::int32_t>(r);
    local_ids_ = Array<std::int32_t>(layout_.blocks() * k);
    weights_ = Array<float>(layout_.blocks() * k);
    scratch_.sent = sent_.view();
    scratch_.arrived = arrived_.data();
  }

  void dispatch_send(const ExchangeInput& input, const Step& step) override {
    accept(input, step);
    for (std::size_t p = 0; p < input.extra.size(); ++p) scratch_.extra[p] = input.extra[p];
    run(CallPart::dispatch_send,
        [this](HostWorker& w) { return one_sided_send(w, layout_, step_.max_tokens, input_, placement_, scratch_); });
    for (int d = 0; d < ranks(); ++d) count_rows(d, scratch_.sent.totals[d], layout_.wire.reported_bytes());
  }

  Arrived dispatch_receive() override {
    const int block = step_.max_tokens;
    const ArrivedRouting routing{options_.topk, local_ids_.data(), weights_.data()};
    run(CallPart::dispatch_receive, [&](HostWorker& w) {
      const std::int32_t* rows = one_sided_receive(w, layout_, scratch_);
      if (rows == nullptr) return false;
      one_sided_list(w, layout_, block, placement_, rows, routing);
      return true;
    });
    Arrived arrived;
    arrived.layout = ArrivedLayout::routed;
    arrived.wire = options_.wire;
    arrived.rows = workspace_.view().mine<std::byte>(layout_.rows());
    arrived.row_stride = layout_.wire.row_bytes();
    arrived.room = ranks() * block;
    for (int s = 0; s < ranks(); ++s) arrived.received += scratch_.arrived[s];
    arrived.local_ids = local_ids_.data();
    arrived.weights = weights_.data();
    arrived.real = count_pairs(arrived, options_.topk);
    for (int p = 0; p < layout_.extra_payloads; ++p)
      arrived.extra.push_back(workspace_.view().mine<std::byte>(layout_.extra(p, 0)));
    return arrived;
  }

  void combine_send(const bf16* results) override {
    accept_results();
    run(CallPart::combine, [&](HostWorker& w) { return one_sided_offer(w, layout_, step_.max_tokens, results, scratch_); });
  }

  void combine_receive(const CombineOutput& output) override {
    accept(output);
    run(CallPart::combine, [&](HostWorker& w) {
      return one_sided_pull(w, layout_, step_.max_tokens, input_, scratch_, shared_rows(output), output.out);
    });
    for (int d = 0; d < ranks(); ++d) count_rows(d, scratch_.sent.totals[d], layout_.returned.reported_bytes());
    share_outputs(output);
  }

 private:
  OneSidedLayout layout_;
  OneSidedScratch scratch_;
  HostNumbering sent_;
  Array<std::int32_t> arrived_, local_ids_;
  Array<float> weights_;
};

}  // namespace

std::unique_ptr<Exchange> create_one_sided(Workspace& workspace, const ExchangeOptions& options, const ExchangeMemory& memory) {
  return std::make_unique<OneSidedExchange>(workspace, options, memory);
}

}  // namespace heddle
