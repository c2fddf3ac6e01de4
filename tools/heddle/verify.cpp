// heddle verify: every way on the same inputs against the float64 reference, and against each other.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <optional>

#include "against_reference.hpp"
#include "command.hpp"
#include "heddle/error.hpp"
#include "inputs.hpp"
#include "job.hpp"
#include "json_file.hpp"
#include "layer/options.hpp"
#include "mega/kernel_limits.hpp"
#include "reference/reference.hpp"
#include "report.hpp"
#include "words.hpp"

namespace heddle::tool {

namespace {

struct VerifyArguments {
  LayerArguments layer;
  std::vector<std::string> ways;
  std::string json;
};

struct Check {
  LayerOptions options;
  JobResult result;
  Comparison error;
  std::size_t family_bits = 0;  ///< values that differ from the first way with the same order of sums
  bool passed = false;
};

/// Does the same call give the same bits again? Results that are added where they arrive come in any order.
bool has_fixed_bits(const LayerOptions& options) { return options.combine == Combine::slots; }

/// Does the fused layer compute this, so that it is checked without being named? See check_mega.
bool is_fusable(const Inputs& inputs, const LayerOptions& mega) {
  if (mega.combine == Combine::add) return true;  // as good as named
  if (mega.weight_at != WeightAt::activation) return false;
  if (inputs.gpus == 0) return true;
  if (inputs.host_experts) return false;
  const LayerWeights common = LayerWeights::common(inputs.source, default_placement(inputs.source.shape, inputs.ranks, mega));
  return refused_by_kernel(exchange_options(common, mega), inputs.source.kind).empty();
}

std::vector<LayerOptions> wanted_ways(const VerifyArguments& arguments, const Inputs& inputs) {
  std::vector<LayerOptions> wanted;
  const auto add = [&](Way way, Reduce reduce) {
    LayerOptions options = inputs.options;
    options.way = way;
    options.reduce = reduce;
    if (way != Way::mega) options.combine = Combine::slots;
    if (!allows_layout(way, layout_of(way, options.runner))) return;
    if (options.expert_slices && way != Way::gather) return;
    if (inputs.nodes > 1 && way != Way::elastic) return;
    if (inputs.nodes > 1 && inputs.gpus > 0 && reduce == Reduce::home) return;  // GPUs of several nodes return a row a rank
    if (way == Way::mega && !is_fusable(inputs, options)) return;
    wanted.push_back(options);
  };
  if (arguments.ways.empty()) {
    for (const Way way : {Way::gather, Way::normal, Way::low_latency}) add(way, Reduce::rank);
    add(Way::elastic, Reduce::rank);
    add(Way::elastic, Reduce::home);
    add(Way::one_sided, Reduce::rank);
    add(Way::mega, Reduce::rank);
    if (wanted.empty()) throw InputError("no way hands over the layout of this --runner");
    return wanted;
  }
  for (const std::string& typed : arguments.ways) {
    wanted.push_back(options_of_way(typed, arguments.layer, inputs));
    if (wanted.back().way != Way::elastic && wanted.back().way != Way::automatic) wanted.back().reduce = Reduce::rank;
  }
  const auto is_mega = [](const LayerOptions& options) { return options.way == Way::mega; };
  if (std::any_of(wanted.begin(), wanted.end(), is_mega)) {
    for (LayerOptions& options : wanted) options.combine = is_mega(options) ? options.combine : Combine::slots;
  }
  return wanted;
}

/// References depend on the order of sums and on the wires only; ways that share them share one.
class References {
 public:
  explicit References(const Inputs& inputs) : inputs_(inputs) {}
  const std::vector<bf16>& of(const LayerOptions& options, const ExchangeOptions& exchange) {
    const Key key{is_slots(options), exchange.wire, options.combine_wire};
    const auto found = known_.find(key);
    if (found != known_.end()) return found->second;
    return known_.emplace(key, reference_of(inputs_, options, exchange)).first->second;
  }

