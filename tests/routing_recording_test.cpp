// Recordings: the excerpts, every id and weight type, both shapes, expansion, damaged files.
#include <gtest/gtest.h>

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "heddle/error.hpp"
#include "heddle/routing.hpp"

namespace {

using heddle::Recording;
using heddle::Routing;

const std::string data = std::string(HEDDLE_TEST_DATA) + "/routing/";

/// A folder that goes away with the test.
class RecordingFiles : public testing::Test {
 protected:
  void SetUp() override { std::filesystem::create_directories(folder_); }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string write(const std::string& name, const std::string& bytes) const {
    std::ofstream(folder_ / name, std::ios::binary) << bytes;
    return (folder_ / name).string();
  }

  std::filesystem::path folder_ = std::filesystem::temp_directory_path() / ("heddle-recording-" + std::to_string(getpid()));
};

/// A .npy file of version 1 with any header text.
std::string npy_with(const std::string& header, const std::string& values) {
  const auto length = static_cast<std::uint16_t>(header.size());
  std::string bytes = std::string("\x93NUMPY\x01\0", 8);
  bytes.append(reinterpret_cast<const char*>(&length), sizeof length);
  return bytes + header + values;
}

template <class Value>
std::string raw(const std::vector<Value>& values) {
  return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(Value));
}

template <class Value>
std::string npy(const std::string& type, const std::string& shape, const std::vector<Value>& values) {
  return npy_with("{'descr': '" + type + "', 'fortran_order': False, 'shape': (" + shape + "), }\n", raw(values));
}

std::string message_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const heddle::InputError& error) {
    return error.what();
  }
  return "no error";
}

void expect_refused(const std::string& path, const std::string& words, const std::string& weights = "") {
  const std::string message = message_of([&] { Recording::open(path, weights); });
  EXPECT_NE(message.find(words), std::string::npos) << message;
  EXPECT_NE(message.find(weights.empty() ? path : weights), std::string::npos) << message;
  EXPECT_EQ(message.find('\n'), std::string::npos) << message;
}

TEST(Excerpts, ShapesIdsAndWeights) {
  struct Expected {
    const char* file;
    int layers, topk, prompts, steps, tokens, experts;
    bool weights;
  };
  for (const Expected& e : {Expected{"esft_intent.ids.npy", 4, 6, 0, 400, 400, 64, false},
                            {"esft_law.ids.npy", 4, 6, 0, 400, 400, 64, true},
                            {"gpt_oss_decode.ids.npy", 3, 4, 16, 24, 384, 32, true}}) {
    const Recording recording = Recording::open(data + e.file);
    EXPECT_EQ(recording.layers(), e.layers);
    EXPECT_EQ(recording.topk(), e.topk);
    EXPECT_EQ(recording.prompts(), e.prompts);
    EXPECT_EQ(recording.steps(), e.steps);
    EXPECT_EQ(recording.tokens(), e.tokens);
    EXPECT_EQ(recording.least_experts(), e.experts);
    EXPECT_EQ(recording.has_weights(), e.weights);
    for (int layer = 0; layer < e.layers; ++layer) {
      const Routing routing = recording.take(layer, 0, e.tokens);
      EXPECT_NO_THROW(heddle::check_choices(routing.ids, e.tokens, e.topk, e.experts));
      for (int token = 0; token < e.tokens; ++token) {
        const auto begin = routing.weights.begin() + token * e.topk;
        const float sum = std::accumulate(begin, begin + e.topk, 0.0f);
        if (e.prompts == 0 && e.weights) {
          ASSERT_TRUE(sum > 0.1f && sum < 1.0f) << sum;  // not renormalised
        } else {
          ASSERT_NEAR(sum, 1.0f, 5e-3f);  // the source stored few digits
        }
      }
    }
  }
}

/// The raw bytes of an excerpt behind its 128-byte header, read without the library.
template <class Value>
std::vector<Value> values_of(const std::string& file) {
  std::ifstream in(file, std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(in), {}};
  std::vector<Value> values((bytes.size() - 128) / sizeof(Value));
  std::memcpy(values.data(), bytes.data() + 128, values.size() * sizeof(Value));
  return values;
}

