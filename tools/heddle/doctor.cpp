// heddle doctor: is this machine fit for Heddle, and if not, what is to be done?
#include <fmt/format.h>

#include <algorithm>
#include <memory>

#include "command.hpp"
#include "doctor/findings.hpp"
#include "doctor/probes.hpp"
#include "doctor_json.hpp"
#include "doctor_tests.hpp"
#include "heddle/version.hpp"
#include "json_file.hpp"

#ifdef HEDDLE_CUDA
#include <cuda_runtime_api.h>
#endif

namespace heddle::tool {

namespace {

using namespace doctor;

BuildFacts this_build() {
#ifdef HEDDLE_CUDA
  return {true, CUDART_VERSION};
#else
  return {};
#endif
}

/// Tests on GPUs come first: once the driver was used in this process, it cannot fork any that use it.
MachineFacts look(bool test) {
  MachineFacts facts;
  facts.build = this_build();
  facts.environment = probe_environment();
  facts.host = probe_host();
  if (test) {
    const std::vector<TestFacts> on_gpus = test_gpus();
    facts.tests = test_host();
    facts.tests.insert(facts.tests.end(), on_gpus.begin(), on_gpus.end());
  } else {
    facts.tests.push_back({"all", TestFacts::State::skipped, 0, "--no-test was given"});
  }
  probe_gpus(facts);
  const bool tried = std::ranges::any_of(facts.tests, [](const TestFacts& one) { return one.name.starts_with("gpu"); });
  if (test && facts.build.cuda && !facts.gpus.empty() && !tried)
    facts.tests.push_back({"gpu: layer", TestFacts::State::failed, 0, "the CUDA runtime shows none of the driver's GPUs"});
  return facts;
}

void print(const std::vector<Finding>& findings) {
  std::size_t widest = 0;
  for (const Finding& finding : findings) widest = std::max(widest, finding.subject.size());
  for (const Finding& finding : findings) {
    fmt::print("{:<8} {:<{}}  {}{}{}\n", name(finding.severity), finding.subject, widest, finding.what,
               finding.advice.empty() ? "" : "; ", finding.advice);
  }
}

void doctor_command(bool test, const std::string& json, int& status) {
  const MachineFacts facts = look(test);
  const std::vector<Finding> findings = judge(facts);
  if (!json.empty()) write_json(json, doctor_json(facts, findings));
  print(findings);
  const auto failed = std::ranges::count(findings, Severity::failed, &Finding::severity);
  if (failed == 0) {
    fmt::print("\nfit for {}\n", engines_of(facts));
  } else {
    fmt::print("\n{} of {} findings failed\n", failed, findings.size());
  }
  status = is_fit(findings) ? 0 : 1;
}

}  // namespace

void add_doctor(CLI::App& app, int& status) {
  struct Arguments {
    bool no_test = false;
    std::string json;
  };
  const auto arguments = std::make_shared<Arguments>();
  auto* command = app.add_subcommand("doctor", "look at this machine: what is wrong with it, and what to do");
  command->add_flag("--no-test", arguments->no_test, "only look; leave out the tests of heap, words and a small layer");
  command->add_option("--json", arguments->json, "findings and facts as one JSON object");
  command->callback([arguments, &status] { doctor_command(!arguments->no_test, arguments->json, status); });
}

}  // namespace heddle::tool
