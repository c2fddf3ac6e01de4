#include "group/memory.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <limits>
#include <string_view>

#include "group/text_reader.hpp"
#include "heddle/error.hpp"

namespace heddle {

std::shared_ptr<HostMemory> HostMemory::create() {
  const int descriptor = memfd_create("heddle", MFD_CLOEXEC);
  if (descriptor < 0) throw InputError(fmt::format("cannot create shared memory (memfd_create): {}", std::strerror(errno)));
  return adopt(descriptor);
}

std::shared_ptr<HostMemory> HostMemory::adopt(int descriptor) { return std::shared_ptr<HostMemory>(new HostMemory(descriptor)); }

HostMemory::~HostMemory() { close(descriptor_); }

namespace {

/// First number of a one-number file or of the line that begins with `key`; `none` if there is none. Without streams,
/// see TextReader.
std::size_t number_in(const std::string& path, std::string_view key, std::size_t none) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return none;
  std::array<char, 4096> text;
  const ssize_t bytes = read(file, text.data(), text.size());
  close(file);
  std::string_view rest(text.data(), bytes > 0 ? static_cast<std::size_t>(bytes) : 0);
  while (!rest.empty() && rest.substr(0, key.size()) != key) {
    const std::size_t end = rest.find('\n');
    rest.remove_prefix(end == rest.npos ? rest.size() : end + 1);
  }
  rest.remove_prefix(std::min(key.size(), rest.size()));
  std::size_t value = none;
  TextReader(rest).number(value);
  return value;
}

}  // namespace

std::size_t available_memory(const std::string& meminfo, const std::string& cgroup) {
  constexpr std::size_t unlimited = std::numeric_limits<std::size_t>::max();
  const std::size_t machine = number_in(meminfo, "MemAvailable:", unlimited / 1024) * 1024;
  const std::size_t limit = number_in(cgroup + "/memory.max", "", unlimited);
  const std::size_t taken = number_in(cgroup + "/memory.current", "", 0);
  const std::string parts = cgroup + "/memory.stat";
  const std::size_t cached = number_in(parts, "inactive_file ", 0) + number_in(parts, "active_file ", 0);
  const std::size_t used = taken - std::min(taken, cached);
  return std::min(machine, limit > used ? limit - used : 0);
}

int HostMemory::reserve(std::size_t offset, std::size_t bytes) {
  if (bytes > available_memory()) return ENOMEM;
  int status = 0;
  do {
    status = fallocate(descriptor_, 0, static_cast<off_t>(offset), static_cast<off_t>(bytes)) == 0 ? 0 : errno;
  } while (status == EINTR);
  if (status != 0) discard(offset, bytes);
  return status;
}

void HostMemory::discard(std::size_t offset, std::size_t bytes) {
  fallocate(descriptor_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset), static_cast<off_t>(bytes));
}

std::shared_ptr<std::byte> HostMemory::map(std::size_t offset, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  if (auto known = mappings_[offset].lock()) return known;
  void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_, static_cast<off_t>(offset));
  if (address == MAP_FAILED) {
    throw InputError(fmt::format("cannot map {} of shared memory: {}", describe_bytes(bytes), std::strerror(errno)));
  }
  std::shared_ptr<std::byte> mapping(static_cast<std::byte*>(address), [bytes](std::byte* start) { munmap(start, bytes); });
  mappings_[offset] = mapping;
  return mapping;
}

std::string describe_bytes(std::size_t bytes) {
  const double value = static_cast<double>(bytes);
  if (bytes >= std::size_t{1} << 30) return fmt::format("{:.2f} GiB", value / (1 << 30));
  if (bytes >= std::size_t{1} << 20) return fmt::format("{:.2f} MiB", value / (1 << 20));
  return fmt::format("{} bytes", bytes);
}

}  // namespace heddle
