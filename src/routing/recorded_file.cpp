#include "routing/recorded_file.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <string_view>

#include "checkpoint/safetensors.hpp"
#include "heddle/error.hpp"
#include "routing/archive.hpp"
#include "routing/file_bytes.hpp"
#include "routing/torch_file.hpp"
#include "routing/vllm_output.hpp"

namespace heddle {

namespace {

enum class Format { npy, archive, torch, safetensors, json };

Format format_of(const std::string& path) {
  std::array<char, 16> head{};
  std::ifstream(path, std::ios::binary).read(head.data(), head.size());
  const std::string_view begin(head.data(), head.size());
  if (begin.starts_with("PK\x03\x04")) {
    const Archive archive = Archive::open(path);
    const bool torch =
        std::ranges::any_of(archive.members(), [](const auto& member) { return member.first.ends_with("data.pkl"); });
    return torch ? Format::torch : Format::archive;
  }
  constexpr std::uint64_t longest_header = 100'000'000;  // of safetensors: eight bytes of length, then JSON
  if (begin[8] == '{' && value_in<std::uint64_t>(head, 0) <= longest_header) return Format::safetensors;
  const std::size_t first = begin.find_first_not_of(" \t\r\n");
  if (first != std::string_view::npos && (begin[first] == '{' || begin[first] == '[')) return Format::json;
  std::error_code ignored;
  if (!begin.starts_with("\x93NUMPY") && std::filesystem::is_regular_file(path, ignored))
    throw InputError(fmt::format("{}: not a .npy file, nor .npz, safetensors, vLLM's JSON or SGLang's .pt", path));
  return Format::npy;
}

/// Named arrays of an archive or a safetensors file. Only those that are asked for are read.
class NamedArrays {
 public:
  NamedArrays(const std::string& path, Format format) : path_(path) {
    if (format == Format::archive) {
      archive_.emplace(Archive::open(path));
    } else {
      tensors_ = checkpoint::SafetensorsFile::open(path);
    }
  }

  /// The first of these names that is there.
  std::optional<NpyArray> find(std::initializer_list<const char*> names) const {
    for (const char* name : names) {
      if (archive_) {
        const auto found = archive_->members().find(std::string(name) + ".npy");
        if (found != archive_->members().end()) return parse_npy(found->second, path_ + ", " + name);
      } else if (const checkpoint::Tensor* tensor = tensors_->find(name)) {
        return array_of(*tensor);
      }
    }
    return std::nullopt;
  }

  std::string names() const {
    std::string text;
    if (archive_) {
      for (const auto& [name, bytes] : archive_->members()) text += (text.empty() ? "" : ", ") + name;
    } else {
      for (const auto& [name, tensor] : tensors_->tensors()) text += (text.empty() ? "" : ", ") + name;
    }
    return text.empty() ? "nothing" : text;
  }

 private:
  static NpyArray array_of(const checkpoint::Tensor& tensor) {
    using checkpoint::Dtype;
    static const std::map<Dtype, const char*> types{{Dtype::u8, "u1"},  {Dtype::i16, "i2"}, {Dtype::u16, "u2"},
                                                    {Dtype::i32, "i4"}, {Dtype::i64, "i8"}, {Dtype::f16, "f2"},
                                                    {Dtype::f32, "f4"}, {Dtype::bf16, "b2"}};
    const auto known = types.find(tensor.dtype);
    if (known == types.end()) checkpoint::refuse(tensor, "a type that no recording has");
    NpyArray array;
    array.path = tensor.label();
    array.type = known->second;
    array.shape.assign(tensor.shape.begin(), tensor.shape.end());
    array.data.assign(tensor.bytes.begin(), tensor.bytes.end());
    return array;
  }

