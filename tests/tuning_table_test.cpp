// Tuning tables: what lies between measured sizes, which entry stands in for a shape, JSON there and back, damaged JSON refused
// with what and where, and the choice from a table or from the planner's model.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <random>
#include <string>

#include "heddle/error.hpp"
#include "heddle/plan.hpp"
#include "heddle/tuning.hpp"
#include "routing/random.hpp"

namespace heddle {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr Way measured_ways[] = {Way::gather, Way::low_latency, Way::mega};

TuningKey key_of(const std::string& machine = "test machine") {
  return {machine, 4096, 2048, 64, 6, 2, WeightKind::mxfp4, Activation::fp8};
}

TuningEntry entry_of(const TuningKey& key) {
  return {key, "a test", {{8, {{Way::gather, 10.0}, {Way::mega, 40.0}}}, {128, {{Way::gather, 160.0}, {Way::mega, 80.0}}}}};
}

TuningTable table_of(std::vector<TuningEntry> entries) {
  TuningTable table;
  for (TuningEntry& entry : entries) table.add(std::move(entry));
  return table;
}

PlanRequest request_of(const TuningKey& key) {
  PlanRequest request;
  request.shape = {key.hidden, key.intermediate, key.experts, key.topk, {}};
  request.weights = key.weights;
  request.ranks = key.ranks;
  request.wire = Wire::fp8;
  return request;
}

std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const InputError& error) {
    return error.what();
  }
  ADD_FAILURE() << "nothing was refused";
  return "";
}

TEST(TuningTable, BetweenSizesTimesFollowALineOfLogarithms) {
  const TuningEntry entry = entry_of(key_of());
  EXPECT_DOUBLE_EQ(*entry.us(Way::gather, 8), 10.0);
  EXPECT_DOUBLE_EQ(*entry.us(Way::gather, 128), 160.0);
  EXPECT_NEAR(*entry.us(Way::gather, 32), 40.0, 1e-9) << "16 times the time for 16 times the tokens";
  EXPECT_NEAR(*entry.us(Way::mega, 32), 40.0 * std::sqrt(2.0), 1e-9);
  EXPECT_DOUBLE_EQ(*entry.us(Way::mega, 1), 40.0) << "below the smallest as there";
  EXPECT_DOUBLE_EQ(*entry.us(Way::mega, 256), 160.0) << "above the largest in proportion";
  EXPECT_FALSE(entry.us(Way::elastic, 8).has_value());
}

/// Times that rise with size rise between sizes, too, and none is beyond its neighbours'.
TEST(TuningTable, RandomEntriesStayBetweenTheirNeighbours) {
  const char* given = std::getenv("HEDDLE_SEED");
  const std::uint64_t seed = given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device{}();
  std::printf("HEDDLE_SEED=%llu\n", static_cast<unsigned long long>(seed));
  Random random(splitmix64(seed));
  for (int round = 0; round < 200; ++round) {
    TuningEntry entry{key_of(), "", {}};
    int tokens = 0;
    for (int i = 0; i < 6; ++i) {
      tokens += 1 + static_cast<int>(random.below(300));
      entry.rows.push_back({tokens, {{Way::gather, 1.0 + static_cast<double>(random.below(1000))}}});
    }
    for (std::size_t i = 1; i < entry.rows.size(); ++i) {
      const double a = entry.rows[i - 1].us.at(Way::gather), b = entry.rows[i].us.at(Way::gather);
      for (int t = entry.rows[i - 1].max_tokens; t <= entry.rows[i].max_tokens; ++t) {
        const double us = *entry.us(Way::gather, t);
        ASSERT_GE(us, std::min(a, b) * (1 - 1e-12)) << t;
        ASSERT_LE(us, std::max(a, b) * (1 + 1e-12)) << t;
      }
    }
  }
}

