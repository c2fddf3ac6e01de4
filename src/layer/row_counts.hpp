// What ranks send each other in a round trip, worked out from their ids: for an exchange whose own counts stay on a GPU.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "heddle/exchange.hpp"

namespace heddle {

/// One call: every rank's counts must be known before anything is asked.
class RowCounts {
 public:
  /// `nodes`: that share the ranks equally, for elastic with reduce = rank (docs/nodes.md); no rank is masked then.
  explicit RowCounts(const ExchangeOptions& options, int nodes = 1);

  /// Counts a rank's choices.
  void count(int rank, const ExchangeInput& input);
  /// A rank's counts as text for other processes, and back; a line a rank.
  std::string lines(int first_rank, int ranks) const;
  void take(const std::string& lines);

  /// As the host engine's take_traffic after each half of the round trip; of mega, what the rank fetched and what it pushed home.
  ExchangeTraffic dispatched(int rank, const std::vector<bool>& live) const;
  ExchangeTraffic combined(int rank, const std::vector<bool>& live, bool all_outputs) const;
  /// As LayerReport::rows_sent.
  std::uint64_t sent(int rank, const std::vector<bool>& live) const;
  /// As Arrived::received.
  int received(int rank, const std::vector<bool>& live) const;

 private:
  struct Sent {
    int tokens = 0;
    std::vector<int> rows, pairs;  ///< to each rank: tokens with an expert there, and their choices
    std::vector<int> node_rows;    ///< to each node, likewise
  };
  const Sent& of(int rank) const { return sent_[static_cast<std::size_t>(rank)]; }
  /// combined() without the all-gather of outputs.
  ExchangeTraffic returned(int rank, const std::vector<bool>& live) const;
  bool tensor_parallel() const { return options_.way == Way::gather && options_.gather == GatherMode::tensor_parallel; }
  /// How many of `rows` that any live rank could work on are this one's, in slices; live ranks before it have the first ones.
  static int slice(int rows, int rank, const std::vector<bool>& live);
  /// Rows of `from` for `to` in a dispatch, by all ways but gather.
  int rows(int from, int to) const;

  // Over several nodes.
  int ranks_a_node() const { return options_.placement.ranks() / nodes_; }
  int node_of(int rank) const { return rank / ranks_a_node(); }
  ExchangeTraffic dispatched_over_nodes(int rank) const;
  ExchangeTraffic returned_over_nodes(int rank) const;
  /// Rows that the rank's peers on other nodes have for ranks of its own, by rank of it; only in hybrid mode.
  std::vector<int> forwarded(int rank) const;

  ExchangeOptions options_;
  int nodes_;
  std::vector<Sent> sent_;  ///< a rank
};

}  // namespace heddle
