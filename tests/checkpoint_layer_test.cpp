// Layers of every naming and kind, written and read back: the values must be the same to the bit.
#include <gtest/gtest.h>

#include <random>
#include <thread>

#include "checkpoint_checks.hpp"

namespace heddle::testing {
namespace {

std::uint64_t fresh_seed() {
  const std::uint64_t seed = std::random_device{}();
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  return seed;
}

struct Case {
  std::string name;
  LayerFileSpec spec;
};

LayerFileSpec spec_of(WeightKind kind, Naming naming) {
  LayerFileSpec spec;
  spec.shape = {192, 320, 3, 2, {}};
  spec.kind = kind;
  spec.naming = naming;
  return spec;
}

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  const std::pair<const char*, WeightKind> kinds[] = {{"bf16", WeightKind::bf16},
                                                      {"fp8", WeightKind::fp8_block},
                                                      {"mxfp4", WeightKind::mxfp4},
                                                      {"nvfp4", WeightKind::nvfp4},
                                                      {"mxfp8", WeightKind::mxfp8}};
  const std::pair<const char*, Naming> namings[] = {
      {"hugging_face", Naming::hugging_face}, {"mixtral", Naming::mixtral}, {"deepseek_v4", Naming::deepseek_v4}};
  for (const auto& [kind_name, kind] : kinds) {
    for (const auto& [naming_name, naming] : namings)
      cases.push_back({std::string(naming_name) + "_" + kind_name, spec_of(kind, naming)});
  }
  cases.push_back({"fused", spec_of(WeightKind::bf16, Naming::fused)});
  cases.push_back({"fused_transposed", spec_of(WeightKind::bf16, Naming::fused_transposed)});
  cases.push_back({"nvfp4_packed", spec_of(WeightKind::nvfp4, Naming::hugging_face)});
  cases.back().spec.packed_names = true;
  cases.push_back({"fp8_powers_of_two", spec_of(WeightKind::fp8_block, Naming::deepseek_v4)});
  cases.back().spec.block_scale = ScaleFormat::ue8m0;
  return cases;
}

class EveryNaming : public ::testing::TestWithParam<Case> {};

TEST_P(EveryNaming, ReadsTheValuesThatWereWritten) {
  LayerFileSpec spec = GetParam().spec;
  spec.seed = fresh_seed();
  spec.bias = true;
  const LayerFile file = write_layer(spec);
  const auto layer = LayerCheckpoint::open(file.path);
  EXPECT_EQ(layer.shape().hidden, 192);
  EXPECT_EQ(layer.shape().intermediate, 320);
  EXPECT_EQ(layer.shape().experts, 3);
  EXPECT_EQ(layer.shape().topk, 0);
  EXPECT_FALSE(layer.shape().clamp);
  EXPECT_EQ(layer.kind(), spec.kind);
  for (int id = 0; id < 3; ++id) expect_same(layer.expert(id), file.experts[static_cast<std::size_t>(id)]);
  ASSERT_TRUE(layer.has_router());
  EXPECT_TRUE(std::equal(layer.router_weights().begin(), layer.router_weights().end(), file.router.begin(), file.router.end()));
  EXPECT_TRUE(std::equal(layer.router_bias().begin(), layer.router_bias().end(), file.bias.begin(), file.bias.end()));
  EXPECT_FALSE(layer.shared());
  EXPECT_FALSE(layer.router_options());
}

INSTANTIATE_TEST_SUITE_P(Checkpoint, EveryNaming, ::testing::ValuesIn(all_cases()),
                         [](const auto& tested) { return tested.param.name; });

TEST(Checkpoint, SharedExpertOfAnotherKindAndWidth) {
  LayerFileSpec spec = spec_of(WeightKind::mxfp4, Naming::deepseek_v4);
  spec.shared = WeightKind::fp8_block;
  spec.shared_intermediate = 448;
  const LayerFile file = write_layer(spec);
  const auto layer = LayerCheckpoint::open(file.path);
  ASSERT_TRUE(layer.shared());
  EXPECT_EQ(layer.shared()->intermediate, 448);
  EXPECT_EQ(layer.shared()->weights.gate.kind, WeightKind::fp8_block);
  EXPECT_TRUE(layer.shared()->gate.empty());
  expect_same(layer.shared()->weights, *file.shared);
}

TEST(Checkpoint, GatedSharedExpert) {
  LayerFileSpec spec = spec_of(WeightKind::bf16, Naming::hugging_face);
  spec.shared = WeightKind::bf16;
  spec.shared_gate = true;
  const LayerFile file = write_layer(spec);
  const auto layer = LayerCheckpoint::open(file.path);
  ASSERT_TRUE(layer.shared());
  EXPECT_EQ(layer.shared()->gate, file.shared_gate);
  ASSERT_EQ(file.shared_gate.size(), 192u);
}

TEST(Checkpoint, RouterInF32AndNone) {
  LayerFileSpec spec = spec_of(WeightKind::bf16, Naming::hugging_face);
  spec.router_f32 = true;
  const LayerFile with = write_layer(spec);
  const auto layer = LayerCheckpoint::open(with.path);
  EXPECT_TRUE(std::equal(layer.router_weights().begin(), layer.router_weights().end(), with.router.begin(), with.router.end()));
  spec.router = false;
  const LayerFile without = write_layer(spec);
  const auto bare = LayerCheckpoint::open(without.path);
  EXPECT_FALSE(bare.has_router());
  EXPECT_TRUE(bare.router_weights().empty());
}

TEST(Checkpoint, HashRoutedLayerHasNoRouter) {
  LayerFileSpec spec = spec_of(WeightKind::bf16, Naming::deepseek_v4);
  auto tensors = make_layer(spec);
  tensors.tensors.push_back(make_tensor("model.layers.3.ffn.gate.tid2eid", "I32", {5, 2}, std::vector<int>(10, 1)));
  const LayerFile file = write_layer(spec, std::move(tensors));
  EXPECT_FALSE(LayerCheckpoint::open(file.path).has_router());
}

TEST(Checkpoint, ShardsWithAndWithoutIndex) {
  LayerFileSpec spec = spec_of(WeightKind::nvfp4, Naming::hugging_face);
  spec.shards = 4;
  const LayerFile file = write_layer(spec);
  const auto check = [&](const std::string& path) {
    const auto layer = LayerCheckpoint::open(path);
    for (int id = 0; id < 3; ++id) expect_same(layer.expert(id), file.experts[static_cast<std::size_t>(id)]);
  };
  check(file.path);
  check(file.folder.file("model.safetensors.index.json"));
  std::filesystem::remove(file.folder.file("model.safetensors.index.json"));
  check(file.path);
}

TEST(Checkpoint, OnlyShardsOfTheLayerAreOpened) {
  LayerFileSpec spec = spec_of(WeightKind::bf16, Naming::hugging_face);
  LayerFile file = write_layer(spec);
  nlohmann::json map = nlohmann::json::object();
  for (const auto& tensor : file.tensors) map[tensor.name] = "model.safetensors";
  map["model.layers.4.mlp.experts.0.gate_proj.weight"] = "not-downloaded.safetensors";
  std::ofstream(file.folder.file("model.safetensors.index.json")) << nlohmann::json{{"weight_map", map}};
  CheckpointOptions options;
  options.layer_index = 3;
  expect_same(LayerCheckpoint::open(file.folder.path().string(), options).expert(1), file.experts[1]);
  options.layer_index = 4;
  expect_refusal([&] { LayerCheckpoint::open(file.folder.path().string(), options); }, {"not-downloaded.safetensors"});
}

TEST(Checkpoint, LayerIsChosenByItsNumber) {
  LayerFileSpec spec = spec_of(WeightKind::bf16, Naming::hugging_face);
  std::vector<OwnedTensor> all;
  std::vector<LayerTensors> layers;
  for (const char* prefix : {"model.layers.3.", "model.layers.12.", "mtp.3.", ""}) {
    spec.prefix = prefix;
    spec.seed += 1;
    layers.push_back(make_layer(spec));
    all.insert(all.end(), layers.back().tensors.begin(), layers.back().tensors.end());
  }
  const TempFolder folder;
  const std::string path = folder.file("all.safetensors");
  write_tensors(path, all);
  const auto open = [&](int index) {
    CheckpointOptions options;
    options.layer_index = index;
    return LayerCheckpoint::open(path, options);
  };
  expect_same(open(3).expert(0), layers[0].experts[0]);
  expect_same(open(12).expert(2), layers[1].experts[2]);
  EXPECT_EQ(open(12).prefix(), "model.layers.12.mlp.");
  expect_refusal([&] { LayerCheckpoint::open(path); }, {"4 layers", "model.layers.3.mlp.", "model.layers.12.mlp."});
  expect_refusal([&] { open(7); }, {"number 7", "model.layers.12.mlp."});
}

TEST(Checkpoint, UnalignedTensorsAreCopiedToAlignment) {
  LayerFileSpec spec = spec_of(WeightKind::fp8_block, Naming::hugging_face);
  auto layer = make_layer(spec);
  // A layout of our own: one byte first, so that every F32 and BF16 tensor behind it is unaligned.
  nlohmann::json header{{"odd", {{"dtype", "U8"}, {"shape", {1}}, {"data_offsets", {0, 1}}}}};
  std::string data(1, '\0');
  for (const auto& tensor : layer.tensors) {
    header[tensor.name] = {
        {"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {data.size(), data.size() + tensor.data.size()}}};
    data.append(reinterpret_cast<const char*>(tensor.data.data()), tensor.data.size());
  }
  std::string text = header.dump();
  text.append((8 - text.size() % 8) % 8, ' ');
  const std::uint64_t length = text.size();
  const TempFolder folder;
  std::ofstream out(folder.file("odd.safetensors"), std::ios::binary);
  out.write(reinterpret_cast<const char*>(&length), 8);
  out << text << data;
  out.close();
  const auto checkpoint = LayerCheckpoint::open(folder.file("odd.safetensors"));
  for (int id = 0; id < 3; ++id) {
    const ExpertWeights expert = checkpoint.expert(id);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(expert.down.scales.data()) % 4, 0u);
    expect_same(expert, layer.experts[static_cast<std::size_t>(id)]);
  }
  EXPECT_TRUE(std::equal(layer.router.begin(), layer.router.end(), checkpoint.router_weights().begin()));
}

/// Kilobytes of the file's mapping that this process has touched.
int resident_kilobytes(const std::string& path) {
  std::ifstream maps("/proc/self/smaps");
  bool inside = false;
  int resident = 0;
  for (std::string line; std::getline(maps, line);) {
    if (line.find('-') < line.find(' ')) inside = line.ends_with(path);  // a mapping's first line starts with its addresses
    if (inside && line.starts_with("Rss:")) resident += std::stoi(line.substr(4));
  }
  return resident;
}

TEST(Checkpoint, OnlyTheExpertsAskedForAreRead) {
  LayerFileSpec spec = spec_of(WeightKind::mxfp4, Naming::hugging_face);
  spec.shape = {512, 512, 8, 2, {}};
  const LayerFile file = write_layer(spec);
  const int all = static_cast<int>(std::filesystem::file_size(file.path) / 1024);
  const auto layer = LayerCheckpoint::open(file.path);
  EXPECT_GT(resident_kilobytes(file.path), 0);
  EXPECT_LT(resident_kilobytes(file.path), all / 8);
  for (const int id : {2, 5}) expect_same(layer.expert(id), file.experts[static_cast<std::size_t>(id)]);
  EXPECT_LT(resident_kilobytes(file.path), all / 2);
}

TEST(Checkpoint, ViewsSurviveMovesAndThreadsShareThem) {
  const LayerFile file = write_layer(spec_of(WeightKind::bf16, Naming::fused_transposed));
  auto first = LayerCheckpoint::open(file.path);
  const ExpertWeights before = first.expert(1);
  const LayerCheckpoint second = std::move(first);
  EXPECT_EQ(before.gate.values.data(), second.expert(1).gate.values.data());
  expect_same(before, file.experts[1]);
  std::vector<std::thread> threads;
  std::vector<const std::byte*> seen(8);
  for (std::size_t i = 0; i < seen.size(); ++i) threads.emplace_back([&, i] { seen[i] = second.expert(2).down.values.data(); });
  for (auto& thread : threads) thread.join();
  for (const std::byte* pointer : seen) EXPECT_EQ(pointer, seen[0]);
}

}  // namespace
}  // namespace heddle::testing
