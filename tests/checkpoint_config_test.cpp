// config.json of the model families whose layers are read: real field names, what they mean, what is refused.
#include <gtest/gtest.h>

#include "checkpoint/model_config.hpp"
#include "checkpoint_checks.hpp"

namespace heddle::testing {
namespace {

using checkpoint::ModelConfig;
using checkpoint::parse_model_config;

ModelConfig parse(const std::string& text) { return parse_model_config(text, "config.json"); }

void expect_router(const ModelConfig& config, Score score, int topk, int groups, int topk_groups, bool renormalise, float scale) {
  ASSERT_TRUE(config.router) << config.router_refusal;
  EXPECT_EQ(config.router->score, score);
  EXPECT_EQ(config.router->topk, topk);
  EXPECT_EQ(config.router->groups, groups);
  EXPECT_EQ(config.router->topk_groups, topk_groups);
  EXPECT_EQ(config.router->renormalise, renormalise);
  EXPECT_EQ(config.router->scale, scale);
}

TEST(ModelConfig, DeepSeekV3) {
  const auto config =
      parse(R"({"model_type":"deepseek_v3","hidden_size":7168,"intermediate_size":18432,"moe_intermediate_size":2048,
    "n_routed_experts":256,"n_shared_experts":1,"num_experts_per_tok":8,"n_group":8,"topk_group":4,"norm_topk_prob":true,
    "routed_scaling_factor":2.5,"scoring_func":"sigmoid","topk_method":"noaux_tc","rope_scaling":{"type":"yarn"}})");
  expect_router(config, Score::sigmoid, 8, 8, 4, true, 2.5f);
  EXPECT_EQ(config.hidden, 7168);
  EXPECT_EQ(config.intermediate, 2048);
  EXPECT_EQ(config.experts, 256);
  EXPECT_EQ(config.shared_experts, 1);
  EXPECT_FALSE(config.clamp);
}

TEST(ModelConfig, DeepSeekV4) {
  const auto config = parse(R"({"model_type":"deepseek_v4","hidden_size":4096,"moe_intermediate_size":2048,"n_routed_experts":256,
    "num_experts_per_tok":6,"norm_topk_prob":true,"routed_scaling_factor":1.5,"scoring_func":"sqrtsoftplus","topk_method":"noaux_tc",
    "swiglu_limit":10.0,"n_group":null})");
  expect_router(config, Score::sqrtsoftplus, 6, 1, 1, true, 1.5f);
  EXPECT_EQ(config.clamp, 10.0f);
}

TEST(ModelConfig, QwenMixtralGlmKimi) {
  expect_router(
      parse(
          R"({"model_type":"qwen3_moe","num_experts":128,"num_experts_per_tok":8,"norm_topk_prob":true,"moe_intermediate_size":768})"),
      Score::softmax, 8, 1, 1, true, 1.0f);
  expect_router(parse(R"({"model_type":"qwen2_moe","num_experts":60,"num_experts_per_tok":4,"norm_topk_prob":false})"),
                Score::softmax, 4, 1, 1, false, 1.0f);
  const auto mixtral = parse(
      R"({"model_type":"mixtral","hidden_size":4096,"intermediate_size":14336,"num_local_experts":8,"num_experts_per_tok":2})");
  expect_router(mixtral, Score::softmax, 2, 1, 1, true, 1.0f);
  EXPECT_EQ(mixtral.intermediate, 14336);
  EXPECT_EQ(mixtral.experts, 8);
  expect_router(
      parse(
          R"({"model_type":"glm4_moe","n_routed_experts":160,"num_experts_per_tok":8,"n_group":1,"topk_group":1,"norm_topk_prob":true,"routed_scaling_factor":2.5})"),
      Score::sigmoid, 8, 1, 1, true, 2.5f);
  expect_router(
      parse(
          R"({"model_type":"kimi_k2","n_routed_experts":384,"num_experts_per_tok":8,"norm_topk_prob":true,"routed_scaling_factor":2.827,"scoring_func":"sigmoid","topk_method":"noaux_tc"})"),
      Score::sigmoid, 8, 1, 1, true, 2.827f);
  expect_router(
      parse(
          R"({"model_type":"kimi_linear","num_experts":256,"num_experts_per_token":8,"moe_renormalize":true,"moe_router_activation_func":"sigmoid","num_expert_group":1,"topk_group":1,"routed_scaling_factor":2.446})"),
      Score::sigmoid, 8, 1, 1, true, 2.446f);
}

TEST(ModelConfig, LanguageModelInsideALargerOne) {
  const auto config = parse(
      R"({"model_type":"kimi_k25","hidden_size":1,"text_config":{"model_type":"kimi_k2","hidden_size":7168,"num_experts_per_tok":8}})");
  EXPECT_EQ(config.hidden, 7168);
  expect_router(config, Score::sigmoid, 8, 1, 1, true, 1.0f);
}

