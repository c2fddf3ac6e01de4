// config.json beside a checkpoint: sizes to check against, router settings, clamp.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "heddle/routing.hpp"

namespace heddle::checkpoint {

/// What config.json says of the layer; what it does not say stays empty.
struct ModelConfig {
  std::string file;  ///< for messages; empty: there is no config.json
  std::optional<int> hidden, intermediate, experts, topk;
  int shared_experts = 0;
  std::optional<float> clamp;
  std::optional<RouterOptions> router;
  std::string router_refusal;  ///< why there is no router though config.json describes one; one line
};

/// Reads the text of a config.json. Throws InputError where it is damaged or a field has an impossible value.
ModelConfig parse_model_config(std::string_view text, const std::string& file);

/// folder/config.json, or an empty result where there is none.
ModelConfig read_model_config(const std::filesystem::path& folder);

}  // namespace heddle::checkpoint
