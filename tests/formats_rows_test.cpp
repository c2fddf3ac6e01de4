// Whole rows: sizes, group rules, padding and conversions, against a slow statement of the rules.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iostream>
#include <limits>
#include <random>
#include <vector>

#include "formats/codes.hpp"
#include "formats/rows.hpp"
#include "heddle/error.hpp"

namespace {

using heddle::bf16;
using heddle::Quantisation;
using heddle::RowFormat;
using heddle::ScaleFormat;
using heddle::Wire;

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float nan_value = std::numeric_limits<float>::quiet_NaN();

RowFormat bf16_row(int hidden) { return {Wire::bf16, hidden, {}, 1.0f}; }
RowFormat fp8_row(int hidden, int group = 128, ScaleFormat scale = ScaleFormat::ue8m0) {
  return {Wire::fp8, hidden, {group, scale}, 1.0f};
}
RowFormat nvfp4_row(int hidden, float global_scale = 1.0f) { return {Wire::nvfp4, hidden, {}, global_scale}; }

std::vector<RowFormat> all_formats(int hidden) {
  std::vector<RowFormat> formats = {bf16_row(hidden), nvfp4_row(hidden), nvfp4_row(hidden, 0.37f)};
  for (const int group : {128, 32}) {
    for (const ScaleFormat scale : {ScaleFormat::ue8m0, ScaleFormat::f32}) formats.push_back(fp8_row(hidden, group, scale));
  }
  return formats;
}

template <class Value>
std::vector<std::byte> quantised(const std::vector<Value>& in, const RowFormat& format) {
  std::vector<std::byte> row(format.row_bytes() + 16, std::byte{0xA5});
  heddle::quantise_row(in.data(), format, row.data());
  EXPECT_TRUE(std::all_of(row.end() - 16, row.end(), [](std::byte b) { return b == std::byte{0xA5}; })) << "wrote behind the row";
  row.resize(format.row_bytes());
  return row;
}

std::vector<float> widened(const std::vector<std::byte>& row, const RowFormat& format) {
  std::vector<float> out(static_cast<std::size_t>(format.hidden));
  heddle::widen_row(row.data(), format, out.data());
  return out;
}

/// The rules of a row, value by value, with the library's division where they say "correctly rounded".
std::vector<std::byte> slow_row(const std::vector<float>& in, const RowFormat& format) {
  std::vector<std::byte> row(format.row_bytes(), std::byte{0});
  const bool fp8 = format.wire == Wire::fp8;
  const int size = fp8 ? format.quantisation.group : 16;
  for (int group = 0; group * size < format.hidden; ++group) {
    float amax = 1e-10f;
    bool has_nan = false, has_infinity = false;
    const int end = std::min((group + 1) * size, format.hidden);
    for (int i = group * size; i < end; ++i) {
      const float v = in[static_cast<std::size_t>(i)];
      has_nan = has_nan || std::isnan(v);
      has_infinity = has_infinity || std::isinf(v);
      if (std::abs(v) > amax) amax = std::abs(v);
    }
    std::byte* scale_out = row.data() + format.scale_offset() + static_cast<std::size_t>(group) * format.bytes_a_scale();
    float scale = 0;
    if (!fp8) {
      const int code = std::max<int>(1, heddle::to_e4m3(amax / (6.0f * format.global_scale)));
      *scale_out = static_cast<std::byte>(has_nan || has_infinity ? 0x7F : code);
      scale = heddle::from_e4m3(static_cast<std::uint8_t>(*scale_out)) * format.global_scale;
    } else if (format.quantisation.scale == ScaleFormat::f32) {
      scale = has_infinity ? nan_value : amax / 448.0f;
      std::memcpy(scale_out, &scale, sizeof scale);
    } else {
      int exponent = 0;
      const float fraction = std::frexp(amax / 448.0f, &exponent);  // in [0.5, 1)
      exponent -= fraction == 0.5f ? 1 : 0;
      *scale_out = static_cast<std::byte>(has_infinity ? 0xFF : exponent + 127);
      scale = has_infinity ? nan_value : std::ldexp(1.0f, exponent);
    }
    for (int i = group * size; i < end; ++i) {
      const float quotient = in[static_cast<std::size_t>(i)] / scale;
      if (fp8) {
        row[static_cast<std::size_t>(i)] = std::byte{heddle::to_e4m3(quotient)};
      } else {
        row[static_cast<std::size_t>(i / 2)] |= static_cast<std::byte>(heddle::to_e2m1(quotient) << (4 * (i % 2)));
      }
    }
  }
  return row;
}

/// Values of many sizes, groups of very different size, and a few zeros, NaNs and infinities.
std::vector<bf16> wild_values(int count, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<bf16> values(static_cast<std::size_t>(count));
  float spread = 1.0f;
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (i % 16 == 0) spread = std::ldexp(1.0f, static_cast<int>(random() % 250) - 130);
    float v = normal(random) * spread;
    const std::uint32_t dice = random() % 400;
    if (dice == 0) v = nan_value;
    if (dice == 1) v = random() % 2 == 0 ? infinity : -infinity;
    if (dice < 30 && dice > 1) v = dice % 2 == 0 ? 0.0f : -0.0f;
    values[i] = heddle::to_bf16(v);
  }
  return values;
}

