// Feeds bytes to everything that reads files: a layer, a batch, config.json. Whatever they hold, the reader
// must answer with a layer or with an InputError of one line; the sanitizers watch every access.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "checkpoint/batch.hpp"
#include "checkpoint/layer.hpp"
#include "heddle/error.hpp"

namespace {

using namespace heddle;

unsigned checksum = 0;  // makes every byte of a view count

void touch(const WeightMatrix& weights) {
  for (const std::byte byte : weights.values) checksum += std::to_integer<unsigned>(byte);
  for (const std::byte byte : weights.scales) checksum += std::to_integer<unsigned>(byte);
}

void touch(const ExpertWeights& expert) {
  touch(expert.gate);
  touch(expert.up);
  touch(expert.down);
}

void read_layer(std::span<const std::byte> bytes, const CheckpointOptions& options) {
  checkpoint::Layer layer(checkpoint::TensorTable::of(checkpoint::SafetensorsFile::from_bytes("input", bytes)), {}, options);
  for (const float value : layer.router_weights()) checksum += value == value ? 1 : 0;
  for (const float value : layer.router_bias()) checksum += value == value ? 1 : 0;
  if (const auto& shared = layer.shared()) {
    touch(shared->weights);
    touch(to_mxfp4(*shared).weights);
  }
  for (int id = 0; id < std::min(layer.shape().experts, 4); ++id) touch(layer.expert(id));
}

void read_batch_bytes(std::span<const std::byte> bytes) {
  const Batch batch = checkpoint::read_batch(*checkpoint::SafetensorsFile::from_bytes("input", bytes), "input");
  checksum += static_cast<unsigned>(batch.hidden_states.size());
}

/// A file whose header is the input itself, so that mutations of it need not keep its length right.
std::vector<std::byte> file_around(std::span<const std::byte> input) {
  if (input.size() < 2) return {};
  const std::size_t data_bytes = std::to_integer<std::size_t>(input[0]) | std::to_integer<std::size_t>(input[1]) << 8;
  const auto header = input.subspan(2);
  std::vector<std::byte> file;
  for (int i = 0; i < 8; ++i) file.push_back(static_cast<std::byte>(header.size() >> (8 * i)));
  file.insert(file.end(), header.begin(), header.end());
  file.insert(file.end(), data_bytes, std::byte{0x11});
  return file;
}

void read_as(std::uint8_t what, std::span<const std::byte> input) {
  CheckpointOptions third_layer;
  third_layer.layer_index = 3;
  switch (what % 6) {
    case 0:
      return read_layer(input, {});
    case 1:
      return read_layer(file_around(input), {});
    case 2:
      return read_layer(file_around(input), third_layer);
    case 3:
      return read_batch_bytes(input);
    case 4:
      return read_batch_bytes(file_around(input));
    default:
      checkpoint::parse_model_config({reinterpret_cast<const char*>(input.data()), input.size()}, "config.json");
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  try {
    read_as(data[0], std::as_bytes(std::span(data + 1, size - 1)));
  } catch (const InputError& error) {
    const std::string_view message = error.what();
    if (message.empty() || message.find('\n') != std::string_view::npos) std::abort();  // not one line
  }
  return 0;
}
