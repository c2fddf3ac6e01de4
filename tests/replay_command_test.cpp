// `heddle replay` from outside: its numbers against those of `heddle run` on the same tokens, every format, and what is refused.
#include <gmock/gmock.h>

#include "command_support.hpp"
#include "heddle/routing.hpp"

namespace heddle::command_test {
namespace {

const std::string data = std::string(HEDDLE_TEST_DATA) + "/routing/";
const std::string law = data + "esft_law.ids.npy";

class ReplayCommand : public CommandTest {
 protected:
  nlohmann::json replayed(const std::string& arguments) const {
    expect_done("replay " + arguments + " --json " + file("r.json") + " >/dev/null");
    return json_of(file("r.json"));
  }
};

TEST_F(ReplayCommand, RowsAreThoseThatTheEngineMoves) {
  const auto json = replayed(law + " --ranks 4 --experts 64 --tokens 90 --steps 1 --layers 2");
  const auto& layer = json.at("placements").at(0).at("layers").at(0);
  for (const auto& [way, kind] : {std::pair{"normal", "copies"}, std::pair{"low_latency", "pairs"}}) {
    expect_done("run" + small_layer + " --experts 64 --ranks 4 --tokens 90 --trace " + law + " --trace-layer 2 --way " + way +
                " --out " + file("o.safetensors") + " --json " + file("j.json") + " >/dev/null");
    const auto ran = json_of(file("j.json"));
    for (std::size_t rank = 0; rank < 4; ++rank) {
      EXPECT_EQ(layer.at("ranks").at(rank).at(kind).at("received"), ran.at("per_rank").at(rank).at("rows_received"))
          << way << " " << rank;
      EXPECT_EQ(layer.at("ranks").at(rank).at("pairs").at("received"), ran.at("per_rank").at(rank).at("rows_real"))
          << way << " " << rank;
    }
    if (kind == std::string("copies")) {
      EXPECT_DOUBLE_EQ(layer.at("copies_per_token"), ran.at("copies_per_token"));
    }
  }
}

TEST_F(ReplayCommand, JsonHoldsEveryPlacementAndWay) {
  const auto json =
      replayed(law + " --ranks 8 --preset deepseek-v4-flash --experts 64 --tokens 100 --replicas 8 --way gather,mega");
  EXPECT_EQ(json.at("steps"), 4);
  EXPECT_EQ(json.at("tokens_per_step"), 100);
  EXPECT_EQ(json.at("predicted_for").at("machine"), "h200");
  EXPECT_TRUE(json.at("measured").is_null());
  for (const char* list : {"placements", "unseen"}) {
    std::vector<std::pair<std::string, int>> names;
    for (const auto& placement : json.at(list)) {
      names.emplace_back(placement.at("placement"), placement.at("replicas"));
      double step = 0, imbalance = 0;
      for (const auto& layer : placement.at("layers")) {
        step += layer.at("predicted_seconds").at("mega").get<double>();
        imbalance += layer.at("step_max_over_mean").get<double>() / 4;
        std::int64_t pairs = 0;
        for (const auto& rank : layer.at("ranks")) pairs += rank.at("pairs").at("received").get<std::int64_t>();
        EXPECT_EQ(pairs, (std::string(list) == "unseen" ? 200 : 400) * 6);
        EXPECT_EQ(layer.at("expert_load").size(), 64u);
      }
      EXPECT_NEAR(step, placement.at("predicted_step_seconds").at("mega").get<double>(), 1e-12);
      EXPECT_NEAR(imbalance, placement.at("step_max_over_mean").get<double>(), 1e-12);
      EXPECT_EQ(placement.at("predicted_step_seconds").size(), 2u);
    }
    EXPECT_EQ(names, (std::vector<std::pair<std::string, int>>{{"contiguous", 0}, {"greedy", 0}, {"greedy", 8}}));
  }
}

TEST_F(ReplayCommand, MeasuredTimesAreLabelledAsTheHostEngines) {
  const std::string arguments = data + "gpt_oss_decode.ids.npy --ranks 2" + small_layer +
                                " --experts 32 --steps 2 --layers 0,2 --measure --calls 1 --way normal,mega";
  const Ran ran = run("replay " + arguments + " --json " + file("r.json"));
  ASSERT_EQ(0, ran.status) << ran.err;
  EXPECT_THAT(ran.out, ::testing::HasSubstr("Measured on the host engine"));
  const auto measured = json_of(file("r.json")).at("measured");
  EXPECT_EQ(measured.at("engine"), "host");
  EXPECT_EQ(measured.at("ways").size(), 2u);
  for (const char* way : {"normal", "mega"}) {
    double sum = 0;
    for (const auto& layer : measured.at("ways").at(way).at("layers")) sum += layer.at("seconds").get<double>();
    EXPECT_GT(sum, 0);
    EXPECT_NEAR(sum, measured.at("ways").at(way).at("step_seconds").get<double>(), 1e-12);
  }
}

/// What is predicted of copies is what runs: the same rows on every rank, by every way.
TEST_F(ReplayCommand, RowsUnderReplicasAreThoseThatRun) {
  for (const char* copies : {"levelled", "turns"}) {
    const auto json = replayed(law + " --ranks 8" + small_layer +
                               " --experts 64 --tokens 200 --layers 1,3 --replicas 32 --measure --calls 1 --copies " + copies);
    EXPECT_EQ(json.at("copies"), copies);
    const auto& predicted = json.at("placements");
    const auto& measured = json.at("measured");
    EXPECT_EQ(measured.at("with_replicas").at("replicas"), 32);
    for (const auto& [way, times] : measured.at("with_replicas").at("ways").items())
      EXPECT_NEAR(times.at("step_max_over_mean"), predicted.at(2).at("step_max_over_mean").get<double>(), 1e-9) << way;
    for (const auto& [way, times] : measured.at("ways").items())
      EXPECT_NEAR(times.at("step_max_over_mean"), predicted.at(0).at("step_max_over_mean").get<double>(), 1e-9) << way;
    EXPECT_EQ(measured.at("ways").size(), 6u);
    EXPECT_LT(predicted.at(2).at("step_max_over_mean").get<double>(), predicted.at(0).at("step_max_over_mean").get<double>());
  }
}

TEST_F(ReplayCommand, CopiesStayOnNodes) {
  const auto json = replayed(law + " --ranks 8 --tokens 200 --replicas 16 --nodes 2 --groups 8");
  EXPECT_EQ(json.at("nodes"), 2);
  EXPECT_LT(json.at("placements").at(2).at("step_max_over_mean").get<double>(), 1.3);
}

TEST_F(ReplayCommand, ABatchOfOursAndItsHiddenStates) {
  expect_done("verify" + small_layer + " --ranks 2 --tokens 24 --way normal --save-inputs " + file("saved") + " >/dev/null");
  const auto json = replayed(file("saved/batch.safetensors") + " --ranks 2" + small_layer + " --measure --calls 1 --way normal");
  EXPECT_EQ(json.at("tokens_per_step"), 24);
  EXPECT_EQ(json.at("experts"), 8);
  expect_error(
      2, "replay " + file("saved/batch.safetensors") + " --ranks 2 --preset mixtral-8x7b --hidden 256 --intermediate 64 --measure",
      "--hidden 128");
}

TEST_F(ReplayCommand, CountsOfSglang) {
  const auto json = replayed(data + "sglang_stat.pt --ranks 4 --preset deepseek-v4-flash --replicas 4");
  EXPECT_EQ(json.at("recording").at("kind"), "counts of experts");
  EXPECT_TRUE(json.at("placements").at(0).at("copies_per_token").is_null());
  const auto& seconds = json.at("placements").at(0).at("predicted_step_seconds");
  EXPECT_EQ(seconds.size(), 3u) << "gather, low_latency, mega: " << seconds;
  const auto same = replayed(law + " --ranks 4 --tokens 100");
  for (std::size_t layer = 0; layer < 4; ++layer) {
    for (const char* field : {"rank_max_over_mean", "step_max_over_mean", "expert_load"}) {
      EXPECT_EQ(json.at("placements").at(0).at("layers").at(layer).at(field),
                same.at("placements").at(0).at("layers").at(layer).at(field));
    }
  }
  expect_error(2, "replay " + data + "sglang_stat.pt --ranks 4 --preset mixtral-8x7b --measure", "counts of experts cannot be run");
  expect_error(2, "replay " + data + "sglang_stat.pt --ranks 4 --tokens 5", "leave --tokens");
  expect_error(2, "replay " + data + "sglang_stat.pt --ranks 4 --topk 0", "--topk 0: 1 to 64");
}

TEST_F(ReplayCommand, WhatIsRefused) {
  expect_error(2, "replay " + law, "--ranks");
  expect_error(2, "replay " + file("absent.npy") + " --ranks 2", "no such file");
  expect_error(2, "replay " + law + " --ranks 2 --experts 2000000000", "1 to 1048576");
  expect_error(2, "replay " + law + " --ranks 2 --expand 1000000000", "--expand");
  expect_error(2, "replay " + law + " --ranks 2 --layers 0,4", "0 to 3");
  expect_error(2, "replay " + law + " --ranks 2 --layers 1,1", "given twice");
  expect_error(2, "replay " + law + " --ranks 2 --tokens 401", "1 to 400");
  expect_error(2, "replay " + law + " --ranks 2 --experts 32", "names 64 experts");
  expect_error(2, "replay " + law + " --ranks 2 --preset mixtral-8x7b", "give --experts 64");
  expect_error(2, "replay " + law + " --ranks 2 --hidden 128", "--intermediate");
  for (const char* of_a_layer : {"--weights bf16", "--wire fp8", "--combine-wire fp8", "--machine b300"})
    expect_error(2, "replay " + law + " --ranks 2 " + of_a_layer, std::string(of_a_layer, 5));
  expect_error(2, "replay " + law + " --ranks 2 --way nonsense", "nonsense");
  expect_error(2, "replay " + law + " --ranks 2 --replicas 65", "65 more copies");
  expect_error(2, "replay " + law + " --ranks 2 --topk 4", "6 choices");
  expect_error(2, "replay " + law + " --ranks 4 --nodes 3", "--nodes 3");
  expect_error(2, "replay " + law + " --ranks 4 --nodes 2 --groups 3", "64 experts in 3 groups");
  expect_error(2, "replay " + law + " --ranks 4 --copies random", "levelled, turns");
  expect_error(2, "replay " + law + " --ranks 4" + small_layer + " --experts 64 --measure --replicas 3", "4 are");
  expect_error(2, "replay " + law + " --ranks 2 --measure", "--preset");
  expect_error(2, "replay " + law + " --ranks 2 --engine cuda", "--measure");
  expect_error(2, "replay " + law + " --ranks 2" + small_layer + " --experts 64 --measure --engine tpu", "tpu");
  expect_error(2, "replay " + law + " --ranks 2 --json " + file("no_folder/r.json"), "no_folder");
}

}  // namespace
}  // namespace heddle::command_test
