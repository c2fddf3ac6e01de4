#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "checkpoint/describe.hpp"
#include "checkpoint/safetensors.hpp"
#include "checkpoint/whole_file.hpp"
#include "heddle/checkpoint.hpp"
#include "heddle/error.hpp"

namespace heddle {

namespace {

using checkpoint::in_quotes;
using checkpoint::one_line;
using checkpoint::shape_text;

checkpoint::Dtype checked_dtype(const std::string& path, const TensorOut& tensor) {
  const auto where = fmt::format("{}: tensor {}", one_line(path), in_quotes(tensor.name));
  const auto dtype = checkpoint::dtype_from_name(tensor.dtype);
  if (!dtype) {
    throw InputError(fmt::format("{}: unknown dtype {}; known are {}", where, in_quotes(tensor.dtype), checkpoint::known_dtypes()));
  }
  const auto needed = checkpoint::tensor_bytes(*dtype, tensor.shape);
  if (!needed || *needed != tensor.data.size()) {
    throw InputError(fmt::format("{}: {} bytes given; {} {} takes {}", where, tensor.data.size(), tensor.dtype,
                                 shape_text(tensor.shape), needed ? fmt::to_string(*needed) : "no whole number of bytes"));
  }
  return *dtype;
}

}  // namespace

void write_safetensors(const std::string& path, std::span<const TensorOut> tensors) {
  struct Placed {
    const TensorOut* tensor;
    int bits;
  };
  std::vector<Placed> order;
  std::set<std::string_view> names{"__metadata__"};
  for (const TensorOut& tensor : tensors) {
    order.push_back({&tensor, bits_per_value(checked_dtype(path, tensor))});
    if (!names.insert(tensor.name).second) {
      throw InputError(
          fmt::format("{}: tensor {}: the name is taken; each tensor needs its own", one_line(path), in_quotes(tensor.name)));
    }
  }
  // Widest elements first: every tensor is then aligned to its element without gaps, which the format forbids.
  std::stable_sort(order.begin(), order.end(), [](const Placed& a, const Placed& b) { return a.bits > b.bits; });

  nlohmann::json header = nlohmann::json::object();
  std::uint64_t offset = 0;
  for (const Placed& placed : order) {
    const TensorOut& tensor = *placed.tensor;
    const std::uint64_t end = offset + tensor.data.size();
    header[tensor.name] = {{"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text;
  try {
    text = header.dump();
  } catch (const nlohmann::json::exception&) {
    throw InputError(fmt::format("{}: a tensor's name is not UTF-8", one_line(path)));
  }
  constexpr std::size_t alignment = 64;  // of the data within the file
  constexpr std::size_t length_bytes = 8;
  text.append((alignment - (length_bytes + text.size()) % alignment) % alignment, ' ');
  std::byte length[length_bytes];
  for (std::size_t i = 0; i < length_bytes; ++i) length[i] = static_cast<std::byte>(std::uint64_t{text.size()} >> (8 * i));

  checkpoint::WholeFile file{std::filesystem::path(path)};
  file.write(length);
  file.write(std::as_bytes(std::span(text)));
  for (const Placed& placed : order) file.write(placed.tensor->data);
  file.publish();
}

}  // namespace heddle
