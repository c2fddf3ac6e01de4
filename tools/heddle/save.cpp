// --save-inputs: the layer and the batch as a run used them, in files that give the same run again.
#include <fmt/format.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "inputs.hpp"
#include "json_file.hpp"
#include "words.hpp"

namespace heddle::tool {

namespace {

/// Bytes of arrays that live until the file is written.
template <class T>
std::span<const std::byte> bytes_of(const std::vector<T>& values) {
  return std::as_bytes(std::span<const T>(values));
}

/// Names of the DeepSeek-V4 and Hugging Face kinds, so that any reader of checkpoints finds its way.
void add_matrix(std::vector<TensorOut>& tensors, std::vector<std::vector<float>>& numbers, const std::string& name,
                const WeightMatrix& matrix) {
  const std::int64_t rows = matrix.rows;
  const std::int64_t cols = matrix.cols;
  const auto blocks = [](std::int64_t size) { return (size + 127) / 128; };
  switch (matrix.kind) {
    case WeightKind::bf16:
      tensors.push_back({name + ".weight", "BF16", {rows, cols}, matrix.values});
      break;
    case WeightKind::fp8_block:
      tensors.push_back({name + ".weight", "F8_E4M3", {rows, cols}, matrix.values});
      tensors.push_back({name + ".scale",
                         matrix.block_scale == ScaleFormat::f32 ? "F32" : "F8_E8M0",
                         {blocks(rows), blocks(cols)},
                         matrix.scales});
      break;
    case WeightKind::mxfp4:
      tensors.push_back({name + ".weight", "U8", {rows, cols / 2}, matrix.values});
      tensors.push_back({name + ".scale", "U8", {rows, cols / 32}, matrix.scales});
      break;
    case WeightKind::nvfp4:
      numbers.push_back({matrix.tensor_scale});
      tensors.push_back({name + ".weight", "U8", {rows, cols / 2}, matrix.values});
      tensors.push_back({name + ".weight_scale", "F8_E4M3", {rows, cols / 16}, matrix.scales});
      tensors.push_back({name + ".weight_scale_2", "F32", {1}, bytes_of(numbers.back())});
      break;
    case WeightKind::mxfp8:
      tensors.push_back({name + ".weight", "F8_E4M3", {rows, cols}, matrix.values});
      tensors.push_back({name + ".weight_scale", "U8", {rows, cols / 32}, matrix.scales});
      break;
  }
}

void save_layer(const Inputs& inputs, const std::string& path) {
  const LayerSource& source = inputs.source;
  std::vector<TensorOut> tensors;
  std::vector<std::vector<float>> numbers;
  numbers.reserve(static_cast<std::size_t>(3 * source.shape.experts + 8));
  const auto add_expert = [&](const std::string& name, const ExpertWeights& expert) {
    add_matrix(tensors, numbers, name + ".w1", expert.gate);
    add_matrix(tensors, numbers, name + ".w3", expert.up);
    add_matrix(tensors, numbers, name + ".w2", expert.down);
  };
  for (int e = 0; e < source.shape.experts; ++e) add_expert(fmt::format("ffn.experts.{}", e), source.expert(e));
  if (source.shared) add_expert("ffn.shared_experts", source.shared->weights);
  if (source.shared && !source.shared->gate.empty()) {
    tensors.push_back({"ffn.shared_expert_gate.weight", "F32", {1, source.shape.hidden}, bytes_of(source.shared->gate)});
  }
  const bool from_file = inputs.checkpoint != nullptr;
  const auto router = from_file ? inputs.checkpoint->router_weights() : std::span<const float>(inputs.synthetic->router_weights());
  const auto bias = from_file ? inputs.checkpoint->router_bias() : std::span<const float>(inputs.synthetic->router_bias());
  if (!router.empty())
    tensors.push_back({"ffn.gate.weight", "F32", {source.shape.experts, source.shape.hidden}, std::as_bytes(router)});
  if (!bias.empty()) tensors.push_back({"ffn.gate.bias", "F32", {source.shape.experts}, std::as_bytes(bias)});
  write_safetensors(path, tensors);
}

void save_batch(const Inputs& inputs, const std::string& path) {
  const std::int64_t tokens = inputs.tokens();
  const std::int64_t topk = inputs.routing.topk;
  const std::vector<TensorOut> tensors{
      {"hidden_states", "BF16", {tokens, inputs.source.shape.hidden}, bytes_of(inputs.hidden_states)},
      {"topk_ids", "I32", {tokens, topk}, bytes_of(inputs.routing.ids)},
      {"topk_weights", "F32", {tokens, topk}, bytes_of(inputs.routing.weights)},
      {"tokens_per_rank", "I32", {static_cast<std::int64_t>(inputs.tokens_per_rank.size())}, bytes_of(inputs.tokens_per_rank)}};
  write_safetensors(path, tensors);
}

}  // namespace

void save_inputs(const Inputs& inputs, const std::string& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) throw InputError(fmt::format("--save-inputs {}: {}", folder, error.message()));
  save_layer(inputs, folder + "/layer.safetensors");
  save_batch(inputs, folder + "/batch.safetensors");
  nlohmann::ordered_json config{{"hidden_size", inputs.source.shape.hidden},
                                {"moe_intermediate_size", inputs.source.shape.intermediate},
                                {"n_routed_experts", inputs.source.shape.experts},
                                {"num_experts_per_tok", inputs.routing.topk}};
  if (inputs.options.clamp) config["swiglu_limit"] = *inputs.options.clamp;
  write_json(folder + "/config.json", config);
}

}  // namespace heddle::tool
