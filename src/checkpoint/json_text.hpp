// JSON from files that may be damaged or hostile: headers, sharded indexes, config.json.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace heddle::checkpoint {

/// Parses strictly: nested at most 64 deep, no name twice in an object. Throws InputError with one line
/// that starts with `where`.
nlohmann::json parse_json(std::string_view text, const std::string& where);

}  // namespace heddle::checkpoint
