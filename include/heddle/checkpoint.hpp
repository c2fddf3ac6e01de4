// Reading one MoE layer from safetensors: a file, a sharded index or a folder (docs/files.md), and batches.
#pragma once

#include <cstddef>
#include <cstdint>
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
  std::vector<float> gate;                        ///< [H], empty: not gated; else its result is multiplied by sigmoid(gate . x)
  std::shared_ptr<const void> storage = nullptr;  ///< keeps converted weights alive; empty for views of a checkpoint
};

/// The same shared expert in mxfp4: opt-in, since it changes its values. Weights are widened to f32 (scales
/// multiplied); each row and 32 columns take the scale amax / 6 raised to the next power of two, and values
/// round to the nearest e2m1, ties to even; a group of zeros takes the scale 1. mxfp4 weights are returned
/// as they are. The result owns its weights through `storage`. Throws InputError where a value is not
/// finite or a column count is not a multiple of 32.
SharedExpert to_mxfp4(const SharedExpert& shared);

/// One layer of a memory-mapped checkpoint. Views stay valid while this object lives (moving it included);
/// nothing but headers, config.json and what is asked for is read. open() checks all names, types, shapes and
/// offsets of the layer; values (scales) are checked when an expert is first asked for. The const functions
/// may be called from several threads. All errors are InputError, one line: file, tensor, what, what would be right.
class LayerCheckpoint {
 public:
  /// `path`: a .safetensors file, a .safetensors.index.json, or a folder with an index or with .safetensors files.
  static LayerCheckpoint open(const std::string& path, const CheckpointOptions& options = {});
  LayerCheckpoint(LayerCheckpoint&&) noexcept;
  LayerCheckpoint& operator=(LayerCheckpoint&&) noexcept;
  ~LayerCheckpoint();

  const std::string& prefix() const;   ///< where the layer was found, e.g. "model.layers.3.mlp."
  const LayerShape& shape() const;     ///< topk is 0 where config.json does not tell; clamp from config.json
  WeightKind kind() const;             ///< of the routed experts
  ExpertWeights expert(int id) const;  ///< validated views, aligned to their elements
  const std::optional<SharedExpert>& shared() const;
  bool has_router() const;                        ///< false too where a hash table chooses (ids then come with the batch)
  std::span<const float> router_weights() const;  ///< [E, H], widened exactly; empty without a router
  std::span<const float> router_bias() const;     ///< [E], selection only; or empty
  /// From config.json; empty where it does not say how scores are made. Throws where it asks for a
  /// router that does not exist here (named in the message).
  const std::optional<RouterOptions>& router_options() const;

 private:
  struct Impl;
  explicit LayerCheckpoint(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

/// A batch: hidden states, choices if the file has them, and how tokens are split over ranks.
struct Batch {
  int tokens = 0;
  int hidden = 0;
  std::vector<bf16> hidden_states;   ///< [T, H]
  std::optional<Routing> routing;    ///< absent: the layer's router chooses
  std::vector<int> tokens_per_rank;  ///< summing to T; empty: split evenly, first ranks take the remainder
};

/// Reads a batch: hidden_states BF16 [T, H]; topk_ids I32 or I64 [T, k] and topk_weights F32 [T, k], or neither;
/// tokens_per_rank I32 [R] or absent. Other tensors are ignored. Throws InputError where shapes or sums disagree.
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
