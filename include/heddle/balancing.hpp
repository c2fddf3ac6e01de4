// Uneven load: experts with several copies, placements that even out known loads, and a layer whose placement changes between calls
// (docs/balancing.md).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "heddle/layer.hpp"
#include "heddle/routing.hpp"

namespace heddle {

/// Which copies of experts there are, and where. Logical experts are what routers choose; a physical expert is a copy of one,
/// numbered rank by rank. Exchanges and layers see physical experts only, through `placement()`; choose_copies leads from one to
/// the other.
class ReplicaMap {
 public:
  ReplicaMap() = default;
  /// One copy of each expert, where the placement has it; physical ids differ from logical ones where ranks do not hold ranges.
  static ReplicaMap single(const Placement& placement);
  /// experts_of[rank]: the logical experts that the rank holds, in local order; the same one twice is legal. Throws InputError
  /// naming an expert outside [0, experts) or without a copy, and for a map of nothing.
  static ReplicaMap from_ranks(const std::vector<std::vector<int>>& experts_of, int experts);

  int experts() const { return begins_.empty() ? 0 : static_cast<int>(begins_.size()) - 1; }  ///< logical ones
  int physical() const { return static_cast<int>(logical_of_.size()); }
  int ranks() const { return placement_.ranks(); }
  /// The expert that a physical one is a copy of.
  int logical_of(int physical) const { return logical_of_[static_cast<std::size_t>(physical)]; }
  /// Physical ids of an expert's copies, ascending: at least one.
  std::span<const int> copies_of(int expert) const;
  /// Where physical experts live: ranks in order, each a range of them.
  const Placement& placement() const { return placement_; }
  /// Logical experts of a rank, in local order.
  std::span<const int> experts_of(int rank) const;
  /// Does every rank hold as many? Then `placement()` is Placement::contiguous, whatever the copies are of.
  bool is_even() const;
  // copies_of as one table, for kernels: copies of expert e are copies()[begins()[e]] to copies()[begins()[e + 1] - 1].
  std::span<const int> begins() const { return begins_; }
  std::span<const int> copies() const { return copies_; }

  bool operator==(const ReplicaMap& other) const;

