// heddle trace: one call of every way asked for, with time stamps; where the time goes, as a table, a trace and strips.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <optional>

#include "checkpoint/whole_file.hpp"
#include "command.hpp"
#include "heddle/error.hpp"
#include "heddle/version.hpp"
#include "inputs.hpp"
#include "job.hpp"
#include "report.hpp"
#include "trace/chrome.hpp"
#include "trace/strips.hpp"
#include "trace_report.hpp"

namespace heddle::tool {

namespace {

struct TraceArguments {
  LayerArguments layer;
  std::vector<std::string> ways;
  std::string out, strips, json;
  int ctas = 4;
  int warm_calls = 1;
};

void check(const TraceArguments& arguments) {
  if (arguments.layer.processes) throw InputError("--processes: a trace is of the threads of one process; leave it out");
  if (arguments.ctas < 1) throw InputError(fmt::format("--ctas {}: at least 1 is drawn", arguments.ctas));
  if (arguments.warm_calls < 0) throw InputError(fmt::format("--warm {}: 0 or more calls", arguments.warm_calls));
  check_stamps(arguments.layer);
}

std::vector<std::string> wanted_ways(const TraceArguments& arguments) {
  if (arguments.ways.empty()) return {"mega", "low_latency"};
  if (arguments.ways.front() != "all") return arguments.ways;
  return {"mega", "gather", "normal", "low_latency", "elastic", "one_sided"};
}

/// Files that appear together, when all of them are written.
class Files {
 public:
  /// "": none.
  void add(const std::string& path, const std::string& text) {
    if (path.empty()) return;
    files_.push_back(std::make_unique<checkpoint::WholeFile>(path));
    files_.back()->write(std::as_bytes(std::span(text)));
  }
  void publish() {
    for (const auto& file : files_) file->publish();
  }

 private:
  std::vector<std::unique_ptr<checkpoint::WholeFile>> files_;
};

void write_files(const TraceArguments& arguments, const Inputs& inputs, const std::vector<TracedWay>& ways) {
  std::vector<trace::TracedCall> calls;
  auto json = nlohmann::ordered_json::array();
  nlohmann::ordered_json clocks = nlohmann::ordered_json::array();
  for (const TracedWay& way : ways) {
    calls.push_back(way.call);
    json.push_back(json_of(inputs, way));
    clocks.push_back(json_of_clocks(way));
  }
  const nlohmann::ordered_json report{{"heddle", version}, {"ways", json}};
  Files files;
  if (!arguments.out.empty())
    files.add(arguments.out, trace::chrome_trace(calls, arguments.ctas, {{"heddle", version}, {"clocks", clocks}}));
  if (!arguments.strips.empty()) files.add(arguments.strips, trace::strips(calls, arguments.ctas));
  files.add(arguments.json, report.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n");
  files.publish();
}

void run(const TraceArguments& arguments) {
  check(arguments);
  const Inputs inputs = load_inputs(arguments.layer);
  std::vector<LayerOptions> wanted;
  for (const std::string& typed : wanted_ways(arguments)) wanted.push_back(options_of_way(typed, arguments.layer, inputs));
  if (!arguments.layer.save_inputs.empty()) save_inputs(inputs, arguments.layer.save_inputs);
  std::vector<TracedWay> ways;
  for (const LayerOptions& options : wanted) ways.push_back(traced(inputs, options, arguments.warm_calls));
  // Figures 2 and 9 side by side: the fused layer first.
  std::stable_partition(ways.begin(), ways.end(), [](const TracedWay& way) { return way.options.way == Way::mega; });
  write_files(arguments, inputs, ways);
  fmt::print("{} tokens on {} ranks ({})\n", inputs.tokens(), inputs.ranks,
             inputs.gpus > 0 ? fmt::format("{} GPUs", inputs.gpus) : "threads");
  for (const std::string& note : inputs.notes) fmt::print("  {}\n", note);
  for (const TracedWay& way : ways) print_totals(way);
}

}  // namespace

void add_trace(CLI::App& app, int&) {
  auto arguments = std::make_shared<TraceArguments>();
  auto* command = app.add_subcommand("trace", "time stamps of one call: who did what, who waited for what, as a trace and strips");
  add_layer_arguments(*command, arguments->layer);
  command->add_option("--way", arguments->ways, "ways to trace, or all (default: mega,low_latency)")->delimiter(',');
  command->add_option("--out", arguments->out, "the trace, for Perfetto (ui.perfetto.dev) or chrome://tracing");
  command->add_option("--strips", arguments->strips, "an SVG: a strip a worker, fused above chain");
  command->add_option("--json", arguments->json, "the table's numbers as one JSON object");
  command->add_option("--ctas", arguments->ctas, "on GPUs: CTAs a rank that --out and --strips show; the table counts all")
      ->check(whole_number)
      ->capture_default_str();
  command->add_option("--warm", arguments->warm_calls, "calls before the traced one")->check(whole_number)->capture_default_str();
  command->callback([arguments] { run(*arguments); });
}

}  // namespace heddle::tool
