#include "exchange/nodes/host.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <type_traits>

#include "exchange/elastic/host.hpp"
#include "exchange/nodes/mail.hpp"
#include "exchange/nodes/protocol.hpp"
#include "exchange/nodes/tables.hpp"
#include "group/counterparts.hpp"
#include "signal/fault.hpp"

namespace heddle {

namespace {

/// Hybrid goes by the same places of all nodes. Where one has lost a rank, rows go straight until it is back: the bits are the
/// same.
NodeMode mode_for(NodeMode wanted, const Group& group) {
  const int inside = group.ranks() / group.nodes();
  for (int rank = 0; rank < group.ranks(); ++rank) {
    const bool is_lost = !group.live()[static_cast<std::size_t>(rank)];
    if (is_lost && counterpart(group.live(), inside, rank / inside, 0)) return NodeMode::direct;
  }
  return wanted;
}

void check_live(const Placement& placement, const std::vector<bool>& live) {
  for (int rank = 0; rank < placement.ranks(); ++rank) {
    if (live[static_cast<std::size_t>(rank)] || placement.experts_of(rank).empty()) continue;
    throw InputError(fmt::format("rank {} is not live and has {} experts; over several nodes they have to move to live ranks", rank,
                                 placement.experts_of(rank).size()));
  }
}

class NodesExchange final : public ElasticExchange {
 public:
  NodesExchange(Workspace& workspace, const ExchangeOptions& options, const ExchangeMemory& memory)
      : ElasticExchange(workspace, options, memory),
        nodes_{layout_, workspace.group().nodes(), mode_for(options.mode, workspace.group())},
        mail_(*workspace.group().link(), nodes_, workspace.view(), workspace.live()) {
    check_live(options.placement, workspace.live());
    drive(*workspace.group().link());
    const std::size_t most = std::max(nodes_.most_out_bytes(), nodes_.most_back_bytes());
    if (most > workspace.group().link()->most_bytes()) {
      throw InputError(fmt::format("a message between nodes would have up to {} bytes, {} are possible; take a smaller cap than {}",
                                   most, workspace.group().link()->most_bytes(), options.cap));
    }
    for (int peer = 0; peer < ranks(); ++peer) {
      if (!workspace.live()[static_cast<std::size_t>(peer)]) continue;
      if (nodes_.is_peer(rank(), peer, nodes_.rows_forwarded())) row_peers_.push_back(peer);
      if (nodes_.is_peer(rank(), peer, nodes_.results_forwarded())) result_peers_.push_back(peer);
    }
    arrived_results_.resize(static_cast<std::size_t>(ranks()));
  }

  void dispatch_send(const ExchangeInput& input, const Step& step) override {
    guarded([&] { send(input, step); });
  }
  Arrived dispatch_receive() override {
    return guarded([&] { return ElasticExchange::dispatch_receive(); });
  }
  void combine_send(const bf16* results) override {
    guarded([&] { ElasticExchange::combine_send(results); });
  }
  void combine_receive(const CombineOutput& output) override {
    if (output.all_out != nullptr)
      throw InputError("outputs for all ranks (tensor-parallel attention) are not gathered across nodes; leave all_out null");
    guarded([&] { ElasticExchange::combine_receive(output); });
  }

 private:
  /// A fault here is told to the other nodes; inside of this one the abort word has done it.
  template <class F>
  std::invoke_result_t<F> guarded(F call) {
    try {
      return call();
    } catch (const InputError&) {
      mail_.tell_fault();  // where the input was refused here alone
      throw;
    } catch (...) {
      raise_abort(workspace_.view(), {{WordKind::failed, -1, -1}, rank(), 0, 0});  // unless a fault stands already
      mail_.tell_fault();
      throw;
    }
  }

  bool on_node(int other) const { return nodes_.together(rank(), other); }
  int first_on_node() const { return nodes_.rank_of(nodes_.node_of(rank()), 0); }

