#include <algorithm>
#include <chrono>

#include "exchange/elastic/protocol.hpp"
#include "exchange/host_exchange.hpp"
#include "trace/recorder.hpp"

namespace heddle {

namespace {

class ElasticExchange final : public HostExchange {
 public:
  ElasticExchange(Workspace& workspace, const ExchangeOptions& options, const ExchangeMemory& memory)
      : HostExchange(workspace, options, memory), layout_(make_layout<ElasticLayout>(options, areas_of(memory, ranks()))) {
    layout_.reduce = options.reduce;
    const auto r = static_cast<std::size_t>(ranks());
    sent_ = HostNumbering(static_cast<std::size_t>(options.cap) * r, r);
    arrived_ = Array<std::int32_t>(r);
    scratch_.sent = sent_.view();
    scratch_.arrived = arrived_.data();
    if (!options.cpu_sync) reserve(layout_.region_rows());
  }

  void dispatch_send(const ExchangeInput& input, const Step& step) override {
    accept(input, step);
    run(CallPart::dispatch_send, [this](HostWorker& w) { return elastic_send(w, layout_, input_, placement_, scratch_); });
    for (int d = 0; d < ranks(); ++d) count_rows(d, scratch_.sent.totals[d], layout_.wire.reported_bytes());
  }

  Arrived dispatch_receive() override {
    run(CallPart::dispatch_receive, [this](HostWorker& w) { return elastic_receive(w, layout_, scratch_) != nullptr; });
    received_ = 0;
    for (int s = 0; s < ranks(); ++s) received_ += scratch_.arrived[s];
    // With cpu_sync the host has the count now and makes outputs of the exact size; without it they
    // have room for the worst case and the rest is marked.
    if (options_.cpu_sync) reserve(static_cast<std::size_t>(received_));
    const int room = options_.cpu_sync ? received_ : static_cast<int>(layout_.region_rows());
    const auto since = std::chrono::steady_clock::now();
    const trace::Recorded recorded(trace::Kind::regroup);
    run(CallPart::dispatch_receive, [&](HostWorker& w) {
      const std::int32_t* rows = scratch_.arrived;
      if (!elastic_list(w, layout_, rows, received_, by_expert() ? received_ : room, placement_, scratch_)) return false;
      if (by_expert()) {
        return elastic_expand(w, layout_, rows, received_, placement_, scratch_,
                              expanded_.layout(options_, local_experts(), ranks()));
      }
      elastic_copy_out(w, layout_, rows, received_, rows_.data());
      return true;
    });
    Arrived arrived;
    arrived.received = received_;
    arrived.host_waited = options_.cpu_sync;
    arrived.regroup_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - since).count();
    if (by_expert()) {
      expanded_.describe(options_, local_experts(), ranks(), layout_.wire, arrived);
      return arrived;
    }
    arrived.layout = ArrivedLayout::routed;
    arrived.wire = options_.wire;
    arrived.rows = rows_.data();
    arrived.row_stride = layout_.wire.row_bytes();
    arrived.room = room;
    arrived.local_ids = local_ids_.data();
    arrived.weights = weights_.data();
    arrived.slots_wanted = options_.reduce == Reduce::home;
    arrived.real = count_pairs(arrived, options_.topk);
    return arrived;
  }

  void combine_send(const bf16* results) override {
    accept_results();
    ElasticResults offered;
    offered.rows = results;
    offered.weighted = options_.weight_at == WeightAt::combine;
    offered.summed = !by_expert();
    if (by_expert()) {
      offered.places = expanded_.places.data();
      offered.sums = sums_.data();
    }
    run(CallPart::combine, [&](HostWorker& w) { return elastic_return(w, layout_, offered, scratch_); });
    for (int s = 0, first = 0; s < ranks(); first += scratch_.arrived[s++]) {
      const std::int32_t* begin = scratch_.routing.local_ids + static_cast<std::ptrdiff_t>(first) * options_.topk;
      const std::int32_t* end = begin + static_cast<std::ptrdiff_t>(scratch_.arrived[s]) * options_.topk;
      const bool summed = options_.reduce == Reduce::rank;
      count_rows(s, summed ? scratch_.arrived[s] : std::count_if(begin, end, [](std::int32_t id) { return id >= 0; }),
                 layout_.returned.reported_bytes());
    }
  }

  void combine_receive(const CombineOutput& output) override {
    accept(output);
    const bool weighted = options_.weight_at == WeightAt::combine;
    run(CallPart::combine, [&](HostWorker& w) {
      return elastic_collect(w, layout_, input_, placement_, scratch_, weighted, shared_rows(output), output.out);
    });
    share_outputs(output);
  }

 private:
  bool by_expert() const { return options_.arrived != ArrivedLayout::routed; }

  void reserve(std::size_t rows) {
    const auto k = static_cast<std::size_t>(options_.topk);
    home_tokens_.grow(rows + 1);
    local_ids_.grow(rows * k + 1);
    weights_.grow(rows * k + 1);
    scratch_.home_tokens = home_tokens_.data();
    scratch_.routing = {options_.topk, local_ids_.data(), weights_.data()};
    if (by_expert()) {
      expanded_.reserve(options_, local_experts(), rows, layout_.wire.row_bytes());
      sums_.grow(rows * static_cast<std::size_t>(options_.hidden) + 1);
    } else {
      rows_.grow(rows * layout_.wire.row_bytes() + 1);
    }
  }

  ElasticLayout layout_;
  ElasticScratch scratch_;
  HostNumbering sent_;
  Array<std::int32_t> arrived_, home_tokens_, local_ids_;
  Array<float> weights_;
  Array<std::byte> rows_;
  Array<bf16> sums_;
  ExpandedRows expanded_;
  int received_ = 0;
};

}  // namespace

std::unique_ptr<Exchange> create_elastic(Workspace& workspace, const ExchangeOptions& options, const ExchangeMemory& memory) {
  return std::make_unique<ElasticExchange>(workspace, options, memory);
}

}  // namespace heddle
