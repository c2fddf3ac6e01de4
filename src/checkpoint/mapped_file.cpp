#include "checkpoint/mapped_file.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "checkpoint/describe.hpp"
#include "heddle/error.hpp"

namespace heddle::checkpoint {

namespace {
struct Descriptor {
  int value;
  ~Descriptor() {
    if (value >= 0) ::close(value);
  }
};

[[noreturn]] void refuse(const std::string& path, std::string_view what) {
  throw InputError(fmt::format("{}: {}", one_line(path), what));
}
}  // namespace

MappedFile::MappedFile(const std::string& path) {
  const Descriptor file{::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};  // a pipe must not block the reader
  if (file.value < 0) refuse(path, fmt::format("cannot be opened: {}", std::strerror(errno)));
  struct stat status {};
  if (::fstat(file.value, &status) != 0) refuse(path, fmt::format("cannot be examined: {}", std::strerror(errno)));
  if (!S_ISREG(status.st_mode)) refuse(path, "is not a regular file; a safetensors file is needed");
  if (status.st_size == 0) return;  // an empty file cannot be mapped; the header check reports it
  const auto size = static_cast<std::size_t>(status.st_size);
  void* const address = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, file.value, 0);
  if (address == MAP_FAILED) refuse(path, fmt::format("cannot be mapped ({} bytes): {}", size, std::strerror(errno)));
  bytes_ = {static_cast<const std::byte*>(address), size};
}

MappedFile::MappedFile(MappedFile&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(bytes_, other.bytes_);
  return *this;
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

}  // namespace heddle::checkpoint