TEST(Excerpts, PromptTokensAreTakenInARow) {
  const auto ids = values_of<std::int16_t>(data + "esft_law.ids.npy");
  const auto weights = values_of<std::uint16_t>(data + "esft_law.weights_e4.npy");
  const Routing routing = Recording::open(data + "esft_law.ids.npy").take(2, 37, 100);
  ASSERT_EQ(routing.ids.size(), 600u);
  for (std::size_t token = 0; token < 100; ++token) {
    for (std::size_t choice = 0; choice < 6; ++choice) {
      const std::size_t at = ((37 + token) * 4 + 2) * 6 + choice;
      ASSERT_EQ(routing.ids[token * 6 + choice], ids[at]);
      ASSERT_FLOAT_EQ(routing.weights[token * 6 + choice], static_cast<float>(weights[at]) * 1e-4f);
    }
  }
}

TEST(Excerpts, DecodeTakesATokenOfEachPromptThenTheNextStep) {
  const auto ids = values_of<std::int16_t>(data + "gpt_oss_decode.ids.npy");
  const Routing routing = Recording::open(data + "gpt_oss_decode.ids.npy").take(1, 5, 40);  // two steps and a half
  for (std::size_t token = 0; token < 40; ++token) {
    const std::size_t prompt = token % 16, step = 5 + token / 16;
    for (std::size_t choice = 0; choice < 4; ++choice) {
      ASSERT_EQ(routing.ids[token * 4 + choice], ids[((prompt * 24 + step) * 3 + 1) * 4 + choice]);
    }
  }
}

TEST(Excerpts, TakingMoreThanThereIs) {
  const Recording recording = Recording::open(data + "gpt_oss_decode.ids.npy");
  EXPECT_EQ(recording.take(0, 23, 16).tokens, 16);
  EXPECT_EQ(recording.take(0, 23, 0).ids.size(), 0u);
  EXPECT_NE(message_of([&] { recording.take(0, 23, 17); }).find("17 tokens from step 23"), std::string::npos);
  EXPECT_NE(message_of([&] { recording.take(3, 0, 1); }).find("layer 3"), std::string::npos);
  EXPECT_THROW(recording.take(0, -1, 1), heddle::InputError);
  EXPECT_THROW(recording.take(-1, 0, 1), heddle::InputError);
  EXPECT_THROW(recording.take(0, 2147483647, 1), heddle::InputError);
}

TEST_F(RecordingFiles, EveryType) {
  const std::vector<std::int32_t> ids = {3, -1, 0, 7, 5, 2};
  const auto expect_ids = [&](const std::string& bytes) {
    EXPECT_EQ(Recording::open(write("a.npy", bytes)).take(0, 0, 3).ids, ids);
  };
  expect_ids(npy("<i2", "3, 1, 2", std::vector<std::int16_t>(ids.begin(), ids.end())));
  expect_ids(npy("<i4", "3, 1, 2", ids));
  expect_ids(npy("<i8", "3,1,2,", std::vector<std::int64_t>(ids.begin(), ids.end())));
  EXPECT_EQ(Recording::open(write("b.npy", npy("<u2", "1, 1, 2", std::vector<std::uint16_t>{9, 40000}))).least_experts(), 40001);

  const std::string path = write("c.npy", npy("<i4", "3, 1, 2", ids));
  const auto weights = [&](const std::string& bytes) { return Recording::open(path, write("w.npy", bytes)).take(0, 0, 3).weights; };
  const std::vector<float> expected = {0.5f, 0.25f, 0.0f, 1.0f, 2.0f, 0.125f};
  EXPECT_EQ(weights(npy("<f4", "3, 1, 2", expected)), expected);
  EXPECT_EQ(weights(npy("<f2", "3, 1, 2", std::vector<std::uint16_t>{0x3800, 0x3400, 0, 0x3C00, 0x4000, 0x3000})), expected);
  EXPECT_EQ(weights(npy("<f2", "3, 1, 2", std::vector<std::uint16_t>{1, 0x3FF, 0x400, 0x7BFF, 0x3C01, 0}))[0],
            0x1p-24f);  // a subnormal
  EXPECT_EQ(weights(npy("<u2", "3, 1, 2", std::vector<std::uint16_t>{5000, 2500, 0, 10000, 20000, 1250})), expected);
  EXPECT_EQ(Recording::open(path).take(0, 0, 1).weights, (std::vector<float>{0.5f, 0.5f}));
}

