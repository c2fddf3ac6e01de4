#include "layer/row_counts.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "exchange/host_exchange.hpp"
#include "group/text_reader.hpp"

namespace heddle {

namespace {

/// Adds up rows to or from the live ranks.
template <class RowsOf>
ExchangeTraffic sum(int rank, const std::vector<bool>& live, std::size_t bytes_a_row, RowsOf rows_of) {
  ExchangeTraffic traffic;
  for (std::size_t peer = 0; peer < live.size(); ++peer) {
    if (!live[peer]) continue;
    const auto rows = static_cast<std::uint64_t>(rows_of(static_cast<int>(peer)));
    const bool own = static_cast<int>(peer) == rank;
    (own ? traffic.local_rows : traffic.remote_rows) += rows;
    (own ? traffic.local_bytes : traffic.remote_bytes) += rows * bytes_a_row;
  }
  return traffic;
}

}  // namespace

RowCounts::RowCounts(const ExchangeOptions& options, int nodes)
    : options_(options), nodes_(nodes), sent_(static_cast<std::size_t>(options.placement.ranks())) {
  for (Sent& sent : sent_) {
    sent.rows.resize(sent_.size());
    sent.pairs.resize(sent_.size());
    sent.node_rows.resize(static_cast<std::size_t>(nodes));
  }
}

void RowCounts::count(int rank, const ExchangeInput& input) {
  Sent& sent = sent_[static_cast<std::size_t>(rank)];
  sent = {input.tokens, std::vector<int>(sent_.size()), std::vector<int>(sent_.size()), std::vector<int>(sent.node_rows.size())};
  std::vector<int> last(sent_.size(), -1);  // token that was counted last for a rank
  std::vector<int> last_of_node(sent.node_rows.size(), -1);
  for (int token = 0; token < input.tokens; ++token) {
    for (int choice = 0; choice < options_.topk; ++choice) {
      const std::int32_t id = input.ids[static_cast<std::ptrdiff_t>(token) * options_.topk + choice];
      if (id < 0) continue;
      if (options_.placement.is_everywhere()) {  // an arrived row has the choice on every rank
        for (int& pairs : sent.pairs) ++pairs;
        continue;
      }
      const auto to = static_cast<std::size_t>(options_.placement.rank_of(id));
      ++sent.pairs[to];
      if (last[to] != token) ++sent.rows[to];
      last[to] = token;
      const auto node = static_cast<std::size_t>(node_of(static_cast<int>(to)));
      if (last_of_node[node] != token) ++sent.node_rows[node];
      last_of_node[node] = token;
    }
    if (!options_.mega.extra_expert) continue;
    const auto own = static_cast<std::size_t>(rank);
    ++sent.pairs[own];
    if (last[own] != token) ++sent.rows[own];
  }
}

std::string RowCounts::lines(int first_rank, int ranks) const {
  std::string text;
  for (int rank = first_rank; rank < first_rank + ranks; ++rank) {
    text += fmt::format("{} {}", rank, of(rank).tokens);
    for (const int rows : of(rank).rows) text += fmt::format(" {}", rows);
    for (const int pairs : of(rank).pairs) text += fmt::format(" {}", pairs);
    for (const int rows : of(rank).node_rows) text += fmt::format(" {}", rows);
    text += '\n';
  }
  return text;
}

void RowCounts::take(const std::string& lines) {
  TextReader told(lines);
  for (std::size_t rank = 0; told.number(rank);) {
    Sent& sent = sent_.at(rank);
    told.number(sent.tokens);
    for (int& rows : sent.rows) told.number(rows);
    for (int& pairs : sent.pairs) told.number(pairs);
    for (int& rows : sent.node_rows) told.number(rows);
  }
}

int RowCounts::slice(int rows, int rank, const std::vector<bool>& live) {
  const auto before = static_cast<long long>(std::count(live.begin(), live.begin() + rank, true));
  const auto all = static_cast<long long>(std::count(live.begin(), live.end(), true));
  return static_cast<int>(rows * (before + 1) / all - rows * before / all);
}

int RowCounts::rows(int from, int to) const {
  const bool by_pair = options_.way == Way::low_latency || options_.way == Way::mega;
  const auto& counts = by_pair ? of(from).pairs : of(from).rows;
  return counts[static_cast<std::size_t>(to)];
}

std::vector<int> RowCounts::forwarded(int rank) const {
  std::vector<int> to(static_cast<std::size_t>(ranks_a_node()));
  if (options_.mode != NodeMode::hybrid) return to;
  for (int source = rank % ranks_a_node(); source < options_.placement.ranks(); source += ranks_a_node()) {
    if (source == rank) continue;
    for (int place = 0; place < ranks_a_node(); ++place)
      to[static_cast<std::size_t>(place)] += rows(source, node_of(rank) * ranks_a_node() + place);
  }
  return to;
}

namespace {
/// Rows on one level: to the rank itself, to another one, or to another node.
struct Levels {
  int own = 0, inside = 0, between = 0;
  void add(bool is_own, int rows) { (is_own ? own : inside) += rows; }
  ExchangeTraffic traffic(std::size_t bytes_a_row) const {
    ExchangeTraffic traffic;
    traffic.local_rows = static_cast<std::uint64_t>(own);
    traffic.between_rows = static_cast<std::uint64_t>(between);
    traffic.remote_rows = static_cast<std::uint64_t>(inside) + traffic.between_rows;
    traffic.local_bytes = traffic.local_rows * bytes_a_row;
    traffic.between_bytes = traffic.between_rows * bytes_a_row;
    traffic.remote_bytes = traffic.remote_rows * bytes_a_row;
    return traffic;
  }
};
}  // namespace

ExchangeTraffic RowCounts::dispatched_over_nodes(int rank) const {
  const bool hybrid = options_.mode == NodeMode::hybrid;
  const std::vector<int> passed_on = forwarded(rank);
  Levels levels;
  for (int to = 0; to < options_.placement.ranks(); ++to) {
    if (node_of(to) == node_of(rank)) {
      levels.add(to == rank, rows(rank, to) + passed_on[static_cast<std::size_t>(to % ranks_a_node())]);
    } else if (!hybrid) {
      levels.between += rows(rank, to);
    }
  }
  for (int node = 0; hybrid && node < nodes_; ++node) {
    if (node != node_of(rank)) levels.between += of(rank).node_rows[static_cast<std::size_t>(node)];
  }
  return levels.traffic(wire_format(options_).reported_bytes());
}

ExchangeTraffic RowCounts::returned_over_nodes(int rank) const {
  const bool hybrid = options_.mode == NodeMode::hybrid;
  Levels levels;
  for (int home = 0; home < options_.placement.ranks(); ++home) {
    if (node_of(home) == node_of(rank) || hybrid) {
      levels.add(home % ranks_a_node() == rank % ranks_a_node(), rows(home, rank));
    } else {
      levels.between += rows(home, rank);
    }
  }
  for (const int passed_on : forwarded(rank)) levels.between += passed_on;
  return levels.traffic(returned_format(options_).reported_bytes());
}

ExchangeTraffic RowCounts::dispatched(int rank, const std::vector<bool>& live) const {
  if (nodes_ > 1) return dispatched_over_nodes(rank);
  const std::size_t bytes = wire_format(options_).reported_bytes();
  if (options_.way == Way::mega) return sum(rank, live, bytes, [&](int peer) { return rows(peer, rank); });  // fetched
  if (options_.way != Way::gather) return sum(rank, live, bytes, [&](int peer) { return rows(rank, peer); });
  if (tensor_parallel()) return {};  // tokens are everywhere
  if (options_.gather != GatherMode::zero_filled) return sum(rank, live, bytes, [&](int) { return of(rank).tokens; });
  // An all-reduce: every live rank pulls a share of all rows from all and pushes the sums to all.
  int all = 0, ranks = 0, position = 0;
  for (std::size_t peer = 0; peer < live.size(); ++peer) {
    if (!live[peer]) continue;
    if (static_cast<int>(peer) < rank) ++position;
    ++ranks;
    all += of(static_cast<int>(peer)).tokens;
  }
  const int share = all / ranks + (position < all % ranks ? 1 : 0);
  return sum(rank, live, bytes, [&](int) { return 2 * share; });
}

ExchangeTraffic RowCounts::returned(int rank, const std::vector<bool>& live) const {
  if (nodes_ > 1) return returned_over_nodes(rank);
  const std::size_t bytes = returned_format(options_).reported_bytes();
  switch (options_.way) {
    case Way::gather:  // pulled
      return sum(rank, live, bytes, [&](int) { return tensor_parallel() ? slice(of(rank).tokens, rank, live) : of(rank).tokens; });
    case Way::one_sided:  // likewise
      return sum(rank, live, bytes, [&](int peer) { return rows(rank, peer); });
    case Way::elastic:
      if (options_.reduce == Reduce::rank) break;
      return sum(rank, live, bytes, [&](int home) { return of(home).pairs[static_cast<std::size_t>(rank)]; });
    default:
      break;
  }
  return sum(rank, live, bytes, [&](int home) { return rows(home, rank); });
}

ExchangeTraffic RowCounts::combined(int rank, const std::vector<bool>& live, bool all_outputs) const {
  ExchangeTraffic traffic = returned(rank, live);
  if (!all_outputs) return traffic;
  const int rows = tensor_parallel() ? slice(of(rank).tokens, rank, live) : of(rank).tokens;
  const auto shared = sum(rank, live, static_cast<std::size_t>(options_.hidden) * sizeof(bf16), [&](int) { return rows; });
  traffic.remote_bytes += shared.remote_bytes;
  traffic.local_bytes += shared.local_bytes;
  traffic.remote_rows += shared.remote_rows;
  traffic.local_rows += shared.local_rows;
  return traffic;
}

std::uint64_t RowCounts::sent(int rank, const std::vector<bool>& live) const {
  // Rows of mega are moved by those that want them.
  const ExchangeTraffic traffic =
      options_.way == Way::mega ? sum(rank, live, 0, [&](int peer) { return rows(rank, peer); }) : dispatched(rank, live);
  return traffic.remote_rows + traffic.local_rows;
}

int RowCounts::received(int rank, const std::vector<bool>& live) const {
  if (tensor_parallel()) return of(rank).tokens;
  int received = 0;
  for (std::size_t peer = 0; peer < live.size(); ++peer) {
    if (!live[peer]) continue;
    const int from = static_cast<int>(peer);
    received += options_.way == Way::gather ? of(from).tokens : rows(from, rank);
  }
  return received;
}

}  // namespace heddle
