#include "checkpoint/safetensors.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "checkpoint/describe.hpp"
#include "checkpoint/json_text.hpp"
#include "heddle/error.hpp"

namespace heddle::checkpoint {

namespace {

constexpr std::size_t length_bytes = 8;
constexpr std::uint64_t longest_header = 100'000'000;  // the format's own limit

std::uint64_t little_endian(std::span<const std::byte> bytes) {
  std::uint64_t value = 0;
  for (std::size_t i = 0; i < length_bytes; ++i) value |= std::to_integer<std::uint64_t>(bytes[i]) << (8 * i);
  return value;
}

Dtype read_dtype(const Tensor& tensor, const nlohmann::json& entry) {
  const auto field = entry.find("dtype");
  if (field == entry.end() || !field->is_string()) refuse(tensor, "has no dtype; the header must name one");
  const auto& text = field->get_ref<const std::string&>();
  const auto dtype = dtype_from_name(text);
  if (!dtype) refuse(tensor, fmt::format("has the unknown dtype {}; known are {}", in_quotes(text), known_dtypes()));
  return *dtype;
}

std::vector<std::int64_t> read_shape(const Tensor& tensor, const nlohmann::json& entry) {
  const auto field = entry.find("shape");
  if (field == entry.end() || !field->is_array()) refuse(tensor, "has no shape; the header must give a list of sizes");
  std::vector<std::int64_t> shape;
  for (const auto& size : *field) {
    const bool fits = size.is_number_unsigned() && size.get<std::uint64_t>() <= std::numeric_limits<std::int64_t>::max();
    if (!fits) {
      refuse(tensor, fmt::format("size {} of its shape is {}; sizes are whole numbers from 0 to 2^63 - 1", shape.size(),
                                 one_line(size.dump(-1, ' ', true))));
    }
    shape.push_back(size.get<std::int64_t>());
  }
  return shape;
}

/// The tensor's part of the data, checked against its size.
std::span<const std::byte> read_offsets(const Tensor& tensor, const nlohmann::json& entry, std::span<const std::byte> data) {
  const auto field = entry.find("data_offsets");
  const bool pair = field != entry.end() && field->is_array() && field->size() == 2 && (*field)[0].is_number_unsigned() &&
                    (*field)[1].is_number_unsigned();
  if (!pair) refuse(tensor, "has no data_offsets; the header must give two whole numbers, begin and end");
  const auto begin = (*field)[0].get<std::uint64_t>();
  const auto end = (*field)[1].get<std::uint64_t>();
  if (begin > end) refuse(tensor, fmt::format("data_offsets [{}, {}] run backwards", begin, end));
  if (end > data.size()) {
    refuse(tensor, fmt::format("data_offsets [{}, {}] lie outside the file, which holds {} bytes of data (truncated?)", begin, end,
                               data.size()));
  }
  const auto needed = tensor_bytes(tensor.dtype, tensor.shape);
  if (!needed)
    refuse(tensor, fmt::format("{} {} has no whole number of bytes below 2^64", name(tensor.dtype), shape_text(tensor.shape)));
  if (*needed != end - begin) {
    refuse(tensor, fmt::format("data_offsets [{}, {}] give {} bytes; {} {} takes {}", begin, end, end - begin, name(tensor.dtype),
                               shape_text(tensor.shape), *needed));
  }
  return data.subspan(begin, end - begin);
}

}  // namespace

std::string Tensor::label() const { return fmt::format("{}: tensor {}", file, in_quotes(name)); }

std::string type_and_shape(const Tensor& tensor) { return fmt::format("{} {}", name(tensor.dtype), shape_text(tensor.shape)); }

void refuse(const Tensor& tensor, const std::string& what) { throw InputError(fmt::format("{}: {}", tensor.label(), what)); }

std::optional<std::uint64_t> tensor_bytes(Dtype dtype, std::span<const std::int64_t> shape) {
  const bool empty = std::find(shape.begin(), shape.end(), 0) != shape.end();
  if (empty) return 0;
  auto bits = static_cast<std::uint64_t>(bits_per_value(dtype));
  for (const std::int64_t size : shape) {
    if (size < 0 || __builtin_mul_overflow(bits, static_cast<std::uint64_t>(size), &bits)) return std::nullopt;
  }
  if (bits % 8 != 0) return std::nullopt;
  return bits / 8;
}

SafetensorsFile::SafetensorsFile(std::string label, MappedFile mapping) : label_(one_line(label)), mapping_(std::move(mapping)) {}

std::unique_ptr<SafetensorsFile> SafetensorsFile::open(const std::string& path) {
  std::unique_ptr<SafetensorsFile> file(new SafetensorsFile(path, MappedFile(path)));
  file->read_header(file->mapping_.bytes());
  return file;
}

std::unique_ptr<SafetensorsFile> SafetensorsFile::from_bytes(std::string label, std::span<const std::byte> bytes) {
  std::unique_ptr<SafetensorsFile> file(new SafetensorsFile(std::move(label), MappedFile()));
  file->read_header(bytes);
  return file;
}

const Tensor* SafetensorsFile::find(std::string_view tensor_name) const {
  const auto found = tensors_.find(tensor_name);
  return found == tensors_.end() ? nullptr : &found->second;
}

void SafetensorsFile::read_header(std::span<const std::byte> bytes) {
  if (bytes.size() < length_bytes) {
    throw InputError(fmt::format("{}: has {} bytes; a safetensors file starts with {} bytes of header length", label_, bytes.size(),
                                 length_bytes));
  }
  const std::uint64_t length = little_endian(bytes);
  if (length > longest_header) {
    throw InputError(
        fmt::format("{}: claims a header of {} bytes; a safetensors header has at most {}", label_, length, longest_header));
  }
  if (length > bytes.size() - length_bytes) {
    throw InputError(fmt::format("{}: claims a header of {} bytes but has {} after the length (truncated?)", label_, length,
                                 bytes.size() - length_bytes));
  }
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()) + length_bytes, length);
  const std::span<const std::byte> data = bytes.subspan(length_bytes + length);
  const nlohmann::json header = parse_json(text, label_ + ": header");
  if (!header.is_object()) throw InputError(fmt::format("{}: header: is not a JSON object of tensors", label_));
  for (const auto& [tensor_name, entry] : header.items()) {
    if (tensor_name == "__metadata__") continue;
    Tensor tensor{label_, tensor_name, Dtype::u8, {}, {}};
    if (!entry.is_object()) refuse(tensor, "is not described by a JSON object with dtype, shape and data_offsets");
    tensor.dtype = read_dtype(tensor, entry);
    tensor.shape = read_shape(tensor, entry);
    tensor.bytes = read_offsets(tensor, entry, data);
    tensors_.emplace(tensor_name, std::move(tensor));
  }
  check_tiling(data.size(), data.data());
}

