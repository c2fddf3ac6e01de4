#include "checkpoint/matrix_source.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string_view>

#include "checkpoint/describe.hpp"
#include "experts/words.hpp"
#include "heddle/error.hpp"

namespace heddle::checkpoint {

namespace {

using Shape = std::vector<std::int64_t>;

bool holds_pairs(Dtype dtype) { return dtype == Dtype::u8 || dtype == Dtype::i8 || dtype == Dtype::f4; }
bool holds_powers(Dtype dtype) { return dtype == Dtype::u8 || dtype == Dtype::f8_e8m0; }

constexpr std::array<std::string_view, 2> value_names{"weight", "weight_packed"};
constexpr std::array<std::string_view, 3> scale_names{"weight_scale_inv", "weight_scale", "scale"};
constexpr std::array<std::string_view, 2> tensor_scale_names{"weight_scale_2", "weight_global_scale"};
// Calibrated activation scales: activations are quantised by their own maximum here.
constexpr std::array<std::string_view, 2> ignored_names{"input_scale", "input_global_scale"};

/// The one of `names` that the matrix has, null where it has none. Two of them would contradict each other.
const Tensor* find_one(TensorTable& table, const std::string& stem, std::span<const std::string_view> names) {
  const Tensor* found = nullptr;
  for (const std::string_view ending : names) {
    const Tensor* const tensor = table.find(fmt::format("{}.{}", stem, ending));
    if (tensor != nullptr && found != nullptr) {
      refuse(*tensor, fmt::format("contradicts {}; only one of the two may be there", in_quotes(found->name)));
    }
    if (tensor != nullptr) found = tensor;
  }
  return found;
}

/// Anything unexpected beside a weight (zero points, biases, permutations) changes what it means.
void refuse_unknown_names(const TensorTable& table, const std::string& stem) {
  const auto among = [](std::span<const std::string_view> names, std::string_view ending) {
    return std::find(names.begin(), names.end(), ending) != names.end();
  };
  for (const std::string& ending : table.endings(stem + ".")) {
    if (among(value_names, ending) || among(scale_names, ending)) continue;
    if (among(tensor_scale_names, ending) || among(ignored_names, ending)) continue;
    throw InputError(
        fmt::format("{}: tensor {}: {}", table.place(), in_quotes(fmt::format("{}.{}", stem, ending)),
                    ending == "bias" ? "experts with biases are not supported" : "is not part of any supported weight kind"));
  }
}

void set_size(MatrixSource& source) {
  const Tensor& values = *source.values;
  const bool packed = values.dtype == Dtype::u8 || values.dtype == Dtype::i8;
  if (values.shape.size() != 2) refuse(values, fmt::format("is {}; a weight matrix has two dimensions", type_and_shape(values)));
  const std::int64_t rows = values.shape[0];
  const std::int64_t stored_cols = values.shape[1];
  constexpr std::int64_t largest = 1 << 24;
  if (rows < 1 || rows > largest || stored_cols < 1 || stored_cols > largest) {
    refuse(values, fmt::format("is {}; sizes from 1 to {} are expected", type_and_shape(values), largest));
  }
  source.rows = static_cast<int>(rows);
  source.cols = static_cast<int>(packed ? 2 * stored_cols : stored_cols);
}

void set_fp8_kind(MatrixSource& source) {
  const Shape per_group{source.rows, source.cols / 32};
  const Shape per_block{(source.rows + 127) / 128, (source.cols + 127) / 128};
  const Tensor& scales = *source.scales;
  if (holds_powers(scales.dtype) && source.cols % 32 == 0 && scales.shape == per_group) {
    source.kind = WeightKind::mxfp8;
  } else if ((scales.dtype == Dtype::f32 || scales.dtype == Dtype::f8_e8m0) && scales.shape == per_block) {
    source.kind = WeightKind::fp8_block;
  } else {
    refuse(scales,
           fmt::format("is {}; for F8_E4M3 {} it should be F32 or F8_E8M0 {} (fp8 block) or U8 or F8_E8M0 {} (mxfp8)",
                       type_and_shape(scales), shape_text(source.values->shape), shape_text(per_block), shape_text(per_group)));
  }
}

void set_four_bit_kind(MatrixSource& source) {
  const Tensor& scales = *source.scales;
  const Shape thirty_twos{source.rows, source.cols / 32};
  const Shape sixteens{source.rows, source.cols / 16};
  if (holds_powers(scales.dtype) && source.cols % 32 == 0 && scales.shape == thirty_twos) {
    source.kind = WeightKind::mxfp4;
  } else if (scales.dtype == Dtype::f8_e4m3 && source.cols % 16 == 0 && scales.shape == sixteens) {
    source.kind = WeightKind::nvfp4;
  } else {
    refuse(scales, fmt::format("is {}; for {} columns of 4 bits it should be F8_E8M0 or U8 {} (mxfp4) or F8_E4M3 {} (nvfp4)",
                               type_and_shape(scales), source.cols, shape_text(thirty_twos), shape_text(sixteens)));
  }
}

void set_kind(MatrixSource& source) {
  const Tensor& values = *source.values;
  if (values.dtype == Dtype::bf16) {
    if (source.scales != nullptr) {
      refuse(*source.scales, fmt::format("is a scale, but {} is BF16, which has none", in_quotes(values.name)));
    }
    source.kind = WeightKind::bf16;
    return;
  }
  if (values.dtype != Dtype::f8_e4m3 && !holds_pairs(values.dtype)) {
    refuse(values,
           fmt::format("is {}; expert weights are BF16, F8_E4M3, or pairs of 4 bits in U8, I8 or F4", type_and_shape(values)));
  }
  if (source.scales == nullptr) {
    refuse(values, fmt::format("is {} without scales; they should be beside it as .weight_scale_inv, .weight_scale or .scale",
                               type_and_shape(values)));
  }
  if (values.dtype == Dtype::f8_e4m3) {
    set_fp8_kind(source);
  } else {
    set_four_bit_kind(source);
  }
}

void check_tensor_scale(const MatrixSource& source) {
  if (source.kind != WeightKind::nvfp4) {
    if (source.tensor_scale == nullptr) return;
    refuse(*source.tensor_scale, fmt::format("is a scale of the whole tensor; {} weights have none", kind_text(source.kind)));
  }
  if (source.tensor_scale == nullptr) {
    refuse(*source.values, "is nvfp4 without its tensor scale; .weight_scale_2 or .weight_global_scale should be beside it");
  }
  const Tensor& scale = *source.tensor_scale;
  if (scale.dtype != Dtype::f32 || scale.bytes.size() != 4) {
    refuse(scale, fmt::format("is {}; one F32 value is expected", type_and_shape(scale)));
  }
}

[[noreturn]] void refuse_scale(const MatrixSource& source, std::size_t index, const std::string& seen) {
  const auto width = static_cast<std::size_t>(source.scales->shape[1]);
  const std::size_t row = index / width;
  const std::size_t group = index % width;
  const std::string where = source.kind == WeightKind::fp8_block ? fmt::format("block row {}, block column {}", row, group)
                                                                 : fmt::format("row {}, group {}", row, group);
  refuse(*source.scales, fmt::format("the scale of {} is {}; scales must be finite", where, seen));
}

void check_byte_scales(const MatrixSource& source) {
  const auto bytes = source.scales->bytes;
  const bool e4m3 = source.scales->dtype == Dtype::f8_e4m3;
  const auto bad = std::find_if(bytes.begin(), bytes.end(), [e4m3](std::byte byte) {
    return e4m3 ? (byte & std::byte{0x7F}) == std::byte{0x7F} : byte == std::byte{0xFF};
  });
  if (bad == bytes.end()) return;
  refuse_scale(source, static_cast<std::size_t>(bad - bytes.begin()), fmt::format("0x{:02X} (NaN)", std::to_integer<int>(*bad)));
}

void check_f32_scales(const MatrixSource& source, std::span<const std::byte> bytes) {
  for (std::size_t i = 0; i < bytes.size() / 4; ++i) {
    float scale = 0.0f;
    std::memcpy(&scale, bytes.data() + 4 * i, 4);
    if (!std::isfinite(scale)) refuse_scale(source, i, fmt::format("{}", scale));
  }
}

float read_tensor_scale(const MatrixSource& source) {
  float stored = 0.0f;
  std::memcpy(&stored, source.tensor_scale->bytes.data(), 4);
  const float scale = source.tensor_scale_divides ? 1.0f / stored : stored;
  if (!std::isfinite(stored) || !std::isfinite(scale)) {
    refuse(*source.tensor_scale, fmt::format("is {}; {} is expected", stored,
                                             source.tensor_scale_divides ? "a divisor with a finite inverse" : "a finite scale"));
  }
  return scale;
}

}  // namespace

std::span<const std::byte> OwnedMemory::aligned(std::span<const std::byte> bytes, std::size_t alignment) {
  if (bytes.empty() || reinterpret_cast<std::uintptr_t>(bytes.data()) % alignment == 0) return bytes;
  const auto copy = allocate(bytes.size());
  std::memcpy(copy.data(), bytes.data(), bytes.size());
  return copy;
}

std::span<std::byte> OwnedMemory::allocate(std::size_t bytes) { return blocks_.emplace_back(bytes); }

MatrixSource find_matrix(TensorTable& table, const std::string& stem) {
  refuse_unknown_names(table, stem);
  MatrixSource source;
  source.values = find_one(table, stem, value_names);
  if (source.values == nullptr)
    throw InputError(fmt::format("{}: tensor {} is missing", table.place(), in_quotes(stem + ".weight")));
  source.scales = find_one(table, stem, scale_names);
  source.tensor_scale = find_one(table, stem, tensor_scale_names);
  source.tensor_scale_divides = source.tensor_scale != nullptr && source.tensor_scale->name.ends_with("weight_global_scale");
  if (source.values->name.ends_with(".weight_packed") && !holds_pairs(source.values->dtype)) {
    refuse(*source.values, fmt::format("is {}; packed weights are pairs of 4 bits in U8", type_and_shape(*source.values)));
  }
  set_size(source);
  set_kind(source);
  check_tensor_scale(source);
  return source;
}

WeightMatrix view_matrix(const MatrixSource& source, OwnedMemory& memory) {
  WeightMatrix matrix;
  matrix.kind = source.kind;
  matrix.rows = source.rows;
  matrix.cols = source.cols;
  matrix.values = memory.aligned(source.values->bytes, source.kind == WeightKind::bf16 ? 2 : 1);
  if (source.scales != nullptr && source.scales->dtype == Dtype::f32) {
    matrix.scales = memory.aligned(source.scales->bytes, 4);
    check_f32_scales(source, matrix.scales);
  } else if (source.scales != nullptr) {
    matrix.scales = source.scales->bytes;
    if (source.kind == WeightKind::fp8_block) matrix.block_scale = ScaleFormat::ue8m0;
    check_byte_scales(source);
  }
  if (source.tensor_scale != nullptr) matrix.tensor_scale = read_tensor_scale(source);
  return matrix;
}

}  // namespace heddle::checkpoint