std::vector<float> as_floats(const std::vector<bf16>& values) {
  std::vector<float> out;
  for (const bf16 v : values) out.push_back(heddle::to_float(v));
  return out;
}

TEST(RowFormat, Bytes) {
  EXPECT_EQ(bf16_row(5120).reported_bytes(), 10240u);
  EXPECT_EQ(fp8_row(5120, 32).reported_bytes(), 5280u);
  EXPECT_EQ(nvfp4_row(5120).reported_bytes(), 2880u);
  EXPECT_EQ(fp8_row(7168, 128, ScaleFormat::f32).reported_bytes(), 7168u + 56u * 4u);

  const RowFormat short_group = fp8_row(2880);  // 22 groups and one of 64
  EXPECT_EQ(short_group.groups(), 23);
  EXPECT_EQ(short_group.scale_bytes(), 23u);
  EXPECT_EQ(short_group.scale_offset(), 2880u);
  EXPECT_EQ(short_group.row_bytes(), 2880u + 32u);
  EXPECT_EQ(short_group.reported_bytes(), 2903u);
  EXPECT_EQ(nvfp4_row(40).scale_offset(), 32u);  // 20 bytes of pairs
  EXPECT_EQ(nvfp4_row(40).groups(), 3);
}

TEST(RowFormat, Check) {
  for (const RowFormat& format : all_formats(640)) EXPECT_NO_THROW(heddle::check_row_format(format));
  for (const RowFormat& bad :
       {bf16_row(0), fp8_row(640, 64), nvfp4_row(640, 0.0f), nvfp4_row(640, infinity), nvfp4_row(640, nan_value)}) {
    EXPECT_THROW(heddle::check_row_format(bad), heddle::InputError);
  }
}

TEST(Rows, RulesOfEveryFormat) {
  const std::uint32_t seed = std::random_device{}();
  std::cout << "seed " << seed << "\n";
  std::mt19937 random(seed);
  for (const int hidden : {64, 640, 2880, 4096, 5120, 40, 33, 1}) {
    for (const RowFormat& format : all_formats(hidden)) {
      for (int repeat = 0; repeat < 4; ++repeat) {
        const std::vector<bf16> values = wild_values(hidden, random);
        const std::vector<float> floats = as_floats(values);
        const std::vector<std::byte> row = quantised(values, format);
        ASSERT_EQ(row, quantised(floats, format)) << "from f32 differs, hidden " << hidden;
        if (format.wire != Wire::bf16) {
          ASSERT_EQ(row, slow_row(floats, format)) << "hidden " << hidden << ", group " << format.group_size();
        } else {
          ASSERT_EQ(std::memcmp(row.data(), values.data(), format.value_bytes()), 0);
        }
      }
    }
  }
}

TEST(Rows, WidenedValues) {
  std::vector<float> in(2880);
  for (std::size_t i = 0; i < in.size(); ++i)
    in[i] = std::sin(0.37f * static_cast<float>(i)) * std::exp2(static_cast<float>(i % 7));
  for (const RowFormat& format : all_formats(2880)) {
    const std::vector<std::byte> row = quantised(in, format);
    const std::vector<float> out = widened(row, format);
    for (int i = 0; i < format.hidden; ++i) {
      const auto at = static_cast<std::size_t>(i);
      const auto scale_at = format.scale_offset() + static_cast<std::size_t>(i / format.group_size()) * format.bytes_a_scale();
      float expected = heddle::to_float(heddle::to_bf16(in[at]));
      if (format.wire == Wire::nvfp4) {
        const auto code = static_cast<std::uint8_t>((static_cast<unsigned>(row[at / 2]) >> (4 * (i % 2))) & 15u);
        expected = heddle::from_e2m1(code) * heddle::from_e4m3(static_cast<std::uint8_t>(row[scale_at])) * format.global_scale;
        EXPECT_NEAR(out[at], in[at], 64.0f / 6.0f * 1.07f);  // half of the widest step, with the scale's own rounding
      } else if (format.wire == Wire::fp8) {
        float scale = heddle::from_ue8m0(static_cast<std::uint8_t>(row[scale_at]));
        if (format.quantisation.scale == ScaleFormat::f32) std::memcpy(&scale, &row[scale_at], sizeof scale);
        expected = heddle::from_e4m3(static_cast<std::uint8_t>(row[at])) * scale;
        EXPECT_NEAR(out[at], in[at], std::abs(in[at]) / 16.0f + 0.001f);
      }
      ASSERT_EQ(out[at], expected) << i;
    }
  }
}