TEST_F(RecordingFiles, NewerHeadersAndCompanions) {
  std::string version2 = std::string("\x93NUMPY\x02\0", 8);
  const std::string header = "{'shape': (1, 1, 1), 'descr': '<i2', 'fortran_order': False}   \n";
  const auto length = static_cast<std::uint32_t>(header.size());
  version2.append(reinterpret_cast<const char*>(&length), sizeof length);
  EXPECT_EQ(Recording::open(write("v2.npy", version2 + header + raw(std::vector<std::int16_t>{4}))).take(0, 0, 1).ids[0], 4);

  // A companion of one of three prompts cuts the recording to it.
  const std::string ids = write("r.ids.npy", npy("<i2", "3, 2, 1, 1", std::vector<std::int16_t>{0, 1, 2, 3, 4, 5}));
  EXPECT_FALSE(Recording::open(ids).has_weights());
  write("r.weights.npy", npy("<f4", "1, 2, 1, 1", std::vector<float>{0.25f, 0.5f}));
  const Recording cut = Recording::open(ids);
  EXPECT_EQ(cut.prompts(), 1);
  EXPECT_EQ(cut.take(0, 0, 2).ids, (std::vector<std::int32_t>{0, 1}));
  EXPECT_EQ(cut.take(0, 0, 2).weights, (std::vector<float>{0.25f, 0.5f}));
}

TEST_F(RecordingFiles, DamagedFilesGetOneClearLine) {
  const std::vector<std::int16_t> six = {0, 1, 2, 3, 4, 5};
  const std::string good = npy("<i2", "3, 1, 2", six);
  ASSERT_NO_THROW(Recording::open(write("good.npy", good)));
  for (std::size_t size = 0; size < good.size(); ++size) {
    const std::string path = write("cut.npy", good.substr(0, size));
    EXPECT_THROW(Recording::open(path), heddle::InputError) << "cut to " << size << " bytes";
  }
  expect_refused(write("longer.npy", good + "x"), "13 bytes of values, shape [3, 1, 2] of i2 needs 12");
  expect_refused(write("text.npy", "a,b,c\n1,2,3\n"), "not a .npy file");
  expect_refused(write("version.npy", std::string("\x93NUMPY\x09\0\x10\0", 10)), "version 9");
  expect_refused(write("long_header.npy", std::string("\x93NUMPY\x01\0\xFF\xFF{}", 12)), "a header of 65535 bytes in a file of 12");
  expect_refused(write("fortran.npy", npy_with("{'descr': '<i2', 'fortran_order': True, 'shape': (3, 1, 2)}", raw(six))),
                 "Fortran order");
  expect_refused(write("big.npy", npy(">i2", "3, 1, 2", six)), "'>i2'");
  expect_refused(write("float.npy", npy("<f4", "1, 1, 3", std::vector<float>{1, 2, 3})), "ids of type f4");
  expect_refused(write("flat.npy", npy("<i2", "6,", six)), "shape [6]");
  expect_refused(write("five.npy", npy("<i2", "1, 1, 3, 1, 2", six)), "shape [1, 1, 3, 1, 2]");
  expect_refused(write("empty.npy", npy("<i2", "0, 1, 2", std::vector<std::int16_t>{})), "has no ids");
  expect_refused(write("huge.npy", npy("<i2", "4611686018427387904, 4, 2", six)), "more than any file has");
  expect_refused(write("digits.npy", npy("<i2", "99999999999999999999, 4, 2", six)), "not a tuple of numbers");
  expect_refused(write("negative.npy", npy("<i2", "-3, 1, 2", six)), "not a tuple of numbers");
  expect_refused(write("no_shape.npy", npy_with("{'descr': '<i2', 'fortran_order': False}", raw(six))), "is missing");
  expect_refused(write("key.npy", npy_with("{'colour': 'red'}", raw(six))), "unknown key 'colour'");
  expect_refused(write("open.npy", npy_with("{'descr': '<i2", raw(six))), "a string does not end");
  expect_refused(folder_.string() + "/absent.npy", "No such file");
  expect_refused(folder_.string(), "cannot be read");
}

