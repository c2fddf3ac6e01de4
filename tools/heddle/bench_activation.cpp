// The flags of heddle bench activation and the order of things; what is measured and printed is bench_activation_run's.
#include "bench_activation.hpp"

#include <fmt/format.h>

#include <chrono>

#include "bench.hpp"
#include "command.hpp"
#include "group/cuda_driver.hpp"
#include "heddle/error.hpp"
#include "json_file.hpp"
#include "words.hpp"

namespace heddle::tool {

namespace {

void add_what(CLI::App& command, ActivationArguments& a) {
  const char* what = "What";
  command.add_option("--tokens", a.tokens, "tokens a GPU, each with --topk rows here on average; 0: none of these sizes")
      ->delimiter(',')
      ->group(what);
  command.add_option("--rows", a.rows, "real rows by themselves; 0: none of these sizes")->delimiter(',')->group(what);
  command.add_option("--grid", a.grids, "padded, persistent, fixed")->delimiter(',')->group(what);
  command.add_option("--l2", a.l2, "warm: the same rows again; cold: rows that are not in the L2")->delimiter(',')->group(what);
  command.add_option("--empty-ctas", a.empty_ctas, "padded grids without rows, by CTAs; 0: none")->delimiter(',')->group(what);
  command.add_option("--experts", a.experts, "local experts")->group(what)->capture_default_str()->check(whole_number);
  command.add_option("--ranks", a.ranks, "GPUs of the group")->group(what)->capture_default_str()->check(whole_number);
  command.add_option("--topk", a.topk, "choices a token")->group(what)->capture_default_str()->check(whole_number);
  command.add_option("--cap", a.cap, "most tokens a GPU: blocks have ranks x cap rows, the padded grid topk times as many CTAs")
      ->group(what)
      ->capture_default_str()
      ->check(whole_number);
  command.add_option("--intermediate", a.intermediate, "D")->group(what)->capture_default_str()->check(whole_number);
  command.add_option("--format", a.format, "fp8 or bf16")->group(what)->capture_default_str();
  command.add_option("--group", a.group, "values a scale: 128 or 32")->group(what)->capture_default_str()->check(whole_number);
  command.add_option("--scale", a.scale, "ue8m0 or f32")->group(what)->capture_default_str();
  command.add_option("--order", a.order, "scales: row, column (f32) or packed (ue8m0)")->group(what)->capture_default_str();
  command.add_option("--clamp", a.clamp, "a number or none")->group(what)->capture_default_str();
  command.add_flag("--no-weights", a.no_weights, "without routing weights")->group(what);
  command.add_option("--seed", a.seed, "seed of everything drawn")->group(what)->capture_default_str()->check(seed_number);
}

void add_how(CLI::App& command, ActivationArguments& a) {
  const char* how = "How";
  command.add_option("--replays", a.replays, "samples")->group(how)->capture_default_str()->check(whole_number);
  command.add_option("--launches", a.launches, "launches a replay")->group(how)->capture_default_str()->check(whole_number);
  command.add_flag("--ahead", a.ahead, "launches may begin before the end of the one before")->group(how);
  command.add_option("--commit", a.commit, "what the JSON says was measured")->group(how);
  command.add_option("--json", a.json, "raw samples with their provenance")->group(how);
}

void bench_activation(const ActivationArguments& a) {
  check_arguments(a);
  int present = 0;
  if (cudaGetDeviceCount(&present) != cudaSuccess || present == 0)
    throw InputError("heddle bench activation needs a GPU; there is none here");
  Lanes lanes({0}, std::chrono::seconds(30));
  const cuda::DeviceScope scope(0);
  ActivationRun run(a, lanes);
  const auto save = [&](const std::string& failed) {
    if (a.json.empty()) return;
    nlohmann::ordered_json object = run.json();
    if (!failed.empty()) object["failed"] = failed;
    write_json(a.json, object);
  };
  try {
    run.all();
  } catch (const Error& error) {
    save(error.what());
    throw;
  }
  save("");
}

}  // namespace

void add_activation_flags(CLI::App& command, ActivationArguments& a) {
  add_what(command, a);
  add_how(command, a);
}

void add_bench_activation(CLI::App& bench) {
  auto a = std::make_shared<ActivationArguments>();
  auto* command = bench.add_subcommand("activation", "SwiGLU, clamp, weight and quantisation between the GEMMs, by grid");
  add_activation_flags(*command, *a);
  command->callback([a] { bench_activation(*a); });
}

}  // namespace heddle::tool
