#include "json_file.hpp"

#include <nlohmann/json.hpp>

#include "checkpoint/whole_file.hpp"

namespace heddle::tool {

void write_json(const std::string& path, const nlohmann::ordered_json& object) {
  // Paths in it may be no UTF-8.
  const std::string text = object.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
  checkpoint::WholeFile file(path);
  file.write(std::as_bytes(std::span(text)));
  file.publish();
}

SaveJson saved_at(const std::string& path) {
  return [path](const nlohmann::ordered_json& object) {
    if (!path.empty()) write_json(path, object);
  };
}

}  // namespace heddle::tool
