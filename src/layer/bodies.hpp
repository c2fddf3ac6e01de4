// What stands behind MoeLayer: a body for every way that a call may go, the choice among them, the passes of a call, the router.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "layer/body.hpp"
#include "layer/candidates.hpp"

namespace heddle {

class LayerBodies {
 public:
  /// Makes a way's body.
  using Make = std::function<std::unique_ptr<LayerBody>(const LayerOptions& options)>;
  LayerBodies(const LayerWeights& weights, const LayerOptions& options, const Make& make);

  void forward(const LayerInput& input, const Step& step, bf16* out);
  void forward(int tokens, const bf16* hidden, const Step& step, bf16* out);
  const Routing& routing() const { return routing_; }
  const LayerReport& report() const { return report_; }
  WayChoice explain(const Step& step) const;
  void update_expert(int local, const ExpertWeights& weights);

 private:
  LayerShape shape_;
  LayerOptions options_;
  int ranks_;
  std::optional<LayerRouter> router_;
  WayChooser chooser_;
  std::vector<std::unique_ptr<LayerBody>> bodies_;  ///< a candidate
  Routing routing_;
  LayerReport report_;
};

}  // namespace heddle
