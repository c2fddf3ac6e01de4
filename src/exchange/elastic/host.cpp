#include "exchange/elastic/host.hpp"

#include <algorithm>
#include <chrono>

#include "exchange/nodes/host.hpp"
#include "trace/recorder.hpp"

namespace heddle {

ElasticExchange::ElasticExchange(Workspace& workspace, const ExchangeOptions& options, const ExchangeMemory& memory)
    : HostExchange(workspace, options, memory), layout_(make_layout<ElasticLayout>(options, areas_of(memory, ranks()))) {
  layout_.reduce = options.reduce;
  const auto r = static_cast<std::size_t>(ranks());
  sent_ = HostNumbering(static_cast<std::size_t>(options.cap) * r, r);
  arrived_ = Array<std::int32_t>(r);
  scratch_.sent = sent_.view();
  scratch_.arrived = arrived_.data();
  if (!options.cpu_sync) reserve(layout_.region_rows());
}

void ElasticExchange::dispatch_send(const ExchangeInput& input, const Step& step) {
  accept(input, step);
  run(CallPart::dispatch_send, [this](HostWorker& w) { return elastic_send(w, layout_, input_, placement_, scratch_); });
  for (int d = 0; d < ranks(); ++d) count_rows(d, scratch_.sent.totals[d], layout_.wire.reported_bytes());
}

void ElasticExchange::await_rows() {
  run(CallPart::dispatch_receive, [this](HostWorker& w) { return elastic_receive(w, layout_, scratch_) != nullptr; });
}

Arrived ElasticExchange::dispatch_receive() {
  await_rows();
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
  Arrived arrived = describe_arrived(room);
  arrived.regroup_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - since).count();
  return arrived;
}

Arrived ElasticExchange::describe_arrived(int room) const {
  Arrived arrived;
  arrived.received = received_;
  arrived.host_waited = options_.cpu_sync;
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

void ElasticExchange::combine_send(const bf16* results) {
  accept_results();
  ElasticResults offered;
  offered.rows = results;
  offered.weighted = weighted();
  offered.summed = !by_expert();
  if (by_expert()) {
    offered.places = expanded_.places.data();
    offered.sums = sums_.data();
  }
  send_results(offered);
}

void ElasticExchange::send_results(const ElasticResults& results) {
  run(CallPart::combine, [&](HostWorker& w) { return elastic_return(w, layout_, results, scratch_); });
  for (int s = 0, first = 0; s < ranks(); first += scratch_.arrived[s++])
    count_rows(s, rows_home(s, first), layout_.returned.reported_bytes());
}

std::int64_t ElasticExchange::rows_home(int source, int first) const {
  if (options_.reduce == Reduce::rank) return scratch_.arrived[source];
  const std::int32_t* begin = scratch_.routing.local_ids + static_cast<std::ptrdiff_t>(first) * options_.topk;
  const std::int32_t* end = begin + static_cast<std::ptrdiff_t>(scratch_.arrived[source]) * options_.topk;
  return std::count_if(begin, end, [](std::int32_t id) { return id >= 0; });
}

void ElasticExchange::combine_receive(const CombineOutput& output) {
  accept(output);
  collect(output);
  share_outputs(output);
}

void ElasticExchange::collect(const CombineOutput& output) {
  run(CallPart::combine, [&](HostWorker& w) {
    return elastic_collect(w, layout_, input_, placement_, scratch_, weighted(), shared_rows(output), output.out);
  });
}

void ElasticExchange::reserve(std::size_t rows) {
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

std::unique_ptr<Exchange> create_elastic(Workspace& workspace, const ExchangeOptions& options, const ExchangeMemory& memory) {
  if (workspace.group().nodes() > 1) return create_elastic_nodes(workspace, options, memory);
  return std::make_unique<ElasticExchange>(workspace, options, memory);
}

}  // namespace heddle
