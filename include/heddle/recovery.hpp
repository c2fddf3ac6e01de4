// Layers that go on when ranks are lost (exchange-ways article, section 9.3; docs/recovery.md). When a rank dies or stops
// answering, the survivors agree on who is left, its experts move to them, and the step is run again:
//
//   RecoveringLayers layers(group, {{&source, Placement::contiguous(experts, ranks), options}});
//   layers.step([&] { layers.layer(0).forward(input, step, out); });
//
// A rank that was lost comes back the same way. Host engine, on one node or, with a store that all reach, over several; GPUs have
// device_recovery.hpp.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "heddle/error.hpp"
#include "heddle/group.hpp"
#include "heddle/layer.hpp"
#include "heddle/routing.hpp"

namespace heddle {

/// Who is in: what ranks agree on. Each mask has a generation, and a generation has one mask.
struct Members {
  std::uint32_t generation = 0;  ///< 0: all ranks, as the group began
  std::vector<bool> live;
};

/// The others went on without this rank: it was silent for too long, or another process has taken its place. Its outputs of the
/// step are void; it may come back (RecoveringLayers::rejoin).
class LostRankError : public Error {
 public:
  LostRankError(int rank, std::uint32_t generation, const Members& now);
  int rank() const noexcept { return rank_; }
  /// Who is in without it, and since when.
  const Members& members() const noexcept { return members_; }

 private:
  int rank_;
  Members members_;
};

/// Where experts live while only some ranks do. The same on every rank, and of the placement that all began with and the mask
/// alone: who comes back, or joins late, gets the same answer. Ranks that are not live hold none.
using Rehome = std::function<Placement(const Placement& original, const std::vector<bool>& live)>;

/// Experts of live ranks stay; the others go, in the order of their numbers, to the live rank that has the fewest, the lower number
/// first. Throws InputError for slices of experts, which nobody else has, and where no rank is live.
Placement spread_over_survivors(const Placement& original, const std::vector<bool>& live);

/// For experts that are copies of others: expert e is a copy of logical_of[e]. A lost copy goes to a live rank that has another one
/// of the same, whose weights are there already; among several, and where there is none, as above. The rule throws InputError for a
/// placement of another number of experts.
Rehome beside_copies(std::vector<int> logical_of);

struct RecoveryOptions {
  /// How long a roll call waits for a rank that an error has named: that one has already let a deadline pass.
  std::chrono::milliseconds grace{100};
  /// How long it waits for any other rank; it has to finish what it computes before it hears of the call. Default: three deadlines.
  /// Over several nodes one deadline is enough for a node of which an error has named a rank and nobody comes.
  std::optional<std::chrono::milliseconds> patience;
  Rehome rehome = spread_over_survivors;
};

/// One interruption of this rank's steps and where its time went, seconds. From `noticed` on they add up to the whole but for
/// `lost`, which lies before.
struct Interruption {
  Members members;     ///< afterwards
  std::string reason;  ///< the error that began it, or that another rank called
  std::uint32_t step = 0;
  bool run_again = false;  ///< else the step turned out to be done on all ranks, or had not begun
  std::chrono::steady_clock::time_point noticed;
  double lost = 0;        ///< of the attempt that was given up, from its begin to `noticed`
  double agree = 0;       ///< the roll call: until the mask was known
  double meet = 0;        ///< until all survivors had left the old memory
  double memory = 0;      ///< new heap
  double experts = 0;     ///< placement, weights, layers, until all survivors had theirs
  double again = 0;       ///< the step, once more
  int experts_moved = 0;  ///< to this rank
  int roll_calls = 1;     ///< more where ranks were lost during the recovery
};

/// How a rank's process enters.
enum class Entry : std::uint8_t {
  together,  ///< with all others, as the group begins
  late,      ///< into a group that is running (rejoin_process_group)
};

/// A context of layers on one rank, made anew whenever the mask changes. Everything is called by the same thread.
class RecoveringLayers {
 public:
  /// Collective with Entry::together: all ranks have the same layers and options. With Entry::late waits as rejoin() does. The
  /// group and the sources must outlive this. Errors as of Workspace and MoeLayer; InputError for what cannot move: expert slices,
  /// and tensor-parallel attention by other ways than gather, where a lost rank's slice of the batch would be nobody's.
  RecoveringLayers(Group& group, std::vector<ContextLayer> layers, const RecoveryOptions& options = {},
                   Entry entry = Entry::together);
  ~RecoveringLayers();
  RecoveringLayers(RecoveringLayers&&) noexcept;
  RecoveringLayers& operator=(RecoveringLayers&&) noexcept;

  /// One step: `body` calls layers, as often as it likes, the same on all ranks and without tokens too. Returns when every live
  /// rank has finished the step. Where a rank is lost, comes back, or ends its step by an exception, all live ranks agree anew and
  /// run `body` again from its beginning: it must leave its inputs as they are and may run any number of times. What it throws
  /// beside faults is thrown here, and the rank has until the others' patience ends to come again with the same step. LostRankError
  /// if the others went on without this rank; Error of kind fault where this rank does not reach the group's store; InputError if
  /// there is no room for what moved; Error of kind fault on all live ranks where the step or what it needs has failed again behind
  /// eight roll calls in a row that lost and brought back nobody.
  void step(const std::function<void()>& body);
  /// A step of one call of layer 0.
  void forward(const LayerInput& input, const Step& step, bf16* out);
  /// After a LostRankError: asks to come in and waits until the others have made room, which they do between two of their steps.
  /// Throws FaultError if they do not within the patience. Who was in again and lost again before it ended a step first waits here,
  /// a deadline and each time twice as long, up to eight: what fails may be a link that is still cut.
  void rejoin();

  /// Valid until the step ends or throws.
  MoeLayer& layer(std::size_t number);
  const Placement& placement(std::size_t number) const;  ///< as it is now
  const Members& members() const;
  std::uint32_t steps() const;  ///< that all live ranks have finished; the same on all of them, also for one that came late
  const std::vector<Interruption>& interruptions() const;  ///< of this rank, in order
  /// Collective end.
  void close();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace heddle
