#include "checkpoint/model_config.hpp"

#include <fmt/format.h>

#include <array>
#include <cmath>
#include <initializer_list>

#include "checkpoint/describe.hpp"
#include "checkpoint/json_text.hpp"
#include "checkpoint/mapped_file.hpp"
#include "heddle/error.hpp"

namespace heddle::checkpoint {

namespace {

using nlohmann::json;

/// One object of config.json; a field may have several spellings, and null counts as absent.
class Fields {
 public:
  Fields(const json& object, const std::string& file) : object_(object), file_(file) {}

  std::optional<int> whole(std::initializer_list<const char*> names, int least) const {
    const auto [name, value] = find(names);
    if (value == nullptr) return std::nullopt;
    const bool fits = value->is_number_integer() && *value >= least && *value <= 1 << 24;
    if (!fits) refuse(name, *value, fmt::format("a whole number from {} to {}", least, 1 << 24));
    return value->get<int>();
  }

  std::optional<float> number(std::initializer_list<const char*> names) const {
    const auto [name, value] = find(names);
    if (value == nullptr) return std::nullopt;
    if (!value->is_number() || !std::isfinite(value->get<float>())) refuse(name, *value, "a number");
    return value->get<float>();
  }

  std::optional<bool> flag(std::initializer_list<const char*> names) const {
    const auto [name, value] = find(names);
    if (value == nullptr) return std::nullopt;
    if (!value->is_boolean()) refuse(name, *value, "true or false");
    return value->get<bool>();
  }

  std::string text(std::initializer_list<const char*> names) const {
    const auto [name, value] = find(names);
    if (value == nullptr) return {};
    if (!value->is_string()) refuse(name, *value, "a text");
    return value->get<std::string>();
  }

 private:
  struct Found {
    const char* name;
    const json* value;
  };

  Found find(std::initializer_list<const char*> names) const {
    for (const char* name : names) {
      const auto found = object_.find(name);
      if (found != object_.end() && !found->is_null()) return {name, &*found};
    }
    return {"", nullptr};
  }

  [[noreturn]] void refuse(const char* name, const json& seen, const std::string& right) const {
    throw InputError(fmt::format("{}: {} is {}; it should be {}", file_, name,
                                 one_line(seen.dump(-1, ' ', true, json::error_handler_t::replace)), right));
  }

