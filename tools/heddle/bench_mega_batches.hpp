// `heddle bench mega --batches 2`: two batches of one size in flight at once, each in a context of its own (a workspace, layers and
// a stream a GPU), against the two in a row and against one batch of both.
#pragma once

#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "bench_attention.hpp"
#include "bench_mega_bed.hpp"
#include "bench_mega_outputs.hpp"

namespace heddle::tool {

/// The routing of `tokens` tokens a rank from token `first` on.
BatchRouting part_of(const BatchRouting& whole, int first, int tokens);

/// What is measured, and how.
struct TwoPlan {
  const LayerSource& source;
  LayerWay way;
  ExchangeMemory memory;          ///< of a batch's heap
  ExchangeMemory memory_of_both;  ///< of one of double size
  int copies = 1;                 ///< of the layer, so that its weights are not in the L2
  std::optional<int> exchange_sms = {};
  const AttentionStandIn* attention = nullptr;  ///< before each layer; null: none
  int replays = 1;
  std::function<int(int copies)> calls = {};                ///< a replay
  std::function<void(const std::string& what)> begin = {};  ///< told what is under way
  std::function<void()> give_up = {};
};

class TwoBatches {
 public:
  /// `whole`: of 2 * tokens a rank; the first half is `first`'s.
  TwoBatches(Lanes& lanes, Batch& first, const BatchRouting& whole, int tokens, std::uint64_t seed);

  /// All three (docs/json.md, `two_batches`); one that does not fit or is refused says so in its place. `alone`: layers of the way
  /// with all SMs and the first batch's workspace, which are destroyed before others are made. Throws what went wrong on GPUs.
  nlohmann::ordered_json compare(std::unique_ptr<MegaBed> alone, const TwoPlan& plan);

 private:
  using Json = nlohmann::ordered_json;

  Json in_a_row(MegaBed& bed, const TwoPlan& plan);
  Json at_once(const TwoPlan& plan);
  Json beside(MegaBed& one, MegaBed& other, const TwoPlan& plan, int calls);
  Json as_one(const TwoPlan& plan);
  /// The stand-in for attention, if any, of so many batches, on all GPUs.
  void attend(const TwoPlan& plan, int batches, bool second_stream) const;
  /// A replay of `work`, or with eager calls the same queued anew, and what it took a call.
  Json timed(const TwoPlan& plan, bool is_eager, int calls, const std::function<void()>& work, const std::function<void()>& check);
  void poison();
  /// Of both batches, first of the first. Throws Error of kind check where some were not written or are not finite.
  std::vector<RankOutputs> outputs();

  Lanes& lanes_;
  int tokens_;
  Batch& first_;
  Batch other_, both_;
  std::vector<RankOutputs> expected_;  ///< those of the two in a row; empty: there are none
};

/// A line of a table that says so, what is gained by being at once included.
std::string two_line(const nlohmann::ordered_json& two);
/// What was wrong with the outputs; empty: nothing.
std::string two_wrong(const nlohmann::ordered_json& two);

}  // namespace heddle::tool