void SafetensorsFile::check_tiling(std::size_t data_size, const std::byte* data) const {
  std::vector<const Tensor*> in_order;
  for (const auto& [tensor_name, tensor] : tensors_) {
    if (!tensor.bytes.empty()) in_order.push_back(&tensor);
  }
  std::sort(in_order.begin(), in_order.end(), [](const Tensor* a, const Tensor* b) { return a->bytes.data() < b->bytes.data(); });
  std::size_t reached = 0;
  const Tensor* previous = nullptr;
  for (const Tensor* tensor : in_order) {
    const auto begin = static_cast<std::size_t>(tensor->bytes.data() - data);
    if (begin < reached) {
      refuse(*tensor, fmt::format("starts at data byte {}, inside tensor {}, which ends at {} (overlapping offsets)", begin,
                                  in_quotes(previous->name), reached));
    }
    if (begin > reached)
      refuse(*tensor, fmt::format("starts at data byte {}; bytes {} to {} belong to no tensor", begin, reached, begin));
    reached = begin + tensor->bytes.size();
    previous = tensor;
  }
  if (reached != data_size) {
    throw InputError(
        fmt::format("{}: its tensors end at data byte {}, the file at {}; nothing may follow", label_, reached, data_size));
  }
}

}  // namespace heddle::checkpoint
