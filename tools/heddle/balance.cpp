// The flags of heddle bench balance.
#include "balance.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "command.hpp"
#include "drawn_layer.hpp"
#include "gpu_job.hpp"
#include "heddle/error.hpp"
#include "heddle/plan.hpp"

namespace heddle::tool {

namespace {

constexpr int most_tokens = 8192, most_calls = 1000;

/// Every rank holds as many.
void check_copies(const BalanceArguments& a) {
  const int experts = a.layer.experts.value_or(find_preset(a.layer.preset).shape.experts);
  const int extra = extra_of(a), ranks = *a.layer.ranks;
  if ((experts + extra) % ranks == 0) return;
  throw InputError(fmt::format("--extra {}: {} experts and {} copies do not divide over {} ranks, which hold as many each", extra,
                               experts, extra, ranks));
}

void between(const char* flag, int value, int least, int most, const char* unit) {
  if (value < least || value > most) throw InputError(fmt::format("{} {}: {} to {} {}", flag, value, least, most, unit));
}

}  // namespace

void add_balance_flags(CLI::App& command, BalanceArguments& a) {
  add_layer_arguments(command, a.layer);
  const char* balance = "Balance";
  command.add_option("--sizes", a.sizes, "tokens a rank (default: 64)")->delimiter(',')->group(balance);
  command.add_option("--way", a.ways, "ways to measure (default: low_latency)")->delimiter(',')->group(balance);
  command.add_option("--extra", a.extra, "copies beside one of each expert (default: four a rank)")
      ->group(balance)
      ->check(whole_number);
  command
      .add_option("--changes", a.changes,
                  "loads one after the other: --routing (default: zipf:1) with other experts popular each time, or the next layer "
                  "of the recording")
      ->group(balance)
      ->capture_default_str()
      ->check(whole_number);
  command.add_option("--calls", a.calls, "calls between looks at the load, and those that are measured behind a change, at least")
      ->group(balance)
      ->capture_default_str()
      ->check(whole_number);
  command.add_option("--copy-mb", a.copy_mb, "MiB of weights that a GPU sends between two calls at most")
      ->group(balance)
      ->capture_default_str()
      ->check(whole_number);
  command.add_option("--calls-ahead", a.calls_ahead, "calls that the host queues ahead")
      ->group(balance)
      ->capture_default_str()
      ->check(whole_number);
  command
      .add_option("--staged", a.staged,
                  "experts that can come to a rank in one change, for which there is memory (default: as many as it holds)")
      ->group(balance)
      ->check(whole_number);
  command.add_option("--commit", a.commit, "what the JSON says was measured")->group(balance);
  command.add_option("--json", a.json, "raw samples with their provenance")->group(balance);
}

void check_arguments(const BalanceArguments& a) {
  if (!a.layer.batch.empty() || a.layer.tokens) {
    throw InputError(
        "heddle bench balance draws batches of its own: give --sizes, the tokens of a rank, instead of --batch or --tokens");
  }
  if (a.layer.engine != "cuda") {
    throw InputError(
        "heddle bench balance measures on GPUs: give --engine cuda; on the host engine `heddle replay --measure` runs placements, "
        "and even rows save nothing where ranks share cores");
  }
  if (!a.layer.ranks) throw InputError("give --ranks N");
  if (*a.layer.ranks < 2) throw InputError(fmt::format("--ranks {}: one rank has all rows, whatever the load", *a.layer.ranks));
  if (a.sizes.empty() || a.ways.empty()) throw InputError("--sizes and --way: at least one of each");
  for (const int size : a.sizes) between("--sizes", size, 1, most_tokens, "tokens a rank");
  for (const std::string& way : a.ways) real_way(way, "--way");
  between("--extra", extra_of(a), 1, 1024, "copies; without any there is nothing to spread");
  between("--changes", a.changes, 1, 100, "changes of the load");
  between("--calls-ahead", a.calls_ahead, 0, 64, "calls ahead");
  // No look, which is answered 2 * calls_ahead + 1 calls later, is answered before the calls that are measured, or behind the next.
  between("--calls", a.calls, 2 * a.calls_ahead + 2 * warm_calls, most_calls, "calls between looks");
  between("--copy-mb", a.copy_mb, 1, 1 << 16, "MiB a call");
  if (a.staged) between("--staged", *a.staged, 1, 1024, "experts");
  check_usual_ways(a.layer, "heddle bench balance");
  check_drawn_layer(a.layer, "heddle bench balance");
  check_copies(a);
}

int extra_of(const BalanceArguments& a) { return a.extra.value_or(4 * a.layer.ranks.value_or(1)); }

#ifndef HEDDLE_CUDA
nlohmann::ordered_json measure_balance(const BalanceArguments& a, const SaveJson&, int&) {
  check_arguments(a);
  refuse_without_cuda("heddle bench balance");
}
#endif

}  // namespace heddle::tool
