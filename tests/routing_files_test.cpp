// Recordings in other containers than .npy: archives, safetensors, vLLM's responses, and SGLang's counts. Damaged ones are told.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>

#include "heddle/checkpoint.hpp"
#include "heddle/error.hpp"
#include "heddle/routing.hpp"
#include "layer_files.hpp"
#include "routing/file_bytes.hpp"
#include "routing/recorded_file.hpp"

namespace heddle {
namespace {

using ::testing::HasSubstr;

const std::string data = std::string(HEDDLE_TEST_DATA) + "/routing/";

template <class Value>
std::string raw(const std::vector<Value>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(Value)};
}

template <class Number>
std::string little(Number value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}

template <class Value>
std::string npy(const std::string& type, const std::string& shape, const std::vector<Value>& values) {
  const std::string header = "{'descr': '" + type + "', 'fortran_order': False, 'shape': (" + shape + "), }\n";
  return std::string("\x93NUMPY\x01\0", 8) + little(static_cast<std::uint16_t>(header.size())) + header + raw(values);
}

/// A zip file of stored members, the fields that readers look at; `method` 8 says that they are compressed.
std::string zip(const std::vector<std::pair<std::string, std::string>>& members, std::uint16_t method = 0) {
  std::string file, directory;
  for (const auto& [name, bytes] : members) {
    const auto size = static_cast<std::uint32_t>(bytes.size()), at = static_cast<std::uint32_t>(file.size());
    const std::string common = little(method) + std::string(8, '\0') + little(size) + little(size) +
                               little(static_cast<std::uint16_t>(name.size())) + little(std::uint16_t{0});
    file += "PK\x03\x04" + std::string(4, '\0') + common + name + bytes;
    directory += "PK\x01\x02" + std::string(6, '\0') + common + std::string(10, '\0') + little(at) + name;
  }
  const auto count = static_cast<std::uint16_t>(members.size());
  return file + directory + "PK\x05\x06" + std::string(4, '\0') + little(count) + little(count) +
         little(static_cast<std::uint32_t>(directory.size())) + little(static_cast<std::uint32_t>(file.size())) +
         std::string(2, '\0');
}

std::vector<float> floats(const std::vector<bf16>& values) {
  std::vector<float> wide;
  for (const bf16 value : values) wide.push_back(to_float(value));
  return wide;
}

std::string base64(const std::string& bytes) {
  constexpr char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string text;
  for (std::size_t at = 0; at < bytes.size(); at += 3) {
    std::uint32_t bits = 0;
    for (std::size_t i = 0; i < 3; ++i)
      bits = bits << 8 | (at + i < bytes.size() ? static_cast<unsigned char>(bytes[at + i]) : std::uint32_t{0});
    for (int shift = 18; shift >= 0; shift -= 6) text += digits[bits >> shift & 63];
    for (std::size_t i = bytes.size() - at; i < 3; ++i) text[text.size() - (3 - i)] = '=';
  }
  return text;
}

class RecordingContainers : public ::testing::Test {
 protected:
  std::string write(const std::string& name, const std::string& bytes) const {
    std::ofstream(folder_.file(name), std::ios::binary) << bytes;
    return folder_.file(name);
  }
  void expect_refused(const std::string& path, const std::string& part) const {
    try {
      Recording::open(path);
      ADD_FAILURE() << path << " was read";
    } catch (const InputError& error) {
      EXPECT_THAT(error.what(), HasSubstr(part));
      EXPECT_THAT(error.what(), HasSubstr(path));
    }
  }
  testing::TempFolder folder_;
};

TEST_F(RecordingContainers, ArchivesOfNumPy) {
  const std::vector<std::int16_t> ids{3, 1, 0, 2, 5, 4};
  const std::vector<float> weights{0.5f, 0.25f, 1.0f, 0.0f, 0.75f, 0.125f};
  const auto path = write("r.npz", zip({{"topk_ids.npy", npy("<i2", "3, 1, 2", ids)},
                                        {"topk_weights.npy", npy("<f4", "3, 1, 2", weights)},
                                        {"hidden_states.npy", npy("<f4", "3, 4", std::vector<float>(12, 1.5f))}}));
  const Recording recording = Recording::open(path);
  EXPECT_EQ(recording.tokens(), 3);
  EXPECT_EQ(recording.layers(), 1);
  EXPECT_EQ(recording.take(0, 1, 2).ids, (std::vector<std::int32_t>{0, 2, 5, 4}));
  EXPECT_EQ(recording.take(0, 0, 3).weights, weights);
  EXPECT_EQ(recording.hidden(), 4);
  EXPECT_EQ(floats(recording.hidden_states()), std::vector<float>(12, 1.5f));
}

TEST_F(RecordingContainers, TwoAxesAreOneLayerAndOtherNamesAreKnown) {
  const std::vector<std::uint8_t> ids{3, 1, 255, 2};
  for (const char* name : {"ids.npy", "routed_experts.npy"}) {
    const Recording recording = Recording::open(write("r.npz", zip({{name, npy("|u1", "2, 2", ids)}})));
    EXPECT_EQ(recording.layers(), 1);
    EXPECT_EQ(recording.take(0, 0, 2).ids, (std::vector<std::int32_t>{3, 1, 255, 2}));
    EXPECT_FALSE(recording.has_weights());
  }
  EXPECT_EQ(Recording::open(write("r.npy", npy("|u1", "2, 2", ids))).layers(), 1);
}

TEST_F(RecordingContainers, ABatchIsARecordingOfOneLayer) {
  const std::vector<std::int32_t> ids{3, -1, 0, 2};
  const std::vector<float> weights{0.5f, 0.0f, 0.25f, 0.75f};
  const std::vector<bf16> hidden(8, to_bf16(-2.0f));
  const std::vector<TensorOut> tensors{{"topk_ids", "I32", {2, 2}, std::as_bytes(std::span(ids))},
                                       {"topk_weights", "F32", {2, 2}, std::as_bytes(std::span(weights))},
                                       {"hidden_states", "BF16", {2, 4}, std::as_bytes(std::span(hidden))}};
  const std::string path = folder_.file("batch.safetensors");
  write_safetensors(path, tensors);
  const Recording recording = Recording::open(path);
  EXPECT_EQ(recording.take(0, 0, 2).ids, ids);
  EXPECT_EQ(recording.take(0, 0, 2).weights, weights);
  EXPECT_EQ(floats(recording.hidden_states()), floats(hidden));
}

TEST_F(RecordingContainers, ResponsesOfVllm) {
  // Version 0.21: nested lists, the prompt apart; -1 for what the prefix cache answered.
  const std::string lists = R"({"prompt_routed_experts": [[[-1, -1], [-1, -1]], [[1, 2], [3, 4]]],
    "choices": [{"text": "a", "routed_experts": [[[5, 6], [7, 0]]]}, {"routed_experts": null}]})";
  const Recording one = Recording::open(write("lists.json", lists));
  EXPECT_EQ(one.layers(), 2);
  EXPECT_EQ(one.left_out(), 1);
  EXPECT_EQ(one.take(0, 0, 2).ids, (std::vector<std::int32_t>{1, 2, 5, 6}));
  EXPECT_EQ(one.take(1, 0, 2).ids, (std::vector<std::int32_t>{3, 4, 7, 0}));
  // Version 0.22 and newer: a .npy file in base64, prompt and generated tokens together.
  const std::string text = base64(npy("|u1", "2, 2, 2", std::vector<std::uint8_t>{1, 2, 3, 4, 5, 6, 7, 0}));
  const std::string response = R"({"choices": [{"routed_experts": ")" + text + "\"}]}";
  EXPECT_EQ(Recording::open(write("npy.json", response)).take(1, 0, 2).ids, (std::vector<std::int32_t>{3, 4, 7, 0}));
  EXPECT_EQ(Recording::open(write("list.json", "[" + response + ", " + response + "]")).tokens(), 4);
  EXPECT_EQ(Recording::open(write("lines.jsonl", response + "\n\n" + response + "\n")).tokens(), 4);
}

