// Sound files that hold no sound layer: missing, misplaced or contradictory tensors, bad scales.
#include <gtest/gtest.h>

#include "checkpoint_checks.hpp"

namespace heddle::testing {
namespace {

LayerFileSpec spec_of(WeightKind kind, Naming naming = Naming::hugging_face) {
  LayerFileSpec spec;
  spec.shape = {128, 64, 3, 1, {}};
  spec.kind = kind;
  spec.naming = naming;
  return spec;
}

OwnedTensor& find(LayerTensors& layer, const std::string& ending) {
  for (auto& tensor : layer.tensors) {
    if (tensor.name.ends_with(ending)) return tensor;
  }
  throw std::invalid_argument("no tensor ends with " + ending);
}

void remove(LayerTensors& layer, const std::string& part) {
  std::erase_if(layer.tensors, [&](const OwnedTensor& tensor) { return tensor.name.find(part) != std::string::npos; });
}

/// Writes the layer after `damage` and expects open() to refuse it.
void expect_refused_layer(LayerFileSpec spec, const std::function<void(LayerTensors&)>& damage,
                          std::initializer_list<std::string> parts) {
  auto layer = make_layer(spec);
  damage(layer);
  const LayerFile file = write_layer(spec, std::move(layer));
  expect_refusal([&] { LayerCheckpoint::open(file.path); }, parts);
}

/// A zeroed tensor of another type or shape under the same name.
void replace(OwnedTensor& tensor, const std::string& dtype, std::vector<std::int64_t> shape, std::size_t value_bytes) {
  std::size_t values = 1;
  for (const auto size : shape) values *= static_cast<std::size_t>(size);
  tensor = {tensor.name, dtype, std::move(shape), std::vector<std::byte>(values * value_bytes)};
}

TEST(DamagedLayer, Missing) {
  expect_refused_layer(spec_of(WeightKind::bf16), [](auto& layer) { remove(layer, "experts."); },
                       {"holds no expert", "gate.weight"});
  expect_refused_layer(spec_of(WeightKind::bf16), [](auto& layer) { remove(layer, "experts.1."); },
                       {"expert 1", "is missing", "2 of 3", "model.layers.3.mlp.experts."});
  expect_refused_layer(spec_of(WeightKind::bf16), [](auto& layer) { remove(layer, "experts.2."); },
                       {"gate.weight", "[3, 128]", "[2, 128]"});
  expect_refused_layer(spec_of(WeightKind::bf16), [](auto& layer) { remove(layer, "1.up_proj"); },
                       {"'model.layers.3.mlp.experts.1.up_proj.weight' is missing"});
  expect_refused_layer(spec_of(WeightKind::mxfp4, Naming::deepseek_v4), [](auto& layer) { remove(layer, "2.w2.scale"); },
                       {"experts.2.w2.weight", "without scales"});
  expect_refused_layer(spec_of(WeightKind::nvfp4), [](auto& layer) { remove(layer, "0.up_proj.weight_scale_2"); },
                       {"0.up_proj.weight'", "nvfp4 without its tensor scale"});
  auto spec = spec_of(WeightKind::bf16);
  spec.config = RouterOptions{};
  expect_refused_layer(spec, [](auto& layer) { remove(layer, "experts.2."); }, {"expert 2", "is missing", "2 of 3", "config.json"});
}

TEST(DamagedLayer, SizesAndTypes) {
  const auto bf16 = spec_of(WeightKind::bf16);
  expect_refused_layer(bf16,
                       [](auto& layer) {
                         replace(find(layer, "1.up_proj.weight"), "BF16", {64, 64}, 2);
                       },
                       {"experts.1.up_proj.weight", "64 x 64", "64 x 128 are needed"});
  expect_refused_layer(bf16,
                       [](auto& layer) {
                         replace(find(layer, "2.down_proj.weight"), "BF16", {64, 128}, 2);
                       },
                       {"experts.2.down_proj.weight", "128 x 64 are needed"});
  expect_refused_layer(bf16,
                       [](auto& layer) {
                         for (const char* m : {"1.gate_proj.weight", "1.up_proj.weight"})
                           replace(find(layer, m), "BF16", {192, 128}, 2);
                         replace(find(layer, "1.down_proj.weight"), "BF16", {128, 192}, 2);
                       },
                       {"experts.1.gate_proj.weight", "like expert 0"});
  expect_refused_layer(bf16,
                       [](auto& layer) {
                         replace(find(layer, "0.gate_proj.weight"), "BF16", {64, 100}, 2);
                       },
                       {"multiples of 64", "64 x 100"});
  expect_refused_layer(bf16,
                       [](auto& layer) {
                         replace(find(layer, "0.gate_proj.weight"), "F16", {64, 128}, 2);
                       },
                       {"F16 [64, 128]", "BF16, F8_E4M3"});
  expect_refused_layer(bf16,
                       [](auto& layer) {
                         replace(find(layer, "0.gate_proj.weight"), "BF16", {64, 128, 1}, 2);
                       },
                       {"two dimensions"});
  expect_refused_layer(bf16,
                       [](auto& layer) {
                         replace(find(layer, "0.gate_proj.weight"), "BF16", {0, 1 << 30}, 2);
                       },
                       {"sizes from 1"});
  expect_refused_layer(bf16,
                       [](auto& layer) {
                         replace(find(layer, "mlp.gate.weight"), "F16", {3, 128}, 2);
                       },
                       {"gate.weight", "BF16 or F32 [3, 128]"});
  expect_refused_layer(spec_of(WeightKind::fp8_block),
                       [](auto& layer) { replace(find(layer, "0.gate_proj.weight_scale_inv"), "F32", {1}, 4); },
                       {"F32 [1]", "[1, 1] (fp8 block)", "[64, 4] (mxfp8)"});
  expect_refused_layer(spec_of(WeightKind::fp8_block),
                       [](auto& layer) {
                         replace(find(layer, "0.gate_proj.weight_scale_inv"), "BF16", {1, 1}, 2);
                       },
                       {"BF16 [1, 1]"});
  expect_refused_layer(spec_of(WeightKind::mxfp4),
                       [](auto& layer) {
                         replace(find(layer, "0.up_proj.weight_scale"), "U8", {64, 8}, 1);
                       },
                       {"U8 [64, 8]", "[64, 4] (mxfp4)", "[64, 8] (nvfp4)"});
}

TEST(DamagedLayer, ContradictoryNames) {
  const auto add = [](std::string ending, std::string dtype, std::vector<std::int64_t> shape, std::size_t bytes) {
    return [=](LayerTensors& layer) {
      layer.tensors.push_back({"model.layers.3.mlp." + ending, dtype, shape, std::vector<std::byte>(bytes)});
    };
  };
  const auto bf16 = spec_of(WeightKind::bf16);
  expect_refused_layer(bf16, add("experts.0.gate_proj.bias", "BF16", {64}, 128), {"gate_proj.bias", "biases are not supported"});
  expect_refused_layer(bf16, add("experts.0.gate_proj.weight_zero_point", "U8", {64}, 64),
                       {"weight_zero_point", "not part of any"});
  expect_refused_layer(bf16, add("experts.0.gate_proj.weight_scale", "F32", {1, 1}, 4), {"weight_scale", "BF16, which has none"});
  expect_refused_layer(spec_of(WeightKind::fp8_block), add("experts.0.gate_proj.weight_scale", "F32", {1, 1}, 4), {"contradicts"});
  expect_refused_layer(spec_of(WeightKind::fp8_block), add("experts.0.gate_proj.weight_scale_2", "F32", {}, 4),
                       {"scale of the whole tensor", "fp8 block weights have none"});
  expect_refused_layer(bf16, add("experts.0.w1.weight", "BF16", {64, 128}, 64 * 128 * 2),
                       {"both gate_proj/up_proj/down_proj and w1/w3/w2"});
  expect_refused_layer(bf16, add("experts.gate_up_proj", "BF16", {1, 1, 1}, 2), {"both single experts and fused"});
  expect_refused_layer(bf16, add("shared_experts.0.gate_proj.weight", "BF16", {64, 128}, 64 * 128 * 2),
                       {"shared_experts.", "has no matrices"});
  auto mixed = make_layer(bf16);
  const auto other = make_layer(spec_of(WeightKind::mxfp8));
  expect_refused_layer(bf16,
                       [&](LayerTensors& layer) {
                         remove(layer, "experts.2.");
                         for (const auto& tensor : other.tensors)
                           if (tensor.name.find("experts.2.") != std::string::npos) layer.tensors.push_back(tensor);
                       },
                       {"experts.2.gate_proj.weight", "is mxfp8", "is bf16", "one kind"});
}

TEST(DamagedLayer, CalibratedActivationScalesAreIgnored) {
  const auto spec = spec_of(WeightKind::nvfp4);
  auto layer = make_layer(spec);
  layer.tensors.push_back(make_tensor("model.layers.3.mlp.experts.0.gate_proj.input_scale", "F32", {}, std::vector<float>{3}));
  const LayerFile file = write_layer(spec, std::move(layer));
  expect_same(LayerCheckpoint::open(file.path).expert(0), file.experts[0]);
}

/// The layer opens, experts 0 and 2 are read, and expert 1 is refused.
void expect_refused_expert(const LayerFileSpec& spec, const std::string& ending, std::size_t at, std::vector<std::uint8_t> bytes,
                           std::initializer_list<std::string> parts) {
  auto layer = make_layer(spec);
  OwnedTensor& scales = find(layer, ending);
  ASSERT_LE(at + bytes.size(), scales.data.size());
  std::memcpy(scales.data.data() + at, bytes.data(), bytes.size());
  const LayerFile file = write_layer(spec, std::move(layer));
  const auto checkpoint = LayerCheckpoint::open(file.path);
  expect_same(checkpoint.expert(0), file.experts[0]);
  for (int attempt = 0; attempt < 2; ++attempt) expect_refusal([&] { checkpoint.expert(1); }, parts);
  expect_same(checkpoint.expert(2), file.experts[2]);
}

TEST(DamagedLayer, ScalesThatAreNotNumbers) {
  expect_refused_expert(spec_of(WeightKind::mxfp4, Naming::deepseek_v4), "experts.1.w3.scale", 7 * 4 + 2, {0xFF},
                        {"experts.1.w3.scale'", "row 7, group 2", "0xFF"});
  expect_refused_expert(spec_of(WeightKind::mxfp8), "experts.1.down_proj.weight_scale", 5 * 2 + 1, {0xFF},
                        {"row 5, group 1", "0xFF"});
  expect_refused_expert(spec_of(WeightKind::nvfp4), "experts.1.gate_proj.weight_scale", 3 * 8, {0x7F}, {"row 3, group 0", "0x7F"});
  expect_refused_expert(spec_of(WeightKind::nvfp4), "experts.1.gate_proj.weight_scale_2", 0, {0, 0, 0x80, 0x7F},
                        {"weight_scale_2", "is inf"});
  expect_refused_expert(spec_of(WeightKind::fp8_block), "experts.1.up_proj.weight_scale_inv", 0, {0, 0, 0xC0, 0x7F},
                        {"block row 0, block column 0", "nan"});
  auto packed = spec_of(WeightKind::nvfp4);
  packed.packed_names = true;
  expect_refused_expert(packed, "experts.1.up_proj.weight_global_scale", 0, {0, 0, 0, 0}, {"weight_global_scale", "is 0"});
}

TEST(DamagedLayer, ExpertNumbers) {
  const LayerFile file = write_layer(spec_of(WeightKind::bf16));
  const auto layer = LayerCheckpoint::open(file.path);
  expect_refusal([&] { layer.expert(3); }, {"expert 3", "0 to 2"});
  expect_refusal([&] { layer.expert(-1); }, {"expert -1"});
}

TEST(DamagedLayer, Fused) {
  const auto fused = spec_of(WeightKind::bf16, Naming::fused);
  const auto add = [](std::string name) {
    return [=](LayerTensors& layer) {
      layer.tensors.push_back({"model.layers.3.mlp.experts." + name, "U8", {1}, std::vector<std::byte>(1)});
    };
  };
  for (const char* name : {"gate_up_proj_bias", "gate_up_proj_blocks", "down_proj_scales"}) {
    expect_refused_layer(fused, add(name), {name, "gpt-oss"});
  }
  expect_refused_layer(fused, add("gate_up_proj_scale_inv"), {"gate_up_proj_scale_inv", "nothing else"});
  expect_refused_layer(fused, [](auto& layer) { remove(layer, "gate_up_proj"); }, {"gate_up_proj' is missing"});
  expect_refused_layer(fused,
                       [](auto& layer) {
                         replace(find(layer, "down_proj"), "F8_E4M3", {3, 128, 64}, 1);
                       },
                       {"F8_E4M3", "supported in BF16"});
  expect_refused_layer(fused,
                       [](auto& layer) {
                         replace(find(layer, "down_proj"), "BF16", {3, 64, 64}, 2);
                       },
                       {"[3, 128, 128]", "[3, 64, 64]", "[E, 2D, H]"});
  expect_refused_layer(fused,
                       [](auto& layer) {
                         replace(find(layer, "down_proj"), "BF16", {2, 128, 64}, 2);
                       },
                       {"3 experts", "down_proj 2"});
}

TEST(DamagedLayer, SquareFusedNeedsAConfig) {
  for (const Naming naming : {Naming::fused, Naming::fused_transposed}) {
    LayerFileSpec spec = spec_of(WeightKind::bf16, naming);
    spec.shape.intermediate = spec.shape.hidden;
    expect_refused_layer(spec, [](auto&) {}, {"down_proj", "[3, 128, 128]", "ambiguous", "config.json"});
    spec.config = RouterOptions{};
    const LayerFile file = write_layer(spec);
    expect_same(LayerCheckpoint::open(file.path).expert(2), file.experts[2]);
  }
}

TEST(DamagedLayer, Index) {
  LayerFileSpec spec = spec_of(WeightKind::bf16);
  spec.shards = 2;
  const LayerFile file = write_layer(spec);
  const std::string index = file.folder.file("model.safetensors.index.json");
  const auto expect = [&](const std::string& text, std::initializer_list<std::string> parts) {
    std::ofstream(index) << text;
    expect_refusal([&] { LayerCheckpoint::open(file.path); }, parts);
  };
  expect("{", {"index.json", "not JSON"});
  expect("[]", {"no weight_map"});
  expect(R"({"weight_map":{"a":"../x.safetensors"}})", {"tensor 'a'", "beside the index"});
  expect(R"({"weight_map":{"a":5}})", {"tensor 'a'", "beside the index"});
  expect(R"({"weight_map":{"model.layers.3.mlp.experts.0.gate_proj.weight":"model-1.safetensors"}})", {"does not hold it"});
  expect(R"({"weight_map":{"model.layers.3.mlp.experts.0.gate_proj.weight":"gone.safetensors"}})",
         {"gone.safetensors", "No such file"});
}

TEST(DamagedLayer, Folders) {
  const TempFolder empty;
  expect_refusal([&] { LayerCheckpoint::open(empty.path().string()); },
                 {"neither model.safetensors.index.json nor any .safetensors"});
  expect_refusal([&] { LayerCheckpoint::open(empty.file("nothing")); }, {"nothing", "no such file or folder"});
  const LayerFile file = write_layer(spec_of(WeightKind::bf16));
  std::filesystem::copy_file(file.path, file.folder.file("copy.safetensors"));
  expect_refusal([&] { LayerCheckpoint::open(file.folder.path().string()); }, {"is in", "copy.safetensors", "one file"});
}

}  // namespace
}  // namespace heddle::testing
