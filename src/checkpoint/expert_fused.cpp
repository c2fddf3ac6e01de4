// Experts that share two tensors: gate_up_proj [E, 2D, H] (gate above up) and down_proj [E, H, D], or both transposed.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "checkpoint/describe.hpp"
#include "checkpoint/expert_source.hpp"
#include "heddle/error.hpp"

namespace heddle::checkpoint {

namespace {

constexpr std::size_t value_bytes = 2;  // bf16

class FusedExperts final : public ExpertSource {
 public:
  FusedExperts(const Tensor& gate_up, const Tensor& down, ExpertSize size, bool transposed)
      : gate_up_(gate_up), down_(down), size_(size), transposed_(transposed) {}

  int experts() const override { return static_cast<int>(down_.shape[0]); }
  ExpertSize size() const override { return size_; }
  WeightKind kind() const override { return WeightKind::bf16; }

  ExpertWeights load(int id, OwnedMemory& memory) const override {
    const auto [hidden, intermediate] = size_;
    return {part(gate_up_, id, 2 * intermediate, hidden, 0, intermediate, memory),
            part(gate_up_, id, 2 * intermediate, hidden, intermediate, intermediate, memory),
            part(down_, id, hidden, intermediate, 0, hidden, memory)};
  }

 private:
  /// Rows [first_row, first_row + rows) of expert id's matrix [all_rows, cols], copied row-major if it is stored transposed.
  WeightMatrix part(const Tensor& tensor, int id, int all_rows, int cols, int first_row, int rows, OwnedMemory& memory) const {
    const std::size_t matrix_bytes = static_cast<std::size_t>(all_rows) * static_cast<std::size_t>(cols) * value_bytes;
    const auto stored = tensor.bytes.subspan(static_cast<std::size_t>(id) * matrix_bytes, matrix_bytes);
    const std::size_t row_bytes = static_cast<std::size_t>(cols) * value_bytes;
    WeightMatrix matrix;
    matrix.rows = rows;
    matrix.cols = cols;
    if (!transposed_) {
      const auto bytes =
          stored.subspan(static_cast<std::size_t>(first_row) * row_bytes, static_cast<std::size_t>(rows) * row_bytes);
      matrix.values = memory.aligned(bytes, value_bytes);
      return matrix;
    }
    const auto copy = memory.allocate(static_cast<std::size_t>(rows) * row_bytes);
    constexpr int tile = 32;  // of columns, so that writes stay near each other as well
    for (int begin = 0; begin < cols; begin += tile) {
      for (int row = 0; row < rows; ++row) {
        for (int col = begin; col < std::min(begin + tile, cols); ++col) {
          const auto from =
              static_cast<std::size_t>(col) * static_cast<std::size_t>(all_rows) + static_cast<std::size_t>(first_row + row);
          const auto to = static_cast<std::size_t>(row) * static_cast<std::size_t>(cols) + static_cast<std::size_t>(col);
          std::memcpy(copy.data() + to * value_bytes, stored.data() + from * value_bytes, value_bytes);
        }
      }
    }
    matrix.values = copy;
    return matrix;
  }

  const Tensor& gate_up_;
  const Tensor& down_;
  ExpertSize size_;
  bool transposed_;
};

/// gpt-oss stores blocks, scales and biases under names like these, with gate and up interleaved.
void refuse_other_fused_names(const TensorTable& table, const std::string& stem) {
  for (const std::string& ending : table.endings(stem)) {
    if (ending == "gate_up_proj" || ending == "down_proj") continue;
    const bool like_gpt_oss = ending.ends_with("_bias") || ending.ends_with("_blocks") || ending.ends_with("_scales");
    throw InputError(fmt::format("{}: tensor {}: {}", table.place(), in_quotes(fmt::format("{}{}", stem, ending)),
                                 like_gpt_oss ? "interleaved or biased experts (gpt-oss) are not supported"
                                              : "fused experts have gate_up_proj and down_proj in BF16, nothing else"));
  }
}

const Tensor& find_fused(TensorTable& table, const std::string& tensor_name) {
  const Tensor* const tensor = table.find(tensor_name);
  if (tensor == nullptr) throw InputError(fmt::format("{}: tensor {} is missing", table.place(), in_quotes(tensor_name)));
  if (tensor->dtype != Dtype::bf16)
    refuse(*tensor, fmt::format("is {}; fused experts are supported in BF16", type_and_shape(*tensor)));
  constexpr std::int64_t largest = 1 << 24;
  const bool sizes_fit =
      std::all_of(tensor->shape.begin(), tensor->shape.end(), [](std::int64_t size) { return size >= 1 && size <= largest; });
  if (tensor->shape.size() != 3 || !sizes_fit) {
    refuse(*tensor, fmt::format("is {}; fused experts have three sizes from 1 to {}", type_and_shape(*tensor), largest));
  }
  return *tensor;
}

/// Do the two shapes fit [E, 2D, H] and [E, H, D], or transposed [E, H, 2D] and [E, D, H]?
bool shapes_fit(const Tensor& gate_up, const Tensor& down, bool transposed) {
  const std::size_t first = transposed ? 2 : 1, second = transposed ? 1 : 2;
  return gate_up.shape[first] == 2 * down.shape[second] && gate_up.shape[second] == down.shape[first];
}

}  // namespace

std::unique_ptr<ExpertSource> find_fused_experts(TensorTable& table, const LayerNames& layer, const ModelConfig& config) {
  const std::string stem = layer.prefix + "experts.";
  refuse_other_fused_names(table, stem);
  const std::string gate_up_name = stem + "gate_up_proj";
  const std::string down_name = stem + "down_proj";
  const Tensor& gate_up = find_fused(table, gate_up_name);
  const Tensor& down = find_fused(table, down_name);
  const bool transposed = shapes_fit(gate_up, down, true);
  if (!transposed && !shapes_fit(gate_up, down, false)) {
    refuse(gate_up, fmt::format("is {} and down_proj is {}; [E, 2D, H] and [E, H, D], or [E, H, 2D] and [E, D, H] are expected",
                                shape_text(gate_up.shape), shape_text(down.shape)));
  }
  if (gate_up.shape[0] != down.shape[0]) {
    refuse(gate_up, fmt::format("holds {} experts and down_proj {}; both should hold the same", gate_up.shape[0], down.shape[0]));
  }
  // A square down_proj reads the same either way; only a configuration with both sizes shows that nothing was mistaken.
  if (down.shape[1] == down.shape[2] && !(config.hidden && config.intermediate)) {
    refuse(down, fmt::format(
                     "is {}: with equal hidden and intermediate size its orientation is ambiguous; a config.json with hidden_size "
                     "and moe_intermediate_size beside the file settles it",
                     shape_text(down.shape)));
  }
  const std::size_t hidden_at = transposed ? 2 : 1, intermediate_at = transposed ? 1 : 2;
  const ExpertSize size{static_cast<int>(down.shape[hidden_at]), static_cast<int>(down.shape[intermediate_at])};
  if (size.hidden % 64 != 0 || size.intermediate % 64 != 0) {
    refuse(down, fmt::format("has hidden size {} and intermediate size {}; both must be multiples of 64", size.hidden,
                             size.intermediate));
  }
  if (config.experts && *config.experts != down.shape[0]) {
    refuse(down, fmt::format("holds {} experts, but {} says {}", down.shape[0], config.file, *config.experts));
  }
  return std::make_unique<FusedExperts>(gate_up, down, size, transposed);
}

}  // namespace heddle::checkpoint
