// Tables as JSON: read with an eye on every field, since people edit them.
#include <fmt/format.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string_view>
#include <utility>

#include "checkpoint/whole_file.hpp"
#include "experts/words.hpp"
#include "heddle/error.hpp"
#include "heddle/tuning.hpp"

namespace heddle {

namespace {

using Json = nlohmann::ordered_json;

constexpr int format = 1;
constexpr std::pair<int TuningKey::*, const char*> sizes[] = {{&TuningKey::hidden, "hidden"},
                                                              {&TuningKey::intermediate, "intermediate"},
                                                              {&TuningKey::experts, "experts"},
                                                              {&TuningKey::topk, "topk"},
                                                              {&TuningKey::ranks, "ranks"}};

/// A value of the text, and where it stands.
struct Place {
  const Json& json;
  std::string path;  ///< file and field

  [[noreturn]] void refuse(const std::string& text) const { throw InputError(fmt::format("{}: {}", path, text)); }
  Place at(const char* field) const {
    if (!json.is_object()) refuse("an object is wanted here");
    const auto found = json.find(field);
    if (found == json.end()) refuse(fmt::format("'{}' is missing", field));
    return {*found, fmt::format("{}.{}", path, field)};
  }
  std::vector<Place> items() const {
    if (!json.is_array()) refuse("a list is wanted here");
    std::vector<Place> all;
    for (std::size_t i = 0; i < json.size(); ++i) all.push_back({json[i], fmt::format("{}[{}]", path, i)});
    return all;
  }
  std::string text() const {
    if (!json.is_string()) refuse("a text is wanted here");
    return json.get<std::string>();
  }
  int size() const {
    constexpr long long most = 1 << 30;
    if (!json.is_number_integer() || json.get<long long>() < 1 || json.get<long long>() > most)
      refuse(fmt::format("a whole number from 1 to {} is wanted here, not {}", most, json.dump()));
    return json.get<int>();
  }
  template <class Words>
  auto word(const Words& words) const {
    const std::string given = text();
    std::string known;
    for (const auto& [value, word] : words) {
      if (word == given) return value;
      known += fmt::format("{}{}", known.empty() ? "" : ", ", word);
    }
    refuse(fmt::format("'{}' is not known here; {} are", given, known));
  }
};

std::map<Way, double> times_of(const Place& place) {
  if (!place.json.is_object()) place.refuse("an object of microseconds by way is wanted here");
  std::map<Way, double> times;
  for (const auto& [word, us] : place.json.items()) {
    const auto way = find_way(word);
    if (!way || *way == Way::automatic) place.refuse(fmt::format("'{}' is no way", word));
    if (!us.is_number()) place.refuse(fmt::format("{}: microseconds are wanted, not {}", word, us.dump()));
    times[*way] = us.template get<double>();
  }
  return times;
}

TuningEntry entry_of(const Place& place) {
  TuningEntry entry;
  entry.key.machine = place.at("machine").text();
  for (const auto& [member, field] : sizes) entry.key.*member = place.at(field).size();
  entry.key.weights = place.at("weights").word(weight_words);
  entry.key.activation = place.at("activation").word(activation_words);
  entry.source = place.at("source").text();
  for (const Place& row : place.at("rows").items()) entry.rows.push_back({row.at("max_tokens").size(), times_of(row.at("us"))});
  return entry;
}

Json json_of(const TuningEntry& entry) {
  Json json{{"machine", entry.key.machine}};
  for (const auto& [member, field] : sizes) json[field] = entry.key.*member;
  json["weights"] = word_in(weight_words, entry.key.weights);
  json["activation"] = word_in(activation_words, entry.key.activation);
  json["source"] = entry.source;
  json["rows"] = Json::array();
  for (const TuningRow& row : entry.rows) {
    Json us = Json::object();
    for (const auto& [way, time] : row.us) us[std::string(name(way))] = time;
    json["rows"].push_back({{"max_tokens", row.max_tokens}, {"us", us}});
  }
  return json;
}

}  // namespace

TuningTable TuningTable::parse(const std::string& text, const std::string& whose) {
  Json json;
  try {
    json = Json::parse(text);
  } catch (const nlohmann::json::parse_error& error) {
    throw InputError(
        fmt::format("{}: no JSON from byte {} on; a tuning table is wanted, as `heddle tune` writes it", whose, error.byte));
  } catch (const nlohmann::json::out_of_range&) {
    throw InputError(fmt::format("{}: it has a number that is beyond any time or size", whose));
  }
  const Place top{json, whose};
  if (const int version = top.at("heddle_tuning").size(); version != format)
    top.refuse(fmt::format("tuning tables of format {} are not known, {} is; tune again", version, format));
  TuningTable table;
  for (const Place& place : top.at("entries").items()) {
    TuningEntry entry = entry_of(place);
    for (const TuningEntry& other : table.entries_) {
      if (other.key == entry.key) place.refuse("there is an entry of this machine and shape already");
    }
    try {
      table.add(std::move(entry));
    } catch (const InputError& error) {
      place.refuse(error.what());
    }
  }
  return table;
}

TuningTable TuningTable::read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  if (file) text << file.rdbuf();
  if (!file) throw InputError(fmt::format("cannot read the tuning table {}", path));
  return parse(text.str(), path);
}

std::string TuningTable::json() const {
  Json json{{"heddle_tuning", format}, {"entries", Json::array()}};
  for (const TuningEntry& entry : entries_) json["entries"].push_back(json_of(entry));
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

void TuningTable::write(const std::string& path) const {
  const std::string text = json();
  checkpoint::WholeFile file(path);
  file.write(std::as_bytes(std::span(text)));
  file.publish();
}

}  // namespace heddle
