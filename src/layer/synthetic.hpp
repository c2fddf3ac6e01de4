// A layer drawn from a seed, for runs without a checkpoint. Experts are drawn when they are asked for,
// each from the seed and its own number, so a rank draws only its own and all ranks draw alike.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "heddle/checkpoint.hpp"
#include "heddle/layer.hpp"

namespace heddle {

struct SyntheticOptions {
  LayerShape shape;
  WeightKind kind = WeightKind::bf16;
  std::optional<WeightKind> shared_kind;  ///< none: no shared expert
  int shared_intermediate = 0;
  bool selection_bias = false;  ///< of the router
  std::uint64_t seed = 0;
};

class SyntheticLayer {
 public:
  explicit SyntheticLayer(const SyntheticOptions& options);
  /// Valid while this object lives. Its functions may be called from several threads.
  LayerSource source();
  ExpertWeights expert(int id);
  const std::vector<float>& router_weights() const { return router_weights_; }  ///< [E, H], bf16 values
  const std::vector<float>& router_bias() const { return router_bias_; }        ///< [E] or empty

 private:
  struct Stored {
    std::vector<std::byte> values[3], scales[3];
    ExpertWeights weights;
  };
  std::unique_ptr<Stored> draw(std::uint64_t number, WeightKind kind, int intermediate) const;

  SyntheticOptions options_;
  std::mutex mutex_;
  std::map<int, std::unique_ptr<Stored>> experts_;
  std::unique_ptr<Stored> shared_;
  std::vector<float> router_weights_, router_bias_;
};

/// How the hidden states of a synthetic batch are spread.
enum class HiddenStates : std::uint8_t {
  gaussian,
  heavy_tailed,  ///< a few outlier channels some twenty times larger, as real models have them
};

std::vector<bf16> draw_hidden_states(int tokens, int hidden, HiddenStates kind, std::uint64_t seed);

}  // namespace heddle
