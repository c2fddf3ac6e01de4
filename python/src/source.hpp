// Where weights come from, and one rank's share of them.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "heddle/layer.hpp"

namespace heddle::python {

/// A layer's weights with what keeps them: a mapped checkpoint, a drawn layer, or arrays of Python.
struct Source {
  LayerSource source;
  std::shared_ptr<const void> owner;
  std::string prefix;                   ///< of a checkpoint's tensors
  std::vector<float> router_weights;    ///< [E, H]; empty: no router
  std::vector<float> router_bias;       ///< [E] or empty
  std::optional<RouterOptions> router;  ///< where config.json says
  std::string router_refusal;           ///< why it does not, though it describes one
};

/// One rank's experts, as views into its source.
struct RankWeights {
  std::shared_ptr<const Source> source;
  LayerWeights weights;
};

/// None: contiguous, or with expert slices everywhere; else the rank of each expert.
Placement placement_of(nanobind::handle placement, const LayerShape& shape, int ranks);

}  // namespace heddle::python
