// Finding the layer: which names are experts, what stands before them, and which layer that is.
#pragma once

#include <optional>
#include <set>
#include <string>
#include <string_view>

#include "checkpoint/tensor_table.hpp"

namespace heddle::checkpoint {

/// The experts that share one prefix. Every supported naming writes "experts." after it, so the prefix
/// ("model.layers.3.mlp.", "layers.3.ffn.", ...) needs no list of models.
struct LayerNames {
  std::string prefix;
  bool fused = false;  ///< experts.gate_up_proj and experts.down_proj instead of experts.{e}.*
  std::set<int> ids;   ///< of experts.{e}.*
};

/// The layer's number in its prefix: after "layers", otherwise the last number; nothing where there is none.
std::optional<int> layer_number(std::string_view prefix);

/// The layer to read. Throws InputError that lists what is there where none or several fit.
LayerNames find_layer(const TensorTable& table, std::optional<int> layer_index);

/// How an expert's three matrices are called.
struct MatrixNames {
  std::string_view gate, up, down;
};

/// From the names that follow `stem` ("...experts.0." or "...shared_experts."): gate_proj/up_proj/down_proj or w1/w3/w2.
/// Nothing where there is neither. Throws InputError where there are both.
std::optional<MatrixNames> find_matrix_names(const TensorTable& table, const std::string& stem);

}  // namespace heddle::checkpoint
