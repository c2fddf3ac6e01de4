#include "json_file.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>

#include "heddle/error.hpp"

namespace heddle::tool {

void write_json(const std::string& path, const nlohmann::ordered_json& object) {
  const std::string text = object.dump(2) + "\n";
  const std::string partial = fmt::format("{}.partial-{}", path, ::getpid());
  const auto fail = [&](int reason) {
    std::remove(partial.c_str());
    throw InputError(fmt::format("cannot write {}: {}", path, std::strerror(reason)));
  };
  std::FILE* file = std::fopen(partial.c_str(), "wb");
  if (file == nullptr) {
    throw InputError(fmt::format("cannot write {}: {}", path, std::strerror(errno)));
  }
  bool good =
      std::fwrite(text.data(), 1, text.size(), file) == text.size() && std::fflush(file) == 0 && ::fsync(::fileno(file)) == 0;
  int reason = errno;
  if (std::fclose(file) != 0 && good) {
    good = false;
    reason = errno;
  }
  if (!good) {
    fail(reason);
  }
  if (std::rename(partial.c_str(), path.c_str()) != 0) {
    fail(errno);
  }
}

}  // namespace heddle::tool
