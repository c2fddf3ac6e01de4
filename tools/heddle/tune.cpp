// heddle tune: the flags, and the file.
#include "tune.hpp"

#include <fmt/format.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>

#include "command.hpp"
#include "drawn_layer.hpp"
#include "gpu_job.hpp"
#include "heddle/error.hpp"
#include "words.hpp"

namespace heddle::tool {

namespace {

using Json = nlohmann::ordered_json;

std::vector<TuningEntry> entries_of_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw InputError(fmt::format("--from {}: cannot be read", path));
  Json json;
  try {
    json = Json::parse(file);
  } catch (const Json::exception&) {
    throw InputError(fmt::format("--from {}: no JSON; the --json of heddle bench mega is wanted", path));
  }
  return entries_of_bench(json, path);
}

void check(const TuneArguments& a) {
  if (a.out.empty()) throw InputError("give --out FILE for the table");
  if (!a.layer.batch.empty() || a.layer.tokens)
    throw InputError("heddle tune draws batches of its own: give --sizes, the tokens of a rank, instead of --batch or --tokens");
  for (const int size : a.sizes) {
    if (size < 1) throw InputError(fmt::format("--sizes {}: a rank brings 1 token or more", size));
  }
  check_usual_ways(a.layer, "heddle tune");  // a table's entry says nothing of others
  if (a.calls < 1) throw InputError(fmt::format("--calls {}: at least 1 is needed", a.calls));
  if (a.layer.engine == "cuda" && a.bench.empty()) check_drawn_layer(a.layer, "heddle tune");
}

void tune(const TuneArguments& a) {
  check(a);
  TuningTable table;
  if (std::filesystem::exists(a.out)) table = TuningTable::read(a.out);
  std::vector<TuningEntry> entries;
  for (const std::string& path : a.bench) {
    for (TuningEntry& entry : entries_of_file(path)) entries.push_back(std::move(entry));
  }
  if (a.bench.empty()) {
    entries = a.layer.engine == "cuda" ? tune_on_gpus(a) : std::vector{tune_on_host(a)};
  }
  for (TuningEntry& entry : entries) table.add(std::move(entry));
  table.write(a.out);
  fmt::print("{}: {} measured, {} entries in all\n", a.out, entries.size(), table.entries().size());
}

}  // namespace

std::vector<TuningEntry> entries_of_bench(const Json& bench, const std::string& whose) {
  std::vector<TuningEntry> entries;
  try {
    for (const Json& row : bench.at("rows")) {
      const auto way = find_way(row.at("way").get<std::string>());
      if (!way || *way == Way::automatic || !row.at("shared").is_null() || row.count("median_us") == 0) continue;
      const Json combine = row.value("combine", Json());
      if (row.count("wrong") != 0 || row.value("ring", "live") != "live" || !(combine.is_null() || combine == "slots"))
        continue;  // of mega as it is by default
      const WeightKind kind = value_of(kinds, "weights", row.at("weights").get<std::string>());
      const TuningKey key{bench.at("machine").at("gpu").get<std::string>(),
                          row.at("hidden").get<int>(),
                          row.at("intermediate").get<int>(),
                          row.at("experts").get<int>(),
                          row.at("topk").get<int>(),
                          bench.at("ranks").get<int>(),
                          kind,
                          kind == WeightKind::bf16 ? Activation::bf16 : Activation::fp8};
      auto entry = std::find_if(entries.begin(), entries.end(), [&](const TuningEntry& one) { return one.key == key; });
      if (entry == entries.end()) {
        const std::string date = bench.at("date").get<std::string>().substr(0, 10);
        entries.push_back({key, fmt::format("heddle bench mega, {}, {}", date, row.at("routing").get<std::string>()), {}});
        entry = entries.end() - 1;
      }
      const int tokens = row.at("tokens").get<int>();
      auto at = std::lower_bound(entry->rows.begin(), entry->rows.end(), tokens,
                                 [](const TuningRow& one, int size) { return one.max_tokens < size; });
      if (at == entry->rows.end() || at->max_tokens != tokens) at = entry->rows.insert(at, {tokens, {}});
      if (!at->us.emplace(*way, row.at("median_us").get<double>()).second)
        throw InputError(
            fmt::format("{}: two times of {} for {} tokens; one run of heddle bench mega is wanted", whose, name(*way), tokens));
    }
  } catch (const Json::exception& error) {
    throw InputError(fmt::format("{}: not what heddle bench mega writes with --json: {}", whose, error.what()));
  }
  if (entries.empty()) throw InputError(fmt::format("{}: it has no times of a layer without a shared expert", whose));
  return entries;
}

#ifndef HEDDLE_CUDA
std::vector<TuningEntry> tune_on_gpus(const TuneArguments&) { refuse_without_cuda("--engine cuda", ", or take --engine host"); }
#endif

void add_tune(CLI::App& app, int&) {
  auto a = std::make_shared<TuneArguments>();
  auto* command = app.add_subcommand("tune", "measure the ways on this machine: the table that way auto chooses by");
  add_layer_arguments(*command, a->layer);
  const char* tune_group = "Tuning";
  command->add_option("--sizes", a->sizes, "tokens a rank to measure at (default: 1,8,64,256; with --engine cuda up to 4096)")
      ->delimiter(',')
      ->group(tune_group);
  command->add_option("--way", a->ways, "ways to measure (default: all that do what the options ask)")
      ->delimiter(',')
      ->group(tune_group);
  command->add_option("--calls", a->calls, "calls a size and way, of which the median counts")
      ->group(tune_group)
      ->capture_default_str()
      ->check(whole_number);
  command->add_option("--from", a->bench, "take times from the --json of heddle bench mega instead of measuring")
      ->delimiter(',')
      ->group(tune_group);
  command->add_option("--out", a->out, "the table; entries of other machines and shapes in it stay")->group(tune_group);
  command->callback([a] { tune(*a); });
}

}  // namespace heddle::tool
