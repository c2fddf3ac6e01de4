#include "checkpoint/tensor_table.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "checkpoint/describe.hpp"
#include "checkpoint/json_text.hpp"
#include "heddle/error.hpp"

namespace heddle::checkpoint {

namespace {

namespace fs = std::filesystem;

constexpr std::string_view index_name = "model.safetensors.index.json";

/// A shard is a file beside its index; anything else would let an index reach across the file system.
bool is_plain_file_name(const std::string& name) {
  return !name.empty() && name != "." && name != ".." && name.find('/') == std::string::npos &&
         name.find('\0') == std::string::npos;
}

}  // namespace

TensorTable TensorTable::open(const std::string& path) {
  TensorTable table;
  table.place_ = one_line(path);
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (!fs::exists(status)) throw InputError(fmt::format("{}: no such file or folder", table.place_));
  if (fs::is_directory(status)) {
    table.folder_ = path;
    table.read_folder(path);
    return table;
  }
  table.folder_ = fs::path(path).parent_path();
  if (fs::path(path).extension() == ".json") {
    table.read_index(path);
  } else {
    table.add_file(SafetensorsFile::open(path), path);
  }
  return table;
}

TensorTable TensorTable::of(std::unique_ptr<SafetensorsFile> file) {
  TensorTable table;
  table.place_ = "memory";
  table.add_file(std::move(file), table.place_);
  return table;
}

const Tensor* TensorTable::find(const std::string& name) {
  const auto found = names_.find(name);
  if (found == names_.end()) return nullptr;
  Shard& shard = shards_[found->second];
  if (!shard.file) shard.file = SafetensorsFile::open(shard.path);
  const Tensor* const tensor = shard.file->find(name);
  if (tensor == nullptr) {
    throw InputError(
        fmt::format("{}: the index puts tensor {} into {}, which does not hold it", place_, in_quotes(name), one_line(shard.path)));
  }
  return tensor;
}

std::vector<std::string> TensorTable::endings(const std::string& stem) const {
  std::vector<std::string> found;
  for (auto it = names_.lower_bound(stem); it != names_.end() && it->first.starts_with(stem); ++it) {
    found.push_back(it->first.substr(stem.size()));
  }
  return found;
}

void TensorTable::add_file(std::unique_ptr<SafetensorsFile> file, const std::string& path) {
  for (const auto& [name, tensor] : file->tensors()) {
    const auto [place, added] = names_.emplace(name, shards_.size());
    if (!added) {
      throw InputError(fmt::format("{}: is in {} too; each tensor belongs into one file of a folder", tensor.label(),
                                   one_line(shards_[place->second].path)));
    }
  }
  shards_.push_back({path, std::move(file)});
}

void TensorTable::read_index(const fs::path& path) {
  const MappedFile mapping(path.string());
  const auto bytes = mapping.bytes();
  constexpr std::size_t longest = 256u << 20;
  const std::string where = one_line(path.string());
  if (bytes.size() > longest)
    throw InputError(fmt::format("{}: has {} bytes; an index has at most {}", where, bytes.size(), longest));
  const auto index = parse_json({reinterpret_cast<const char*>(bytes.data()), bytes.size()}, where);
  const auto map = index.is_object() ? index.find("weight_map") : index.end();
  if (map == index.end() || !map->is_object()) {
    throw InputError(fmt::format("{}: has no weight_map; an index maps each tensor's name to its file", where));
  }
  std::map<std::string, std::size_t> numbers;
  for (const auto& [name, file] : map->items()) {
    if (!file.is_string() || !is_plain_file_name(file.get_ref<const std::string&>())) {
      throw InputError(
          fmt::format("{}: tensor {}: its file must be the plain name of a file beside the index", where, in_quotes(name)));
    }
    const auto& shard = file.get_ref<const std::string&>();
    const auto [number, added] = numbers.emplace(shard, shards_.size());
    if (added) shards_.push_back({(path.parent_path() / shard).string(), nullptr});
    names_.emplace(name, number->second);
  }
}

void TensorTable::read_folder(const fs::path& path) {
  if (fs::exists(path / index_name)) return read_index(path / index_name);
  std::vector<fs::path> files;
  std::error_code error;
  for (fs::directory_iterator it(path, error), end; !error && it != end; it.increment(error)) {
    if (it->path().extension() == ".safetensors") files.push_back(it->path());
  }
  if (error) throw InputError(fmt::format("{}: cannot be listed: {}", place_, error.message()));
  if (files.empty()) throw InputError(fmt::format("{}: holds neither {} nor any .safetensors file", place_, index_name));
  std::sort(files.begin(), files.end());
  for (const fs::path& file : files) add_file(SafetensorsFile::open(file.string()), file.string());
}

}  // namespace heddle::checkpoint