TEST(TuningTable, TheNearestShapeStandsIn) {
  TuningKey far = key_of(), near = key_of();
  far.hidden = 2048;
  near.intermediate = 1536;
  const TuningTable table = table_of({entry_of(far), entry_of(near)});
  EXPECT_EQ(table.find(key_of())->key, near);
  EXPECT_EQ(table.find(far)->key, far) << "its own entry comes first";
  for (const auto& [change, what] : std::initializer_list<std::pair<std::function<void(TuningKey&)>, const char*>>{
           {[](TuningKey& key) { key.machine = "another"; }, "machine"},
           {[](TuningKey& key) { key.ranks = 8; }, "ranks"},
           {[](TuningKey& key) { key.weights = WeightKind::nvfp4; }, "weights"},
           {[](TuningKey& key) { key.activation = Activation::bf16; }, "activations"},
           {[](TuningKey& key) { key.hidden = 448; }, "a far shape"}}) {
    TuningKey other = key_of();
    change(other);
    EXPECT_EQ(table.find(other), nullptr) << what;
  }
}

TEST(TuningTable, JsonThereAndBack) {
  TuningKey second = key_of("NVIDIA \"H200\"\n");
  second.weights = WeightKind::bf16;
  second.activation = Activation::bf16;
  TuningEntry odd = entry_of(second);
  odd.rows[0].us[Way::one_sided] = 1.0 / 3.0;
  const TuningTable table = table_of({entry_of(key_of()), odd});
  const TuningTable back = TuningTable::parse(table.json(), "text");
  EXPECT_EQ(back.json(), table.json());
  EXPECT_EQ(back.fingerprint(), table.fingerprint());
  EXPECT_EQ(back.entries()[1].key, second);
  EXPECT_DOUBLE_EQ(*back.entries()[1].us(Way::one_sided, 8), 1.0 / 3.0);

  const std::filesystem::path file =
      std::filesystem::temp_directory_path() / ("heddle-tuning-" + std::to_string(getpid()) + ".json");
  table.write(file.string());
  EXPECT_EQ(TuningTable::read(file.string()).fingerprint(), table.fingerprint());
  std::filesystem::remove(file);
  EXPECT_THAT(refusal([&] { TuningTable::read(file.string()); }), HasSubstr(file.string()));
}

TEST(TuningTable, AnotherTimeIsAnotherFingerprint) {
  TuningEntry entry = entry_of(key_of());
  const std::string before = table_of({entry}).fingerprint();
  entry.rows[1].us[Way::mega] += 0.01;
  EXPECT_NE(table_of({entry}).fingerprint(), before);
}

TEST(TuningTable, DamagedJsonIsRefusedWithWhatAndWhere) {
  const std::string good = table_of({entry_of(key_of())}).json();
  const auto changed = [&](const std::string& from, const std::string& to) {
    std::string text = good;
    const std::size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    return text.replace(at, from.size(), to);
  };
  const auto expect = [&](const std::string& text, const std::string& where, const std::string& what) {
    EXPECT_THAT(refusal([&] { TuningTable::parse(text, "F.json"); }), AllOf(HasSubstr(where), HasSubstr(what))) << text;
  };
  expect("", "F.json", "byte");
  expect(good.substr(0, good.size() / 2), "F.json", "byte");
  expect("[]", "F.json", "object");
  expect(changed("heddle_tuning", "heddle_turning"), "F.json", "heddle_tuning");
  expect(changed("\"heddle_tuning\": 1", "\"heddle_tuning\": 2"), "F.json", "format 2");
  expect(changed("\"entries\": [", "\"entries\": 3, \"others\": ["), "F.json.entries", "list");
  expect(changed("\"hidden\"", "\"hiden\""), "F.json.entries[0]", "'hidden' is missing");
  expect(changed("4096", "-4096"), "F.json.entries[0].hidden", "-4096");
  expect(changed("4096", "4096.5"), "F.json.entries[0].hidden", "4096.5");
  expect(changed("4096", "99999999999999999999"), "F.json.entries[0].hidden", "whole number");
  expect(changed("mxfp4", "fp3"), "F.json.entries[0].weights", "fp3");
  expect(changed("\"fp8\"", "8"), "F.json.entries[0].activation", "text");
  expect(changed("\"gather\"", "\"gathr\""), "F.json.entries[0].rows[0].us", "gathr");
  expect(changed("\"gather\"", "\"auto\""), "F.json.entries[0].rows[0].us", "auto");
  expect(changed("10.0", "\"fast\""), "F.json.entries[0].rows[0].us", "fast");
  expect(changed("10.0", "-1"), "F.json.entries[0]", "-1");
  expect(changed("10.0", "1e999"), "F.json", "beyond");
  expect(changed("\"max_tokens\": 128", "\"max_tokens\": 8"), "F.json.entries[0]", "ascend");
  const std::size_t begin = good.find('{', 1), end = good.rfind('}', good.size() - 3);
  const std::string entry = good.substr(begin, end - begin + 1);
  expect(changed(entry, entry + "," + entry), "F.json.entries[1]", "already");
}

