// Shapes of published models, from their configuration files. What was not confirmed stays empty.
#include "heddle/plan.hpp"
#include "plan/find.hpp"

namespace heddle {

namespace {

using enum WeightKind;

std::vector<ModelPreset> deepseek() {
  return {
      {.name = "deepseek-v3",
       .shape = {7168, 2048, 256, 8, {}},
       .shared_experts = 1,
       .weights = {fp8_block},
       .router = RouterPreset{Score::sigmoid, true, 8, 4, true, 2.5f}},
      {.name = "deepseek-v4-flash",
       .shape = {4096, 2048, 256, 6, 10.0f},
       .shared_experts = 1,
       .weights = {mxfp4},
       .shared_weights = fp8_block,
       .router = RouterPreset{Score::sqrtsoftplus, true, 1, 1, true, 1.5f},
       .layers = 43,
       .note = "43 layers; the first 3 route by a hash table"},
      {.name = "deepseek-v4-pro",
       .shape = {7168, 3072, 384, 6, 10.0f},
       .router = RouterPreset{Score::sqrtsoftplus, true, 1, 1, {}, {}},
       .note = "shared experts, weight format and router factor not confirmed"},
      {.name = "deepseek-v4.1-flash",
       .shape = {5120, 2304, 384, 6, 10.0f},
       .shared_experts = 1,
       .weights = {mxfp4},
       .router = RouterPreset{Score::sqrtsoftplus, true, 1, 1, true, 1.5f},
       .layers = 40,
       .note = "40 layers"},
  };
}

std::vector<ModelPreset> qwen_and_glm() {
  return {
      {.name = "qwen3-235b",
       .shape = {4096, 1536, 128, 8, {}},
       .shared_experts = 0,
       .weights = {bf16, fp8_block},
       .router = RouterPreset{Score::softmax, false, 1, 1, true, 1.0f}},
      {.name = "qwen3.5-397b",
       .shape = {4096, 1024, 512, 10, {}},
       .shared_experts = 1,
       .weights = {bf16, fp8_block},
       .router = RouterPreset{Score::softmax, false, 1, 1, {}, 1.0f},
       .note = "the shared expert is gated"},
      {.name = "qwen3.8-flash-next",
       .shape = {2560, 640, 512, 10, {}},
       .weights = {fp8_block},
       .note = "shared experts, clamp, fp8 scale layout and router not confirmed"},
      {.name = "glm-4.5",
       .shape = {5120, 1536, 160, 8, {}},
       .shared_experts = 1,
       .weights = {bf16, fp8_block},
       .router = RouterPreset{Score::sigmoid, true, 1, 1, {}, 2.5f}},
      {.name = "glm-5",
       .shape = {6144, 2048, 256, 8, {}},
       .shared_experts = 1,
       .weights = {fp8_block},
       .router = RouterPreset{Score::sigmoid, true, 1, 1, {}, 2.5f}},
  };
}

std::vector<ModelPreset> others() {
  return {
      {.name = "kimi-k2",
       .shape = {7168, 2048, 384, 8, {}},
       .shared_experts = 1,
       .weights = {fp8_block},
       .router = RouterPreset{Score::sigmoid, false, 1, 1, {}, 2.827f}},
      {.name = "kimi-k3",
       .shape = {3584, 3072, 896, 16, {}},
       .shared_experts = 2,
       .weights = {mxfp4},
       .router = RouterPreset{Score::sigmoid, false, 1, 1, true, 1.0f},
       .plan_only = true,
       .note = "hidden is the width of the routed latent"},
      {.name = "gpt-oss-120b",
       .shape = {2880, 2880, 128, 4, {}},
       .shared_experts = 0,
       .weights = {mxfp4},
       .router = RouterPreset{Score::softmax_topk, false, 1, 1, {}, 1.0f},
       .plan_only = true,
       .note = "weights have biases"},
      {.name = "mixtral-8x7b",
       .shape = {4096, 14336, 8, 2, {}},
       .shared_experts = 0,
       .weights = {bf16},
       .router = RouterPreset{Score::softmax, false, 1, 1, true, 1.0f}},
      {.name = "minimax-m2",
       .shape = {3072, 1536, 256, 8, {}},
       .shared_experts = 0,
       .weights = {fp8_block},
       .router = RouterPreset{Score::sigmoid, true, 1, 1, {}, 1.0f}},
  };
}

std::vector<ModelPreset> all_presets() {
  std::vector<ModelPreset> all = deepseek();
  for (std::vector<ModelPreset> family : {qwen_and_glm(), others()}) {
    all.insert(all.end(), family.begin(), family.end());
  }
  return all;
}

}  // namespace

std::span<const ModelPreset> model_presets() {
  static const std::vector<ModelPreset> all = all_presets();
  return all;
}

const ModelPreset& find_preset(std::string_view name) { return plan::find_named(model_presets(), name, "preset"); }

}  // namespace heddle
