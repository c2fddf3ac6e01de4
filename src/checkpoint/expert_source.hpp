// The routed experts of a layer, one tensor a matrix or all experts fused; and the shared expert.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "checkpoint/matrix_source.hpp"
#include "checkpoint/model_config.hpp"
#include "checkpoint/naming.hpp"
#include "heddle/experts.hpp"

namespace heddle::checkpoint {

/// Sizes of one expert: gate and up [intermediate, hidden], down [hidden, intermediate].
struct ExpertSize {
  int hidden = 0;
  int intermediate = 0;
};

/// All experts of a layer. Names, types and shapes have been checked; bytes are read by load().
class ExpertSource {
 public:
  virtual ~ExpertSource() = default;
  ExpertSource() = default;
  ExpertSource(const ExpertSource&) = delete;
  ExpertSource& operator=(const ExpertSource&) = delete;

  virtual int experts() const = 0;
  virtual ExpertSize size() const = 0;
  virtual WeightKind kind() const = 0;
  /// Checked views of one expert; id in [0, experts()). `memory` must live as long as they do.
  virtual ExpertWeights load(int id, OwnedMemory& memory) const = 0;
};

/// One expert whose matrices are tensors of their own, e.g. the shared one.
struct ExpertTensors {
  MatrixSource gate, up, down;
  ExpertSize size() const { return {gate.cols, gate.rows}; }
  ExpertWeights view(OwnedMemory& memory) const;
};

/// Finds and checks the expert whose names start with `stem`; the matrices must fit each other and be of one kind.
ExpertTensors find_expert(TensorTable& table, const std::string& stem);

/// The routed experts of the layer. Throws InputError naming what is missing or does not fit.
std::unique_ptr<ExpertSource> find_experts(TensorTable& table, const LayerNames& layer, const ModelConfig& config);

/// The same for the fused naming (expert_fused.cpp).
std::unique_ptr<ExpertSource> find_fused_experts(TensorTable& table, const LayerNames& layer, const ModelConfig& config);

}  // namespace heddle::checkpoint