TEST(TuningTable, TheShippedOneIsOfH200AndChoosesWhatWasFastest) {
  const auto table = TuningTable::shipped();
  ASSERT_FALSE(table->entries().empty());
  for (const TuningEntry& entry : table->entries()) {
    EXPECT_EQ(entry.key.machine, "NVIDIA H200");
    EXPECT_NE(entry.source, "");
    for (const TuningRow& row : entry.rows) {
      std::vector<Way> ways;
      for (const auto& [way, us] : row.us) ways.push_back(way);
      const WayChoice choice = choose_way(*table, entry.key, request_of(entry.key), ways, row.max_tokens);
      for (const auto& [way, us] : row.us) EXPECT_LE(row.us.at(choice.way), us) << name(way) << " at " << row.max_tokens;
    }
  }
}

TEST(TuningTable, TheChoiceIsTheFastestThatWasMeasured) {
  const TuningTable table = table_of({entry_of(key_of())});
  const PlanRequest request = request_of(key_of());
  EXPECT_EQ(choose_way(table, key_of(), request, measured_ways, 8).way, Way::gather);
  EXPECT_EQ(choose_way(table, key_of(), request, measured_ways, 128).way, Way::mega);
  EXPECT_EQ(choose_way(table, key_of(), request, measured_ways, 0).way, Way::gather)
      << "a step without tokens is one of the smallest";
  const WayChoice without = choose_way(table, key_of(), request, std::vector{Way::low_latency, Way::mega}, 8);
  EXPECT_EQ(without.way, Way::mega) << "what was not measured is left out where something was";
  EXPECT_THAT(without.text(), AllOf(HasSubstr("mega"), HasSubstr("40.0 us"), HasSubstr("not measured"), HasSubstr("test machine")));
  EXPECT_THROW(choose_way(table, key_of(), request, {}, 8), InputError);
}

TEST(TuningTable, WhereNothingFitsThePlannersModelChooses) {
  const TuningTable table = table_of({entry_of(key_of())});
  TuningKey key = key_of();
  key.ranks = 8;
  key.experts = 256;
  PlanRequest request = request_of(key);
  for (const int tokens : {1, 16, 300, 4096}) {
    const WayChoice choice = choose_way(table, key, request, real_ways, tokens);
    request.tokens = request.cap = tokens;
    request.machine = find_machine("h200");
    for (const Way way : real_ways) {
      EXPECT_LE(estimate_time(choice.way, request)->total, estimate_time(way, request)->total) << name(way) << " at " << tokens;
    }
    EXPECT_THAT(choice.text(), AllOf(HasSubstr("planner's model"), HasSubstr("exchange"), HasSubstr("experts")));
  }
}

}  // namespace
}  // namespace heddle
