// What run and verify say of a job as JSON (docs/json.md lists the names; they are stable).
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "inputs.hpp"
#include "job.hpp"

namespace heddle::tool {

/// "elastic (reduce=home)" where options distinguish it.
std::string title_of(const LayerOptions& options);
/// Of way auto the way that it went, too.
std::string title_of(const LayerOptions& asked, const JobResult& result);

nlohmann::ordered_json configuration_of(const Inputs& inputs, const LayerOptions& options, const JobResult& result);
nlohmann::ordered_json report_of(const Inputs& inputs, const LayerOptions& options, const JobResult& result);

}  // namespace heddle::tool