TEST_F(RecordingFiles, ValuesThatCannotBe) {
  expect_refused(write("id.npy", npy("<i2", "1, 1, 2", std::vector<std::int16_t>{1, -2})), "value 1 is -2");
  expect_refused(write("wide.npy", npy("<i8", "1, 1, 2", std::vector<std::int64_t>{std::int64_t{1} << 40, 0})),
                 "value 0 is 1099511627776");
  expect_refused(write("twice.npy", npy("<i2", "2, 1, 2", std::vector<std::int16_t>{1, 2, 2, 2})), "value 3 repeats expert 2");
  const std::string ids = write("ids.npy", npy("<i2", "2, 1, 1", std::vector<std::int16_t>{1, 2}));
  expect_refused(ids, "[2, 1, 2] does not fit", write("w1.npy", npy("<f4", "2, 1, 2", std::vector<float>(4, 1.0f))));
  expect_refused(ids, "[3, 1, 1] does not fit", write("w2.npy", npy("<f4", "3, 1, 1", std::vector<float>(3, 1.0f))));
  expect_refused(ids, "value 1 is -1", write("w3.npy", npy("<f4", "2, 1, 1", std::vector<float>{1.0f, -1.0f})));
  expect_refused(ids, "value 0 is nan", write("w4.npy", npy("<f2", "2, 1, 1", std::vector<std::uint16_t>{0x7E00, 0})));
  expect_refused(ids, "weights of type i4", write("w5.npy", npy("<i4", "2, 1, 1", std::vector<std::int32_t>{1, 1})));
}

TEST(Expand, SpreadsEachExpertOverItsOwnRange) {
  const Routing routing = Recording::open(data + "esft_intent.ids.npy").take(0, 0, 400);
  const Routing wide = heddle::expand(routing, 4);
  EXPECT_EQ(wide.weights, routing.weights);
  EXPECT_NO_THROW(heddle::check_choices(wide.ids, 400, 6, 256));
  std::vector<int> remainders(4, 0);
  for (std::size_t i = 0; i < wide.ids.size(); ++i) {
    ASSERT_EQ(wide.ids[i] / 4, routing.ids[i]);
    ++remainders[static_cast<std::size_t>(wide.ids[i] % 4)];
  }
  for (const int count : remainders) EXPECT_NEAR(count, 600, 100);  // 2400 pairs, standard deviation 21
  EXPECT_EQ(heddle::expand(routing, 1).ids, routing.ids);
  EXPECT_EQ(heddle::expand(Routing{1, 2, {-1, 3}, {0, 1}}, 4).ids[0], -1);
  EXPECT_THROW(heddle::expand(routing, 0), heddle::InputError);
  EXPECT_THROW(heddle::expand(Routing{1, 1, {1 << 20}, {1}}, 4000), heddle::InputError);
}

TEST(Expand, UsesTheStatedHash) {
  const auto mix = [](std::uint64_t x) {
    std::uint64_t z = x + 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  };
  EXPECT_EQ(mix(0), 0xE220A8397B1DCDAFu);  // the published first output of splitmix64 with seed 0
  const Routing routing{3, 2, {5, 6, 7, 8, 9, 10}, std::vector<float>(6, 0.5f)};
  const Routing wide = heddle::expand(routing, 7);
  for (std::uint64_t token = 0; token < 3; ++token) {
    for (std::uint64_t choice = 0; choice < 2; ++choice) {
      const std::size_t at = token * 2 + choice;
      EXPECT_EQ(wide.ids[at], routing.ids[at] * 7 + static_cast<std::int32_t>(mix(mix(token) + choice) % 7));
    }
  }
}

}  // namespace
