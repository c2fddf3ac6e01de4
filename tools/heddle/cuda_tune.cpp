// heddle tune --engine cuda: a run of `heddle bench mega`, whose medians become the table.
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "bench_machine.hpp"
#include "bench_mega.hpp"
#include "bench_mega_run.hpp"
#include "heddle/error.hpp"
#include "tune.hpp"

namespace heddle::tool {

namespace {

MegaArguments bench_arguments(const TuneArguments& a) {
  MegaArguments bench = mega_arguments(a.layer, "heddle tune");
  bench.replays = a.calls;
  bench.tokens = a.sizes.empty() ? std::vector{1, 8, 64, 128, 512, 4096} : a.sizes;
  if (a.ways.empty()) return bench;
  bench.ways.clear();
  for (const std::string& way : a.ways) {
    if (way != "mega") bench.ways.push_back(way);  // it is always measured
  }
  if (bench.ways.empty()) bench.ways = {"none"};
  return bench;
}

}  // namespace

std::vector<TuningEntry> tune_on_gpus(const TuneArguments& a) {
  MegaArguments bench = bench_arguments(a);
  check_arguments(bench);
  Lanes lanes(devices_for("mega", bench.ranks, bench.gpus), std::chrono::milliseconds(bench.deadline_ms));
  MegaRun run(bench, lanes);
  run_and_save(run, lanes, "");
  if (run.wrong() > 0) throw Error(ErrorKind::check, "heddle tune: some results were wrong, see above; nothing is written");
  return entries_of_bench(run.json(), "this run");
}

}  // namespace heddle::tool
