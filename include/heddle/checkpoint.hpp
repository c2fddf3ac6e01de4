// Reading one MoE layer from safetensors: a file, a sharded index or a folder (FILES of docs/checkpoints.md).
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "heddle/experts.hpp"
#include "heddle/routing.hpp"
#include "heddle/shape.hpp"

namespace heddle {

/// What a rank may ask of a checkpoint beyond its names.
struct CheckpointOptions {
  std::optional<int> layer_index;  ///< which layer, where the file holds several
};

/// The shared expert(s) of a layer, fused into one wider expert where a checkpoint holds several;
/// its weights may be of another kind than the routed ones.
struct SharedExpert {
  ExpertWeights weights;
  int intermediate = 0;
  std::vector<float> gate;  ///< [H], empty: not gated; else its result is multiplied by sigmoid(gate . x)
};

/// One layer of a memory-mapped checkpoint. Views stay valid while this object lives; nothing but
/// the header and the experts that are asked for is read. All errors are InputError, one line.
class LayerCheckpoint {
 public:
  static LayerCheckpoint open(const std::string& path, const CheckpointOptions& options = {});
  LayerCheckpoint(LayerCheckpoint&&) noexcept;
  LayerCheckpoint& operator=(LayerCheckpoint&&) noexcept;
  ~LayerCheckpoint();

  const LayerShape& shape() const;                    ///< topk is 0 where neither file nor config.json tells; clamp from config.json
  WeightKind kind() const;                            ///< of the routed experts
  ExpertWeights expert(int id) const;                 ///< validated views
  const std::optional<SharedExpert>& shared() const;
  bool has_router() const;
  std::span<const float> router_weights() const;      ///< [E, H], widened exactly; empty without a router
  std::span<const float> router_bias() const;         ///< [E] or empty
  const std::optional<RouterOptions>& router_options() const;  ///< from config.json

 private:
  struct Impl;
  explicit LayerCheckpoint(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

/// A batch: hidden states, choices if the file has them, and how tokens are split over ranks.
struct Batch {
  int tokens = 0;
  int hidden = 0;
  std::vector<bf16> hidden_states;            ///< [T, H]
  std::optional<Routing> routing;             ///< absent: the layer's router chooses
  std::vector<int> tokens_per_rank;           ///< summing to T; empty: split evenly, first ranks take the remainder
};

/// Reads FILES' batch tensors: hidden_states, topk_ids, topk_weights, tokens_per_rank.
Batch read_batch(const std::string& path);

/// One tensor to write; dtype is a safetensors name (BF16, F32, I32, U8, F8_E4M3, F8_E8M0 ...).
struct TensorOut {
  std::string name;
  std::string dtype;
  std::vector<std::int64_t> shape;
  std::span<const std::byte> data;
};

/// Writes a safetensors file beside its final name, flushes it and renames it: either all of it
/// appears or nothing. Throws InputError (kind input) with errno's text, e.g. on a full disk.
void write_safetensors(const std::string& path, std::span<const TensorOut> tensors);

}  // namespace heddle
