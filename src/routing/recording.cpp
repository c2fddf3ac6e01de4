#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <limits>

#include "heddle/error.hpp"
#include "heddle/routing.hpp"
#include "routing/npy.hpp"
#include "routing/random.hpp"
#include "routing/recorded_file.hpp"

namespace heddle {

namespace {

/// The file of weights beside X.ids.npy, empty if there is none.
std::string companion_of(const std::string& path) {
  constexpr std::string_view ending = ".ids.npy";
  if (!path.ends_with(ending)) return "";
  const std::string stem = path.substr(0, path.size() - ending.size());
  for (const char* const name : {".weights_e4.npy", ".weights.npy"}) {
    std::error_code ignored;
    if (std::filesystem::exists(stem + name, ignored)) return stem + name;
  }
  return "";
}

void check_shape(const NpyArray& array) {
  const auto& shape = array.shape;
  if (shape.size() != 3 && shape.size() != 4) {
    throw InputError(fmt::format(
        "{}: shape {}; a recording is [tokens, layers, topk], [prompts, steps, layers, topk], or of one layer [tokens, topk]",
        array.path, array.shape_text()));
  }
  // Large enough for any recording, and no product of two of them leaves an int.
  constexpr std::size_t largest_count = std::numeric_limits<int>::max();
  if (array.size() > largest_count || std::ranges::count(shape, std::size_t{0}) != 0) {
    throw InputError(fmt::format("{}: shape {} has no ids, or more than {}", array.path, array.shape_text(), largest_count));
  }
}

/// Cuts the ids to the tokens (or prompts) that the weights cover; their other sizes have to be equal.
void cut_to_weights(NpyArray& ids, const NpyArray& weights) {
  const bool same =
      weights.shape.size() == ids.shape.size() && std::equal(ids.shape.begin() + 1, ids.shape.end(), weights.shape.begin() + 1);
  if (!same || weights.shape[0] > ids.shape[0]) {
    throw InputError(fmt::format("{}: shape {} does not fit the ids of {}, {}; only the first size may be smaller", weights.path,
                                 weights.shape_text(), ids.path, ids.shape_text()));
  }
  ids.data.resize(ids.data.size() / ids.shape[0] * weights.shape[0]);
  ids.shape[0] = weights.shape[0];
}

std::vector<std::int32_t> checked_ids(const NpyArray& array, int topk) {
  const std::vector<std::int64_t> wide = integers(array);
  const auto outside = std::ranges::find_if(wide, [](std::int64_t id) { return id < -1 || id >= most_recorded_experts; });
  if (outside != wide.end()) {
    throw InputError(fmt::format("{}: value {} is {}, which is no expert id; ids are -1 to {}", array.path, outside - wide.begin(),
                                 *outside, most_recorded_experts - 1));
  }
  std::vector<std::int32_t> ids(wide.begin(), wide.end());
  const auto k = static_cast<std::size_t>(topk);
  for (std::size_t at = 0; at < ids.size(); ++at) {
    const auto token_begin = ids.begin() + static_cast<std::ptrdiff_t>(at / k * k);
    const auto here = ids.begin() + static_cast<std::ptrdiff_t>(at);
    if (*here >= 0 && std::find(token_begin, here, *here) != here) {
      throw InputError(
          fmt::format("{}: value {} repeats expert {} within a token; a token's ids have to differ", array.path, at, *here));
    }
  }
  return ids;
}

/// Throws where hidden states are not one row for each prompt token.
int hidden_size_of(const NpyArray& hidden, int tokens, int prompts) {
  if (prompts == 0 && hidden.shape.size() == 2 && hidden.shape[0] == static_cast<std::size_t>(tokens) && hidden.shape[1] <= 1 << 20)
    return static_cast<int>(hidden.shape[1]);
  throw InputError(fmt::format("{}: shape {}; hidden states are [tokens, hidden] of the {} prompt tokens", hidden.path,
                               hidden.shape_text(), prompts == 0 ? tokens : 0));
}

std::vector<float> checked_weights(const NpyArray& array) {
  std::vector<float> weights = weights_of(array);
  const auto bad = std::ranges::find_if(weights, [](float w) { return !(w >= 0.0f && w <= std::numeric_limits<float>::max()); });
  if (bad != weights.end()) {
    throw InputError(
        fmt::format("{}: value {} is {}; a weight is finite and not negative", array.path, bad - weights.begin(), *bad));
  }
  return weights;
}

}  // namespace

Recording Recording::open(const std::string& path, const std::string& weights_path) {
  RecordedFile file = read_recorded_file(path);
  NpyArray& ids = file.ids;
  check_shape(ids);
  Recording recording;
  recording.path_ = path;
  const std::string companion = weights_path.empty() && !file.weights ? companion_of(path) : weights_path;
  if (!companion.empty()) file.weights = read_npy(companion);
  if (file.weights) {
    check_shape(*file.weights);
    cut_to_weights(ids, *file.weights);
    recording.weights_ = checked_weights(*file.weights);
  }
  const auto size_at = [&ids](std::size_t from_end) { return static_cast<int>(ids.shape[ids.shape.size() - from_end]); };
  recording.topk_ = size_at(1);
  recording.layers_ = size_at(2);
  recording.steps_ = size_at(3);
  recording.prompts_ = ids.shape.size() == 4 ? size_at(4) : 0;
  recording.ids_ = checked_ids(ids, recording.topk_);
  if (file.hidden) {
    recording.hidden_ = hidden_size_of(*file.hidden, recording.tokens(), recording.prompts_);
    for (const float value : weights_of(*file.hidden)) recording.hidden_states_.push_back(to_bf16(value));
  }
  recording.least_experts_ = std::ranges::max(recording.ids_) + 1;
  recording.leave_out_empty();
  return recording;
}

void Recording::leave_out_empty() {
  if (prompts_ != 0) return;  // decode steps keep their places
  const auto a_token = static_cast<std::ptrdiff_t>(layers_) * topk_;
  int kept = 0;
  for (int token = 0; token < steps_; ++token) {
    const auto begin = ids_.begin() + token * a_token;
    if (std::all_of(begin, begin + a_token, [](std::int32_t id) { return id < 0; })) continue;
    if (kept != token) {
      std::copy_n(begin, a_token, ids_.begin() + kept * a_token);
      if (has_weights()) std::copy_n(weights_.begin() + token * a_token, a_token, weights_.begin() + kept * a_token);
      if (hidden_ > 0) {
        const auto width = static_cast<std::ptrdiff_t>(hidden_);
        std::copy_n(hidden_states_.begin() + token * width, width, hidden_states_.begin() + kept * width);
      }
    }
    ++kept;
  }
  if (kept == 0) throw InputError(fmt::format("{}: no token has a choice", path_));
  left_out_ = steps_ - kept;
  steps_ = kept;
  ids_.resize(static_cast<std::size_t>(kept * a_token));
  if (has_weights()) weights_.resize(ids_.size());
  hidden_states_.resize(static_cast<std::size_t>(kept) * static_cast<std::size_t>(hidden_));
}

Routing Recording::take(int layer, int step, int tokens) const {
  if (layer < 0 || layer >= layers_) {
    throw InputError(fmt::format("{}: layer {} of the recording was asked for, it has 0 to {}", path_, layer, layers_ - 1));
  }
  const int a_step = std::max(prompts_, 1);  // tokens a step
  const std::int64_t first = std::int64_t{step} * a_step;
  if (step < 0 || tokens < 0 || first + tokens > this->tokens()) {
    throw InputError(fmt::format("{}: {} tokens from step {} on were asked for; the recording has {} steps of {} token{}", path_,
                                 tokens, step, steps_, a_step, a_step == 1 ? "" : "s"));
  }
  const auto k = static_cast<std::size_t>(topk_);
  Routing routing{tokens, topk_, {}, {}};
  routing.ids.reserve(static_cast<std::size_t>(tokens) * k);
  routing.weights.assign(static_cast<std::size_t>(tokens) * k, 1.0f / static_cast<float>(topk_));
  for (std::int64_t token = 0; token < tokens; ++token) {
    const std::int64_t at_step = (first + token) / a_step, prompt = (first + token) % a_step;
    const auto row = static_cast<std::size_t>((prompt * steps_ + at_step) * layers_ + layer) * k;
    const auto begin = static_cast<std::ptrdiff_t>(row);
    routing.ids.insert(routing.ids.end(), ids_.begin() + begin, ids_.begin() + begin + topk_);
    if (has_weights())
      std::copy_n(weights_.begin() + begin, k, routing.weights.begin() + static_cast<std::ptrdiff_t>(token) * topk_);
  }
  return routing;
}

Routing expand(const Routing& routing, int factor) {
  if (factor < 1) throw InputError(fmt::format("routing: expansion by {}; at least 1 is needed", factor));
  Routing out = routing;
  for (std::size_t at = 0; at < out.ids.size(); ++at) {
    const std::int64_t id = out.ids[at];
    if (id < 0) continue;
    const std::uint64_t token = at / static_cast<std::size_t>(out.topk), choice = at % static_cast<std::size_t>(out.topk);
    const std::uint64_t hash = splitmix64(splitmix64(token) + choice);
    const std::int64_t wide = id * factor + static_cast<std::int64_t>(hash % static_cast<std::uint64_t>(factor));
    if (wide > std::numeric_limits<std::int32_t>::max()) {
      throw InputError(fmt::format("routing: expert id {} times {} leaves 32 bits", id, factor));
    }
    out.ids[at] = static_cast<std::int32_t>(wide);
  }
  return out;
}

}  // namespace heddle