  void send(const ExchangeInput& input, const Step& step);
  void await_rows() override;
  void send_results(const ElasticResults& results) override;
  void collect(const CombineOutput& output) override;

  void take_rows();
  void check_message(int peer, const NodeMessage& message) const;
  /// Results of this node's ranks for sources elsewhere, which came by way of this one.
  void send_on();
  void take_results();

  NodesLayout nodes_;
  NodeMail mail_;
  std::vector<int> row_peers_, result_peers_;
  // Rows of other nodes' sources, one of each a row peer.
  std::vector<NodeMessage> arrived_rows_;
  std::vector<MessageSlots> placed_;
  std::vector<ArrivedMessage> messages_;      ///< views of both
  std::vector<NodeMessage> arrived_results_;  ///< [ranks], of result peers
};

void NodesExchange::send(const ExchangeInput& input, const Step& step) {
  accept(input, step);
  const MessageNumbers numbers = number_messages(nodes_, input_, placement_, rank(), row_peers_);
  std::vector<NodeMessage> messages;
  std::vector<std::byte*> places;
  for (const std::int32_t count : numbers.counts)
    places.push_back(messages.emplace_back(nodes_.record(static_cast<std::size_t>(count))).data());
  const FilledMessages filled{static_cast<int>(places.size()), places.data(), numbers.numbers.data()};
  run(CallPart::dispatch_send, [&](HostWorker& w) { return nodes_send(w, nodes_, input_, placement_, scratch_, filled); });
  for (std::size_t p = 0; p < messages.size(); ++p) {
    NodeMail::head(messages[p], worker().epoch(), static_cast<std::uint32_t>(numbers.counts[p]));
    mail_.post(row_peers_[p], node_rows, std::move(messages[p]));
    count_between(numbers.counts[p], layout_.wire.reported_bytes());
  }
  for (int d = 0; d < ranks(); ++d) {
    if (on_node(d)) count_rows(d, scratch_.sent.totals[d], layout_.wire.reported_bytes());
  }
}

void NodesExchange::take_rows() {
  arrived_rows_.assign(row_peers_.size(), {});
  run(CallPart::dispatch_receive, [&](HostWorker& w) {
    if (w.index() != 0) return true;
    for (std::size_t p = 0; p < row_peers_.size(); ++p) {
      if (!mail_.take(w, row_peers_[p], node_rows, workspace_.group().deadline(), arrived_rows_[p])) return false;
    }
    return row_peers_.empty() || mail_.drain(w, node_rows, row_peers_.back(), workspace_.group().deadline());
  });
}

void NodesExchange::check_message(int peer, const NodeMessage& message) const {
  const auto tokens = static_cast<std::size_t>(NodeMail::rows_of(message));
  if (message.size() == nodes_.record(tokens) && tokens <= static_cast<std::size_t>(options_.cap)) return;
  throw Error(ErrorKind::fault, fmt::format("rank {}: a message of {} tokens from rank {} has {} bytes; the cap is {} tokens",
                                            rank(), tokens, peer, message.size(), options_.cap));
}

void NodesExchange::await_rows() {
  take_rows();
  placed_.clear();
  messages_.clear();
  for (std::size_t p = 0; p < row_peers_.size(); ++p) {
    check_message(row_peers_[p], arrived_rows_[p]);
    const std::uint32_t tokens = NodeMail::rows_of(arrived_rows_[p]);
    placed_.push_back(place_message(nodes_, arrived_rows_[p].data(), tokens, placement_, rank()));
    messages_.push_back({row_peers_[p], static_cast<int>(tokens), arrived_rows_[p].data(), placed_.back().slots.data(),
                         placed_.back().totals.data()});  // a vector's memory stays where it is when it is moved
  }
  const bool forwarded = nodes_.rows_forwarded();
  run(CallPart::dispatch_receive,
      [&](HostWorker& w) { return nodes_forward(w, nodes_, messages_.data(), static_cast<int>(messages_.size()), forwarded); });
  for (const MessageSlots& placed : placed_) {
    for (std::size_t place = 0; forwarded && place < placed.totals.size(); ++place)
      count_rows(first_on_node() + static_cast<int>(place), placed.totals[place], layout_.wire.reported_bytes());
  }
  ElasticExchange::await_rows();
}

void NodesExchange::send_results(const ElasticResults& results) {
  std::vector<std::byte*> places(static_cast<std::size_t>(ranks()), nullptr);
  std::vector<NodeMessage> messages(places.size());
  const std::vector<std::int32_t> before = results_before(nodes_, scratch_.arrived, scratch_.routing.local_ids);
  for (int s = 0, first = 0; s < ranks(); first += scratch_.arrived[s++]) {
    const std::int64_t rows = rows_home(s, first);
    const auto source = static_cast<std::size_t>(s);
    if (on_node(s) || nodes_.results_forwarded()) {
      count_rows(first_on_node() + nodes_.place_of(s), rows, layout_.returned.reported_bytes());
    } else {
      messages[source].resize(nodes_.result(static_cast<std::size_t>(rows)));
      NodeMail::head(messages[source], worker().epoch(), static_cast<std::uint32_t>(rows));
      places[source] = messages[source].data();
      count_between(rows, layout_.returned.reported_bytes());
    }
  }
  const NodeResults out{places.data(), before.data()};
  run(CallPart::combine, [&](HostWorker& w) { return nodes_return(w, nodes_, results, scratch_, out); });
  for (const int peer : result_peers_) {
    auto& message = messages[static_cast<std::size_t>(peer)];
    if (!message.empty()) mail_.post(peer, node_results, std::move(message));
  }
}

void NodesExchange::send_on() {
  std::vector<NodeMessage> results;
  std::vector<std::byte*> places;
  for (const MessageSlots& placed : placed_) {
    const auto rows = std::accumulate(placed.totals.begin(), placed.totals.end(), std::size_t{0});
    NodeMessage& message = results.emplace_back(nodes_.result(rows));
    NodeMail::head(message, worker().epoch(), static_cast<std::uint32_t>(rows));
    places.push_back(message.data());
    count_between(static_cast<std::int64_t>(rows), layout_.returned.reported_bytes());
  }
  run(CallPart::combine,
      [&](HostWorker& w) { return nodes_gather(w, nodes_, messages_.data(), static_cast<int>(messages_.size()), places.data()); });
  for (std::size_t p = 0; p < results.size(); ++p) mail_.post(row_peers_[p], node_results, std::move(results[p]));
}

void NodesExchange::take_results() {
  run(CallPart::combine, [&](HostWorker& w) {
    if (w.index() != 0) return true;
    for (const int peer : result_peers_) {
      NodeMessage& message = arrived_results_[static_cast<std::size_t>(peer)];
      if (!mail_.take(w, peer, node_results, workspace_.group().deadline(), message)) return false;
    }
    return result_peers_.empty() || mail_.drain(w, node_results, result_peers_.back(), workspace_.group().deadline());
  });
}

void NodesExchange::collect(const CombineOutput& output) {
  run(CallPart::combine, [&](HostWorker& w) { return nodes_hear_results(w, nodes_); });
  if (nodes_.results_forwarded()) send_on();
  take_results();
  const bool by_rank = layout_.reduce == Reduce::rank;
  const auto terms = result_rows(nodes_, workspace_.view(), input_, placement_, scratch_.sent.numbers, arrived_results_);
  run(CallPart::combine, [&](HostWorker& w) {
    return nodes_collect(w, nodes_, input_, terms.data(), by_rank ? ranks() : options_.topk, weighted() && !by_rank,
                         shared_rows(output), output.out);
  });
}

}  // namespace

std::unique_ptr<Exchange> create_elastic_nodes(Workspace& workspace, const ExchangeOptions& options, const ExchangeMemory& memory) {
  return std::make_unique<NodesExchange>(workspace, options, memory);
}

}  // namespace heddle
