// Element types of safetensors files.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace heddle::checkpoint {

enum class Dtype : std::uint8_t {
  boolean,
  f4,
  f6_e2m3,
  f6_e3m2,
  u8,
  i8,
  f8_e5m2,
  f8_e4m3,
  f8_e8m0,
  f8_e4m3fnuz,
  f8_e5m2fnuz,
  i16,
  u16,
  f16,
  bf16,
  i32,
  u32,
  f32,
  i64,
  u64,
  f64,
  c64
};

/// The name a header uses, e.g. "F8_E4M3".
std::string_view name(Dtype dtype);
int bits_per_value(Dtype dtype);
/// Nothing where the format knows no such name.
std::optional<Dtype> dtype_from_name(std::string_view name);
/// All known names, for messages.
std::string known_dtypes();

}  // namespace heddle::checkpoint
