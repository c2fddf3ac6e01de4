#include "routing/file_bytes.hpp"

#include <fmt/format.h>

#include <cerrno>
#include <filesystem>
#include <fstream>

#include "heddle/error.hpp"

namespace heddle {

std::vector<char> read_file(const std::string& path) {
  std::error_code error;
  const std::uintmax_t size = std::filesystem::file_size(path, error);
  if (error) throw InputError(fmt::format("{}: cannot be read: {}", path, error.message()));
  std::ifstream file(path, std::ios::binary);
  std::vector<char> bytes(size);
  if (!file.read(bytes.data(), static_cast<std::streamsize>(size))) {
    throw InputError(fmt::format("{}: cannot be read: {}", path, file.is_open() ? "it ended early" : std::strerror(errno)));
  }
  return bytes;
}

}  // namespace heddle
