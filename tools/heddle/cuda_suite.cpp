// heddle bench all on GPUs: the other benchmarks, called as they are.
#include <fmt/format.h>

#include "bench_activation.hpp"
#include "bench_experts_run.hpp"
#include "bench_machine.hpp"
#include "bench_mega_run.hpp"
#include "bench_run.hpp"
#include "cuda_job.hpp"
#include "group/cuda_driver.hpp"
#include "heddle/error.hpp"
#include "step.hpp"
#include "suite.hpp"
#include "suite_flags.hpp"

namespace heddle::tool {

namespace {

#ifdef HEDDLE_TRACE
constexpr bool takes_stamps = true;
#else
constexpr bool takes_stamps = false;
#endif

/// Kernels that take time stamps are slower: what is timed with them would be taken for something else.
void refuse_stamps() {
  if (takes_stamps)
    throw InputError("the kernels of this build take time stamps, which costs time; a build with the preset cuda measures this");
}

/// What a run has measured by `work`, also where that did not come to its end.
template <class Run, class Work>
Measured kept(const Run& run, const Work& work) {
  Measured measured;
  try {
    work();
  } catch (const InputError&) {
    throw;
  } catch (const Error& error) {
    measured.failed = error.what();
  }
  measured.result = run.json();
  if constexpr (requires { run.wrong(); }) measured.wrong = run.wrong() > 0;
  return measured;
}

Measured exchange(const std::string& typed, const std::string& commit) {
  refuse_stamps();
  BenchArguments a;
  read_flags(typed, a, add_exchange_flags);
  a.commit = commit;
  check_arguments(a);
  Lanes lanes(devices_for("all", a.ranks, a.gpus), std::chrono::milliseconds(a.deadline_ms));
  Run run(a, lanes);
  return kept(run, [&] { run.all([] {}); });
}

Measured mega(const std::string& typed, const std::string& commit) {
  refuse_stamps();
  MegaArguments a;
  read_flags(typed, a, add_mega_flags);
  a.commit = commit;
  check_arguments(a);
  Lanes lanes(devices_for("all", a.ranks, a.gpus), std::chrono::milliseconds(a.deadline_ms));
  MegaRun run(a, lanes);
  return kept(run, [&] { run_and_save(run, lanes, ""); });
}

Measured experts(const std::string& typed, const std::string& commit) {
  refuse_stamps();
  ExpertsArguments a;
  read_flags(typed, a, add_experts_flags);
  a.commit = commit;
  check_arguments(a);
  int ranks = 1, gpus = 1;
  Lanes lanes(devices_for("all", ranks, gpus), std::chrono::milliseconds(a.deadline_ms));
  ExpertsRun run(a, counts_of(a), lanes);
  return kept(run, [&] { run_and_save(run, lanes, ""); });
}

Measured activation(const std::string& typed, const std::string& commit) {
  refuse_stamps();
  ActivationArguments a;
  read_flags(typed, a, add_activation_flags);
  a.commit = commit;
  check_arguments(a);
  Lanes lanes({0}, std::chrono::seconds(30));
  const cuda::DeviceScope scope(0);
  ActivationRun run(a, lanes);
  return kept(run, [&] { run.all(); });
}

}  // namespace

std::map<std::string, Runner> gpu_runners() {
  std::map<std::string, Runner> runners = host_runners();  // copies, buffers, step and trace are of either engine
  const Runner step = runners.at("step");
  runners["step"] = [step](const std::string& typed, const std::string& commit) {
    refuse_stamps();
    return step(typed, commit);
  };
  runners["exchange"] = exchange;
  runners["mega"] = mega;
  runners["experts"] = experts;
  runners["activation"] = activation;
  return runners;
}

SuiteMachine gpu_machine(const std::optional<int>& gpus) {
  int ranks = 0, used = gpus.value_or(0);
  if (gpus && *gpus < 1) throw InputError(fmt::format("--gpus {}: at least 1 is needed", *gpus));
  gpus_present();  // while CUDA is untouched here: jobs ask again
  const std::vector<int> devices = devices_for("all", ranks, used);
  const Lanes lanes(devices, std::chrono::seconds(30));
  nlohmann::ordered_json machine{{"engine", "cuda"}};
  machine.update(machine_of(lanes));
  return {machine, used};
}

}  // namespace heddle::tool
