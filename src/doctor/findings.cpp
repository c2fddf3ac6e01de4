#include "doctor/findings.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "doctor/judges.hpp"

namespace heddle::doctor {

std::string_view name(Severity severity) {
  constexpr std::array<std::string_view, 4> names{"ok", "note", "warning", "failed"};
  return names[static_cast<std::size_t>(severity)];
}

namespace {

void judge_test(const TestFacts& test, Findings& out) {
  const std::string subject = "test " + test.name;
  switch (test.state) {
    case TestFacts::State::passed:
      out.push_back({Severity::ok, subject,
                     fmt::format("passed in {:.2f} s{}{}", test.seconds, test.message.empty() ? "" : ": ", test.message), ""});
      return;
    case TestFacts::State::skipped:
      out.push_back({Severity::note, subject, "left out: " + test.message, ""});
      return;
    case TestFacts::State::failed:
      out.push_back({Severity::failed, subject, test.message,
                     "first mend what failed above; if nothing did, report this line and the output of heddle doctor --json"});
      return;
  }
}

}  // namespace

std::vector<Finding> judge(const MachineFacts& facts) {
  Findings out;
  judge_host(facts, out);
  judge_driver(facts, out);
  for (const GpuFacts& gpu : facts.gpus) judge_gpu(gpu, out);
  judge_links(facts, out);
  judge_environment(facts, out);
  for (const TestFacts& test : facts.tests) judge_test(test, out);
  return out;
}

bool is_fit(const std::vector<Finding>& findings) {
  return std::ranges::none_of(findings, [](const Finding& finding) { return finding.severity == Severity::failed; });
}

std::string engines_of(const MachineFacts& facts) {
  if (facts.gpus.empty() || !facts.build.cuda) return "the host engine";
  return fmt::format("the host engine and {} GPU{}", facts.gpus.size(), facts.gpus.size() == 1 ? "" : "s");
}

}  // namespace heddle::doctor
