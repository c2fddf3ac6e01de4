// The memory of a host group: one memfd that holds the control segment and every heap. It has no name
// in any file system and goes when the last process that holds it goes, however that one ends.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <string>

namespace heddle {

class HostMemory {
 public:
  /// A new, empty memfd.
  static std::shared_ptr<HostMemory> create();
  /// Takes over a descriptor received from another process.
  static std::shared_ptr<HostMemory> adopt(int descriptor);
  ~HostMemory();
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  int descriptor() const { return descriptor_; }
  /// Makes [offset, offset + bytes) exist with pages reserved. Returns an errno, 0 if done.
  int reserve(std::size_t offset, std::size_t bytes);
  /// Gives the pages of a range back; it reads as zeros afterwards.
  void discard(std::size_t offset, std::size_t bytes);
  /// Maps a range; ranks of one process share one mapping. Throws InputError where mmap fails.
  std::shared_ptr<std::byte> map(std::size_t offset, std::size_t bytes);

 private:
  explicit HostMemory(int descriptor) : descriptor_(descriptor) {}
  int descriptor_;
  std::mutex mutex_;
  std::map<std::size_t, std::weak_ptr<std::byte>> mappings_;
};

/// Bytes that can be taken without driving the machine, or the container, out of memory: the kernel would
/// otherwise hand out pages until it has to kill somebody. What files are cached in counts as free, since it is given up for
/// others.
std::size_t available_memory(const std::string& meminfo = "/proc/meminfo", const std::string& cgroup = "/sys/fs/cgroup");

/// A heap's size in words for a person: "1.5 GiB".
std::string describe_bytes(std::size_t bytes);

}  // namespace heddle
