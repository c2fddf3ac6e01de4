// The ways that a layer has bodies for: one, or with way auto all that do what its options ask for; and which of them a call goes.
#pragma once

#include <functional>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "heddle/layer.hpp"
#include "heddle/plan.hpp"
#include "heddle/tuning.hpp"

namespace heddle {

/// Who computes: GPUs leave out what their hosts wait for, and what the fused kernel does not take.
enum class Engine : std::uint8_t { host, gpus };

struct Candidates {
  std::vector<LayerOptions> options;  ///< as of a layer of that way alone
  std::vector<RefusedWay> refused;    ///< the others of the real ways
};

/// Why a candidate cannot be made here, beyond its options; empty: it can. Decides by what all ranks know alike.
using CandidateCheck = std::function<std::string(const ExchangeOptions&)>;

/// In the order of real_ways, and the same on all ranks. Throws InputError where none is left, with every reason. A way that was
/// asked for by name is not checked here.
Candidates candidates_of(const LayerWeights& weights, const LayerOptions& options, Engine engine = Engine::host,
                         const CandidateCheck& check = {});

/// What ranks that choose have to agree on beside the candidates, as "name=value" lines.
std::string describe_choice(const LayerOptions& options);

/// Picks among candidates call by call.
class WayChooser {
 public:
  /// `machine`: what times are looked up by, unless the options say another.
  WayChooser(const LayerWeights& weights, const LayerOptions& options, Candidates candidates, const std::string& machine);

  const std::vector<LayerOptions>& options() const { return candidates_.options; }
  const std::string& machine() const { return key_.machine; }
  /// Which of options(). Looked up once a size. `not_now`: candidates that cannot be called at present, the same ones on all
  /// ranks; where no other is left they are taken all the same, and say themselves what is wrong.
  std::size_t pick(const Step& step, std::span<const RefusedWay> not_now = {});
  WayChoice explain(const Step& step, std::span<const RefusedWay> not_now = {}) const;

 private:
  int tokens_of(const Step& step) const;
  std::vector<Way> usable(std::span<const RefusedWay> not_now) const;

  Candidates candidates_;
  std::vector<Way> ways_;
  bool asked_;  ///< for the one way
  bool tensor_parallel_;
  std::shared_ptr<const TuningTable> table_;
  TuningKey key_;
  PlanRequest request_;
  std::map<std::pair<int, std::vector<Way>>, std::size_t> picked_;  ///< by tokens and usable ways
};

/// What the planner is asked about a layer.
PlanRequest plan_request(const LayerWeights& weights, const LayerOptions& options);

}  // namespace heddle
