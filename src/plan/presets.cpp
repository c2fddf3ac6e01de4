// Shapes of published models, from their configuration files. What was not confirmed stays empty.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "heddle/error.hpp"
#include "heddle/plan.hpp"

namespace heddle {

namespace {

using enum WeightKind;

std::vector<ModelPreset> deepseek() {
  return {
      {.name = "deepseek-v3",
       .shape = {7168, 2048, 256, 8, {}},
       .shared_experts = 1,
       .weights = {fp8_block},
       .shared_weights = {},
       .router = RouterPreset{Score::sigmoid, true, 8, 4, true, 2.5f},
       .note = ""},
      {.name = "deepseek-v4-flash",
       .shape = {4096, 2048, 256, 6, 10.0f},
       .shared_experts = 1,
       .weights = {mxfp4},
       .shared_weights = fp8_block,
       .router = RouterPreset{Score::sqrtsoftplus, true, 1, 1, true, 1.5f},
       .note = "43 layers; the first 3 route by a hash table"},
      {.name = "deepseek-v4-pro",
       .shape = {7168, 3072, 384, 6, 10.0f},
       .shared_experts = {},
       .weights = {},
       .shared_weights = {},
       .router = RouterPreset{Score::sqrtsoftplus, true, 1, 1, {}, {}},
       .note = "shared experts, weight format and router factor not confirmed"},
      {.name = "deepseek-v4.1-flash",
       .shape = {5120, 2304, 384, 6, 10.0f},
       .shared_experts = 1,
       .weights = {mxfp4},
       .shared_weights = {},
       .router = RouterPreset{Score::sqrtsoftplus, true, 1, 1, true, 1.5f},
       .note = "40 layers"},
  };
}

std::vector<ModelPreset> qwen_and_glm() {
  return {
      {.name = "qwen3-235b",
       .shape = {4096, 1536, 128, 8, {}},
       .shared_experts = 0,
       .weights = {bf16, fp8_block},
       .shared_weights = {},
       .router = RouterPreset{Score::softmax, false, 1, 1, true, 1.0f},
       .note = ""},
      {.name = "qwen3.5-397b",
       .shape = {4096, 1024, 512, 10, {}},
       .shared_experts = 1,
       .weights = {bf16, fp8_block},
       .shared_weights = {},
       .router = RouterPreset{Score::softmax, false, 1, 1, {}, 1.0f},
       .note = "the shared expert is gated"},
      {.name = "qwen3.8-flash-next",
       .shape = {2560, 640, 512, 10, {}},
       .shared_experts = {},
       .weights = {fp8_block},
       .shared_weights = {},
       .router = {},
       .note = "shared experts, clamp, fp8 scale layout and router not confirmed"},
      {.name = "glm-4.5",
       .shape = {5120, 1536, 160, 8, {}},
       .shared_experts = 1,
       .weights = {bf16, fp8_block},
       .shared_weights = {},
       .router = RouterPreset{Score::sigmoid, true, 1, 1, {}, 2.5f},
       .note = ""},
      {.name = "glm-5",
       .shape = {6144, 2048, 256, 8, {}},
       .shared_experts = 1,
       .weights = {fp8_block},
       .shared_weights = {},
       .router = RouterPreset{Score::sigmoid, true, 1, 1, {}, 2.5f},
       .note = ""},
  };
}

std::vector<ModelPreset> others() {
  return {
      {.name = "kimi-k2",
       .shape = {7168, 2048, 384, 8, {}},
       .shared_experts = 1,
       .weights = {fp8_block},
       .shared_weights = {},
       .router = RouterPreset{Score::sigmoid, false, 1, 1, {}, 2.827f},
       .note = ""},
      {.name = "kimi-k3",
       .shape = {3584, 3072, 896, 16, {}},
       .shared_experts = 2,
       .weights = {mxfp4},
       .shared_weights = {},
       .router = RouterPreset{Score::sigmoid, false, 1, 1, true, 1.0f},
       .plan_only = true,
       .note = "hidden is the width of the routed latent"},
      {.name = "gpt-oss-120b",
       .shape = {2880, 2880, 128, 4, {}},
       .shared_experts = 0,
       .weights = {mxfp4},
       .shared_weights = {},
       .router = RouterPreset{Score::softmax_topk, false, 1, 1, {}, 1.0f},
       .plan_only = true,
       .note = "weights have biases"},
      {.name = "mixtral-8x7b",
       .shape = {4096, 14336, 8, 2, {}},
       .shared_experts = 0,
       .weights = {bf16},
       .shared_weights = {},
       .router = RouterPreset{Score::softmax, false, 1, 1, true, 1.0f},
       .note = ""},
      {.name = "minimax-m2",
       .shape = {3072, 1536, 256, 8, {}},
       .shared_experts = 0,
       .weights = {fp8_block},
       .shared_weights = {},
       .router = RouterPreset{Score::sigmoid, true, 1, 1, {}, 1.0f},
       .note = ""},
  };
}

std::vector<ModelPreset> all_presets() {
  std::vector<ModelPreset> all = deepseek();
  for (std::vector<ModelPreset> family : {qwen_and_glm(), others()}) {
    all.insert(all.end(), family.begin(), family.end());
  }
  return all;
}

std::vector<Machine> all_machines() {
  constexpr std::string_view measured = "measured on 2 x H200";
  Machine h200{.name = "h200", .title = "NVIDIA H200", .sms = 132};
  h200.link = MachineValue{370e9, "measured on 2 x H200: vector loads or stores, 8 SMs or more"};
  h200.sm_read = MachineValue{47e9, "measured on 2 x H200: one SM pulling over NVLink"};
  h200.sm_write = MachineValue{47e9, "measured on 2 x H200: one SM pushing over NVLink"};
  h200.memory_read = MachineValue{4.5e12, "measured on 2 x H200: all SMs, gigabytes"};
  h200.memory_copy = MachineValue{3.9e12, "measured on 2 x H200: read + write"};
  h200.fp8 = MachineValue{1400e12, "measured on 2 x H200: 1,400 sustained (1,508 for one dense 8192 cube)"};
  h200.bf16 = MachineValue{796e12, measured};
  h200.word_latency = MachineValue{1.26e-6, measured};
  h200.launch = MachineValue{0.55e-6, "measured on 2 x H200: empty kernels of a graph, back to back"};

  const Machine b200{.name = "b200", .title = "NVIDIA B200 (persistent-grid article)", .sms = 148};

  Machine b300{.name = "b300", .title = "NVIDIA B300 (exchange-ways and fused-kernel articles)", .sms = 148};
  b300.link = MachineValue{0.9 * 18 * 53.125e9, "nominal: 18 links x 53.125 GB/s, nine tenths of it usable"};
  b300.sm_read = MachineValue{200e9, "assumed by the transfer library of the exchange-ways article, section 5.1"};
  b300.sm_write = MachineValue{50e9, "assumed by the transfer library of the exchange-ways article, section 5.1"};
  b300.memory_read = MachineValue{6.5e12, "assumed by the kernel's own test, fused-kernel article, section 3.4"};
  return {h200, b200, b300};
}

template <typename Named>
const Named& find(std::span<const Named> all, std::string_view name, std::string_view what) {
  const auto found = std::find_if(all.begin(), all.end(), [&](const Named& one) { return one.name == name; });
  if (found == all.end()) {
    std::vector<std::string_view> names;
    std::transform(all.begin(), all.end(), std::back_inserter(names), [](const Named& one) { return one.name; });
    throw InputError(fmt::format("unknown {} '{}'; known are {}", what, name, fmt::join(names, ", ")));
  }
  return *found;
}

}  // namespace

std::span<const ModelPreset> model_presets() {
  static const std::vector<ModelPreset> all = all_presets();
  return all;
}

const ModelPreset& find_preset(std::string_view name) { return find(model_presets(), name, "preset"); }

std::span<const Machine> machines() {
  static const std::vector<Machine> all = all_machines();
  return all;
}

const Machine& find_machine(std::string_view name) { return find(machines(), name, "machine"); }

}  // namespace heddle
