#include <chrono>

#include "exchange/host_exchange.hpp"
#include "exchange/normal/protocol.hpp"
#include "trace/recorder.hpp"

namespace heddle {

namespace {

class NormalExchange final : public HostExchange {
 public:
  NormalExchange(Workspace& workspace, const ExchangeOptions& options, const ExchangeMemory& memory)
      : HostExchange(workspace, options, memory), layout_(make_layout<NormalLayout>(options, areas_of(memory, ranks()))) {
    layout_.queue_rows = options.queue_rows;
    layout_.chunk_rows = options.chunk_rows;
    const auto r = static_cast<std::size_t>(ranks());
    sent_ = HostNumbering(static_cast<std::size_t>(options.cap) * r, r);
    arrived_ = Array<std::int32_t>(r);
    firsts_ = Array<std::int32_t>(r);
    returned_firsts_ = Array<std::int32_t>(r);
    progress_ = Array<NormalProgress>(r);
    tokens_ = Array<std::int32_t>(static_cast<std::size_t>(options.cap) * r);
    wire_rows_ = Array<std::byte>(static_cast<std::size_t>(options.cap) * layout_.wire.row_bytes());
    scratch_.sent = sent_.view();
    scratch_.arrived = arrived_.data();
    scratch_.progress = progress_.data();
    scratch_.tokens = tokens_.data();
  }

  void dispatch_send(const ExchangeInput& input, const Step& step) override {
    accept(input, step);
    scratch_.rows_to_send = options_.wire == Wire::bf16 ? reinterpret_cast<const std::byte*>(input_.hidden) : wire_rows_.data();
    run(CallPart::dispatch_send, [this](HostWorker& w) {
      for (int token = w.index(); options_.wire != Wire::bf16 && token < input_.tokens; token += w.count()) {
        const auto row = static_cast<std::size_t>(token);
        w.quantise_row(wire_rows_.data() + row * layout_.wire.row_bytes(),
                       input_.hidden + row * static_cast<std::size_t>(options_.hidden), layout_.wire);
      }
      w.complete_all();
      return normal_exchange_counts(w, layout_, input_, placement_, scratch_);
    });
  }

  Arrived dispatch_receive() override {
    // The host has the counts: everything that follows has its exact size.
    received_ = 0;
    int returned = 0;
    for (std::size_t peer = 0; peer < static_cast<std::size_t>(ranks()); ++peer) {
      firsts_[peer] = received_;
      received_ += arrived_[peer];
      returned_firsts_[peer] = returned;
      returned += scratch_.sent.totals[peer];
    }
    reserve(static_cast<std::size_t>(received_), static_cast<std::size_t>(returned));
    const ArrivedRouting routing{options_.topk, local_ids_.data(), weights_.data()};
    run(CallPart::dispatch_receive, [&](HostWorker& w) {
      return normal_dispatch(w, layout_, input_, placement_, scratch_, firsts_.data(), rows_.data(), routing);
    });
    for (int d = 0; d < ranks(); ++d) count_rows(d, scratch_.sent.totals[d], layout_.wire.reported_bytes());
    const auto since = std::chrono::steady_clock::now();
    const trace::Recorded recorded(trace::Kind::regroup);
    run(CallPart::dispatch_receive, [&](HostWorker& w) {
      if (!by_expert()) return true;
      const auto row_of = [&](int i) { return rows_.data() + static_cast<std::size_t>(i) * layout_.wire.row_bytes(); };
      const auto weights_of = [&](int i) { return routing.weights + static_cast<std::ptrdiff_t>(i) * options_.topk; };
      return expand_rows(w, received_, options_.topk, routing.local_ids, layout_.wire, row_of, weights_of,
                         expanded_.layout(options_, local_experts(), ranks()));
    });
    Arrived arrived;
    arrived.received = received_;
    arrived.host_waited = true;
    arrived.regroup_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - since).count();
    if (by_expert()) {
      expanded_.describe(options_, local_experts(), ranks(), layout_.wire, arrived);
      return arrived;
    }
    arrived.layout = ArrivedLayout::routed;
    arrived.wire = options_.wire;
    arrived.rows = rows_.data();
    arrived.row_stride = layout_.wire.row_bytes();
    arrived.room = received_;
    arrived.local_ids = local_ids_.data();
    arrived.weights = weights_.data();
    arrived.real = count_pairs(arrived, options_.topk);
    return arrived;
  }

  void combine_send(const bf16* results) override {
    accept_results();
    const ArrivedRouting routing{options_.topk, local_ids_.data(), weights_.data()};
    const bool weighted = options_.weight_at == WeightAt::combine;
    run(CallPart::combine, [&](HostWorker& w) {
      for (int i = w.index(); by_expert() && i < received_; i += w.count()) {
        sum_pairs(w, i, routing, expanded_.places.data(), results, options_.hidden, weighted,
                  sums_.data() + static_cast<std::size_t>(i) * static_cast<std::size_t>(options_.hidden));
      }
      if (by_expert() && !w.team_barrier()) return false;
      return normal_return(w, layout_, scratch_, firsts_.data(), by_expert() ? sums_.data() : results, returned_firsts_.data(),
                           returned_.data());
    });
    for (int home = 0; home < ranks(); ++home) count_rows(home, scratch_.arrived[home], layout_.returned.reported_bytes());
  }

  void combine_receive(const CombineOutput& output) override {
    accept(output);
    run(CallPart::combine, [&](HostWorker& w) {
      return normal_collect(w, layout_, input_, scratch_, returned_firsts_.data(), returned_.data(), shared_rows(output),
                            output.out);
    });
    share_outputs(output);
  }

 private:
  bool by_expert() const { return options_.arrived != ArrivedLayout::routed; }

  void reserve(std::size_t received, std::size_t returned) {
    const auto k = static_cast<std::size_t>(options_.topk);
    rows_.grow(received * layout_.wire.row_bytes() + 1);
    local_ids_.grow(received * k + 1);
    weights_.grow(received * k + 1);
    returned_.grow(returned * layout_.returned.row_bytes() + 1);
    if (!by_expert()) return;
    expanded_.reserve(options_, local_experts(), received, layout_.wire.row_bytes());
    sums_.grow(received * static_cast<std::size_t>(options_.hidden) + 1);
  }

  NormalLayout layout_;
  NormalScratch scratch_;
  HostNumbering sent_;
  Array<std::int32_t> tokens_, arrived_, firsts_, returned_firsts_, local_ids_;
  Array<NormalProgress> progress_;
  Array<std::byte> wire_rows_, rows_, returned_;
  Array<float> weights_;
  Array<bf16> sums_;
  ExpandedRows expanded_;
  int received_ = 0;
};

}  // namespace

std::unique_ptr<Exchange> create_normal(Workspace& workspace, const ExchangeOptions& options, const ExchangeMemory& memory) {
  return std::make_unique<NormalExchange>(workspace, options, memory);
}

}  // namespace heddle
