// `heddle run` and `heddle verify --engine cuda` from outside: every way against the reference, what moved against the host
// engine's report, a process a GPU, slices of experts, and what is refused. The command is the one beside this program's folder,
// or in it, or HEDDLE_COMMAND.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "gpu/buffers.hpp"
#include "gpu/command.hpp"

namespace heddle {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

const std::string layer = " --preset deepseek-v4-flash --hidden 512 --intermediate 384 --experts 24 --tokens 96 --seed 3";

class CommandGpu : public testing::Test {
 protected:
  void SetUp() override {
    SKIP_WITHOUT_GPU();
    if (!fs::exists(heddle_command())) GTEST_SKIP() << "the command is not at " << heddle_command();
  }
  void TearDown() override {
    for (const char* name : {"json", "out"}) fs::remove(file(name));
  }
  static std::string file(const char* name) {
    return (fs::temp_directory_path() / fmt::format("heddle-command-gpu-test.{}.{}", getpid(), name)).string();
  }
  static std::string on_gpus(int ranks) {
    return fmt::format(" --engine cuda --ranks {} --gpus {}", ranks, std::min({gpus_here(), 2, ranks}));
  }

  /// The report of a run or a verification that went well; null otherwise.
  static Json report(const std::string& arguments) {
    const Ran ran = run_heddle(fmt::format("{} --json {}", arguments, file("json")));
    EXPECT_EQ(ran.status, 0) << arguments << "\n" << ran.text;
    if (ran.status != 0) return nullptr;
    return Json::parse(std::ifstream(file("json")));
  }
};

TEST_F(CommandGpu, VerifyHasEveryWayPass) {
  for (const int ranks : {1, 4}) {
    for (const char* more : {"", " --weights bf16", " --weights nvfp4 --activation bf16 --wire fp8", " --tensor-parallel"}) {
      const Json json = report(fmt::format("verify{}{}{}", layer, more, on_gpus(ranks)));
      if (json.is_null()) return;
      EXPECT_TRUE(json.at("passed").get<bool>());
      const bool is_fusable = std::string(more).find("nvfp4") == std::string::npos;
      EXPECT_EQ(json.at("ways").size(), is_fusable ? 7u : 6u);
      for (const Json& way : json.at("ways")) {
        EXPECT_EQ(way.at("configuration").at("experts_engine"), "cuda");
        EXPECT_GT(way.at("experts_seconds").get<double>(), 0.0);
      }
    }
  }
}

TEST_F(CommandGpu, SlicesOfExperts) {
  for (const char* more : {"", " --tensor-parallel", " --gather uneven"}) {
    const Json json = report(fmt::format("verify{}{} --expert-slices{}", layer, more, on_gpus(3)));
    if (json.is_null()) return;
    EXPECT_EQ(json.at("ways").size(), 1u);
    EXPECT_TRUE(json.at("ways").at(0).at("configuration").at("expert_slices").get<bool>());
  }
}

// What moved does not depend on the engine.
TEST_F(CommandGpu, ReportsTheHostEnginesRowsAndBytes) {
  for (const char* way : {"gather", "normal", "low_latency", "elastic", "one_sided", "gather --tensor-parallel",
                          "elastic --tensor-parallel", "gather --expert-slices", "elastic --reduce home --cpu-sync", "mega",
                          "mega --tensor-parallel", "mega --ring full --block-rows 32"}) {
    const std::string common = fmt::format("run{} --out {} --way {}", layer, file("out"), way);
    const Json host = report(common + " --ranks 3");
    const Json gpu = report(common + on_gpus(3));
    if (host.is_null() || gpu.is_null()) return;
    for (std::size_t rank = 0; rank < 3; ++rank) {
      Json of_gpu = gpu.at("per_rank").at(rank), of_host = host.at("per_rank").at(rank);
      of_gpu.erase("rows_room");  // bounds on GPUs where the host knows counts
      of_host.erase("rows_room");
      EXPECT_EQ(of_gpu, of_host) << way;
    }
    for (const auto& [phase, of_host] : host.at("phases").items()) {
      EXPECT_EQ(gpu.at("phases").at(phase).at("remote_bytes"), of_host.at("remote_bytes")) << way << ", " << phase;
      EXPECT_EQ(gpu.at("phases").at(phase).at("local_bytes"), of_host.at("local_bytes")) << way << ", " << phase;
    }
    EXPECT_EQ(gpu.at("copies_per_token"), host.at("copies_per_token")) << way;
    EXPECT_EQ(gpu.at("host_waited"), host.at("host_waited")) << way;
    EXPECT_GT(gpu.at("kernels_launched").get<int>(), 0);
  }
}

// Virtual nodes share one GPU.
TEST_F(CommandGpu, SeveralNodesHaveTheHostEnginesRowsAndBytesAtEachLevel) {
  const std::string on_one = " --engine cuda --gpus 1 --ranks 4";
  for (const char* mode : {"direct", "hybrid"}) {
    for (const int nodes : {2, 4}) {
      const std::string over = fmt::format(" --way elastic --nodes {} --mode {}", nodes, mode);
      const Json verified = report(fmt::format("verify{}{} --nodes {} --mode {}", layer, on_one, nodes, mode));
      const Json host = report(fmt::format("run{} --out {} --ranks 4{}", layer, file("out"), over));
      const Json gpu = report(fmt::format("run{} --out {}{}{}", layer, file("out"), on_one, over));
      if (verified.is_null() || host.is_null() || gpu.is_null()) return;
      EXPECT_TRUE(verified.at("passed").get<bool>()) << over;
      EXPECT_EQ(verified.at("ways").size(), 1u) << over;
      for (std::size_t rank = 0; rank < 4; ++rank) {
        Json of_gpu = gpu.at("per_rank").at(rank), of_host = host.at("per_rank").at(rank);
        of_gpu.erase("rows_room");
        of_host.erase("rows_room");
        EXPECT_EQ(of_gpu, of_host) << over;
      }
      for (const char* phase : {"dispatch", "combine"}) {
        for (const char* bytes : {"remote_bytes", "local_bytes", "between_bytes"})
          EXPECT_EQ(gpu.at("phases").at(phase).at(bytes), host.at("phases").at(phase).at(bytes)) << over << ", " << phase;
      }
      EXPECT_GT(gpu.at("phases").at("dispatch").at("between_bytes").get<int>(), 0) << over;
    }
  }
  const Ran refused = run_heddle(fmt::format("run{} --out {}{} --way elastic --reduce home --nodes 2", layer, file("out"), on_one));
  EXPECT_EQ(refused.status, 2) << refused.text;
  EXPECT_NE(refused.text.find("take reduce = rank"), std::string::npos) << refused.text;
}

TEST_F(CommandGpu, TheFusedLayerIsThreeLaunchesAGpu) {
  for (const char* typed : {"mega", "megamoe", "flashinfer_megamoe --block-rows 8", "mega --shared fused --ring full"}) {
    const Json json = report(fmt::format("run{} --out {} --way {}{}", layer, file("out"), typed, on_gpus(4)));
    if (json.is_null()) return;
    const Json& configuration = json.at("configuration");
    EXPECT_EQ(configuration.at("way"), "mega") << typed;
    EXPECT_EQ(configuration.at("layout"), "contiguous") << typed;
    EXPECT_EQ(json.at("kernels_launched").get<int>(), 3 * configuration.at("gpus").get<int>()) << typed;
    EXPECT_FALSE(json.at("host_waited").get<bool>()) << typed;
    EXPECT_GT(json.at("seconds").get<double>(), 0.0) << typed;
  }
}

TEST_F(CommandGpu, AProcessAGpu) {
  const Json json = report(fmt::format("verify{} --processes{}", layer, on_gpus(4)));
  if (json.is_null()) return;
  EXPECT_TRUE(json.at("passed").get<bool>());
}

TEST_F(CommandGpu, ExpertsMayStayOnTheHost) {
  const Json json = report(fmt::format("verify{} --experts-engine host{}", layer, on_gpus(2)));
  if (json.is_null()) return;
  EXPECT_EQ(json.at("ways").at(0).at("configuration").at("experts_engine"), "host");
  EXPECT_EQ(json.at("ways").size(), 6u) << "all but mega, whose experts are part of its kernel";
}

TEST_F(CommandGpu, RefusesWhatGpusDoNotCompute) {
  const auto expect_refused = [](const std::string& typed, std::initializer_list<const char*> parts) {
    const Ran ran = run_heddle(fmt::format("run{} {} --out {}{}", layer, typed, file("out"), on_gpus(1)));
    EXPECT_EQ(ran.status, 2) << ran.text;
    for (const char* part : parts)
      EXPECT_NE(ran.text.find(part), std::string::npos) << "should say \"" << part << "\": " << ran.text;
  };
  expect_refused("--weights mxfp4 --activation bf16 --way low_latency", {"take fp8 activations", "--experts-engine host"});
  expect_refused("--weights nvfp4 --way mega", {"take", "--engine host"});
  expect_refused("--wire nvfp4 --way mega", {"take", "--engine host"});
  expect_refused("--experts-engine host --way mega", {"take --experts-engine cuda"});
}

}  // namespace
}  // namespace heddle