TEST_F(RecordingContainers, WrongOnesAreTold) {
  expect_refused(write("a.npz", zip({{"logits.npy", npy("<f4", "1, 1", std::vector<float>{1})}})), "it holds logits.npy");
  expect_refused(write("b.npz", zip({{"ids.npy", "no array"}})), "not a .npy file");
  expect_refused(write("c.npz", zip({{"ids.npy", "squeezed"}}, 8)), "savez instead of savez_compressed");
  expect_refused(write("d.npz", zip({{"topk_ids.npy", npy("<i2", "2, 1, 1", std::vector<std::int16_t>{1, 2})},
                                     {"hidden_states.npy", npy("<f4", "3, 1", std::vector<float>(3))}})),
                 "[3, 1]");
  expect_refused(write("e.json", R"({"choices": [{"text": "a"}]})"), "--enable-return-routed-experts");
  expect_refused(write("f.json", R"({"choices": [{"routed_experts": [[[1, 2]], [[1]]]}]})"), "1 layers of 1 choices, where 1 of 2");
  expect_refused(write("g.json", R"({"choices": [{"routed_experts": "?"}]})"), "base64");
  expect_refused(write("h.json", R"({"choices": [)"), "cannot be read");
  expect_refused(write("i.json", R"({"choices": [{"routed_experts": [[[-1, -1]]]}]})"), "no token has a choice");
  expect_refused(data + "sglang_stat.pt", "heddle replay");
  const std::string good = zip({{"ids.npy", npy("<i2", "2, 1, 1", std::vector<std::int16_t>{1, 2})}});
  for (std::size_t size = 4; size < good.size(); ++size)
    EXPECT_THROW(Recording::open(write("cut.npz", good.substr(0, size))), InputError) << size;
}

