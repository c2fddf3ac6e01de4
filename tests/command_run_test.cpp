// `heddle run` from outside: outputs, reports, every name of a way, saved inputs, recordings, processes.
#include "command_support.hpp"

namespace heddle::command_test {
namespace {

class RunCommand : public CommandTest {
 protected:
  /// The output's bytes of a run that must succeed.
  std::vector<std::byte> output(const std::string& arguments) const {
    expect_done("run" + arguments + " --out " + file("o"));
    return bytes_of(file("o"), "output");
  }
};

const std::vector<std::string> our_ways{"gather", "normal", "low_latency", "elastic", "one_sided", "mega"};

TEST_F(RunCommand, WritesTheOutputAndNothingElse) {
  const Ran ran = run("run" + small_layer + " --ranks 3 --tokens 10 --way elastic --out " + file("o.safetensors"));
  EXPECT_EQ(0, ran.status) << ran.err;
  EXPECT_NE(std::string::npos, ran.out.find("10 tokens on 3 ranks")) << ran.out;
  EXPECT_EQ(files(), std::vector<std::string>{file("o.safetensors")});
  const auto opened = checkpoint::SafetensorsFile::open(file("o.safetensors"));
  const std::map<std::string, std::pair<std::string, std::vector<std::int64_t>>> wanted{
      {"output", {"BF16", {10, 128}}}, {"topk_ids", {"I32", {10, 2}}}, {"topk_weights", {"F32", {10, 2}}}};
  EXPECT_EQ(opened->tensors().size(), wanted.size());
  for (const auto& [name, what] : wanted) {
    const auto* tensor = opened->find(name);
    ASSERT_NE(tensor, nullptr) << name;
    EXPECT_EQ(checkpoint::name(tensor->dtype), what.first);
    EXPECT_EQ(tensor->shape, what.second);
  }
}

TEST_F(RunCommand, ReportsAllFields) {
  expect_done("run" + deepseek_layer + " --ranks 3 --tokens 11 --way normal --clamp none --out " + file("o") + " --json " +
              file("j"));
  const auto json = json_of(file("j"));
  const auto keys_of = [](const nlohmann::json& object) {
    std::vector<std::string> keys;
    for (const auto& [key, value] : object.items()) keys.push_back(key);
    return keys;  // in alphabetical order
  };
  EXPECT_EQ(keys_of(json), (std::vector<std::string>{"buffer_bytes", "configuration", "copies_per_token", "heddle", "host_waited",
                                                     "kernels_launched", "passes", "per_rank", "phases", "seconds"}));
  EXPECT_EQ(
      keys_of(json.at("configuration")),
      (std::vector<std::string>{"activation",  "asked_way",       "cap",           "clamp",   "combine_wire",   "cpu_sync",
                                "deadline_ms", "engine",          "expert_slices", "experts", "gather",         "group",
                                "hidden",      "intermediate",    "layout",        "notes",   "overflow",       "processes",
                                "ranks",       "reduce",          "scale",         "shared",  "shared_weights", "tensor_parallel",
                                "tokens",      "tokens_per_rank", "topk",          "way",     "weight_at",      "weights",
                                "wire",        "workers"}));
  EXPECT_EQ(keys_of(json.at("phases")),
            (std::vector<std::string>{"activation", "combine", "dispatch", "gemm1", "gemm2", "regroup"}));
  for (const auto& phase : json.at("phases")) {
    EXPECT_EQ(keys_of(phase), (std::vector<std::string>{"local_bytes", "remote_bytes", "seconds"}));
  }
  const auto& configuration = json.at("configuration");
  EXPECT_EQ(configuration.at("tokens_per_rank"), nlohmann::json({4, 4, 3}));
  EXPECT_EQ(configuration.at("way"), "normal");
  EXPECT_EQ(configuration.at("layout"), "contiguous");
  EXPECT_EQ(configuration.at("weights"), "mxfp4");
  EXPECT_EQ(configuration.at("activation"), "fp8");
  EXPECT_EQ(configuration.at("wire"), "fp8");
  EXPECT_EQ(configuration.at("shared"), "alone");
  EXPECT_TRUE(configuration.at("clamp").is_null());
  EXPECT_EQ(configuration.at("topk"), 6);
  EXPECT_TRUE(json.at("host_waited").get<bool>());
  ASSERT_EQ(json.at("per_rank").size(), 3u);
  std::uint64_t sent = 0;
  std::uint64_t real = 0;
  for (const auto& rank : json.at("per_rank")) {
    EXPECT_EQ(keys_of(rank), (std::vector<std::string>{"rank", "rows_real", "rows_received", "rows_room", "rows_sent"}));
    sent += rank.at("rows_sent").get<std::uint64_t>();
    real += rank.at("rows_real").get<std::uint64_t>();
  }
  EXPECT_EQ(real, 11u * 6u);
  EXPECT_NEAR(json.at("copies_per_token").get<double>(), static_cast<double>(sent) / 11, 1e-9);
  // A row of 128 values in e4m3 with one scale.
  const auto& dispatch = json.at("phases").at("dispatch");
  EXPECT_EQ(dispatch.at("remote_bytes").get<std::uint64_t>() + dispatch.at("local_bytes").get<std::uint64_t>(), sent * 129);
}

TEST_F(RunCommand, KnowsEveryNameOfAWay) {
  struct Name {
    std::string typed, way, wire, combine_wire;
  };
  const std::vector<Name> names{{"gather", "gather", "fp8", "bf16"},
                                {"normal", "normal", "fp8", "bf16"},
                                {"low_latency", "low_latency", "fp8", "bf16"},
                                {"elastic", "elastic", "fp8", "bf16"},
                                {"one_sided", "one_sided", "fp8", "bf16"},
                                {"mega", "mega", "fp8", "bf16"},
                                {"mega --wire nvfp4", "mega", "nvfp4", "bf16"},
                                {"megamoe", "mega", "fp8", "bf16"},
                                {"flashinfer_megamoe", "mega", "fp8", "bf16"},
                                {"none", "gather", "fp8", "bf16"},
                                {"deepep", "normal", "fp8", "bf16"},
                                {"deepep --deepep-mode normal", "normal", "fp8", "bf16"},
                                {"deepep --deepep-mode low_latency", "low_latency", "fp8", "bf16"},
                                {"deepep --deepep-mode auto", "low_latency", "fp8", "bf16"},
                                {"deepep_v2", "elastic", "fp8", "bf16"},
                                {"flashinfer", "one_sided", "fp8", "bf16"},
                                {"pplx", "low_latency", "fp8", "bf16"},
                                {"mooncake", "low_latency", "fp8", "bf16"},
                                {"nixl", "low_latency", "fp8", "bf16"},
                                {"mori", "normal", "nvfp4", "fp8"},
                                {"mori --wire fp8", "normal", "fp8", "fp8"},
                                {"mori --combine-wire bf16", "normal", "nvfp4", "bf16"}};
  for (const Name& name : names) {
    expect_done("run" + deepseek_layer + " --ranks 2 --tokens 4 --way " + name.typed + " --out " + file("o") + " --json " +
                file("j"));
    const auto configuration = json_of(file("j")).at("configuration");
    EXPECT_EQ(configuration.at("way"), name.way) << name.typed;
    EXPECT_EQ(configuration.at("wire"), name.wire) << name.typed;
    EXPECT_EQ(configuration.at("combine_wire"), name.combine_wire) << name.typed;
  }
  expect_done("run" + deepseek_layer + " --ranks 2 --tokens 4 --way auto --out " + file("o") + " --json " + file("j"));
  const std::string chosen = json_of(file("j")).at("configuration").at("way");
  EXPECT_NE(std::find(our_ways.begin(), our_ways.end(), chosen), our_ways.end()) << chosen;
  const auto refused = [&](const std::string& typed, const std::string& part) {
    expect_error(2, "run" + deepseek_layer + " --ranks 2 --tokens 4 --way " + typed + " --out " + file("never"), part);
  };
  refused("mega --block-rows 12", "row blocks of 12 rows");
  refused("mega --ring endless", "--ring does not know 'endless'; it takes full, live");
  for (const char* ascend : {"ascend_fuseep", "ascend_tp"}) refused(ascend, "Ascend");
  refused("deepep --deepep-mode fast", "low_latency");
  refused("warp", "one_sided");
}

// Beside the preset's routed experts a shared one is of the preset's kind, beside those of --weights like them.
TEST_F(RunCommand, DrawsASharedExpertThatGoesWithTheWeights) {
  const auto expect_kinds = [&](const std::string& layer, const char* routed, const nlohmann::json& shared) {
    expect_done("run" + layer + " --ranks 2 --tokens 4 --way gather --out " + file("o") + " --json " + file("j"));
    const auto configuration = json_of(file("j")).at("configuration");
    EXPECT_EQ(configuration.at("weights"), routed) << layer;
    EXPECT_EQ(configuration.at("shared_weights"), shared) << layer;
  };
  expect_kinds(deepseek_layer, "mxfp4", "fp8_block");
  expect_kinds(deepseek_layer + " --weights mxfp4", "mxfp4", "fp8_block");
  for (const char* kind : {"bf16", "nvfp4", "fp8_block"}) expect_kinds(deepseek_layer + " --weights " + kind, kind, kind);
  expect_kinds(small_layer, "bf16", nullptr);
}

TEST_F(RunCommand, SavedInputsGiveTheSameBits) {
  for (const std::string& layer :
       {small_layer + " --weights bf16", small_layer + " --weights fp8_block", small_layer + " --weights nvfp4 --shared fused",
        deepseek_layer + " --weights mxfp8", deepseek_layer + " --experts 16",
        deepseek_layer + " --experts 16 --clamp 0.5 --shared fused",
        std::string(
            " --preset deepseek-v3 --hidden 192 --intermediate 64 --experts 32 --shared-mxfp4 --hidden-states heavy_tailed")}) {
    SCOPED_TRACE(layer);
    const std::string run_as = " --ranks 3 --way one_sided";
    const std::vector<std::byte> drawn = output(layer + " --tokens 13 --seed 3 --save-inputs " + file("saved") + run_as);
    EXPECT_TRUE(fs::exists(file("saved/layer.safetensors")) && fs::exists(file("saved/batch.safetensors")));
    const std::string fused = layer.find("fused") == std::string::npos ? "" : " --shared fused";
    const std::string from_files =
        " --layer " + file("saved/layer.safetensors") + " --batch " + file("saved/batch.safetensors") + fused;
    EXPECT_EQ(output(from_files + run_as), drawn);
    // Saved from files, over themselves, they are the same again.
    const std::string before = text_of(file("saved/layer.safetensors"));
    EXPECT_EQ(output(from_files + run_as + " --save-inputs " + file("saved")), drawn);
    EXPECT_EQ(text_of(file("saved/layer.safetensors")), before);
    fs::remove_all(file("saved"));
  }
}

TEST_F(RunCommand, TakesRoutingFromRecordings) {
  const std::string trace = std::string(HEDDLE_TEST_DATA) + "/routing/esft_law.ids.npy";
  const std::string layer = " --preset deepseek-v4-flash --hidden 64 --intermediate 64";
  const Ran ran = run("run" + layer + " --ranks 4 --tokens 40 --trace " + trace +
                      " --trace-layer 1 --trace-step 7 --trace-expand 4 --way gather --out " + file("o") + " --json " + file("j"));
  EXPECT_EQ(0, ran.status) << ran.err;
  EXPECT_NE(std::string::npos, ran.out.find("expanded 4 times")) << ran.out;
  const auto json = json_of(file("j"));
  std::string notes;
  for (const auto& note : json.at("configuration").at("notes")) notes += note.get<std::string>() + "\n";
  EXPECT_NE(std::string::npos, notes.find("expanded 4 times")) << notes;
  expect_done("run" + layer + " --experts 64 --ranks 4 --tokens 40 --trace " + trace +
              " --trace-layer 1 --trace-step 7 --way gather --out " + file("plain"));
  const std::vector<std::byte> expanded = bytes_of(file("o"), "topk_ids");
  const std::vector<std::byte> recorded = bytes_of(file("plain"), "topk_ids");
  ASSERT_EQ(expanded.size(), 40u * 6u * sizeof(std::int32_t));
  ASSERT_EQ(recorded.size(), expanded.size());
  for (std::size_t i = 0; i < expanded.size(); i += sizeof(std::int32_t)) {
    std::int32_t wide = 0;
    std::int32_t narrow = 0;
    std::memcpy(&wide, expanded.data() + i, sizeof wide);
    std::memcpy(&narrow, recorded.data() + i, sizeof narrow);
    EXPECT_EQ(wide / 4, narrow);
  }
  const std::string with_trace =
      "run" + layer + " --experts 64 --ranks 4 --way gather --out " + file("never") + " --trace " + trace;
  expect_error(2, with_trace + " --tokens 40 --trace-expand 2", "the layer has 64");
  expect_error(2, with_trace + " --tokens 40 --trace-expand 2000000000", "the layer has 64");
  expect_error(2, with_trace + " --tokens 40 --trace-expand 0", "--trace-expand");
  expect_error(2, with_trace + " --tokens 401", "400");
  expect_error(2, with_trace + " --tokens 4 --trace-layer 4", "layer");
  expect_error(2, with_trace + " --tokens 4 --routing uniform", "--routing");
}

TEST_F(RunCommand, DrawnRoutings) {
  const std::string counts = std::string(HEDDLE_TEST_DATA) + "/routing/expert_counts.csv";
  for (const std::string& routing : {std::string("uniform"), std::string("zipf:1.2"), std::string("hot:1"), "counts:" + counts}) {
    expect_done("run" + small_layer + " --ranks 2 --tokens 6 --way normal --routing " + routing + " --out " + file("o"));
  }
  for (const std::string wrong : {"zipf", "zipf:", "zipf:1x", "hot:0.5", "hot:", "hot:2", "hot:-1", "hot:99999999999", "even",
                                  "counts:", "counts:/nowhere", "uniform:1"}) {
    expect_error(2, "run" + small_layer + " --ranks 2 --tokens 6 --way normal --routing " + wrong + " --out " + file("never"), "");
  }
}

TEST_F(RunCommand, ProcessesGiveTheBitsOfThreads) {
  const std::string layer = deepseek_layer + " --experts 12 --tokens 23 --seed 5 --ranks 5 --way ";
  for (const std::string& way : our_ways) {
    EXPECT_EQ(output(layer + way + " --processes"), output(layer + way)) << way;
  }
  for (const std::string extra :
       {"elastic --reduce home --cpu-sync", "gather --tensor-parallel", "low_latency --tensor-parallel --workers 2"}) {
    EXPECT_EQ(output(layer + extra + " --processes"), output(layer + extra)) << extra;
  }
}

TEST_F(RunCommand, TensorParallelAttentionChangesNoBit) {
  const std::string layer = deepseek_layer + " --experts 12 --tokens 23 --ranks 4 --way ";
  for (const std::string& way : our_ways) {
    EXPECT_EQ(output(layer + way + " --tensor-parallel"), output(layer + way)) << way;
  }
}

TEST_F(RunCommand, NodesChangeNoBit) {
  const std::string layer = deepseek_layer + " --experts 12 --tokens 23 --ranks 6 --way elastic";
  for (const std::string reduce : {"rank", "home"}) {
    const auto alone = output(layer + " --reduce " + reduce);
    for (const std::string nodes : {"2 --mode hybrid", "3 --mode direct", "6 --mode hybrid"}) {
      EXPECT_EQ(output(layer + " --reduce " + reduce + " --nodes " + nodes), alone) << reduce << ", " << nodes;
    }
  }
  expect_done("run" + layer + " --nodes 2 --mode hybrid --out " + file("o") + " --json " + file("nodes.json"));
  const auto json = json_of(file("nodes.json"));
  EXPECT_EQ(2, json.at("configuration").at("nodes"));
  EXPECT_EQ("hybrid", json.at("configuration").at("mode"));
  EXPECT_GT(json.at("phases").at("dispatch").at("between_bytes").get<int>(), 0);
  expect_error(2, "run" + layer + " --nodes 4 --out " + file("never"), "--nodes 4 does not divide 6 ranks");
  expect_error(2, "run" + layer + " --nodes 2 --processes --out " + file("never"), "--processes");
  expect_error(2, "run" + layer + " --nodes 2 --way normal --out " + file("never"), "");
  expect_error(2, "run" + layer + " --mode sideways --out " + file("never"), "direct");
}

}  // namespace
}  // namespace heddle::command_test
