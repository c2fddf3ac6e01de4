// All tensors of a checkpoint, whether it is one file, a sharded index or a folder of files.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/safetensors.hpp"

namespace heddle::checkpoint {

/// Knows every tensor's name at once; with an index, a shard is opened (and its header checked) when a
/// tensor of its is first asked for, so that a layer of a large checkpoint touches only its own shards.
class TensorTable {
 public:
  /// A .safetensors file, a .json index, or a folder with model.safetensors.index.json or .safetensors files.
  static TensorTable open(const std::string& path);
  static TensorTable of(std::unique_ptr<SafetensorsFile> file);

  /// Every tensor name, sorted, and the number of its shard.
  const std::map<std::string, std::size_t, std::less<>>& names() const { return names_; }
  /// Null where there is no such name. Throws InputError where the index names a shard that lacks it.
  const Tensor* find(const std::string& name);
  /// The endings of the names that start with `stem`.
  std::vector<std::string> endings(const std::string& stem) const;

  /// What the user named, for messages.
  const std::string& place() const { return place_; }
  /// Where config.json would be.
  const std::filesystem::path& folder() const { return folder_; }

 private:
  struct Shard {
    std::string path;
    std::unique_ptr<SafetensorsFile> file;
  };

  void add_file(std::unique_ptr<SafetensorsFile> file, const std::string& path);
  void read_index(const std::filesystem::path& path);
  void read_folder(const std::filesystem::path& path);

  std::string place_;
  std::filesystem::path folder_;
  std::vector<Shard> shards_;
  std::map<std::string, std::size_t, std::less<>> names_;
};

}  // namespace heddle::checkpoint