TEST(ModelConfig, WhatIsNotToldStaysOpen) {
  const auto unknown = parse(R"({"model_type":"something_new","num_experts_per_tok":4})");
  EXPECT_EQ(unknown.topk, 4);
  EXPECT_FALSE(unknown.router);
  EXPECT_TRUE(unknown.router_refusal.empty());
  EXPECT_FALSE(parse(R"({"scoring_func":"sigmoid"})").router);
  EXPECT_FALSE(parse(R"({"swiglu_limit":0})").clamp);
  EXPECT_FALSE(parse("{}").hidden);
}

TEST(ModelConfig, RoutersThatDoNotExistHereAreNamed) {
  const auto grouped = parse(
      R"({"model_type":"deepseek_v2","num_experts_per_tok":6,"n_group":8,"topk_group":3,"topk_method":"group_limited_greedy","scoring_func":"softmax"})");
  EXPECT_FALSE(grouped.router);
  EXPECT_NE(grouped.router_refusal.find("'group_limited_greedy' over 8 groups"), std::string::npos);
  expect_router(parse(R"({"num_experts_per_tok":6,"n_group":8,"topk_method":"greedy","scoring_func":"softmax"})"), Score::softmax,
                6, 1, 1, true, 1.0f);
  const auto score = parse(R"({"num_experts_per_tok":6,"scoring_func":"tanh"})");
  EXPECT_FALSE(score.router);
  EXPECT_NE(score.router_refusal.find("'tanh'"), std::string::npos);
}

TEST(ModelConfig, Damage) {
  expect_refusal([] { parse("{"); }, {"config.json", "not JSON"});
  expect_refusal([] { parse("3"); }, {"config.json", "not a JSON object"});
  expect_refusal([] { parse(R"({"hidden_size":"big"})"); }, {"hidden_size is \"big\"", "whole number"});
  expect_refusal([] { parse(R"({"num_experts_per_tok":0})"); }, {"num_experts_per_tok is 0", "from 1"});
  expect_refusal([] { parse(R"({"num_experts_per_tok":99999999999999999999})"); }, {"num_experts_per_tok"});
  expect_refusal([] { parse(R"({"n_group":-3})"); }, {"n_group is -3"});
  expect_refusal([] { parse(R"({"norm_topk_prob":1})"); }, {"norm_topk_prob is 1", "true or false"});
  expect_refusal([] { parse(R"({"swiglu_limit":-7})"); }, {"swiglu_limit is -7"});
  expect_refusal([] { parse(R"({"routed_scaling_factor":1e300})"); }, {"routed_scaling_factor"});
  expect_refusal([] { parse(R"({"scoring_func":3})"); }, {"scoring_func is 3", "text"});
}

LayerFileSpec layer_with_config() {
  LayerFileSpec spec;
  spec.shape = {128, 64, 4, 2, 10.0f};
  spec.config = RouterOptions{Score::sqrtsoftplus, 2, 2, 1, true, 1.5f};
  return spec;
}

TEST(ModelConfig, ReachesTheLayer) {
  const LayerFile file = write_layer(layer_with_config());
  const auto layer = LayerCheckpoint::open(file.path);
  EXPECT_EQ(layer.shape().topk, 2);
  EXPECT_EQ(layer.shape().clamp, 10.0f);
  ASSERT_TRUE(layer.router_options());
  EXPECT_EQ(layer.router_options()->score, Score::sqrtsoftplus);
  EXPECT_EQ(layer.router_options()->groups, 2);
}

TEST(ModelConfig, MustFitTheLayer) {
  const auto spec = layer_with_config();
  const LayerFile file = write_layer(spec);
  const auto with = [&](const char* name, int value) {
    auto config = make_config(spec, *spec.config);
    config[name] = value;
    std::ofstream(file.folder.file("config.json")) << config;
    return [&] { LayerCheckpoint::open(file.path); };
  };
  expect_refusal(with("hidden_size", 256), {"hidden size 128", "config.json says 256"});
  expect_refusal(with("moe_intermediate_size", 128), {"intermediate size 64", "config.json says 128"});
  expect_refusal(with("n_routed_experts", 3), {"expert 3", "there are 3"});
  expect_refusal(with("num_experts_per_tok", 5), {"5 experts a token of 4"});
  expect_refusal(with("n_shared_experts", 1), {"shared expert", "is missing", "n_shared_experts 1"});
}

TEST(ModelConfig, RefusalOfARouterWaitsUntilItIsNeeded) {
  const auto spec = layer_with_config();
  const LayerFile file = write_layer(spec);
  auto config = make_config(spec, *spec.config);
  config["scoring_func"] = "tanh";
  std::ofstream(file.folder.file("config.json")) << config;
  const auto layer = LayerCheckpoint::open(file.path);
  EXPECT_EQ(layer.shape().topk, 2);
  expect_same(layer.expert(0), file.experts[0]);
  expect_refusal([&] { layer.router_options(); }, {"'tanh'", "sqrtsoftplus"});
}

}  // namespace
}  // namespace heddle::testing
