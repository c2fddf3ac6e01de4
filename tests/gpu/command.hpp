// The command `heddle`, run from outside: the one beside the test program's folder, or in it, or HEDDLE_COMMAND.
#pragma once

#include <fmt/format.h>
#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>

namespace heddle {

inline std::filesystem::path heddle_command() {
  namespace fs = std::filesystem;
  if (const char* given = std::getenv("HEDDLE_COMMAND")) return given;
  const fs::path here = fs::read_symlink("/proc/self/exe").parent_path();
  return fs::exists(here.parent_path() / "heddle") ? here.parent_path() / "heddle" : here / "heddle";
}

struct Ran {
  int status = -1;
  std::string text;  ///< standard output and error
};

/// heddle `arguments`.
inline Ran run_heddle(const std::string& arguments) {
  Ran ran;
  FILE* pipe = popen(fmt::format("'{}' {} 2>&1", heddle_command().string(), arguments).c_str(), "r");
  if (pipe == nullptr) return ran;
  std::array<char, 4096> part;
  while (std::fgets(part.data(), static_cast<int>(part.size()), pipe) != nullptr) ran.text += part.data();
  const int status = pclose(pipe);
  ran.status = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return ran;
}

}  // namespace heddle
