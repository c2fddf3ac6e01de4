// One MoE layer over a tensor table: everything checked that needs no bytes, the rest read when asked for.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "checkpoint/expert_source.hpp"
#include "checkpoint/model_config.hpp"
#include "checkpoint/tensor_table.hpp"
#include "heddle/checkpoint.hpp"

namespace heddle::checkpoint {

/// A value made at its first use, by one thread while others wait; a failed attempt may be repeated.
template <typename Value>
class Lazy {
 public:
  template <typename Make>
  const Value& get(Make&& make) {
    const std::lock_guard lock(mutex_);
    if (!value_) value_.emplace(make());
    return *value_;
  }

 private:
  std::mutex mutex_;
  std::optional<Value> value_;
};

/// What LayerCheckpoint offers; see there. Apart from it so that a layer can be read from memory as well.
class Layer {
 public:
  Layer(TensorTable table, ModelConfig config, const CheckpointOptions& options);

  const std::string& prefix() const { return names_.prefix; }
  const LayerShape& shape() const { return shape_; }
  WeightKind kind() const { return experts_->kind(); }
  ExpertWeights expert(int id);
  const std::optional<SharedExpert>& shared();
  bool has_router() const { return router_ != nullptr; }
  std::span<const float> router_weights();
  std::span<const float> router_bias();
  const std::optional<RouterOptions>& router_options() const;

 private:
  struct LoadedExpert {
    OwnedMemory memory;
    ExpertWeights weights;
  };

  void check_config() const;
  void find_router();
  void find_shared();
  std::optional<SharedExpert> load_shared();

  TensorTable table_;
  ModelConfig config_;
  LayerNames names_;
  std::unique_ptr<ExpertSource> experts_;
  LayerShape shape_;
  const Tensor* router_ = nullptr;
  const Tensor* router_bias_ = nullptr;
  std::optional<ExpertTensors> shared_;
  const Tensor* shared_gate_ = nullptr;

  std::vector<Lazy<LoadedExpert>> loaded_experts_;
  OwnedMemory shared_memory_;
  Lazy<std::optional<SharedExpert>> loaded_shared_;
  Lazy<std::vector<float>> loaded_router_, loaded_bias_;
};

}  // namespace heddle::checkpoint
