#include "json_file.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "heddle/error.hpp"

namespace heddle::tool {

namespace {

/// A device or a pipe is written as it is: a rename would put a file in its place.
bool written_in_place(const std::string& path) {
  std::error_code ignored;
  const auto status = std::filesystem::status(path, ignored);
  return std::filesystem::exists(status) && !std::filesystem::is_regular_file(status);
}

[[noreturn]] void fail(const std::string& path, int reason) {
  throw InputError(fmt::format("cannot write {}: {}", path, std::strerror(reason)));
}

/// 0, or the system's reason.
int write_text(const std::string& path, const std::string& text, bool durable) {
  std::FILE* file = std::fopen(path.c_str(), "wb");
  if (file == nullptr) {
    return errno;
  }
  const bool written = std::fwrite(text.data(), 1, text.size(), file) == text.size() && std::fflush(file) == 0 &&
                       (!durable || ::fsync(::fileno(file)) == 0);
  const int reason = written ? 0 : errno;
  return std::fclose(file) == 0 || !written ? reason : errno;
}

}  // namespace

void write_json(const std::string& path, const nlohmann::ordered_json& object) {
  const std::string text = object.dump(2) + "\n";
  if (written_in_place(path)) {
    if (const int reason = write_text(path, text, false); reason != 0) {
      fail(path, reason);
    }
    return;
  }
  const std::string partial = fmt::format("{}.partial-{}", path, ::getpid());
  int reason = write_text(partial, text, true);
  if (reason == 0 && std::rename(partial.c_str(), path.c_str()) != 0) {
    reason = errno;
  }
  if (reason != 0) {
    std::remove(partial.c_str());
    fail(path, reason);
  }
}

}  // namespace heddle::tool
