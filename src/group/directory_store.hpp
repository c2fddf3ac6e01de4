// The store of ranks on several machines: words in a directory that all of them reach.
//
// A word is a directory with one empty file in it, whose name says how often the word has changed and what it holds:
// DIRECTORY/called.0/17.0000000000000003. To change it is to rename that file, which succeeds for one of those who try: the name
// that the others want to change is gone. A rename is one call of the kernel, so nobody who stops or dies is in the middle of one;
// there is no server, and nothing grows.
#pragma once

#include <filesystem>
#include <string>

#include "heddle/store.hpp"

namespace heddle {

class DirectoryStore final : public Store {
 public:
  DirectoryStore(std::filesystem::path directory, int ranks);
  std::uint64_t get(const StoreKey& key) const override;
  bool compare_set(const StoreKey& key, std::uint64_t& expected, std::uint64_t desired) override;
  bool wait(const std::function<bool()>& there, Clock::time_point end) override;

 private:
  /// A word as it is: the name of its file.
  struct Entry {
    std::uint64_t changes = 0;
    std::uint64_t value = 0;
  };
  static std::string name_of(const Entry& entry);
  std::filesystem::path path_of(const StoreKey& key) const;
  Entry read(const StoreKey& key) const;
  bool is_there(const StoreKey& key) const;
  void make() const;
  void check_ranks() const;

  std::filesystem::path directory_;
  int ranks_;
};

}  // namespace heddle
