// What heddle doctor found, for programs (docs/json.md lists the names; they are stable).
#pragma once

#include <nlohmann/json.hpp>
#include <vector>

#include "doctor/findings.hpp"

namespace heddle::tool {

nlohmann::ordered_json doctor_json(const doctor::MachineFacts& facts, const std::vector<doctor::Finding>& findings);

}  // namespace heddle::tool
