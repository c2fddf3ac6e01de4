// The ways that a layer has bodies for: one, or with way auto all that do what its options ask for; and which of them a call goes.
#pragma once

#include <map>
#include <string>
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

/// In the order of real_ways, and the same on all ranks. Throws InputError where none is left, with every reason.
Candidates candidates_of(const LayerWeights& weights, const LayerOptions& options, Engine engine = Engine::host);

/// What ranks that choose have to agree on beside the candidates, as "name=value" lines.
std::string describe_choice(const LayerOptions& options);

/// Picks among candidates call by call.
class WayChooser {
 public:
  /// `machine`: what times are looked up by, unless the options say another.
  WayChooser(const LayerWeights& weights, const LayerOptions& options, Candidates candidates, const std::string& machine);

  const std::vector<LayerOptions>& options() const { return candidates_.options; }
  const std::string& machine() const { return key_.machine; }
  /// Which of options(). Looked up once a size.
  std::size_t pick(const Step& step);
  WayChoice explain(const Step& step) const;

 private:
  int tokens_of(const Step& step) const;
  WayChoice choose(int max_tokens) const;

  Candidates candidates_;
  std::vector<Way> ways_;
  bool asked_;  ///< for the one way
  bool tensor_parallel_;
  std::shared_ptr<const TuningTable> table_;
  TuningKey key_;
  PlanRequest request_;
  std::map<int, std::size_t> picked_;
};

/// What the planner is asked about a layer.
PlanRequest plan_request(const LayerWeights& weights, const LayerOptions& options);

}  // namespace heddle
