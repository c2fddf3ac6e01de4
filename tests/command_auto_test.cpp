// Way auto from outside: tables measured, read and refused, what the command says of its choice, and calls split into passes.
#include "command_support.hpp"

namespace heddle::command_test {
namespace {

class CommandAuto : public CommandTest {
 protected:
  static std::string layer_with(const std::string& more) { return deepseek_layer + " --experts 16 --ranks 2 " + more; }
  std::string out(const std::string& name) const { return " --out " + file(name); }
  /// Outputs of a run by a way.
  std::vector<std::byte> outputs(const std::string& more) const {
    expect_done("run" + layer_with(more) + out("o"));
    return bytes_of(file("o"), "output");
  }
  static std::string changed(std::string text, const std::string& from, const std::string& to) {
    const std::size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    return at == std::string::npos ? text : text.replace(at, from.size(), to);
  }
};

TEST_F(CommandAuto, TunesThisMachineAndGoesTheFastestWayOfTheTable) {
  expect_done("tune" + layer_with("--sizes 8,2 --calls 2" + out("t.json")));
  const auto table = json_of(file("t.json"));
  ASSERT_EQ(table.at("entries").size(), 1u);
  const auto& entry = table.at("entries")[0];
  EXPECT_EQ(entry.at("ranks"), 2);
  EXPECT_EQ(entry.at("rows")[0].at("max_tokens"), 2);
  EXPECT_EQ(entry.at("rows")[1].at("us").size(), 6u) << "every way";

  expect_done("run" + layer_with("--tokens 16 --way auto --tuning " + file("t.json") + " --json " + file("j")) + out("o"));
  const auto json = json_of(file("j"));
  const auto& us = entry.at("rows")[1].at("us");
  std::string fastest = "gather";
  for (const auto& [way, time] : us.items()) {
    if (time.get<double>() < us.at(fastest).get<double>()) fastest = way;
  }
  EXPECT_EQ(json.at("configuration").at("way"), fastest);
  EXPECT_EQ(json.at("configuration").at("asked_way"), "auto");
  EXPECT_NE(json.at("choice").dump().find("measured on"), std::string::npos) << json.at("choice");
  const auto automatic = bytes_of(file("o"), "output");
  EXPECT_EQ(automatic, outputs("--tokens 16 --way " + fastest));
}

TEST_F(CommandAuto, ATableKeepsEntriesOfOtherShapes) {
  expect_done("tune" + layer_with("--sizes 2 --calls 1 --way gather" + out("t.json")));
  expect_done("tune" + layer_with("--sizes 2 --calls 1 --way gather,mega --topk 2" + out("t.json")));
  EXPECT_EQ(json_of(file("t.json")).at("entries").size(), 2u);
  expect_done("tune" + layer_with("--sizes 2,3 --calls 1 --way gather" + out("t.json")));
  const auto table = json_of(file("t.json"));
  ASSERT_EQ(table.at("entries").size(), 2u) << "the same shape again takes its place";
  EXPECT_EQ(table.at("entries")[0].at("rows").size(), 2u);
}

TEST_F(CommandAuto, OnlyCandidatesAndSumsThatWereAskedFor) {
  const auto way_of = [&](const std::string& more) {
    expect_done("run" + layer_with("--tokens 16 --way auto --json " + file("j") + " " + more) + out("o"));
    return json_of(file("j")).at("configuration").at("way").get<std::string>();
  };
  EXPECT_EQ(way_of("--candidates normal"), "normal");
  const std::string two_stages = way_of("--sums two_stages");
  EXPECT_TRUE(two_stages != "mega" && two_stages != "low_latency") << two_stages;
  expect_error(2, "run" + layer_with("--tokens 16 --way auto --candidates warp") + out("n"), "warp");
  expect_error(2, "run" + layer_with("--tokens 16 --way auto --sums both") + out("n"), "two_stages");
  expect_error(2, "run" + layer_with("--tokens 16 --way auto --candidates mega --weight-at combine") + out("n"), "weight_at");
}

TEST_F(CommandAuto, DamagedTablesAreRefused) {
  expect_done("tune" + layer_with("--sizes 2 --calls 1 --way gather" + out("t.json")));
  const std::string good = text_of(file("t.json"));
  const auto with = [&](const std::string& text) { std::ofstream(file("t.json")) << text; };
  const std::string run = "run" + layer_with("--tokens 4 --way auto --tuning " + file("t.json")) + out("n");
  with(good.substr(0, good.size() / 2));
  expect_error(2, run, "t.json");
  with(changed(good, "gather", "gathering"));
  expect_error(2, run, "entries[0].rows[0].us");
  expect_error(2, "tune" + layer_with("--sizes 2 --way gather" + out("t.json")), "gathering");
  fs::remove(file("t.json"));
  expect_error(2, run, "t.json");
}

TEST_F(CommandAuto, TuneSaysWhatItNeeds) {
  expect_error(2, "tune" + layer_with("--sizes 2"), "--out");
  expect_error(2, "tune" + layer_with("--sizes 0" + out("n")), "--sizes 0");
  expect_error(2, "tune" + layer_with("--tokens 4" + out("n")), "--sizes");
  expect_error(2, "tune" + layer_with("--way warp" + out("n")), "warp");
  expect_error(2, "tune" + layer_with("--sizes 2 --combine-wire fp8" + out("n")), "--combine-wire");
  expect_error(2, "tune" + layer_with("--sizes 2000000000" + out("n")), "2000000000");
  expect_error(2, "tune --from " + file("none") + out("n"), "none");
}

TEST_F(CommandAuto, TuneOnGpusRefusesByNameWhatItWouldNotMeasure) {
  const std::string on_gpus = "tune --engine cuda --preset deepseek-v4-flash --ranks 2 --sizes 2" + out("n");
  for (const char* flag : {"--workers", "--block-rows", "--cap"}) expect_error(2, on_gpus + " " + flag + " 16", flag);
  for (const char* flag : {"--tensor-parallel", "--processes", "--cpu-sync"}) expect_error(2, on_gpus + " " + flag, flag);
  expect_error(2, on_gpus + " --activation bf16", "mxfp4 weights are measured with fp8 activations");
  expect_error(2, on_gpus + " --weights bf16 --activation fp8", "bf16 weights are measured with bf16 activations");
  expect_error(2, on_gpus + " --activation int8", "--activation int8");
}

/// The shipped table is what the measured results of the repository give: of two GPUs a benchmark's, of one a table's own.
TEST_F(CommandAuto, TakesTimesFromTheBenchmarksFiles) {
  const fs::path results = fs::path(HEDDLE_TEST_DATA).parent_path().parent_path() / "bench" / "results";
  expect_done("tune --from " + (results / "mega-2xh200.json").string() + out("t.json"));
  auto entries = json_of(file("t.json")).at("entries");
  const auto of_one = json_of(results / "tuning-1xh200-6eb0c72.json").at("entries");
  entries.insert(entries.end(), of_one.begin(), of_one.end());
  const auto shipped = json_of(results.parent_path().parent_path() / "src" / "tuning" / "h200.json").at("entries");
  ASSERT_EQ(entries.size(), shipped.size());
  for (std::size_t i = 0; i < entries.size(); ++i) {
    for (const char* field : {"machine", "hidden", "intermediate", "experts", "topk", "ranks", "weights", "activation"})
      EXPECT_EQ(entries[i].at(field), shipped[i].at(field)) << field;
    const auto& rows = shipped[i].at("rows");
    ASSERT_EQ(rows.size(), entries[i].at("rows").size());
    for (std::size_t r = 0; r < rows.size(); ++r) {
      for (const auto& [way, us] : rows[r].at("us").items())
        EXPECT_NEAR(entries[i].at("rows")[r].at("us").at(way).get<double>(), us.get<double>(), 0.006) << way;
    }
  }
}

/// Of a run that measured other ways of combining, too: mega's time is that of slots, and of the chains there are all.
TEST_F(CommandAuto, TakesMegaAsItIsByDefault) {
  const fs::path results = fs::path(HEDDLE_TEST_DATA).parent_path().parent_path() / "bench" / "results";
  const fs::path bench = results / "mega-1xh200-combine.json";
  expect_done("tune --from " + bench.string() + out("t.json"));
  const auto entries = json_of(file("t.json")).at("entries");
  ASSERT_EQ(entries.size(), 1u);
  int compared = 0;
  const auto measured = json_of(bench);
  for (const auto& row : measured.at("rows")) {
    if (row.at("tokens") != 8 || row.at("way") == "stream") continue;
    if (row.at("way") == "mega" && row.at("combine") != "slots") continue;
    const auto& us = entries[0].at("rows")[0].at("us");
    EXPECT_NEAR(us.at(row.at("way").get<std::string>()).get<double>(), row.at("median_us").get<double>(), 0.006) << row.at("way");
    ++compared;
  }
  EXPECT_EQ(compared, 3) << "gather, low_latency, mega";
}

TEST_F(CommandAuto, PlanExplainsTheChoiceBySize) {
  const Ran ran = run("plan --explain --preset deepseek-v4-flash --experts 64 --ranks 2 --cap 100 --json " + file("j"));
  ASSERT_EQ(0, ran.status) << ran.err;
  for (const char* text : {"measured on NVIDIA H200", "tokens", "gather", "mega", "Left out: normal"})
    EXPECT_NE(std::string::npos, ran.out.find(text)) << text << "\n" << ran.out;
  const auto sizes = json_of(file("j")).at("explain").at("sizes");
  ASSERT_EQ(sizes.size(), 8u) << "1, 2, 4 .. 64 and the cap";
  EXPECT_EQ(sizes[7].at("max_tokens"), 100);
  EXPECT_EQ(sizes[0].at("way"), "gather");
  const Ran far = run("plan --explain --preset deepseek-v4-flash --ranks 8 --cap 100");
  EXPECT_NE(std::string::npos, far.out.find("planner's model")) << far.out;
  EXPECT_NE(std::string::npos, far.out.find("exchange")) << far.out;
  expect_error(2, "plan --explain --budget --preset deepseek-v4-flash --ranks 8", "--budget");
  expect_error(2, "plan --preset deepseek-v4-flash --ranks 8 --tokens 1 --tuning F", "--explain");
}

TEST_F(CommandAuto, MoreTokensThanTheCapInPasses) {
  for (const char* way : {"gather", "mega"}) {
    const std::string call = std::string("--tokens 20 --way ") + way;
    const auto whole = outputs(call);
    EXPECT_EQ(outputs(call + " --cap 3 --overflow split --json " + file("j")), whole) << way;
    EXPECT_EQ(json_of(file("j")).at("passes"), 4);
    EXPECT_EQ(json_of(file("j")).at("configuration").at("overflow"), "split");
  }
  expect_error(2, "run" + layer_with("--tokens 20 --way gather --cap 3") + out("n"), "--overflow split");
  expect_error(2, "run" + layer_with("--tokens 20 --way gather --overflow drop") + out("n"), "drop");
}

TEST_F(CommandAuto, VerifyChecksTheWayThatWasChosen) {
  expect_done("verify" + layer_with("--tokens 40 --cap 7 --overflow split --way auto,low_latency,gather --json " + file("j")));
  const auto ways = json_of(file("j")).at("ways");
  ASSERT_EQ(ways.size(), 3u);
  for (const auto& way : ways) EXPECT_TRUE(way.at("passed").get<bool>());
}

}  // namespace
}  // namespace heddle::command_test
