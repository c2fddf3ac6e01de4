// Memory that a command shares with the processes of its ranks.
#pragma once

#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>

#include "heddle/error.hpp"

namespace heddle::tool {

/// Zeros at first; processes that are forked later see it too.
class SharedBlock {
 public:
  explicit SharedBlock(std::size_t bytes) : bytes_(std::max<std::size_t>(bytes, 1)) {
    address_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (address_ == MAP_FAILED)
      throw InputError(fmt::format("cannot map {} bytes to share with processes: {}", bytes_, std::strerror(errno)));
  }
  ~SharedBlock() { munmap(address_, bytes_); }
  SharedBlock(const SharedBlock&) = delete;
  SharedBlock& operator=(const SharedBlock&) = delete;
  void* address() const { return address_; }

 private:
  std::size_t bytes_;
  void* address_;
};

}  // namespace heddle::tool