  const json& object_;
  const std::string& file_;
};

/// What a model family means where its config.json leaves the router's rules to the code that came with it.
struct FamilyDefaults {
  std::string_view model_type;  ///< a prefix, longer ones first
  Score score;
  bool renormalise;
};

constexpr std::array family_defaults{
    FamilyDefaults{"deepseek_v4", Score::sqrtsoftplus, true},  //
    FamilyDefaults{"deepseek_v3", Score::sigmoid, true},       //
    FamilyDefaults{"deepseek_v2", Score::softmax, false},      //
    FamilyDefaults{"deepseek", Score::softmax, false},         //
    FamilyDefaults{"kimi", Score::sigmoid, true},              //
    FamilyDefaults{"glm", Score::sigmoid, true},               //
    FamilyDefaults{"minimax", Score::sigmoid, true},           //
    FamilyDefaults{"mixtral", Score::softmax, true},           //
    FamilyDefaults{"qwen3_5", Score::softmax, true},           //
    FamilyDefaults{"qwen3_next", Score::softmax, true},        //
    FamilyDefaults{"qwen", Score::softmax, false},             //
    FamilyDefaults{"gpt_oss", Score::softmax_topk, true},      //
};

const FamilyDefaults* find_family(std::string_view model_type) {
  for (const FamilyDefaults& family : family_defaults) {
    if (model_type.starts_with(family.model_type)) return &family;
  }
  return nullptr;
}

std::optional<Score> score_from_text(std::string_view text) {
  if (text == "softmax") return Score::softmax;
  if (text == "sigmoid") return Score::sigmoid;
  if (text == "sqrtsoftplus") return Score::sqrtsoftplus;
  if (text == "softmax_topk") return Score::softmax_topk;
  return std::nullopt;
}

/// DeepSeek's name for how the k are chosen: sets the groups, or says why it cannot be followed.
void apply_topk_method(const std::string& method, ModelConfig& config, RouterOptions& router) {
  if (method == "greedy") {
    router.groups = router.topk_groups = 1;
  } else if (!method.empty() && method != "noaux_tc" && router.groups > 1) {
    config.router_refusal = fmt::format(
        "{}: topk_method is {} over {} groups; supported are greedy and noaux_tc (groups by the sum of their two best scores)",
        config.file, in_quotes(method), router.groups);
  }
}

void read_router(const Fields& fields, ModelConfig& config) {
  const FamilyDefaults* const family = find_family(fields.text({"model_type"}));
  const std::string score_text = fields.text({"scoring_func", "moe_router_activation_func", "score_function"});
  const auto named_score = score_from_text(score_text);
  RouterOptions router;
  router.groups = fields.whole({"n_group", "num_expert_group"}, 0).value_or(1);
  if (router.groups < 1) router.groups = 1;  // some configurations write 0 for "no groups"
  router.topk_groups = router.groups > 1 ? fields.whole({"topk_group"}, 1).value_or(router.groups) : 1;
  router.renormalise = fields.flag({"norm_topk_prob", "moe_renormalize"}).value_or(family == nullptr || family->renormalise);
  router.scale = fields.number({"routed_scaling_factor", "route_scale"}).value_or(1.0f);
  apply_topk_method(fields.text({"topk_method"}), config, router);
  if (!score_text.empty() && !named_score) {
    config.router_refusal = fmt::format("{}: scoring_func is {}; supported are softmax, sigmoid, sqrtsoftplus and softmax_topk",
                                        config.file, in_quotes(score_text));
  }
  const bool score_known = named_score || (score_text.empty() && family != nullptr);
  if (!config.topk || !score_known || !config.router_refusal.empty()) return;
  router.topk = *config.topk;
  router.score = named_score ? *named_score : family->score;
  config.router = router;
}

}  // namespace

ModelConfig parse_model_config(std::string_view text, const std::string& file) {
  ModelConfig config;
  config.file = one_line(file);
  const json document = parse_json(text, config.file);
  if (!document.is_object()) throw InputError(fmt::format("{}: is not a JSON object", config.file));
  // Models that also see or hear keep the language model's settings in an object of their own.
  const json* settings = &document;
  for (const char* inner : {"text_config", "language_config"}) {
    const auto found = document.find(inner);
    if (found != document.end() && found->is_object()) settings = &*found;
  }
  const Fields fields(*settings, config.file);
  config.hidden = fields.whole({"hidden_size"}, 1);
  config.intermediate = fields.whole({"moe_intermediate_size", "intermediate_size"}, 1);
  config.experts = fields.whole({"n_routed_experts", "num_experts", "num_local_experts"}, 1);
  config.topk = fields.whole({"num_experts_per_tok", "num_experts_per_token", "experts_per_token"}, 1);
  config.shared_experts = fields.whole({"n_shared_experts", "num_shared_experts"}, 0).value_or(0);
  const auto clamp = fields.number({"swiglu_limit"});
  if (clamp && *clamp < 0)
    throw InputError(fmt::format("{}: swiglu_limit is {}; it should be above 0, or absent", config.file, *clamp));
  if (clamp && *clamp > 0) config.clamp = clamp;  // 0 means "no clamp" in these configurations
  read_router(fields, config);
  return config;
}

ModelConfig read_model_config(const std::filesystem::path& folder) {
  const std::filesystem::path path = folder / "config.json";
  std::error_code error;
  if (!std::filesystem::exists(path, error)) return {};
  const MappedFile mapping(path.string());
  constexpr std::size_t longest = 16u << 20;
  const auto bytes = mapping.bytes();
  if (bytes.size() > longest) {
    throw InputError(fmt::format("{}: has {} bytes; a config.json has at most {}", one_line(path.string()), bytes.size(), longest));
  }
  return parse_model_config({reinterpret_cast<const char*>(bytes.data()), bytes.size()}, path.string());
}

}  // namespace heddle::checkpoint
