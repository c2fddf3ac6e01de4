// heddle plan: copies, bytes, buffers, grids and floors of one layer; needs no data.
#include "heddle/plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "budget.hpp"
#include "command.hpp"
#include "explain.hpp"
#include "heddle/error.hpp"
#include "heddle/version.hpp"
#include "json_file.hpp"
#include "plan/text.hpp"
#include "scale_out.hpp"
#include "words.hpp"

namespace heddle::tool {

namespace {

using Json = nlohmann::ordered_json;

/// What was typed; what was not is empty.
struct PlanOptions {
  std::string preset;
  std::optional<int> hidden, intermediate, experts, topk, shared;
  std::optional<int> ranks, tokens, cap;
  std::string weights, wire, combine_wire = "bf16", combine = "slots", scale = "ue8m0", machine = "h200", json;
  int group = 128;
  BudgetOptions budget;
  NodeOptions nodes;
  bool list = false, articles = false, explain = false;
  std::string tuning;
};

// ------------------------------------------------------------------ the request

int required(const std::optional<int>& value, std::string_view option) {
  if (!value) {
    throw InputError(fmt::format("plan needs {0}; give {0} N, or see heddle plan --help", option));
  }
  return *value;
}

WeightKind weight_kind(const PlanOptions& options, const ModelPreset* preset) {
  if (!options.weights.empty()) {
    return value_of(kinds, "--weights", options.weights);
  }
  if (preset == nullptr) {
    return WeightKind::bf16;
  }
  if (preset->weights.empty()) {
    throw InputError(fmt::format("the weight format of {} is not confirmed; give --weights, one of {}", preset->name, keys(kinds)));
  }
  return preset->weights.front();
}

/// The preset's shape, or the one from flags; a flag beside a preset replaces the preset's number.
void take_shape(const PlanOptions& options, PlanRequest& request) {
  const ModelPreset* preset = options.preset.empty() ? nullptr : &find_preset(options.preset);
  if (preset != nullptr) {
    request.shape = preset->shape;
    request.shared_experts = preset->shared_experts.value_or(0);
  } else if (!options.hidden || !options.intermediate || !options.experts || !options.topk) {
    throw InputError(
        "plan needs --preset NAME, or all of --hidden, --intermediate, --experts and --topk (heddle plan --list shows presets)");
  }
  LayerShape& shape = request.shape;
  shape.hidden = options.hidden.value_or(shape.hidden);
  shape.intermediate = options.intermediate.value_or(shape.intermediate);
  shape.experts = options.experts.value_or(shape.experts);
  shape.topk = options.topk.value_or(shape.topk);
  request.shared_experts = options.shared.value_or(request.shared_experts);
  request.weights = weight_kind(options, preset);
}

PlanRequest make_request(const PlanOptions& options) {
  PlanRequest request;
  take_shape(options, request);
  request.ranks = options.nodes.up_to ? ranks_a_node(options.nodes) : required(options.ranks, "--ranks");
  take_nodes(options.nodes, request);
  if (options.explain) {
    constexpr int usual = 8192;
    request.cap = options.cap.value_or(options.tokens.value_or(usual));
  } else if (!options.budget.wanted) {  // it says what both are
    request.tokens = required(options.tokens, "--tokens");
    request.cap = options.cap.value_or(request.tokens);
  }
  request.quantisation = {options.group, value_of(scales, "--scale", options.scale)};
  const std::string usual = request.activation() == Activation::fp8 ? "fp8" : "bf16";
  request.wire = value_of(wires, "--wire", options.wire.empty() ? usual : options.wire);
  request.combine_wire = value_of(wires, "--combine-wire", options.combine_wire);
  request.combine = value_of(combines, "--combine", options.combine);
  request.machine = find_machine(options.machine);
  return request;
}

// ------------------------------------------------------------------ text

std::string thousands(double value) { return plan::with_commas(fmt::format("{:.0f}", value)); }

std::string bytes_text(double bytes) {
  constexpr double kibi = 1024, mebi = kibi * kibi, gibi = mebi * kibi;
  if (bytes < kibi * 100) {
    return fmt::format("{} bytes", thousands(std::round(bytes)));
  }
  return bytes < gibi ? fmt::format("{:.2f} MB", bytes / mebi) : fmt::format("{:.2f} GB", bytes / gibi);
}

std::string value_text(const Quantity& quantity) {
  const double value = quantity.value;
  switch (quantity.unit) {
    case Unit::bytes:
      return bytes_text(value);
    case Unit::seconds:
      return fmt::format("{:.2f} us", value * 1e6);
    case Unit::copies:
    case Unit::ratio:
      return fmt::format("{:.2f}", value);
    case Unit::count:
    case Unit::rows:
      break;
  }
  return value == std::round(value) ? thousands(value) : fmt::format("{:.1f}", value);
}

/// Columns padded to their widest cell; the first is indented, the second is aligned to the right.
void print_table(const std::vector<std::vector<std::string>>& rows) {
  std::vector<std::size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (std::size_t column = 0; column < row.size(); ++column) {
      widths[column] = std::max(widths[column], row[column].size());
    }
  }
  for (const auto& row : rows) {
    std::string line = "  ";
    for (std::size_t column = 0; column < row.size(); ++column) {
      line +=
          column == 1 ? fmt::format("{:>{}}  ", row[column], widths[column]) : fmt::format("{:<{}}  ", row[column], widths[column]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    fmt::print("{}\n", line);
  }
}

void print_plan(const PlanOptions& options, const Plan& plan) {
  const bool guessed = !options.preset.empty() && !options.shared && !find_preset(options.preset).shared_experts;
  const PlanRequest& request = plan.request;
  const LayerShape& shape = request.shape;
  fmt::print("{}: hidden {}, intermediate {}, {} experts, top-{}, {} shared{}, {} weights\n",
             options.preset.empty() ? "layer" : options.preset, shape.hidden, shape.intermediate, shape.experts, shape.topk,
             request.shared_experts, guessed ? " (not confirmed)" : "", word_of(kinds, request.weights));
  fmt::print("{} ranks, {} tokens a rank, cap {}, wire {}, combine wire {}, machine {} ({} SMs)\n", request.ranks, request.tokens,
             request.cap, word_of(wires, request.wire), word_of(wires, request.combine_wire), request.machine.name,
             request.machine.sms);
  fmt::print(
      "The router is uniform. MB and GB are powers of 1,024; rates are powers of ten. Rows are counted without ids and weights.\n");
  for (const Section& section : plan.sections) {
    fmt::print("\n{}\n", section.title);
    std::vector<std::vector<std::string>> rows;
    for (const Quantity& quantity : section.quantities) {
      rows.push_back({quantity.title, value_text(quantity), quantity.formula, fmt::format("[{}]", quantity.source)});
    }
    print_table(rows);
  }
}

void print_list() {
  const auto number = [](const std::optional<int>& value) { return value ? std::to_string(*value) : std::string("-"); };
  fmt::print("Presets (-: not confirmed)\n");
  std::vector<std::vector<std::string>> rows{{"name", "hidden", "intermediate", "experts", "top-k", "shared", "weights", "note"}};
  for (const ModelPreset& preset : model_presets()) {
    std::string weights;
    for (const WeightKind kind : preset.weights) {
      weights += (weights.empty() ? "" : ", ") + word_of(kinds, kind);
    }
    std::string note(preset.note);
    if (preset.plan_only) {
      note = "plan only: its activation is its own" + (note.empty() ? "" : "; " + note);
    }
    const LayerShape& shape = preset.shape;
    rows.push_back({std::string(preset.name), std::to_string(shape.hidden), std::to_string(shape.intermediate),
                    std::to_string(shape.experts), std::to_string(shape.topk), number(preset.shared_experts),
                    weights.empty() ? "-" : weights, note});
  }
  print_table(rows);

  fmt::print("\nMachines\n");
  rows = {{"name", "SMs", "what", "value", "where it comes from"}};
  for (const Machine& machine : machines()) {
    rows.push_back({std::string(machine.name), std::to_string(machine.sms), std::string(machine.title)});
    const auto add = [&](const char* what, const std::optional<MachineValue>& value, double scale, const char* unit) {
      if (value) {
        rows.push_back({"", "", what, fmt::format("{:.4g} {}", value->value * scale, unit), std::string(value->source)});
      }
    };
    add("link, one direction", machine.link, 1e-9, "GB/s");
    add("one SM reads", machine.sm_read, 1e-9, "GB/s");
    add("one SM writes", machine.sm_write, 1e-9, "GB/s");
    add("memory, read", machine.memory_read, 1e-12, "TB/s");
    add("memory, copy", machine.memory_copy, 1e-12, "TB/s");
    add("tensor cores, fp8", machine.fp8, 1e-12, "TFLOP/s");
    add("tensor cores, bf16", machine.bf16, 1e-12, "TFLOP/s");
    add("a word seen elsewhere", machine.word_latency, 1e6, "us");
    add("a kernel in a graph", machine.launch, 1e6, "us");
    add("network of a GPU", machine.network, 1e-9, "GB/s");
    add("a word seen at another node", machine.network_latency, 1e6, "us");
    if (machine.fit) rows.push_back({"", "", "times fitted to", "", std::string(machine.fit->source)});
  }
  print_table(rows);
}

int print_articles(const std::vector<ArticleNumber>& numbers) {
  std::vector<std::vector<std::string>> rows{{"number", "article", "ours", "unit", "where", "how"}};
  std::size_t agreeing = 0;
  for (const ArticleNumber& number : numbers) {
    agreeing += number.agrees() ? 1 : 0;
    rows.push_back({number.title, number.stated, number.agrees() ? number.rounded() : number.rounded() + " (differs)", number.unit,
                    fmt::format("{}, {}", number.article, number.section), number.formula});
  }
  fmt::print("The numbers that the three articles compute, and ours rounded to the same digits.\n");
  fmt::print(
      "MB and GB are powers of 1,024 in the exchange-ways and fused-kernel articles, powers of ten in the persistent-grid "
      "article.\n\n");
  print_table(rows);
  fmt::print("\n{} of {} agree.\n", agreeing, numbers.size());
  return agreeing == numbers.size() ? 0 : static_cast<int>(ErrorKind::check);
}

// ------------------------------------------------------------------ JSON

constexpr std::array<const char*, 6> unit_names{"count", "copies", "rows", "bytes", "seconds", "ratio"};

/// Whole numbers as JSON integers.
Json number(double value) { return value == std::round(value) ? Json(static_cast<std::int64_t>(value)) : Json(value); }

Json request_json(const PlanOptions& options, const PlanRequest& request) {
  Json json{{"preset", options.preset.empty() ? Json(nullptr) : Json(options.preset)},
            {"hidden", request.shape.hidden},
            {"intermediate", request.shape.intermediate},
            {"experts", request.shape.experts},
            {"topk", request.shape.topk},
            {"shared_experts", request.shared_experts},
            {"weights", word_of(kinds, request.weights)},
            {"ranks", request.ranks},
            {"nodes", request.nodes},
            {"tokens", request.tokens},
            {"cap", request.cap},
            {"wire", word_of(wires, request.wire)},
            {"combine_wire", word_of(wires, request.combine_wire)},
            {"combine", word_of(combines, request.combine)},
            {"group", request.quantisation.group},
            {"scale", word_of(scales, request.quantisation.scale)},
            {"machine", request.machine.name},
            {"sms", request.machine.sms}};
  if (options.budget.wanted) json["budget"] = budget_json(token_budget(options.budget));
  return json;
}

/// "gather.dispatch" of section "traffic" becomes object["traffic"]["gather"]["dispatch"].
Json plan_json(const PlanOptions& options, const Plan& plan) {
  Json json{{"version", version}, {"request", request_json(options, plan.request)}};
  for (const Section& section : plan.sections) {
    for (const Quantity& quantity : section.quantities) {
      std::string path = fmt::format("/{}/{}", section.name, quantity.name);
      std::replace(path.begin(), path.end(), '.', '/');
      json[Json::json_pointer(path)] = Json{{"value", number(quantity.value)},
                                            {"unit", unit_names[static_cast<std::size_t>(quantity.unit)]},
                                            {"formula", quantity.formula},
                                            {"source", quantity.source}};
    }
  }
  return json;
}

Json articles_json(const std::vector<ArticleNumber>& numbers) {
  Json json{{"version", version}, {"articles", Json::array()}};
  for (const ArticleNumber& one : numbers) {
    json["articles"].push_back(Json{{"title", one.title},
                                    {"article", one.article},
                                    {"section", one.section},
                                    {"stated", one.stated},
                                    {"value", number(one.value)},
                                    {"unit", one.unit},
                                    {"formula", one.formula},
                                    {"agrees", one.agrees()}});
  }
  return json;
}

Plan plan_of(const PlanOptions& options) {
  const PlanRequest request = make_request(options);
  return options.budget.wanted ? make_budget_plan(token_budget(options.budget), request, options.cap) : make_plan(request);
}

int scale_out_plan(const PlanOptions& options) {
  const PlanRequest request = make_request(options);
  const std::vector<ScaleStep> steps = scale_out_steps(options.nodes, request);
  if (!options.json.empty()) {
    write_json(options.json,
               Json{{"version", version}, {"request", request_json(options, request)}, {"scale_out", scale_out_json(steps)}});
  }
  print_scale_out(request, steps);
  return 0;
}

/// A table file says by its first entry which machine it is of.
int explain_plan(const PlanOptions& options) {
  const PlanRequest request = make_request(options);
  const TuningTable table = options.tuning.empty() ? *TuningTable::shipped() : TuningTable::read(options.tuning);
  const bool of_table = !options.tuning.empty() && !table.entries().empty();
  const auto choices =
      explain_sizes(request, table, of_table ? table.entries().front().key.machine : std::string(request.machine.title));
  if (!options.json.empty()) {
    write_json(options.json,
               Json{{"version", version}, {"request", request_json(options, request)}, {"explain", choices_json(choices)}});
  }
  print_choices(request, choices);
  return 0;
}

int run_plan(const PlanOptions& options) {
  if (options.list) {
    print_list();
    return 0;
  }
  if (options.articles) {
    const std::vector<ArticleNumber> numbers = article_numbers();
    if (!options.json.empty()) {
      write_json(options.json, articles_json(numbers));
    }
    return print_articles(numbers);
  }
  if (options.explain) return explain_plan(options);
  if (options.nodes.up_to) return scale_out_plan(options);
  const Plan plan = plan_of(options);
  if (!options.json.empty()) {
    write_json(options.json, plan_json(options, plan));
  }
  print_plan(options, plan);
  return 0;
}

}  // namespace

void add_plan(CLI::App& app, int& status) {
  CLI::App* plan = app.add_subcommand("plan", "copies, bytes, buffers, grids and floors of a layer; needs no data");
  const auto number = [plan](const char* name, auto& value, const char* help) {
    return plan->add_option(name, value, help)->type_name("N")->check(whole_number);
  };
  const auto options = std::make_shared<PlanOptions>();
  plan->add_option("--preset", options->preset, "a published model's shape (see --list)")->type_name("NAME");
  number("--hidden", options->hidden, "hidden size, a multiple of 64");
  number("--intermediate", options->intermediate, "intermediate size of a routed expert, a multiple of 64");
  number("--experts", options->experts, "routed experts over all ranks");
  number("--topk", options->topk, "experts a token");
  number("--shared", options->shared, "shared experts");
  plan->add_option("--weights", options->weights, fmt::format("weight format: {} (default: the preset's, or bf16)", keys(kinds)))
      ->type_name("KIND");
  CLI::Option* ranks = number("--ranks", options->ranks, "ranks that share the experts");
  CLI::Option* up_to = add_node_options(*plan, options->nodes)->excludes(ranks);
  CLI::Option* tokens = number("--tokens", options->tokens, "tokens that each rank brings");
  number("--cap", options->cap, "most tokens that a rank may bring (default: --tokens; with --budget: what the budget needs)");
  plan->add_option("--machine", options->machine, "whose SMs and rates to use (see --list)")
      ->type_name("NAME")
      ->capture_default_str();
  plan->add_option("--wire", options->wire,
                   fmt::format("rows of dispatch: {} (default: fp8, or bf16 with bf16 weights)", keys(wires)))
      ->type_name("FORMAT");
  plan->add_option("--combine-wire", options->combine_wire, fmt::format("rows of combine: {}", keys(wires)))
      ->type_name("FORMAT")
      ->capture_default_str();
  plan->add_option("--combine", options->combine, "mega: results wait in slots, or are added where they arrive (add)")
      ->type_name("PLACE")
      ->capture_default_str();
  number("--group", options->group, "values that share a scale on an fp8 wire: 128 or 32")->capture_default_str();
  plan->add_option("--scale", options->scale, "scale format of an fp8 wire: ue8m0 or f32")
      ->type_name("FORMAT")
      ->capture_default_str();
  plan->add_option("--json", options->json, "also write the numbers to this file")->type_name("FILE");
  CLI::Option* budget = add_budget_options(*plan, options->budget)->excludes(tokens)->excludes(up_to);
  CLI::Option* explain = plan->add_flag("--explain", options->explain, "which way `auto` goes at which size up to --cap, and why")
                             ->excludes(budget)
                             ->excludes(up_to);
  plan->add_option("--tuning", options->tuning, "the table of times to explain (heddle tune; default: the shipped one)")
      ->type_name("FILE")
      ->needs(explain);
  plan->add_flag("--list", options->list, "list presets and machines");
  plan->add_flag("--articles", options->articles, "list the numbers that the articles compute, with ours");
  plan->callback([options, &status] { status = run_plan(*options); });
}

}  // namespace heddle::tool