 private:
  using Key = std::tuple<bool, Wire, Wire>;
  const Inputs& inputs_;
  std::map<Key, std::vector<bf16>> known_;
};

std::size_t different_from_family(const std::vector<Check>& checks, const Check& check) {
  if (!has_fixed_bits(check.options)) return 0;
  for (const Check& other : checks) {
    const bool same = has_fixed_bits(other.options) && is_slots(other.result.options) == is_slots(check.result.options) &&
                      other.result.exchange.wire == check.result.exchange.wire &&
                      other.options.combine_wire == check.options.combine_wire;
    if (same) return compare(check.result.output, other.result.output).different_bits;
  }
  return 0;
}

std::string bytes_text(std::uint64_t bytes) {
  return bytes < 100000 ? fmt::format("{} B", bytes) : fmt::format("{:.1f} MB", static_cast<double>(bytes) / 1e6);
}

void print_head(const Inputs& inputs, const LayerOptions& first) {
  const LayerShape& shape = inputs.source.shape;
  fmt::print("{} experts of {} x {} ({}), top-{}, shared expert: {}; {} tokens on {} ranks ({})\n", shape.experts, shape.hidden,
             shape.intermediate, word_of(kinds, inputs.source.kind), shape.topk,
             inputs.source.shared ? word_of(shared_modes, first.shared) : "none", inputs.tokens(), inputs.ranks,
             inputs.gpus > 0    ? fmt::format("{} GPUs", inputs.gpus)
             : inputs.processes ? "processes"
                                : "threads");
  for (const std::string& note : inputs.notes) fmt::print("  {}\n", note);
  fmt::print("\n{:<24} {:>11} {:>11} {:>11} {:>10} {:<10} {:>9} {:<9} {:>8}\n", "way", "copies/token", "dispatch", "combine",
             "host waits", "arrives", "error", "bits", "time");
}

std::string bits_text(const Check& check) {
  if (!has_fixed_bits(check.options)) return "any order";
  return check.family_bits == 0 ? "equal" : fmt::format("{} off", check.family_bits);
}

void print_line(const Check& check) {
  const PhaseReport out = check.result.total(&LayerReport::dispatch);
  const PhaseReport back = check.result.total(&LayerReport::combine);
  fmt::print("{:<24} {:>11.2f}  {:>11} {:>11} {:>10} {:<10} {:>9.1e} {:<9} {:>6.0f} ms{}\n", title_of(check.options, check.result),
             check.result.copies, bytes_text(out.remote_bytes + out.local_bytes), bytes_text(back.remote_bytes + back.local_bytes),
             check.result.reports.front().host_waited ? "yes" : "no", name(check.result.exchange.arrived),
             check.error.relative_error, bits_text(check), check.result.seconds * 1e3, check.passed ? "" : "  MISSED");
  std::fflush(stdout);
}

void verify(const VerifyArguments& arguments, int& status) {
  const Inputs inputs = load_inputs(arguments.layer);
  if (!arguments.layer.save_inputs.empty()) save_inputs(inputs, arguments.layer.save_inputs);
  const std::vector<LayerOptions> wanted = wanted_ways(arguments, inputs);
  print_head(inputs, wanted.front());
  References references(inputs);
  std::vector<Check> checks;
  auto json = nlohmann::ordered_json::array();
  int missed = 0;
  for (const LayerOptions& options : wanted) {
    Check check{options, run_job(inputs, options), {}, 0, false};
    const double bound = bound_of(inputs, options);
    check.error = compare(check.result.output, references.of(check.result.options, check.result.exchange));
    check.family_bits = different_from_family(checks, check);
    check.passed = check.error.relative_error <= bound && check.family_bits == 0;
    missed += check.passed ? 0 : 1;
    print_line(check);
    auto entry = report_of(inputs, options, check.result);
    entry["relative_error"] = check.error.relative_error;
    entry["bound"] = bound;
    entry["different_bits"] = check.family_bits;
    entry["passed"] = check.passed;
    json.push_back(std::move(entry));
    checks.push_back(std::move(check));
  }
  const double bound = bound_of(inputs, wanted.front());
  fmt::print(
      "\nerror: relative to the float64 reference, at most {:.1e}; bits: against the first way that sums in the same order\n",
      bound);
  fmt::print("{} of {} ways passed\n", wanted.size() - static_cast<std::size_t>(missed), wanted.size());
  if (!arguments.json.empty()) write_json(arguments.json, {{"ways", json}, {"passed", missed == 0}});
  status = missed == 0 ? 0 : 1;
}

}  // namespace

void add_verify(CLI::App& app, int& status) {
  auto arguments = std::make_shared<VerifyArguments>();
  auto* command = app.add_subcommand("verify", "check every way against the float64 reference and against each other");
  add_layer_arguments(*command, arguments->layer);
  command->add_option("--way", arguments->ways, "ways to check (default: all)")->delimiter(',');
  command->add_option("--json", arguments->json, "the checks as one JSON object");
  command->callback([arguments, &status] { verify(*arguments, status); });
}

}  // namespace heddle::tool
