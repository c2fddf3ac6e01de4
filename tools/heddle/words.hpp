// The words of the command line and what they mean.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <string>

#include "experts/words.hpp"
#include "heddle/balancing.hpp"
#include "heddle/error.hpp"
#include "heddle/exchange.hpp"
#include "heddle/experts.hpp"
#include "heddle/layer.hpp"
#include "heddle/routing.hpp"

namespace heddle::tool {

/// By word.
template <typename Value, std::size_t count>
std::map<std::string, Value> map_of(const std::pair<Value, std::string_view> (&words)[count]) {
  std::map<std::string, Value> map;
  for (const auto& [value, word] : words) map.emplace(word, value);
  return map;
}

inline const std::map<std::string, Wire> wires{{"bf16", Wire::bf16}, {"fp8", Wire::fp8}, {"nvfp4", Wire::nvfp4}};
inline const std::map<std::string, ScaleFormat> scales{{"ue8m0", ScaleFormat::ue8m0}, {"f32", ScaleFormat::f32}};
inline const std::map<std::string, WeightKind> kinds = map_of(weight_words);
inline const std::map<std::string, RunnerKind> runners{{"auto", RunnerKind::automatic},
                                                       {"contiguous", RunnerKind::contiguous},
                                                       {"masked", RunnerKind::masked},
                                                       {"routed", RunnerKind::routed}};
inline const std::map<std::string, Activation> activations = map_of(activation_words);
inline const std::map<std::string, WeightAt> weight_places{{"activation", WeightAt::activation}, {"combine", WeightAt::combine}};
inline const std::map<std::string, NodeMode> node_modes{{"direct", NodeMode::direct}, {"hybrid", NodeMode::hybrid}};
inline const std::map<std::string, Reduce> reduces{{"rank", Reduce::rank}, {"home", Reduce::home}};
inline const std::map<std::string, Combine> combines{{"slots", Combine::slots}, {"add", Combine::add}};
inline const std::map<std::string, Score> scores{{"softmax", Score::softmax},
                                                 {"sigmoid", Score::sigmoid},
                                                 {"sqrtsoftplus", Score::sqrtsoftplus},
                                                 {"softmax_topk", Score::softmax_topk}};
inline const std::map<std::string, GatherMode> gather_modes{
    {"padded", GatherMode::padded}, {"uneven", GatherMode::uneven}, {"zero_filled", GatherMode::zero_filled}};
inline const std::map<std::string, CopyRule> copy_rules{{"levelled", CopyRule::levelled}, {"turns", CopyRule::turns}};
inline const std::map<std::string, RingSize> ring_sizes{{"live", RingSize::live}, {"full", RingSize::full}};
inline const std::map<std::string, SharedMode> shared_modes{
    {"alone", SharedMode::alone}, {"fused", SharedMode::fused}, {"extra", SharedMode::extra}};

inline const std::map<std::string, Overflow> overflows{{"error", Overflow::error}, {"split", Overflow::split}};
inline const std::map<std::string, SumOrder> sum_orders{
    {"any", SumOrder::any}, {"slots", SumOrder::slots}, {"two_stages", SumOrder::two_stages}};

template <typename Value>
const std::string& word_of(const std::map<std::string, Value>& words, Value value) {
  return std::find_if(words.begin(), words.end(), [&](const auto& word) { return word.second == value; })->first;
}

template <typename Value>
std::string keys(const std::map<std::string, Value>& words) {
  std::string text;
  for (const auto& [word, value] : words) text += (text.empty() ? "" : ", ") + word;
  return text;
}

/// Throws InputError that lists the words `option` takes.
template <typename Value>
Value value_of(const std::map<std::string, Value>& words, const std::string& option, const std::string& word) {
  const auto found = words.find(word);
  if (found == words.end()) throw InputError(fmt::format("{} does not know '{}'; it takes {}", option, word, keys(words)));
  return found->second;
}

}  // namespace heddle::tool