 private:
  Placement placement_;
  std::vector<int> logical_of_, begins_, copies_;
};

/// How a source's pairs are shared out among the copies of their experts. A source is a rank with its tokens of a call; under
/// tensor-parallel attention, where all ranks have all tokens, all of them are source 0. Both rules follow from the source's ids
/// alone, so nobody has to be asked, and are the same wherever they are worked out.
enum class CopyRule : std::uint8_t {
  /// Each source spreads its rows evenly over the ranks. Rows of experts with one copy lie where they lie. Experts with several
  /// follow
  /// in ascending id: each one's rows go, one by one, to the copy whose rank has the fewest of this source's rows so far, ties to
  /// the
  /// first rank from `source` on. In a second round each expert's rows are taken back and dealt again, now that the others' are
  /// known.
  levelled,
  /// Copies of an expert take turns: each gets as many of a source's rows, give or take one; the first of the longer turns is copy
  /// (source + expert) mod copies. What an even share means to balance_experts.
  turns,
};

/// shares[physical]: how many of a source's counts[expert] pairs each copy takes. In the order of (token, choice), the first ones
/// go to the expert's first copy, the next ones to its second, and so on. Throws InputError for counts of another size.
std::vector<int> share_rows(const ReplicaMap& map, CopyRule rule, int source, std::span<const int> counts);

/// physical[i]: the copy that pair i of a source takes; -1 stays -1. ids and physical are [tokens, topk], of any length, and may be
/// the same memory. counts [experts]: pairs of each logical expert are added to it. Throws InputError for an id outside
/// [-1, experts), spans that differ, or counts of another size.
void choose_copies(const ReplicaMap& map, CopyRule rule, int source, std::span<const std::int32_t> ids,
                   std::span<std::int32_t> physical, std::span<std::int64_t> counts);

/// A routing whose tokens live on ranks rank by rank, tokens_of_rank[rank] each, with physical ids. Throws InputError where the
/// numbers are not those of the routing.
Routing choose_copies(const ReplicaMap& map, CopyRule rule, const Routing& routing, std::span<const int> tokens_of_rank);

/// What a placement is asked for.
struct BalanceOptions {
  int ranks = 1;
  int extra = 0;  ///< copies beside one of each expert
  int nodes = 1;  ///< ranks [n * ranks / nodes, (n + 1) * ranks / nodes) are node n
  /// Several nodes: experts come in groups of consecutive ids (as routers with group limits have them) that stay together on a
  /// node. Default: every expert is a group.
  std::optional<int> groups;
};

/// A placement that evens out known loads (of each expert, in any unit, not negative), in the manner of DeepSeek's EPLB. Several
/// nodes: groups of experts go to nodes, as many to each, by falling load to the node that has least. In a node (or over all ranks)
/// further copies go to the expert whose copies have most to do, of those not on every rank of the node yet; then copies go by
/// falling load to the rank that has least to do, of those with room and without that expert. No rank holds more than its even
/// share of copies, rounded up. A copy is taken to have an even share of its expert's load. Ties go to the lower expert, node or
/// rank: the same loads give the same map everywhere. Throws InputError for options that do not fit together, numbers in the
/// message.
ReplicaMap balance_experts(std::span<const double> loads, const BalanceOptions& options);

/// Load of each rank under a map, copies sharing evenly.
std::vector<double> rank_loads(std::span<const double> loads, const ReplicaMap& map);
/// The greatest over the mean: 1 where all are equal, 0 where all are 0.
double max_over_mean(std::span<const double> values);

/// `wanted` with nodes and the ranks of a node renamed, and experts of a rank put in other places, so that few of them come to
/// ranks that do not hold them in `current`: what stays, stays in its place. The loads of ranks are those of `wanted`, in another
/// order. Both maps are even and of the same sizes (InputError).
ReplicaMap settle(const ReplicaMap& wanted, const ReplicaMap& current, int nodes = 1);

/// What a layer of physical experts is made from: the same source, with a map's copies as its experts. The source and what it views
/// must outlive it; the map is copied.
LayerSource physical_source(const LayerSource& source, const ReplicaMap& map);

/// How a BalancedLayer balances itself. The same on all ranks.
struct BalancingOptions {
  CopyRule rule = CopyRule::levelled;
  int nodes = 1;              ///< as BalanceOptions
  std::optional<int> groups;  ///< likewise
  /// Calls between looks at the loads, which all ranks take together, but not while a rank is masked; none: the layer changes only
  /// when it is told to (move_to).
  std::optional<int> every;
  /// A look leads to another placement if the busiest rank's rows, over those counted since the last look, would become fewer by at
  /// least this share.
  double worth = 0.02;
  /// Most bytes of weights that a rank copies at the end of a call.
  std::size_t copy_bytes = std::size_t{64} << 20;
};

/// What a BalancedLayer did so far on this rank.
struct BalancingReport {
  std::int64_t calls = 0;
  std::int64_t looks = 0;     ///< at the loads
  std::int64_t switches = 0;  ///< to other placements
  std::int64_t moved = 0;     ///< experts that came to this rank
  std::uint64_t copied_bytes = 0;
  double copy_seconds = 0;    ///< of copies at the ends of calls
  double switch_seconds = 0;  ///< of putting copied weights in place
  double imbalance = 0;       ///< max/mean of rows by rank over the calls before the last look, copies shared out by the rule
  double expected = 0;        ///< that of the placement that the look led to, or would have led to
};

/// A layer on one rank of the host engine whose experts may have copies and change places between calls, without a stop. It is a
/// MoeLayer of physical experts, of any way; ids and weights that come in are those of logical experts. Outputs of ways that sum
/// slots have the bits of a layer without copies, whatever the placement; those of two stages round by where experts live
/// (docs/numerics.md). Weights lie in a heap of this object, a cell an expert, on the rank that has it.
///
/// A change: new experts are copied from ranks that have them, over the heap, a part at the end of every call, beside those in use.
/// A rank that has all of its own says from which call on. What a rank said before a call, all others know when they return from
/// it, so all find in the same call that nobody is missing, and use the new placement from the next call on. No rank waits for
/// another beyond what the calls do, and nothing is agreed on outside of them.
class BalancedLayer {
 public:
  /// Collective. `source`: of logical experts; views of experts are read here and not needed later, those of a shared expert must
  /// stay. `first`: the placement to begin with, even (ReplicaMap::is_even). `memory`: what the workspace was sized for,
  /// layer_memory of LayerWeights::common(physical_source(source, first), first.placement()) merged with that of other layers;
  /// likewise `options`' configuration. Throws InputError on all ranks for what does not fit together or differs between them,
  /// for expert_slices, for a group of several nodes, and where memory for the weights does not suffice.
  BalancedLayer(Workspace& workspace, const ExchangeMemory& memory, const LayerSource& source, const ReplicaMap& first,
                const LayerOptions& options, const BalancingOptions& balancing = {});
  ~BalancedLayer();
  BalancedLayer(BalancedLayer&&) noexcept;
  BalancedLayer& operator=(BalancedLayer&&) noexcept;

  /// As MoeLayer::forward, with ids of logical experts. Throws InputError for ids outside [-1, experts) or that repeat within a
  /// token; the others, who have their FaultError, may call again after a reset.
  void forward(const LayerInput& input, const Step& step, bf16* out);
  /// Begins a change to that placement. All ranks do, between the same calls, with the same one. Throws InputError while a change
  /// is under way, for a placement of other sizes, and where an expert has no copy on a live rank. `settle` it first.
  void move_to(const ReplicaMap& map);
  bool is_moving() const;
  const ReplicaMap& map() const;  ///< in force for the next call
  const BalancingReport& report() const;
  const LayerReport& layer_report() const;  ///< of the last call, physical experts'
  /// Pairs of each logical expert that this rank brought since the last look.
  std::span<const std::int64_t> counts() const;

  /// After a fault, behind Workspace::reset, by all live ranks: those that the fault kept from a switch make up for it, changes
  /// that nobody has made are forgotten, and counting begins anew.
  void reset();
  /// Collective end: gives the memory of the weights back.
  void close();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace heddle
