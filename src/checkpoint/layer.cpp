#include "checkpoint/layer.hpp"

#include <fmt/format.h>

#include <array>
#include <cstring>
#include <utility>

#include "checkpoint/describe.hpp"
#include "heddle/error.hpp"

namespace heddle::checkpoint {

namespace {

/// A BF16 or F32 tensor of the given shape, or null where there is none of this name.
const Tensor* find_plain(TensorTable& table, const std::string& tensor_name, const std::vector<std::int64_t>& shape) {
  const Tensor* const tensor = table.find(tensor_name);
  if (tensor == nullptr) return nullptr;
  if ((tensor->dtype != Dtype::bf16 && tensor->dtype != Dtype::f32) || tensor->shape != shape) {
    throw InputError(
        fmt::format("{}: is {}; BF16 or F32 {} is expected", tensor->label(), type_and_shape(*tensor), shape_text(shape)));
  }
  return tensor;
}

/// Exact f32 values of a BF16 or F32 tensor.
std::vector<float> widen(const Tensor& tensor) {
  const bool narrow = tensor.dtype == Dtype::bf16;
  std::vector<float> values(tensor.bytes.size() / (narrow ? 2 : 4));
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (narrow) {
      bf16 value;
      std::memcpy(&value, tensor.bytes.data() + 2 * i, 2);
      values[i] = to_float(value);
    } else {
      std::memcpy(&values[i], tensor.bytes.data() + 4 * i, 4);
    }
  }
  return values;
}

void require_config_size(const ModelConfig& config, std::string_view what, std::optional<int> told, int found,
                         const std::string& place) {
  if (!told || *told == found) return;
  throw InputError(fmt::format("{}: the experts have {} {}, but {} says {}", place, what, found, config.file, *told));
}

}  // namespace

Layer::Layer(TensorTable table, ModelConfig config, const CheckpointOptions& options)
    : table_(std::move(table)),
      config_(std::move(config)),
      names_(find_layer(table_, options.layer_index)),
      experts_(find_experts(table_, names_, config_)),
      loaded_experts_(static_cast<std::size_t>(experts_->experts())) {
  const auto [hidden, intermediate] = experts_->size();
  shape_ = {hidden, intermediate, experts_->experts(), config_.topk.value_or(0), config_.clamp};
  check_config();
  find_router();
  find_shared();
}

void Layer::check_config() const {
  require_config_size(config_, "hidden size", config_.hidden, shape_.hidden, table_.place());
  require_config_size(config_, "intermediate size", config_.intermediate, shape_.intermediate, table_.place());
  if (shape_.topk > shape_.experts) {
    throw InputError(fmt::format("{}: chooses {} experts a token of {}; at most all of them can be chosen", config_.file,
                                 shape_.topk, shape_.experts));
  }
}

void Layer::find_router() {
  const std::string gate = names_.prefix + "gate.";
  // Hash routing: a table from token ids to experts stands beside the gate; the ids must come with the batch.
  if (table_.names().contains(gate + "tid2eid")) return;
  router_ = find_plain(table_, gate + "weight", {shape_.experts, shape_.hidden});
  if (router_ == nullptr) return;
  const std::array<std::string, 3> bias_names{gate + "e_score_correction_bias", gate + "bias",
                                              names_.prefix + "e_score_correction_bias"};
  for (const std::string& bias_name : bias_names) {
    if (router_bias_ == nullptr) router_bias_ = find_plain(table_, bias_name, {shape_.experts});
  }
}

void Layer::find_shared() {
  for (const char* word : {"shared_experts.", "shared_expert."}) {
    const std::string stem = names_.prefix + word;
    if (table_.endings(stem).empty()) continue;
    if (shared_)
      throw InputError(fmt::format("{}: {} has both shared_experts and shared_expert", table_.place(), in_quotes(names_.prefix)));
    shared_ = find_expert(table_, stem);
    if (shared_->gate.cols != shape_.hidden) {
      throw InputError(fmt::format("{}: has hidden size {}; the routed experts have {}", shared_->gate.values->label(),
                                   shared_->gate.cols, shape_.hidden));
    }
  }
  if (!shared_ && config_.shared_experts > 0) {
    throw InputError(fmt::format("{}: the shared expert {} is missing; {} says there is one (n_shared_experts {})", table_.place(),
                                 in_quotes(names_.prefix + "shared_experts."), config_.file, config_.shared_experts));
  }
  if (shared_) shared_gate_ = find_plain(table_, names_.prefix + "shared_expert_gate.weight", {1, shape_.hidden});
}

ExpertWeights Layer::expert(int id) {
  if (id < 0 || id >= shape_.experts) {
    throw InputError(
        fmt::format("{}: expert {} asked for; the layer has {} (0 to {})", table_.place(), id, shape_.experts, shape_.experts - 1));
  }
  return loaded_experts_[static_cast<std::size_t>(id)]
      .get([&] {
        LoadedExpert loaded;
        loaded.weights = experts_->load(id, loaded.memory);
        return loaded;
      })
      .weights;
}

const std::optional<SharedExpert>& Layer::shared() {
  return loaded_shared_.get([&] { return load_shared(); });
}

std::optional<SharedExpert> Layer::load_shared() {
  if (!shared_) return std::nullopt;
  SharedExpert expert;
  expert.weights = shared_->view(shared_memory_);
  expert.intermediate = shared_->size().intermediate;
  if (shared_gate_ != nullptr) expert.gate = widen(*shared_gate_);
  return expert;
}

std::span<const float> Layer::router_weights() {
  return loaded_router_.get([&] { return router_ != nullptr ? widen(*router_) : std::vector<float>(); });
}

std::span<const float> Layer::router_bias() {
  return loaded_bias_.get([&] { return router_bias_ != nullptr ? widen(*router_bias_) : std::vector<float>(); });
}

const std::optional<RouterOptions>& Layer::router_options() const {
  if (!config_.router_refusal.empty()) throw InputError(config_.router_refusal);
  return config_.router;
}

}  // namespace heddle::checkpoint
