#include "checkpoint/naming.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <map>
#include <vector>

#include "checkpoint/describe.hpp"
#include "heddle/error.hpp"

namespace heddle::checkpoint {

namespace {

constexpr std::string_view marker = "experts.";

/// The digits at the start of text as a number below a million, without leading zeros.
std::optional<int> leading_number(std::string_view text) {
  std::size_t length = 0;
  while (length < text.size() && text[length] >= '0' && text[length] <= '9') ++length;
  if (length == 0 || length > 6 || (length > 1 && text[0] == '0')) return std::nullopt;
  int number = 0;
  std::from_chars(text.data(), text.data() + length, number);
  return number;
}

bool is_digits(std::string_view word) {
  return std::all_of(word.begin(), word.end(), [](char c) { return c >= '0' && c <= '9'; });
}

/// Where "experts." starts as a whole word ("shared_experts." is another), npos where it does not.
std::size_t find_marker(std::string_view name) {
  std::size_t at = name.find(marker);
  while (at != std::string_view::npos && at > 0 && name[at - 1] != '.') at = name.find(marker, at + 1);
  return at;
}

std::map<std::string, LayerNames> all_layers(const TensorTable& table) {
  std::map<std::string, LayerNames> layers;
  for (const auto& [name, shard] : table.names()) {
    const std::size_t at = find_marker(name);
    if (at == std::string::npos) continue;
    const std::string_view rest = std::string_view(name).substr(at + marker.size());
    const auto id = is_digits(rest.substr(0, rest.find('.'))) ? leading_number(rest) : std::nullopt;
    const bool fused = rest.starts_with("gate_up_proj") || rest.starts_with("down_proj");
    if (!id && !fused) continue;
    LayerNames& layer = layers[name.substr(0, at)];
    layer.prefix = name.substr(0, at);
    layer.fused = layer.fused || fused;
    if (id) layer.ids.insert(*id);
  }
  return layers;
}

std::string listed(const std::vector<const LayerNames*>& layers) {
  constexpr std::size_t most = 8;
  std::string text;
  for (std::size_t i = 0; i < std::min(most, layers.size()); ++i) {
    text += fmt::format("{}{}", i == 0 ? "" : ", ", in_quotes(layers[i]->prefix));
  }
  if (layers.size() > most)
    text += fmt::format(" and {} more, the last {}", layers.size() - most, in_quotes(layers.back()->prefix));
  return text;
}

bool counts_layers(std::string_view prefix) {
  return prefix.starts_with("layers.") || prefix.find(".layers.") != std::string_view::npos;
}

/// Of the layers with this number, those under "layers" go before others ("mtp.0." beside "layers.0.").
std::vector<const LayerNames*> with_number(const std::vector<const LayerNames*>& layers, int number) {
  std::vector<const LayerNames*> fitting, under_layers;
  for (const LayerNames* layer : layers) {
    if (layer_number(layer->prefix) != number) continue;
    fitting.push_back(layer);
    if (counts_layers(layer->prefix)) under_layers.push_back(layer);
  }
  return under_layers.empty() ? fitting : under_layers;
}

}  // namespace

std::optional<int> layer_number(std::string_view prefix) {
  std::optional<int> last;
  bool after_layers = false;
  while (!prefix.empty()) {
    const std::size_t dot = prefix.find('.');
    const std::string_view word = prefix.substr(0, dot);
    prefix = dot == std::string_view::npos ? std::string_view() : prefix.substr(dot + 1);
    const auto number = is_digits(word) ? leading_number(word) : std::nullopt;
    if (number && after_layers) return number;
    if (number) last = number;
    after_layers = word == "layers";
  }
  return last;
}

LayerNames find_layer(const TensorTable& table, std::optional<int> layer_index) {
  const auto all = all_layers(table);
  std::vector<const LayerNames*> layers;
  for (const auto& [prefix, layer] : all) layers.push_back(&layer);
  if (layers.empty()) {
    const std::string example = table.names().empty()
                                    ? "it holds no tensor"
                                    : fmt::format("its first tensor is {}", in_quotes(table.names().begin()->first));
    throw InputError(
        fmt::format("{}: holds no expert: no tensor is called ...experts.0.gate_proj.weight, ...experts.0.w1.weight or "
                    "...experts.gate_up_proj; {}",
                    table.place(), example));
  }
  std::stable_sort(layers.begin(), layers.end(), [](const LayerNames* a, const LayerNames* b) {
    return layer_number(a->prefix).value_or(-1) < layer_number(b->prefix).value_or(-1);
  });
  if (!layer_index) {
    if (layers.size() == 1) return *layers.front();
    throw InputError(fmt::format("{}: holds {} layers with experts; choose one by its number (layer index): {}", table.place(),
                                 layers.size(), listed(layers)));
  }
  const bool only_one_unnumbered = layers.size() == 1 && !layer_number(layers.front()->prefix);
  const auto chosen = only_one_unnumbered ? layers : with_number(layers, *layer_index);
  if (chosen.size() == 1) return *chosen.front();
  throw InputError(fmt::format("{}: holds {} with experts that has the number {} (layer index); there {} {}", table.place(),
                               chosen.empty() ? "no layer" : "more than one layer", *layer_index, layers.size() == 1 ? "is" : "are",
                               listed(chosen.empty() ? layers : chosen)));
}

std::optional<MatrixNames> find_matrix_names(const TensorTable& table, const std::string& stem) {
  constexpr MatrixNames words{"gate_proj", "up_proj", "down_proj"};
  constexpr MatrixNames numbers{"w1", "w3", "w2"};
  bool has_words = false, has_numbers = false;
  for (const std::string& ending : table.endings(stem)) {
    const std::string_view matrix = std::string_view(ending).substr(0, ending.find('.'));
    has_words = has_words || matrix == words.gate || matrix == words.up || matrix == words.down;
    has_numbers = has_numbers || matrix == numbers.gate || matrix == numbers.up || matrix == numbers.down;
  }
  if (has_words && has_numbers) {
    throw InputError(fmt::format("{}: expert {} has both gate_proj/up_proj/down_proj and w1/w3/w2; one naming is needed",
                                 table.place(), in_quotes(stem)));
  }
  if (has_words) return words;
  if (has_numbers) return numbers;
  return std::nullopt;
}

}  // namespace heddle::checkpoint
