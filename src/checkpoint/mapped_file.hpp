// A file mapped read-only: pages are read when they are touched, and never written.
#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace heddle::checkpoint {

/// Owns one mapping. The file must not shrink while it is mapped (the system would end the process
/// on a page that is gone), as with any memory-mapped reader.
class MappedFile {
 public:
  MappedFile() = default;
  /// Throws InputError with errno's text where the file cannot be opened or is not a regular file.
  explicit MappedFile(const std::string& path);
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();

  std::span<const std::byte> bytes() const { return bytes_; }

 private:
  std::span<const std::byte> bytes_;
};

}  // namespace heddle::checkpoint
