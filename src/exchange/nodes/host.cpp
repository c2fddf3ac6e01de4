#include "exchange/nodes/host.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "exchange/elastic/host.hpp"
#include "exchange/nodes/mail.hpp"
#include "exchange/nodes/protocol.hpp"

namespace heddle {

namespace {

class NodesExchange final : public ElasticExchange {
 public:
  NodesExchange(Workspace& workspace, const ExchangeOptions& options, const ExchangeMemory& memory)
      : ElasticExchange(workspace, options, memory),
        nodes_{layout_, workspace.group().nodes(), options.mode},
        mail_(*workspace.group().link(), nodes_, workspace.view()) {
    const std::size_t most = std::max(nodes_.most_out_bytes(), nodes_.most_back_bytes());
    if (most > workspace.group().link()->most_bytes()) {
      throw InputError(fmt::format("a message between nodes would have up to {} bytes, {} are possible; take a smaller cap than {}",
                                   most, workspace.group().link()->most_bytes(), options.cap));
    }
    for (int peer = 0; peer < ranks(); ++peer) {
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
    } catch (...) {
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

  /// numbers [tokens, row peers] and how many tokens each message has.
  std::vector<std::int32_t> number_messages();
  void take_rows();
  /// The slots that a message's tokens have at the ranks of this node.
  void place_message(int peer, const NodeMessage& message);
  /// Results of this node's ranks for a source elsewhere, which came by way of this one.
  void send_on();
  void take_results();
  std::vector<const std::byte*> terms_by_rank() const;
  std::vector<const std::byte*> terms_by_choice() const;

  NodesLayout nodes_;
  NodeMail mail_;
  std::vector<int> row_peers_, result_peers_;
  std::vector<std::int32_t> sent_counts_;  ///< [row peers]
  // Rows of other nodes' sources, one of each a row peer.
  std::vector<NodeMessage> arrived_rows_;
  std::vector<std::vector<std::int32_t>> slots_, totals_;
  std::vector<NodeMessage> arrived_results_;  ///< [ranks], of result peers
};

std::vector<std::int32_t> NodesExchange::number_messages() {
  const std::size_t peers = row_peers_.size();
  std::vector<std::int32_t> numbers(static_cast<std::size_t>(input_.tokens) * peers, -1);
  sent_counts_.assign(peers, 0);
  for (int token = 0; token < input_.tokens; ++token) {
    for (int choice = 0; choice < input_.topk; ++choice) {
      const int d = placement_.rank_of_choice(input_.ids[token * input_.topk + choice]);
      if (d < 0 || on_node(d)) continue;
      const int peer = nodes_.rows_forwarded() ? nodes_.rank_of(nodes_.node_of(d), nodes_.place_of(rank())) : d;
      const auto p = static_cast<std::size_t>(std::lower_bound(row_peers_.begin(), row_peers_.end(), peer) - row_peers_.begin());
      std::int32_t& number = numbers[static_cast<std::size_t>(token) * peers + p];
      if (number < 0) number = sent_counts_[p]++;
    }
  }
  return numbers;
}

void NodesExchange::send(const ExchangeInput& input, const Step& step) {
  accept(input, step);
  const std::vector<std::int32_t> numbers = number_messages();
  std::vector<NodeMessage> messages;
  std::vector<std::byte*> places;
  for (const std::int32_t count : sent_counts_)
    places.push_back(messages.emplace_back(nodes_.record(static_cast<std::size_t>(count))).data());
  const FilledMessages filled{static_cast<int>(places.size()), places.data(), numbers.data()};
  run(CallPart::dispatch_send, [&](HostWorker& w) { return nodes_send(w, nodes_, input_, placement_, scratch_, filled); });
  for (std::size_t p = 0; p < messages.size(); ++p) {
    NodeMail::head(messages[p], worker().epoch(), static_cast<std::uint32_t>(sent_counts_[p]));
    mail_.post(row_peers_[p], node_rows, std::move(messages[p]));
    count_between(sent_counts_[p], layout_.wire.reported_bytes());
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
    return mail_.drain(w, node_rows, row_peers_.back(), workspace_.group().deadline());
  });
}

void NodesExchange::place_message(int peer, const NodeMessage& message) {
  const auto tokens = static_cast<std::size_t>(NodeMail::rows_of(message));
  const auto inside = static_cast<std::size_t>(nodes_.ranks_a_node());
  if (message.size() != nodes_.record(tokens) || tokens > static_cast<std::size_t>(options_.cap)) {
    throw Error(ErrorKind::fault, fmt::format("rank {}: a message of {} tokens from rank {} has {} bytes; the cap is {} tokens",
                                              rank(), tokens, peer, message.size(), options_.cap));
  }
  std::vector<std::int32_t> slots(tokens * inside, -1), totals(inside, 0);
  std::vector<std::int32_t> ids(static_cast<std::size_t>(options_.topk));
  for (std::size_t token = 0; token < tokens; ++token) {
    std::memcpy(ids.data(), message.data() + nodes_.record(token) + nodes_.routing_in_record(), ids.size() * sizeof ids[0]);
    for (const std::int32_t id : ids) {
      const int d = placement_.rank_of_choice(id);
      if (d < 0 || !on_node(d) || (!nodes_.rows_forwarded() && d != rank())) continue;
      const auto place = static_cast<std::size_t>(nodes_.place_of(d));
      std::int32_t& slot = slots[token * inside + place];
      if (slot < 0) slot = totals[place]++;
    }
  }
  slots_.push_back(std::move(slots));
  totals_.push_back(std::move(totals));
}

void NodesExchange::await_rows() {
  take_rows();
  slots_.clear();
  totals_.clear();
  std::vector<ArrivedMessage> messages;
  for (std::size_t p = 0; p < row_peers_.size(); ++p) {
    place_message(row_peers_[p], arrived_rows_[p]);
    messages.push_back(
        {row_peers_[p], static_cast<int>(NodeMail::rows_of(arrived_rows_[p])), arrived_rows_[p].data(), nullptr, nullptr});
  }
  for (std::size_t p = 0; p < messages.size(); ++p) {
    messages[p].slots = slots_[p].data();
    messages[p].totals = totals_[p].data();
  }
  const bool forwarded = nodes_.rows_forwarded();
  run(CallPart::dispatch_receive,
      [&](HostWorker& w) { return nodes_forward(w, nodes_, messages.data(), static_cast<int>(messages.size()), forwarded); });
  for (const auto& totals : totals_) {
    for (std::size_t place = 0; forwarded && place < totals.size(); ++place)
      count_rows(first_on_node() + static_cast<int>(place), totals[place], layout_.wire.reported_bytes());
  }
  ElasticExchange::await_rows();
}

void NodesExchange::send_results(const ElasticResults& results) {
  std::vector<std::byte*> places(static_cast<std::size_t>(ranks()), nullptr);
  std::vector<NodeMessage> messages(places.size());
  std::vector<std::int32_t> rows_before;
  for (int s = 0, first = 0; s < ranks(); first += scratch_.arrived[s++]) {
    const std::int64_t rows = rows_home(s, first);
    std::int32_t before = 0;
    for (int i = first; i < first + scratch_.arrived[s]; ++i) {
      rows_before.push_back(before);
      for (int choice = 0; choice < options_.topk; ++choice) before += scratch_.routing.local_ids[i * options_.topk + choice] >= 0;
    }
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
  const NodeResults out{places.data(), rows_before.data()};
  run(CallPart::combine, [&](HostWorker& w) { return nodes_return(w, nodes_, results, scratch_, out); });
  for (const int peer : result_peers_) {
    auto& message = messages[static_cast<std::size_t>(peer)];
    if (!message.empty()) mail_.post(peer, node_results, std::move(message));
  }
}

void NodesExchange::send_on() {
  const HeapView heap = workspace_.view();
  const auto inside = static_cast<std::size_t>(nodes_.ranks_a_node());
  const std::size_t bytes = layout_.returned.row_bytes();
  for (std::size_t p = 0; p < row_peers_.size(); ++p) {
    const int node = nodes_.node_of(row_peers_[p]);
    std::int64_t rows = 0;
    for (const std::int32_t total : totals_[p]) rows += total;
    NodeMessage message(nodes_.result(static_cast<std::size_t>(rows)));
    NodeMail::head(message, worker().epoch(), static_cast<std::uint32_t>(rows));
    std::byte* to = message.data() + nodes_.result(0);
    for (std::size_t i = 0; i < slots_[p].size(); ++i) {  // tokens, of each the ranks of this node
      if (slots_[p][i] < 0) continue;
      const int region = nodes_.rank_of(node, static_cast<int>(i % inside));
      std::memcpy(to, heap.mine<std::byte>(layout_.summed_row(region, slots_[p][i])), bytes);
      to += bytes;
    }
    mail_.post(row_peers_[p], node_results, std::move(message));
    count_between(rows, layout_.returned.reported_bytes());
  }
}

void NodesExchange::take_results() {
  run(CallPart::combine, [&](HostWorker& w) {
    if (w.index() != 0) return true;
    for (const int peer : result_peers_) {
      NodeMessage& message = arrived_results_[static_cast<std::size_t>(peer)];
      if (!mail_.take(w, peer, node_results, workspace_.group().deadline(), message)) return false;
    }
    return mail_.drain(w, node_results, result_peers_.back(), workspace_.group().deadline());
  });
}

/// The next row of a message, whose length its sender and this rank have from the same choices.
class RowsInOrder {
 public:
  RowsInOrder(const NodesLayout& layout, const NodeMessage& message) : layout_(layout), message_(message) {}
  const std::byte* next(int peer) {
    const std::size_t at = layout_.result(number_++);
    if (at + layout_.elastic.returned.row_bytes() > message_.size()) {
      throw Error(ErrorKind::fault,
                  fmt::format("the results of rank {} end after {} rows, more were sent there", peer, number_ - 1));
    }
    return message_.data() + at;
  }

 private:
  const NodesLayout& layout_;
  const NodeMessage& message_;
  std::size_t number_ = 0;
};

std::vector<const std::byte*> NodesExchange::terms_by_rank() const {
  const HeapView heap = workspace_.view();
  std::vector<RowsInOrder> rows;
  for (const NodeMessage& message : arrived_results_) rows.emplace_back(nodes_, message);
  std::vector<const std::byte*> terms(static_cast<std::size_t>(input_.tokens) * static_cast<std::size_t>(ranks()), nullptr);
  for (std::size_t i = 0; i < terms.size(); ++i) {
    const std::int32_t slot = scratch_.sent.numbers[i];
    const int d = static_cast<int>(i) % ranks();
    if (slot < 0) continue;
    const int peer = nodes_.results_forwarded() ? nodes_.rank_of(nodes_.node_of(d), nodes_.place_of(rank())) : d;
    terms[i] = on_node(d) ? heap.mine<std::byte>(layout_.summed_row(d, slot)) : rows[static_cast<std::size_t>(peer)].next(peer);
  }
  return terms;
}

std::vector<const std::byte*> NodesExchange::terms_by_choice() const {
  const HeapView heap = workspace_.view();
  std::vector<RowsInOrder> rows;
  for (const NodeMessage& message : arrived_results_) rows.emplace_back(nodes_, message);
  std::vector<const std::byte*> terms(static_cast<std::size_t>(input_.tokens) * static_cast<std::size_t>(input_.topk), nullptr);
  for (std::size_t pair = 0; pair < terms.size(); ++pair) {
    const int d = placement_.rank_of_choice(input_.ids[pair]);
    if (d < 0) continue;
    terms[pair] = on_node(d) ? heap.mine<std::byte>(layout_.slot(pair)) : rows[static_cast<std::size_t>(d)].next(d);
  }
  return terms;
}

void NodesExchange::collect(const CombineOutput& output) {
  run(CallPart::combine, [&](HostWorker& w) { return nodes_hear_results(w, nodes_); });
  if (nodes_.results_forwarded()) send_on();
  take_results();
  const bool by_rank = layout_.reduce == Reduce::rank;
  const auto terms = by_rank ? terms_by_rank() : terms_by_choice();
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
