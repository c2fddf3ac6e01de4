#include "suite_file.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <utility>

#include "heddle/error.hpp"
#include "json_file.hpp"
#include "provenance.hpp"

namespace heddle::tool {

using Json = nlohmann::ordered_json;

namespace {

bool is_text(const Json& object, const char* field) { return object.contains(field) && object[field].is_string(); }

/// Whether `heddle bench all` has written it.
bool is_ours(const Json& json) {
  if (!json.is_object() || !is_text(json, "benchmark") || json["benchmark"].get<std::string>() != "all") return false;
  if (!is_text(json, "engine") || (json.contains("under_way") && !is_text(json, "under_way"))) return false;
  const auto all = json.find("measurements");
  if (all == json.end() || !all->is_array()) return false;
  return std::all_of(all->begin(), all->end(), [](const Json& entry) {
    return entry.is_object() && is_text(entry, "name") && is_text(entry, "arguments") && is_text(entry, "commit");
  });
}

Json read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  Json json = Json::parse(file, nullptr, false);
  if (!is_ours(json))
    throw InputError(fmt::format("--out {}: there is a file that heddle bench all did not write; give another name", path));
  return json;
}

/// What stays the same while clocks go up and down.
Json identity(const Json& machine) {
  Json same;
  for (const char* field : {"engine", "processor", "cores", "gpu", "driver"}) same[field] = machine.value(field, Json());
  return same;
}

bool is_computed(const Measurement& what) { return what.benchmark == "copies" || what.benchmark == "buffers"; }

}  // namespace

SuiteFile::SuiteFile(std::string path, const SuiteArguments& a, Json machine)
    : path_(std::move(path)), commit_(a.commit), machine_(std::move(machine)) {
  json_ = result_head("all", commit_, machine_);
  json_["engine"] = a.engine;
  if (is_there()) {
    const Json earlier = read(path_);
    if (earlier.value("engine", "") != a.engine)
      throw InputError(fmt::format("--out {}: its measurements are of --engine {}; give another name for those of {}", path_,
                                   earlier.value("engine", ""), a.engine));
    json_["measurements"] = earlier["measurements"];
    interrupted_ = earlier.value("under_way", "");
  } else {
    json_["measurements"] = Json::array();
  }
}

bool SuiteFile::is_there() const { return std::filesystem::is_regular_file(path_); }

const Json* SuiteFile::find(const Measurement& what) const {
  for (const Json& entry : json_["measurements"]) {
    if (entry.value("name", "") == what.name) return &entry;
  }
  return nullptr;
}

bool SuiteFile::has(const Measurement& what) const {
  const Json* entry = find(what);
  return entry != nullptr && entry->contains("result") && !entry->contains("failed") &&
         entry->value("arguments", "") == what.arguments && entry->value("commit", "") == commit_ &&
         (is_computed(what) || identity(entry->value("machine", Json::object())) == identity(machine_));
}

bool SuiteFile::was_interrupted(const Measurement& what) const { return what.name == interrupted_; }

Json SuiteFile::entry_of(const Measurement& what) const {
  return {{"name", what.name},    {"benchmark", what.benchmark}, {"arguments", what.arguments}, {"serves", what.serves},
          {"date", now_in_utc()}, {"commit", commit_},           {"machine", machine_}};
}

void SuiteFile::put(const Json& entry) {
  const auto name = entry.at("name").get<std::string>();
  for (Json& old : json_["measurements"]) {
    if (old.value("name", "") != name) continue;
    old = entry;
    return;
  }
  json_["measurements"].push_back(entry);
}

void SuiteFile::begin(const Measurement& what) {
  json_["under_way"] = what.name;
  save();
}

void SuiteFile::finish(const Measurement& what, const Measured& measured, double seconds) {
  Json entry = entry_of(what);
  if (measured.result.contains("machine")) entry["machine"].update(measured.result["machine"]);  // with clocks of that time
  entry["wall_seconds"] = seconds;
  if (!measured.failed.empty()) entry["failed"] = measured.failed;
  if (measured.wrong) entry["wrong"] = true;
  entry["result"] = measured.result;
  put(entry);
  json_.erase("under_way");
  save();
}

void SuiteFile::skip(const Measurement& what, const std::string& why) {
  json_.erase("under_way");
  if (!has(what)) {  // else it is of another build, one whose kernels take time stamps, say
    Json entry = entry_of(what);
    entry["skipped"] = why;
    put(entry);
  }
  save();
}

void SuiteFile::save() {
  json_["date"] = now_in_utc();
  write_json(path_, json_);
}

}  // namespace heddle::tool