/// Selections over the excerpt that the dumps were counted from.
std::vector<std::int64_t> counted(int layer, int first, int tokens) {
  std::vector<std::int64_t> counts(64, 0);
  for (const std::int32_t id : Recording::open(data + "esft_law.ids.npy").take(layer, first, tokens).ids)
    ++counts[static_cast<std::size_t>(id)];
  return counts;
}

void expect_counts(const ExpertLoads& loads, int steps) {
  ASSERT_EQ(loads.steps, steps);
  ASSERT_EQ(loads.layers, 4);
  ASSERT_EQ(loads.experts, 64);
  for (int step = 0; step < steps; ++step) {
    for (int layer = 0; layer < 4; ++layer) {
      const auto of = loads.of(step, layer);
      EXPECT_EQ(std::vector<std::int64_t>(of.begin(), of.end()), counted(layer, step * 100, 100)) << step << " " << layer;
    }
  }
}

TEST(ExpertLoadFiles, SglangsRecorder) {
  EXPECT_TRUE(holds_loads(data + "sglang_stat.pt"));
  expect_counts(read_expert_loads(data + "sglang_stat.pt"), 4);
  const ExpertLoads passes = read_expert_loads(data + "sglang_passes.pt");  // copies of an expert are added up
  expect_counts(passes, 2);
  EXPECT_THAT(passes.notes, ::testing::Contains(HasSubstr("one rank")));
  EXPECT_FALSE(holds_loads(data + "esft_law.ids.npy"));
}

TEST_F(RecordingContainers, CountsByNameAndEmptySteps) {
  const std::vector<std::int32_t> counts{0, 0, 0, 0, 3, 1, 0, 4};
  const auto path = write("counts.npz", zip({{"logical_count.npy", npy("<i4", "2, 2, 2", counts)}}));
  EXPECT_TRUE(holds_loads(path));
  const ExpertLoads loads = read_expert_loads(path);
  EXPECT_EQ(loads.steps, 1);
  EXPECT_EQ(loads.counts, (std::vector<std::int64_t>{3, 1, 0, 4}));
  EXPECT_THAT(loads.notes, ::testing::Contains(HasSubstr("1 of 2 steps are empty")));
  const auto refused = [&](const std::string& shape, const std::vector<std::int32_t>& values, const char* part) {
    try {
      read_expert_loads(write("bad.npz", zip({{"logical_count.npy", npy("<i4", shape, values)}})));
      ADD_FAILURE() << part;
    } catch (const InputError& error) {
      EXPECT_THAT(error.what(), HasSubstr(part));
    }
  };
  refused("2,", {1, 2}, "[steps, layers, experts]");
  refused("1, 2", {1, -2}, "a count of -2");
  refused("1, 2", {0, 0}, "all counts are 0");
}

/// Whatever a file holds, it is read or refused; nothing else happens.
void expect_read_or_refused(const std::string& path) {
  try {
    read_expert_loads(path);
  } catch (const InputError&) {
  }
}

TEST_F(RecordingContainers, DamagedDumpsAreReadOrRefused) {
  const auto seed = std::random_device()();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  for (const char* name : {"sglang_stat.pt", "sglang_passes.pt"}) {
    const std::vector<char> good = read_file(data + name);
    for (int round = 0; round < 150; ++round) {
      std::string bytes(good.begin(), good.end());
      const auto flips = 1 + random() % 4;
      for (unsigned i = 0; i < flips; ++i)
        bytes[random() % std::min<std::size_t>(bytes.size(), round % 2 ? 1500 : bytes.size())] ^=
            static_cast<char>(1 << random() % 8);
      expect_read_or_refused(write("damaged.pt", bytes));
    }
    for (std::size_t size = 0; size < good.size(); size += 97)
      EXPECT_THROW(read_expert_loads(write("cut.pt", std::string(good.data(), size))), InputError) << size << " bytes of " << name;
  }
}

}  // namespace
}  // namespace heddle
