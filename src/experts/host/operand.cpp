#include "experts/host/operand.hpp"

#include <algorithm>
#include <cstring>

#include "experts/host/kernels.hpp"
#include "experts/host/tile.hpp"
#include "formats/codes.hpp"
#include "formats/rows.hpp"

namespace heddle {
namespace {
std::size_t size(int value) { return static_cast<std::size_t>(value); }
}  // namespace

const float* Operand::values(int step, int row) const {
  return values_.data() + (size(step) * size(padded_) + size(row)) * tile::step;
}

float Operand::scale(int group, int row) const { return scaled_ ? scales_.data()[size(group) * size(padded_) + size(row)] : 1.0f; }

void Operand::pack_bf16(const std::byte* values, int row) {
  const TileKernels& kernels = tile_kernels();
  for (int step = 0; step * tile::step < cols_; ++step) {
    const int begin = step * tile::step;
    float* out = values_.data() + (size(step) * size(padded_) + size(row)) * tile::step;
    kernels.widen_bf16(values + 2 * begin, std::min(tile::step, cols_ - begin), out);
  }
}

void Operand::pack_fp8(const std::byte* values, const std::byte* scales, ScaleFormat format, int row) {
  const TileKernels& kernels = tile_kernels();
  for (int step = 0; step * tile::step < cols_; ++step) {
    const int begin = step * tile::step;
    float* out = values_.data() + (size(step) * size(padded_) + size(row)) * tile::step;
    kernels.widen_e4m3(values + begin, std::min(tile::step, cols_ - begin), out);
  }
  for (int group = 0; group * group_ < cols_; ++group) {
    float scale;
    if (format == ScaleFormat::ue8m0) {
      scale = from_ue8m0(static_cast<std::uint8_t>(scales[group]));
    } else {
      std::memcpy(&scale, scales + sizeof(float) * size(group), sizeof scale);
    }
    scales_.data()[size(group) * size(padded_) + size(row)] = scale;
  }
}

void Operand::pack(const RowView& view, const int* rows, int count, int cols, Activation activation,
                   const Quantisation& quantisation) {
  count_ = count;
  padded_ = tile::round_up(count_, tile::row_unit);
  cols_ = cols;
  scaled_ = activation == Activation::fp8;
  group_ = scaled_ ? quantisation.group : tile::step;
  const std::size_t values = size(tile::steps(cols)) * size(padded_) * tile::step;
  std::fill_n(values_.resize(values), values, 0.0f);
  const std::size_t groups = size((cols + group_ - 1) / group_);
  scales_.resize(groups * size(padded_));
  for (int i = 0; i < count_; ++i) {
    const std::size_t row = size(rows != nullptr ? rows[i] : i);
    const std::byte* from = view.values + row * view.value_stride;
    if (!scaled_) {
      pack_bf16(from, i);
    } else if (view.format == Activation::fp8) {
      pack_fp8(from, view.scales + row * view.scale_stride, quantisation.scale, i);
    } else {
      tile_kernels().widen_bf16(from, cols, wide_.resize(size(cols)));
      quantise_fp8(wide_.data(), cols, quantisation, codes_.resize(size(cols)), code_scales_.resize(groups * sizeof(float)));
      pack_fp8(reinterpret_cast<const std::byte*>(codes_.data()), code_scales_.data(), quantisation.scale, i);
    }
  }
}

}  // namespace heddle
