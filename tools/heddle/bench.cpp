// heddle bench: the benchmarks that are there in this build.
#include "bench.hpp"

#include <CLI/CLI.hpp>
#include <memory>
#include <string>

#include "balance.hpp"
#include "gpu_job.hpp"
#include "json_file.hpp"
#include "recovery.hpp"
#include "step.hpp"

namespace heddle::tool {

namespace {

void add_bench_step(CLI::App& bench, int& status) {
  auto a = std::make_shared<StepArguments>();
  auto* command = bench.add_subcommand("step", "layers one after the other, with gaps for attention: what a step takes, by way");
  add_step_flags(*command, *a);
  command->callback([a, &status] {
    const SaveJson save = saved_at(a->json);
    save(measure_step(*a, save, status));
  });
}

void add_bench_balance(CLI::App& bench, int& status) {
  auto a = std::make_shared<BalanceArguments>();
  auto* command = bench.add_subcommand(
      "balance",
      "a layer whose placement follows uneven load, on GPUs: calls before, during and after a change, and what it takes");
  add_balance_flags(*command, *a);
  command->callback([a, &status] {
    const SaveJson save = saved_at(a->json);
    save(measure_balance(*a, save, status));
  });
}

void add_bench_recovery(CLI::App& bench) {
  auto a = std::make_shared<RecoveryArguments>();
  auto* command = bench.add_subcommand("recovery", "ranks are killed and replaced: what an interruption takes, part by part");
  add_recovery_flags(*command, *a);
  command->callback([a] { saved_at(a->json)(measure_recovery(*a)); });
}

}  // namespace

void add_bench(CLI::App& app, int& status) {
  auto* command = app.add_subcommand("bench", "measure on this machine: one part after the other, or all that its report shows");
  command->require_subcommand(1);
  add_bench_all(*command);
  add_bench_step(*command, status);
  add_bench_balance(*command, status);
  add_bench_recovery(*command);
#ifdef HEDDLE_CUDA
  add_bench_exchange(*command);
  add_bench_activation(*command);
  add_bench_experts(*command, status);
  add_bench_mega(*command, status);
#else
  for (const std::string name : {"exchange", "activation", "experts", "mega"}) {
    command->add_subcommand(name, "in builds with CUDA")->allow_extras()->callback([name] {
      refuse_without_cuda("heddle bench " + name);
    });
  }
#endif
}

}  // namespace heddle::tool