  std::string path_;
  std::optional<Archive> archive_;
  std::unique_ptr<checkpoint::SafetensorsFile> tensors_;
};

/// [tokens, topk] is one layer's.
void add_layer_axis(NpyArray& array) {
  if (array.shape.size() == 2) array.shape.insert(array.shape.begin() + 1, 1);
}

RecordedFile named_recording(const std::string& path, Format format) {
  const NamedArrays arrays(path, format);
  auto ids = arrays.find({"topk_ids", "ids", "routed_experts"});
  if (!ids)
    throw InputError(fmt::format("{}: it holds {}; a recording has topk_ids (or ids, or routed_experts)", path, arrays.names()));
  return {std::move(*ids), arrays.find({"topk_weights", "weights"}), arrays.find({"hidden_states"})};
}

// ---------------------------------------------------------------- counts

[[noreturn]] void refuse_counts(const NpyArray& array) {
  throw InputError(
      fmt::format("{}: shape {}; counts are [layers, experts] or [steps, layers, experts]", array.path, array.shape_text()));
}

std::vector<std::int64_t> counts_in(const NpyArray& array) {
  std::vector<std::int64_t> counts = integers(array);
  const auto bad = std::ranges::find_if(counts, [](std::int64_t count) { return count < 0; });
  if (bad != counts.end()) throw InputError(fmt::format("{}: a count of {}", array.path, *bad));
  return counts;
}

/// Steps that a ring buffer never filled, or in which nothing ran, say nothing.
void drop_empty_steps(ExpertLoads& loads) {
  const auto a_step = static_cast<std::size_t>(loads.layers) * static_cast<std::size_t>(loads.experts);
  std::vector<std::int64_t> kept;
  for (auto begin = loads.counts.begin(); begin != loads.counts.end(); begin += static_cast<std::ptrdiff_t>(a_step)) {
    const auto end = begin + static_cast<std::ptrdiff_t>(a_step);
    if (std::any_of(begin, end, [](std::int64_t count) { return count != 0; })) kept.insert(kept.end(), begin, end);
  }
  const auto left = static_cast<int>(kept.size() / a_step);
  if (left < loads.steps)
    loads.notes.push_back(fmt::format("{} of {} steps are empty and were left out", loads.steps - left, loads.steps));
  loads.counts = std::move(kept);
  loads.steps = left;
}

ExpertLoads loads_of(const NpyArray& array) {
  ExpertLoads loads;
  const auto& shape = array.shape;
  if ((shape.size() != 2 && shape.size() != 3) || array.size() == 0) refuse_counts(array);
  loads.experts = static_cast<int>(shape.back());
  loads.layers = static_cast<int>(shape[shape.size() - 2]);
  loads.steps = shape.size() == 3 ? static_cast<int>(shape[0]) : 1;
  loads.counts = counts_in(array);
  return loads;
}

/// Counts of physical experts [layers, physical] added up by the logical expert of each.
void add_physical(const NpyArray& counts, const NpyArray& map, ExpertLoads& loads) {
  if (counts.shape != map.shape) {
    throw InputError(
        fmt::format("{}: counts of shape {} with a map of shape {}", counts.path, counts.shape_text(), map.shape_text()));
  }
  const std::vector<std::int64_t> values = counts_in(counts), experts = integers(map);
  const std::size_t physical = counts.shape[1], begin = loads.counts.size();
  loads.counts.resize(begin + counts.shape[0] * static_cast<std::size_t>(loads.experts));
  for (std::size_t i = 0; i < values.size(); ++i) {
    loads.counts[begin + i / physical * static_cast<std::size_t>(loads.experts) + static_cast<std::size_t>(experts[i])] +=
        values[i];
  }
  ++loads.steps;
}

/// Modes per_pass and per_token: a record a forward pass, of one rank's tokens.
ExpertLoads loads_of_records(const std::string& path, const TorchValue& dump) {
  const TorchValue* records = dump.find("records");
  const TorchValue* map = dump.find("last_physical_to_logical_map");
  if (records == nullptr || records->list() == nullptr || map == nullptr || map->tensor() == nullptr ||
      map->tensor()->shape.size() != 2) {
    throw InputError(
        fmt::format("{}: no dump of SGLang's expert distribution recorder: it has neither logical_count nor records", path));
  }
  ExpertLoads loads;
  const std::vector<std::int64_t> experts = integers(*map->tensor());
  const auto [least, most] = std::ranges::minmax(experts);
  const auto physical = static_cast<std::int64_t>(map->tensor()->shape[1]);  // every expert has one of these, or more
  if (least < 0 || most >= physical) {
    throw InputError(fmt::format("{}: its map of {} physical experts names expert {}", path, physical, least < 0 ? least : most));
  }
  loads.experts = static_cast<int>(most) + 1;
  loads.layers = static_cast<int>(map->tensor()->shape[0]);
  for (const TorchValue& record : *records->list()) {
    const TorchValue* counts = record.find("global_physical_count");
    if (counts != nullptr && counts->tensor() != nullptr) add_physical(*counts->tensor(), *map->tensor(), loads);
  }
  loads.notes.push_back("a dump of single passes has the tokens of one rank of the engine");
  return loads;
}

}  // namespace

RecordedFile read_recorded_file(const std::string& path) {
  const Format format = format_of(path);
  RecordedFile file;
  switch (format) {
    case Format::npy:
      file.ids = read_npy(path);
      break;
    case Format::torch:
      throw InputError(
          fmt::format("{}: a file of torch.save; `heddle replay` reads SGLang's counts of experts in it, no ids", path));
    case Format::json: {
      file.ids = parse_vllm_output(read_file(path), path);
      break;
    }
    case Format::archive:
    case Format::safetensors:
      file = named_recording(path, format);
      break;
  }
  add_layer_axis(file.ids);
  if (file.weights) add_layer_axis(*file.weights);
  return file;
}

bool holds_loads(const std::string& path) {
  const Format format = format_of(path);
  if (format == Format::torch) return true;
  if (format != Format::archive && format != Format::safetensors) return false;
  const NamedArrays arrays(path, format);
  return !arrays.find({"topk_ids", "ids", "routed_experts"}) && arrays.find({"logical_count"});
}

ExpertLoads read_expert_loads(const std::string& path) {
  const Format format = format_of(path);
  ExpertLoads loads;
  if (format == Format::torch) {
    const TorchValue dump = read_torch_file(path);
    const TorchValue* counts = dump.find("logical_count");
    loads = counts != nullptr && counts->tensor() != nullptr ? loads_of(*counts->tensor()) : loads_of_records(path, dump);
  } else {
    const auto counts = NamedArrays(path, format).find({"logical_count"});
    if (!counts) throw InputError(fmt::format("{}: no logical_count in it", path));
    loads = loads_of(*counts);
  }
  drop_empty_steps(loads);
  if (loads.steps == 0) throw InputError(fmt::format("{}: all counts are 0", path));
  return loads;
}

}  // namespace heddle