TEST(Rows, Infinity) {
  for (const RowFormat& format : all_formats(640)) {
    if (format.wire == Wire::bf16) continue;
    std::vector<float> in(640, 1.0f);
    in[300] = -infinity;
    const std::vector<float> out = widened(quantised(in, format), format);
    for (int i = 0; i < 640; ++i) {
      const bool same_group = i / format.group_size() == 300 / format.group_size();
      ASSERT_EQ(std::isnan(out[static_cast<std::size_t>(i)]), same_group) << i;
    }
  }
}

TEST(Rows, NanStaysInItsElementWithFp8AndInItsGroupWithNvfp4) {
  std::vector<float> in(640, 1.0f);
  in[300] = nan_value;
  for (const RowFormat& format : all_formats(640)) {
    const std::vector<float> out = widened(quantised(in, format), format);
    for (int i = 0; i < 640; ++i) {
      const bool poisoned = format.wire == Wire::nvfp4 ? i / 16 == 300 / 16 : i == 300;
      ASSERT_EQ(std::isnan(out[static_cast<std::size_t>(i)]), poisoned) << i;
      if (!poisoned) {
        ASSERT_NEAR(out[static_cast<std::size_t>(i)], 1.0f, 0.13f);
      }
    }
  }
  EXPECT_EQ(quantised(in, fp8_row(640))[300], std::byte{0x7F});
}

TEST(Rows, SmallestScales) {
  const std::vector<float> zeros(64, -0.0f);
  const std::vector<std::byte> fp8 = quantised(zeros, fp8_row(64));
  EXPECT_EQ(fp8[0], std::byte{0x80});
  EXPECT_EQ(static_cast<int>(fp8[64]), 127 - 42);  // 1e-10 / 448 = 2.2e-13 is a little below 2^-42
  const std::vector<std::byte> nvfp4 = quantised(zeros, nvfp4_row(64));
  EXPECT_EQ(nvfp4[0], std::byte{0x88});
  EXPECT_EQ(nvfp4[32], std::byte{1});  // 2^-9, the first subnormal
}

TEST(Rows, ScaleIsLargeEnoughForTheLargestValue) {
  std::vector<float> in(128, 0.0f);
  for (const float largest : {448.0f, std::nextafter(448.0f, 1000.0f), 449.0f, 1e-6f, 3e38f}) {
    in[5] = largest;
    const std::vector<std::byte> row = quantised(in, fp8_row(128));
    const float scale = heddle::from_ue8m0(static_cast<std::uint8_t>(row[128]));
    EXPECT_GE(scale * 448.0, largest);
    EXPECT_LT(scale * 224.0, largest);
  }
  in[5] = 448.0f;
  EXPECT_EQ(static_cast<int>(quantised(in, fp8_row(128))[128]), 127);  // exactly 1: not raised
}

TEST(Rows, GlobalScaleExtendsTheRange) {
  const std::vector<float> large(16, 50000.0f);  // 448 * 6 = 2688 without one
  EXPECT_EQ(widened(quantised(large, nvfp4_row(16)), nvfp4_row(16))[3], 2688.0f);
  const RowFormat scaled = nvfp4_row(16, 50000.0f / 2688.0f);
  EXPECT_NEAR(widened(quantised(large, scaled), scaled)[3], 50000.0f, 0.01f);
}

TEST(Rows, ConversionsWidenAndQuantiseAgain) {
  const std::uint32_t seed = std::random_device{}();
  std::cout << "seed " << seed << "\n";
  std::mt19937 random(seed);
  for (const int hidden : {640, 2880, 33}) {
    const std::vector<bf16> values = wild_values(hidden, random);
    for (const RowFormat& from : all_formats(hidden)) {
      const std::vector<std::byte> row = quantised(values, from);
      for (const RowFormat& to : all_formats(hidden)) {
        std::vector<std::byte> converted(to.row_bytes(), std::byte{0xA5});
        heddle::convert_row(row.data(), from, converted.data(), to);
        ASSERT_EQ(converted, heddle::same_bytes(from, to) ? row : quantised(widened(row, from), to));
      }
    }
  }
}

TEST(Rows, PackedGroupsAreTheRowsGroups) {
  std::mt19937 random(7);
  const std::vector<float> in = as_floats(wild_values(2880, random));
  for (const int group : {128, 32}) {
    for (const ScaleFormat scale : {ScaleFormat::ue8m0, ScaleFormat::f32}) {
      const RowFormat format = fp8_row(2880, group, scale);
      const std::vector<std::byte> row = quantised(in, format);
      std::vector<std::uint8_t> values(2880);
      std::vector<std::byte> scales(format.scale_bytes());
      heddle::quantise_fp8(in.data(), 2880, format.quantisation, values.data(), scales.data());
      EXPECT_EQ(std::memcmp(values.data(), row.data(), 2880), 0);
      EXPECT_EQ(std::memcmp(scales.data(), row.data() + format.scale_offset(), scales.size()), 0);
      std::vector<float> out(2880);
      heddle::widen_fp8(values.data(), scales.data(), 2880, format.quantisation, out.data());
      EXPECT_EQ(std::memcmp(out.data(), widened(row, format).data(), 2880 * sizeof(float)), 0);
    }
  }
}

}  // namespace
