// Results for programs: one JSON object a file.
#pragma once

#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace heddle::tool {

/// Writes the object beside its final name and renames it: either all of it appears or nothing.
/// A device or a pipe (/dev/stdout) is written directly. Throws InputError with the system's reason.
void write_json(const std::string& path, const nlohmann::ordered_json& object);

/// Keeps what a measurement has so far, each time in place of the last.
using SaveJson = std::function<void(const nlohmann::ordered_json&)>;
/// By write_json; nowhere if `path` is empty.
SaveJson saved_at(const std::string& path);

}  // namespace heddle::tool
