// One safetensors file: 8 bytes of header length (little endian), a JSON header, the tensors' bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/dtype.hpp"
#include "checkpoint/mapped_file.hpp"

namespace heddle::checkpoint {

/// One tensor: what it is and where its bytes lie. Valid while its file lives.
struct Tensor {
  std::string_view file;  ///< for messages
  std::string name;
  Dtype dtype = Dtype::u8;
  std::vector<std::int64_t> shape;
  std::span<const std::byte> bytes;  ///< row-major, not necessarily aligned

  /// "model.safetensors: tensor 'mlp.gate.weight'", the start of every message about it.
  std::string label() const;
};

/// "BF16 [64, 128]"
std::string type_and_shape(const Tensor& tensor);

/// Throws InputError: the tensor's label and what is wrong with it.
[[noreturn]] void refuse(const Tensor& tensor, const std::string& what);

/// Bytes of a tensor, or nothing where they overflow 64 bits or end within a byte.
std::optional<std::uint64_t> tensor_bytes(Dtype dtype, std::span<const std::int64_t> shape);

/// A file whose header has been checked in full: names, types, shapes, and offsets that tile the data
/// without overlap or gap. No tensor's bytes are read. All errors are InputError, one line.
class SafetensorsFile {
 public:
  static std::unique_ptr<SafetensorsFile> open(const std::string& path);
  /// The same from memory, which must outlive the object.
  static std::unique_ptr<SafetensorsFile> from_bytes(std::string label, std::span<const std::byte> bytes);
  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;

  const std::map<std::string, Tensor, std::less<>>& tensors() const { return tensors_; }
  /// Null where the file has no such tensor.
  const Tensor* find(std::string_view name) const;

 private:
  SafetensorsFile(std::string label, MappedFile mapping);
  void read_header(std::span<const std::byte> bytes);
  void check_tiling(std::size_t data_size, const std::byte* data) const;

  std::string label_;
  MappedFile mapping_;
  std::map<std::string, Tensor, std::less<>> tensors_;
};

}  // namespace heddle::checkpoint
