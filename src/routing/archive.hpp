// Archives of stored files, as numpy.savez and torch.save write them: zip files whose members are not compressed.
#pragma once

#include <map>
#include <span>
#include <string>
#include <vector>

namespace heddle {

class Archive {
 public:
  /// Throws InputError: no such file, not a zip file, damaged, or with compressed members.
  static Archive open(const std::string& path);

  const std::string& path() const { return path_; }
  /// Names of the members with where their bytes lie; valid while the archive lives.
  const std::map<std::string, std::span<const char>>& members() const { return members_; }

 private:
  Archive() = default;
  void read_directory();
  std::span<const char> stored(std::size_t header, std::size_t bytes, const std::string& name) const;
  [[noreturn]] void fail(const std::string& what) const;

  std::string path_;
  std::vector<char> bytes_;
  std::map<std::string, std::span<const char>> members_;
};

}  // namespace heddle
