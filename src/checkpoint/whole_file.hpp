// A file that appears whole or not at all.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>

namespace heddle::checkpoint {

/// Written beside its final name, and renamed by publish(); removed again without it. What exists under that name and is no
/// regular file (a device, a pipe) is written directly, since a rename would put a file in its place; a symbolic link
/// stays and its target is written. All functions throw InputError with the path and the system's reason, e.g. on a full disk.
class WholeFile {
 public:
  explicit WholeFile(const std::filesystem::path& final_path);
  WholeFile(const WholeFile&) = delete;
  WholeFile& operator=(const WholeFile&) = delete;
  ~WholeFile();

  void write(std::span<const std::byte> bytes);
  /// Flushes, closes and renames: from here on the final name holds all of it.
  void publish();

 private:
  void create_beside();
  void flush_folder() const;
  [[noreturn]] void fail(const char* what) const;

  std::filesystem::path final_path_;
  std::filesystem::path path_;  ///< what is written: the final path itself, or a file beside it
  int descriptor_ = -1;
  bool published_ = false;
};

}  // namespace heddle::checkpoint
