// heddle bench exchange: dispatch + combine of every way on the GPUs of this machine, one rank a GPU or
// virtual ranks, as replays of a CUDA graph (exchange-ways article, section 8). The flags and the order of things;
// what is measured and printed is bench_run's.
#include <fmt/format.h>

#include <CLI/CLI.hpp>

#include "bench.hpp"
#include "bench_machine.hpp"
#include "bench_run.hpp"
#include "heddle/error.hpp"
#include "json_file.hpp"
#include "words.hpp"

namespace heddle::tool {

namespace {

void add_what(CLI::App& command, BenchArguments& a) {
  const char* what = "What";
  command
      .add_option("--way", a.ways,
                  "gather, normal, low_latency, elastic, one_sided, elastic_sync (its host waits for counts), nccl (by itself), "
                  "gather_nccl (gather by NCCL)")
      ->delimiter(',')
      ->group(what);
  command.add_option("--wire", a.wires, "wires of the dispatch: bf16, fp8, nvfp4")->delimiter(',')->group(what);
  command.add_option("--combine-wire", a.combine_wires, "wires of the combine")->delimiter(',')->group(what);
  command.add_option("--tokens", a.tokens, "tokens a rank, 1 to 8192")->delimiter(',')->group(what);
  command.add_option("--hidden", a.hidden, "hidden sizes")->delimiter(',')->group(what);
  command.add_option("--experts", a.experts, "experts over all ranks")->group(what)->capture_default_str();
  command.add_option("--topk", a.topk, "choices a token (a recording brings its own)")->group(what)->capture_default_str();
  command.add_option("--routing", a.routing, "uniform, zipf:EXPONENT or hot:RANK")->group(what)->capture_default_str();
  auto* trace =
      command.add_option("--trace", a.trace, "recorded routing (.npy), its tokens dealt to the ranks in turn")->group(what);
  command.add_option("--trace-layer", a.trace_layer, "layer of the recording")->group(what)->needs(trace);
  command.add_option("--trace-step", a.trace_step, "first step of the recording")->group(what)->needs(trace);
  command.add_option("--trace-expand", a.trace_expand, "spread each recorded expert over this many")->group(what)->needs(trace);
  command.add_option("--seed", a.seed, "seed of everything drawn")->group(what)->capture_default_str();
}

void add_how(CLI::App& command, BenchArguments& a) {
  const char* how = "How";
  command.add_option("--ranks", a.ranks, "ranks (default: one a GPU); more than GPUs: virtual ranks")->group(how);
  command.add_option("--gpus", a.gpus, "GPUs (default: all)")->group(how);
  command.add_option("--sms", a.sms, "CTAs a GPU (default: by the rule)")->group(how);
  command
      .add_option(
          "--bulk", a.bulk,
          "least bytes of a bf16 row, or of a part of one, that goes by bulk copies (0: none); several are measured in turn")
      ->delimiter(',')
      ->group(how)
      ->capture_default_str();
  command
      .add_option(
          "--tagged", a.tagged,
          "most tokens of gather in bf16 whose rows travel with the flag beside the data (0: none); several are measured in turn")
      ->delimiter(',')
      ->group(how)
      ->capture_default_str();
  command
      .add_option("--counters", a.counters,
                  "off, on: are calls counted (DeviceExchangeOptions::counters)? off,on: both in turn, and what counting costs")
      ->delimiter(',')
      ->group(how)
      ->capture_default_str();
  command.add_option("--replays", a.replays, "samples")->group(how)->capture_default_str()->check(CLI::PositiveNumber);
  command.add_option("--round-trips", a.round_trips, "round trips a replay")
      ->group(how)
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  command.add_option("--deadline-ms", a.deadline_ms, "longest wait for another rank")
      ->group(how)
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  command.add_option("--commit", a.commit, "what the JSON says was measured")->group(how);
  command.add_option("--json", a.json, "raw samples with their provenance")->group(how);
}

void add_studies(CLI::App& command, BenchArguments& a) {
  const char* studies = "Instead of round trips";
  command.add_flag("--layout-cost", a.layout_cost, "what is left to do when rows have arrived, and the price of each layout")
      ->group(studies);
  command.add_option("--sms-sweep", a.sweep, "round trips by CTAs a GPU, against the rule, e.g. 4,8,16,32,64,132")
      ->delimiter(',')
      ->group(studies);
  auto* overlap =
      command.add_option("--overlap", a.overlap, "halves of low_latency around other work of so many microseconds, e.g. 10,50")
          ->delimiter(',')
          ->group(studies);
  command.add_option("--overlap-sms", a.overlap_sms, "CTAs that the halves get there")
      ->delimiter(',')
      ->group(studies)
      ->needs(overlap)
      ->capture_default_str();
  command.add_option("--work-sms", a.work_sms, "CTAs of the other work (default: the SMs that the halves leave)")
      ->group(studies)
      ->needs(overlap);
}

void bench_exchange(const BenchArguments& arguments) {
  BenchArguments a = arguments;
  check_arguments(a);
  Lanes lanes(devices_for("exchange", a.ranks, a.gpus), std::chrono::milliseconds(a.deadline_ms));
  Run run(a, lanes);
  const auto save = [&](const std::string& failed) {
    if (a.json.empty()) return;
    Json object = run.json();
    if (!failed.empty()) object["failed"] = failed;
    write_json(a.json, object);
  };
  try {
    run.all([&] { save(""); });
  } catch (const Error& error) {
    save(error.what());
    throw;
  }
  save("");
}

}  // namespace

void check_arguments(const BenchArguments& a) {
  const auto positive = [](const char* option, const std::vector<int>& values) {
    if (values.empty()) throw InputError(fmt::format("{}: give at least one number", option));
    for (const int value : values) {
      if (value < 1) throw InputError(fmt::format("{} {}: at least 1 is needed", option, value));
    }
  };
  positive("--tokens", a.tokens);
  positive("--hidden", a.hidden);
  for (const int bytes : a.bulk) {
    if (bytes < 0) throw InputError(fmt::format("--bulk {}: 0 for no bulk copies, or the least bytes of a row", bytes));
  }
  for (const int tokens : a.tagged) {
    if (tokens < 0) throw InputError(fmt::format("--tagged {}: 0 for no tagged rows, or the most tokens that travel so", tokens));
  }
  for (const std::string& word : a.counters) value_of(off_on, "--counters", word);
  if (a.counters.empty()) throw InputError("--counters: give off, on or both");
  if (!a.sweep.empty()) positive("--sms-sweep", a.sweep);
  if (!a.overlap.empty()) positive("--overlap", a.overlap);
  positive("--overlap-sms", a.overlap_sms);
  for (const std::string& way : a.ways) {
    if (way != "nccl" && way != "gather_nccl" && way != "elastic_sync" && own_ways.count(way) == 0)
      throw InputError(fmt::format("--way does not know '{}'; it takes {}, elastic_sync, nccl, gather_nccl", way, keys(own_ways)));
  }
  for (const std::string& wire : a.wires) value_of(wires, "--wire", wire);
  for (const std::string& wire : a.combine_wires) value_of(wires, "--combine-wire", wire);
  if (a.ranks < 0 || a.gpus < 0 || a.sms < 0 || a.experts < 1 || a.topk < 1)
    throw InputError("--ranks, --gpus and --sms cannot be negative, --experts and --topk are at least 1");
}

void add_exchange_flags(CLI::App& command, BenchArguments& a) {
  add_what(command, a);
  add_how(command, a);
  add_studies(command, a);
}

void add_bench_exchange(CLI::App& bench) {
  auto a = std::make_shared<BenchArguments>();
  auto* exchange = bench.add_subcommand("exchange", "dispatch + combine of the ways and of NCCL, as CUDA graph replays");
  add_exchange_flags(*exchange, *a);
  exchange->callback([a] { bench_exchange(*a); });
}

}  // namespace heddle::tool
