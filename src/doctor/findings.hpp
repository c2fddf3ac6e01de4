// The judgement of a machine: what is fit, what is not, and what to do about it.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "doctor/facts.hpp"

namespace heddle::doctor {

enum class Severity : std::uint8_t {
  ok,
  note,     ///< nothing is wrong, but one should know
  warning,  ///< works, and slower or with less than one might think
  failed,   ///< something will not work
};

/// "ok", "note", "warning", "failed".
std::string_view name(Severity severity);

struct Finding {
  Severity severity = Severity::ok;
  std::string subject;  ///< what is judged, stable: cpu, memory, shm, driver, gpu 0, links, test host: layer ...
  std::string what;     ///< what was found, with numbers
  std::string advice;   ///< what to do; empty where nothing is to be done
};

/// All findings, in the order in which a person would look: host, container, driver, GPUs, links, libraries, tests. Depends on
/// the facts alone.
std::vector<Finding> judge(const MachineFacts& facts);

/// No finding is `failed`.
bool is_fit(const std::vector<Finding>& findings);

/// What runs here, as a sentence's end: "the host engine", "the host engine and 2 GPUs".
std::string engines_of(const MachineFacts& facts);

}  // namespace heddle::doctor
