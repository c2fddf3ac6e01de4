// heddle bench experts: the grouped products of the experts on one GPU, beside cuBLASLt and CUTLASS. The flags and the order of
// things; what is measured and printed is bench_experts_run's.
#include "bench_experts.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>

#include "bench.hpp"
#include "bench_checks.hpp"
#include "bench_experts_run.hpp"
#include "bench_machine.hpp"
#include "command.hpp"
#include "heddle/error.hpp"
#include "heddle/routing.hpp"
#include "words.hpp"

namespace heddle::tool {

namespace {

/// Rows of the first experts of a recording.
RowCounts recorded(const ExpertsArguments& a, const Recording& recording, int tokens) {
  Routing routing = recording.take(a.trace_layer, a.trace_step, tokens);
  if (a.trace_expand > 1) routing = expand(routing, a.trace_expand);
  RowCounts counts;
  counts.name = fmt::format("rec {}", tokens);
  counts.rows.assign(static_cast<std::size_t>(a.experts), 0);
  for (const std::int32_t id : routing.ids) {
    if (id >= 0 && id < a.experts) ++counts.rows[static_cast<std::size_t>(id)];
  }
  return counts;
}

void add_what(CLI::App& command, ExpertsArguments& a) {
  const char* what = "What";
  command.add_option("--shape", a.shapes, "v4_flash (4096x2048), v3 (7168x2048), or HIDDENxINTERMEDIATE")
      ->delimiter(',')
      ->group(what);
  command.add_option("--weights", a.weights, "fp8_block, mxfp4, bf16, nvfp4, mxfp8")->delimiter(',')->group(what);
  command
      .add_option("--product", a.products,
                  "gemm1 (gate and up stored as bf16), fused (activated and quantised in the epilogue), gemm2")
      ->delimiter(',')
      ->group(what);
  command.add_option("--blocks", a.blocks, "row blocks: small, medium, large, or auto, what the rule takes")
      ->delimiter(',')
      ->group(what);
  command.add_option("--peer", a.peers, "cublaslt, cutlass, or none")->delimiter(',')->group(what);
  command.add_option("--experts", a.experts, "local experts")->group(what)->capture_default_str();
  auto* rows = command.add_option("--rows", a.rows, "rows an expert")->delimiter(',')->group(what);
  auto* touched = command.add_option("--touched", a.touched, "experts that have rows, and what one more costs (default: all)")
                      ->delimiter(',')
                      ->group(what);
  auto* trace =
      command
          .add_option("--trace", a.trace,
                      "rows by recorded routing (.npy) instead: those of its first experts, as if they were the local ones")
          ->group(what)
          ->excludes(rows)
          ->excludes(touched);
  command.add_option("--tokens", a.tokens, "tokens of the recording, over all ranks")->delimiter(',')->group(what)->needs(trace);
  command.add_option("--trace-layer", a.trace_layer, "layer of the recording")->group(what)->needs(trace)->check(whole_number);
  command.add_option("--trace-step", a.trace_step, "first step of the recording")->group(what)->needs(trace)->check(whole_number);
  command.add_option("--trace-expand", a.trace_expand, "spread each recorded expert over this many")
      ->group(what)
      ->needs(trace)
      ->check(whole_number);
  command.add_option("--seed", a.seed, "seed of everything drawn")->group(what)->capture_default_str()->check(seed_number);
}

void add_how(CLI::App& command, ExpertsArguments& a) {
  const char* how = "How";
  command.add_flag("--gather", a.gather, "fetch token rows one by one, as a list of them would be, not in boxes")->group(how);
  command.add_option("--ctas", a.ctas, "CTAs of the products, e.g. 132,120,100,64 (default: one a SM)")->delimiter(',')->group(how);
  command
      .add_option("--calls", a.calls, "calls a replay, at least; fewer where they take more than 3 ms, as many as the layers need")
      ->group(how)
      ->capture_default_str();
  command.add_option("--replays", a.replays, "samples")->group(how)->capture_default_str();
  command.add_option("--deadline-ms", a.deadline_ms, "longest wait for the GPU")->group(how)->capture_default_str();
  command.add_option("--commit", a.commit, "what the JSON says was measured")->group(how);
  command.add_option("--json", a.json, "raw samples with their provenance")->group(how);
}

void bench_experts(const ExpertsArguments& a, int& status) {
  check_arguments(a);
  const std::vector<RowCounts> counts = counts_of(a);
  int ranks = 1, gpus = 1;
  Lanes lanes(devices_for("experts", ranks, gpus), std::chrono::milliseconds(a.deadline_ms));
  ExpertsRun run(a, counts, lanes);
  run_and_save(run, lanes, a.json);
  if (run.wrong() > 0) status = 1;
}

}  // namespace

ExpertsShape shape_of(const std::string& word) {
  if (word == "v4_flash") return {word, 4096, 2048};
  if (word == "v3") return {word, 7168, 2048};
  ExpertsShape shape{word, 0, 0};
  char end = 0;
  if (std::sscanf(word.c_str(), "%5dx%5d%c", &shape.hidden, &shape.intermediate, &end) != 2)
    throw InputError(
        fmt::format("--shape does not know '{}'; it takes v4_flash, v3, or HIDDENxINTERMEDIATE such as 4096x2048", word));
  if (shape.hidden < 128 || shape.intermediate < 128 || shape.hidden % 128 != 0 || shape.intermediate % 128 != 0)
    throw InputError(fmt::format("--shape {}: both sizes are multiples of 128 here", word));
  return shape;
}

std::vector<RowCounts> counts_of(const ExpertsArguments& a) {
  std::vector<RowCounts> all;
  if (!a.trace.empty()) {
    const Recording recording = Recording::open(a.trace);
    for (const int tokens : a.tokens) all.push_back(recorded(a, recording, tokens));
    return all;
  }
  const std::vector<int> touched = a.touched.empty() ? std::vector<int>{a.experts} : a.touched;
  for (const int rows : a.rows) {
    for (const int experts : touched) {
      RowCounts counts;
      counts.name = experts == a.experts ? fmt::format("{}", rows) : fmt::format("{} in {}", rows, experts);
      counts.rows.assign(static_cast<std::size_t>(a.experts), 0);
      std::fill_n(counts.rows.begin(), experts, rows);
      all.push_back(counts);
    }
  }
  return all;
}

void check_arguments(const ExpertsArguments& a) {
  for (const std::string& shape : a.shapes) shape_of(shape);
  for (const std::string& kind : a.weights) value_of(kinds, "--weights", kind);
  one_of("--product", a.products, {"gemm1", "fused", "gemm2"});
  one_of("--blocks", a.blocks, {"small", "medium", "large", "auto"});
  one_of("--peer", a.peers, {"cublaslt", "cutlass", "none"});
  at_least_one("--rows", a.rows);
  at_least_one("--tokens", a.tokens);
  if (!a.touched.empty()) at_least_one("--touched", a.touched);
  if (!a.ctas.empty()) at_least_one("--ctas", a.ctas);
  at_least_one("--experts", {a.experts});
  at_least_one("--calls", {a.calls});
  at_least_one("--replays", {a.replays});
  at_least_one("--deadline-ms", {a.deadline_ms});
  at_least_one("--trace-expand", {a.trace_expand});
  if (a.experts > sm90::most_experts)
    throw InputError(fmt::format("--experts {}: the engine takes at most {}", a.experts, sm90::most_experts));
  for (const int touched : a.touched) {
    if (touched > a.experts) throw InputError(fmt::format("--touched {}: there are {} experts (--experts)", touched, a.experts));
  }
  const auto most = *std::max_element(a.rows.begin(), a.rows.end());
  if (most > (1 << 20) / a.experts)
    throw InputError(fmt::format("--rows {}: {} experts take at most {} rows each here", most, a.experts, (1 << 20) / a.experts));
}

int average_rows(const RowCounts& counts) {
  const auto experts = static_cast<int>(counts.rows.size());
  return (counts.total() + experts - 1) / experts;
}

void add_experts_flags(CLI::App& command, ExpertsArguments& a) {
  add_what(command, a);
  add_how(command, a);
}

void add_bench_experts(CLI::App& bench, int& status) {
  auto a = std::make_shared<ExpertsArguments>();
  auto* command = bench.add_subcommand("experts", "the grouped products of the experts, beside cuBLASLt and CUTLASS, on one GPU");
  add_experts_flags(*command, *a);
  command->callback([a, &status] { bench_experts(*a, status); });
}

}  // namespace heddle::tool
