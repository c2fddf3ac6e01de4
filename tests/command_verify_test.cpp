// `heddle verify` from outside: every way passes, a miss is status 1, the table and the JSON say the same.
#include "command_support.hpp"

namespace heddle::command_test {
namespace {

class VerifyCommand : public CommandTest {
 protected:
  /// The JSON of a verify that must end with `status`.
  nlohmann::json verify(int status, const std::string& arguments) const {
    const Ran ran = run("verify" + arguments + " --json " + file("j"));
    EXPECT_EQ(status, ran.status) << arguments << "\n" << ran.out << ran.err;
    EXPECT_EQ("", ran.err);
    const auto json = json_of(file("j"));
    EXPECT_EQ(json.at("passed"), status == 0);
    for (const auto& way : json.at("ways")) {
      const bool passed = way.at("relative_error") <= way.at("bound") && way.at("different_bits") == 0;
      EXPECT_EQ(way.at("passed"), passed) << arguments;
      const std::string name = way.at("configuration").at("way");
      EXPECT_NE(std::string::npos, ran.out.find(name)) << ran.out;
    }
    const std::string sum = " of " + std::to_string(json.at("ways").size()) + " ways passed";
    EXPECT_NE(std::string::npos, ran.out.find(sum)) << ran.out;
    EXPECT_EQ(status == 0, ran.out.find("MISSED") == std::string::npos) << ran.out;
    return json;
  }
};

/// Sizes at which a value that is rounded apart does not weigh too much.
const std::string layer = deepseek_layer + " --experts 20 --tokens 120 --seed 11";

TEST_F(VerifyCommand, EveryWayPasses) {
  const auto json = verify(0, layer + " --ranks 3");
  std::vector<std::string> ways;
  for (const auto& way : json.at("ways")) {
    ways.push_back(way.at("configuration").at("way").get<std::string>() + "/" +
                   way.at("configuration").at("reduce").get<std::string>());
    EXPECT_EQ(way.at("bound"), 6e-3);
    EXPECT_EQ(way.at("configuration").at("tokens"), 120);
    EXPECT_EQ(way.at("per_rank").size(), 3u);
  }
  EXPECT_EQ(ways, (std::vector<std::string>{"gather/rank", "normal/rank", "low_latency/rank", "elastic/rank", "elastic/home",
                                            "one_sided/rank", "mega/rank"}));
  EXPECT_EQ(verify(0, layer + " --ranks 3 --activation bf16").at("ways").at(0).at("bound"), 4e-3);
  const auto quantised = verify(0, layer + " --ranks 3 --combine-wire nvfp4").at("ways");
  EXPECT_EQ(quantised.at(0).at("bound"), 4e-2) << "few outputs";
  EXPECT_EQ(quantised.size(), 7u) << "mega, too";
  EXPECT_EQ(quantised.at(6).at("different_bits"), 0) << "low_latency has the same wire";
}

TEST_F(VerifyCommand, NobodyHasTokens) {
  for (const std::string more : {"", " --tensor-parallel", " --tensor-parallel --processes"}) {
    verify(0, deepseek_layer + " --experts 4 --topk 2 --ranks 3 --tokens 0" + more);
  }
}

TEST_F(VerifyCommand, PassesWithOtherOptions) {
  for (const std::string options :
       {"--ranks 1", "--ranks 8 --processes", "--ranks 2 --weight-at combine --group 32 --scale f32",
        "--ranks 2 --shared fused --workers 2", "--ranks 4 --tensor-parallel", "--ranks 3 --wire nvfp4 --combine-wire fp8",
        "--ranks 25 --routing hot:3 --gather uneven --cpu-sync"}) {
    verify(0, layer + " " + options);
  }
  const std::string recorded =
      " --tokens 64 --trace " + std::string(HEDDLE_TEST_DATA) + "/routing/gpt_oss_decode.ids.npy --trace-expand 2";
  verify(0, " --preset deepseek-v4-flash --hidden 128 --intermediate 64 --experts 64 --ranks 4" + recorded);
}

TEST_F(VerifyCommand, ChecksTheWaysThatAreNamedOrFitTheRunner) {
  EXPECT_EQ(verify(0, layer + " --ranks 2 --way normal,deepep_v2 --way pplx").at("ways").size(), 3u);
  const auto masked = verify(0, layer + " --ranks 2 --runner masked");
  for (const auto& way : masked.at("ways")) EXPECT_EQ(way.at("configuration").at("layout"), "masked");
  EXPECT_EQ(masked.at("ways").size(), 4u);  // normal, low_latency, elastic twice
  const auto mori = verify(0, layer + " --ranks 2 --way mori --combine-wire bf16");
  EXPECT_EQ(mori.at("ways").at(0).at("configuration").at("wire"), "nvfp4");
  EXPECT_EQ(mori.at("ways").at(0).at("configuration").at("combine_wire"), "bf16");
  expect_error(2, "verify" + layer + " --ranks 2 --way gather --runner masked", "masked");
  EXPECT_EQ(verify(0, layer + " --ranks 2 --way low_latency,megamoe --ring full").at("ways").at(1).at("different_bits"), 0);
  expect_error(2, "verify" + layer + " --ranks 2 --way mega --weight-at combine", "take weight_at = activation");
  expect_error(2, "verify" + layer + " --ranks 2 --way mega --combine add --combine-wire fp8", "take combine_wire = bf16");
  expect_error(2, "verify" + layer + " --ranks 2 --way low_latency --combine add", "combine = add is mega's");
  expect_error(2, "verify" + layer + " --ranks 2 --way mega --combine both", "add, slots");
  expect_error(2, "verify" + layer + " --ranks 2 --way mega --runner masked", "way mega cannot hand over the masked layout");
  expect_error(2, "verify" + layer, "--ranks");
}

TEST_F(VerifyCommand, ResultsThatAreAddedAreCheckedByTheirErrorAlone) {
  const auto ways = verify(0, layer + " --ranks 3 --combine add").at("ways");
  ASSERT_EQ(ways.size(), 7u);
  EXPECT_EQ(ways.at(6).at("configuration").at("combine"), "add");
  EXPECT_EQ(ways.at(6).at("different_bits"), 0) << "which bits they have depends on what comes first";
  EXPECT_GT(ways.at(6).at("relative_error"), ways.at(2).at("relative_error")) << "every addition rounds";
  EXPECT_LT(ways.at(6).at("buffer_bytes"), verify(0, layer + " --ranks 3 --way mega").at("ways").at(0).at("buffer_bytes"));
}

/// f32 sums cannot hold 2^24 and a small number at once, the reference can: a layer in which they cancel is a miss.
TEST_F(VerifyCommand, AMissIsStatus1) {
  testing::LayerFileSpec spec;
  spec.shape = {128, 64, 2, 1, std::nullopt};
  testing::LayerTensors tensors = testing::make_layer(spec);
  constexpr std::size_t first = 0;
  constexpr std::size_t last = 127;
  for (auto& tensor : tensors.tensors) {  // gate and up multiply both of these columns by the same
    if (tensor.shape != std::vector<std::int64_t>{64, 128}) continue;
    for (std::size_t row = 0; row < 64; ++row) {
      std::copy_n(tensor.data.begin() + static_cast<std::ptrdiff_t>(2 * (row * 128 + first)), 2,
                  tensor.data.begin() + static_cast<std::ptrdiff_t>(2 * (row * 128 + last)));
    }
  }
  const testing::LayerFile file_of_layer = testing::write_layer(spec, tensors);
  constexpr int tokens = 8;
  std::vector<std::uint16_t> hidden(tokens * 128);
  testing::Random random(3);
  for (std::size_t i = 0; i < hidden.size(); ++i) {
    hidden[i] = to_bf16(random.symmetric()).bits;
    if (i % 128 == first) hidden[i] = to_bf16(0x1p24f).bits;
    if (i % 128 == last) hidden[i] = to_bf16(-0x1p24f).bits;
  }
  testing::write_tensors(file("batch"),
                         {testing::make_tensor("hidden_states", "BF16", {tokens, 128}, hidden),
                          testing::make_tensor("topk_ids", "I32", {tokens, 1}, std::vector<std::int32_t>(tokens, 1)),
                          testing::make_tensor("topk_weights", "F32", {tokens, 1}, std::vector<float>(tokens, 1.0f))});
  const auto json = verify(1, " --layer " + file_of_layer.path + " --batch " + file("batch") + " --ranks 2");
  for (const auto& way : json.at("ways")) EXPECT_FALSE(way.at("passed").get<bool>());
}

}  // namespace
}  // namespace heddle::command_test
