// Random weights and rows for the tests of the experts.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "experts/words.hpp"
#include "formats/codes.hpp"
#include "formats/rows.hpp"
#include "heddle/experts.hpp"

namespace heddle::testing {

inline constexpr WeightKind all_kinds[] = {WeightKind::bf16, WeightKind::fp8_block, WeightKind::mxfp4, WeightKind::nvfp4,
                                           WeightKind::mxfp8};
inline std::string name_of(WeightKind kind) { return std::string(word_in(weight_words, kind)); }

using Random = std::mt19937_64;

inline int pick(Random& random, int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); }

inline std::vector<std::uint16_t> bits_of(const std::vector<bf16>& values) {
  std::vector<std::uint16_t> bits;
  for (const bf16 value : values) bits.push_back(value.bits);
  return bits;
}

/// A weight matrix with its storage; moving it keeps the view right.
struct OwnedWeights {
  std::vector<std::byte> values;
  std::vector<std::byte> scales;
  WeightMatrix view;
};

/// Values of about unit size times 1/sqrt(cols), every code that is finite possible.
inline OwnedWeights random_weights(Random& random, WeightKind kind, int rows, int cols,
                                   ScaleFormat block_scale = ScaleFormat::f32) {
  OwnedWeights out;
  const auto count = static_cast<std::size_t>(rows) * static_cast<std::size_t>(cols);
  const auto groups = [&](int group) {
    return static_cast<std::size_t>(rows) * static_cast<std::size_t>((cols + group - 1) / group);
  };
  const auto bytes = [&](std::vector<std::byte>& to, std::size_t n, auto draw) {
    to.resize(n);
    for (std::byte& byte : to) {
      byte = static_cast<std::byte>(draw());
    }
  };
  const auto e4m3 = [&] {
    const int magnitude = pick(random, 0, 0x7E);
    return magnitude | (pick(random, 0, 1) << 7);
  };
  const auto any = [&] { return pick(random, 0, 255); };
  switch (kind) {
    case WeightKind::bf16: {
      std::normal_distribution<float> normal(0.0f, 0.05f);
      out.values.resize(2 * count);
      for (std::size_t i = 0; i < count; ++i) {
        const bf16 value = to_bf16(normal(random));
        std::memcpy(out.values.data() + 2 * i, &value, 2);
      }
      break;
    }
    case WeightKind::fp8_block: {
      bytes(out.values, count, e4m3);
      const auto blocks = static_cast<std::size_t>((rows + 127) / 128) * static_cast<std::size_t>((cols + 127) / 128);
      if (block_scale == ScaleFormat::ue8m0) {
        bytes(out.scales, blocks, [&] { return pick(random, 112, 118); });
      } else {
        std::uniform_real_distribution<float> scale(1e-4f, 2e-3f);
        out.scales.resize(4 * blocks);
        for (std::size_t i = 0; i < blocks; ++i) {
          const float value = scale(random);
          std::memcpy(out.scales.data() + 4 * i, &value, 4);
        }
      }
      break;
    }
    case WeightKind::mxfp4:
      bytes(out.values, count / 2, any);
      bytes(out.scales, groups(32), [&] { return pick(random, 118, 123); });
      break;
    case WeightKind::nvfp4:
      bytes(out.values, count / 2, any);
      bytes(out.scales, groups(16), [&] { return pick(random, 1, 0x60); });
      break;
    case WeightKind::mxfp8:
      bytes(out.values, count, e4m3);
      bytes(out.scales, groups(32), [&] { return pick(random, 112, 118); });
      break;
  }
  out.view.kind = kind;
  out.view.rows = rows;
  out.view.cols = cols;
  out.view.block_scale = block_scale;
  out.view.tensor_scale = kind == WeightKind::nvfp4 ? 0.0123f : 1.0f;
  out.view.values = out.values;
  out.view.scales = out.scales;
  return out;
}

/// Rows as they arrive, with their storage.
struct OwnedRows {
  std::vector<std::byte> bytes;
  RowView view;
  int count = 0;
};

/// Gaussian rows, each of its own size within 2^spread either way; as bf16, or quantised to wire rows.
inline OwnedRows random_rows(Random& random, int count, int cols, Activation format, const Quantisation& quantisation,
                             int spread = 3) {
  RowFormat wire;
  wire.wire = format == Activation::fp8 ? Wire::fp8 : Wire::bf16;
  wire.hidden = cols;
  wire.quantisation = quantisation;
  OwnedRows out;
  out.count = count;
  out.bytes.resize(static_cast<std::size_t>(count) * wire.row_bytes());
  std::vector<float> row(static_cast<std::size_t>(cols));
  std::normal_distribution<float> normal;
  for (int i = 0; i < count; ++i) {
    const float size = std::exp2(static_cast<float>(pick(random, -spread, spread)));
    for (float& value : row) {
      value = to_float(to_bf16(size * normal(random)));
    }
    quantise_row(row.data(), wire, out.bytes.data() + static_cast<std::size_t>(i) * wire.row_bytes());
  }
  out.view.format = format;
  out.view.values = out.bytes.data();
  out.view.value_stride = wire.row_bytes();
  out.view.scales = format == Activation::fp8 ? out.bytes.data() + wire.scale_offset() : nullptr;
  out.view.scale_stride = wire.row_bytes();
  return out;
}

inline std::size_t size(int value) { return static_cast<std::size_t>(value); }

/// A rank's experts with their storage.
struct Layer {
  std::vector<OwnedWeights> storage;
  std::vector<ExpertWeights> views;
  int hidden = 0;
  int intermediate = 0;

  Layer(Random& random, int experts, int h, int d, WeightKind kind) : hidden(h), intermediate(d) {
    for (int expert = 0; expert < experts; ++expert) {
      storage.push_back(random_weights(random, kind, d, h));
      storage.push_back(random_weights(random, kind, d, h));
      storage.push_back(random_weights(random, kind, h, d));
    }
    for (std::size_t i = 0; i < storage.size(); i += 3) {
      views.push_back({storage[i].view, storage[i + 1].view, storage[i + 2].view});
    }
  }
  HostExperts experts(const ExpertOptions& options) const { return {views, hidden, intermediate, options}; }
};

inline ExpertOptions random_options(Random& random) {
  ExpertOptions options;
  options.activation = pick(random, 0, 2) == 0 ? Activation::bf16 : Activation::fp8;
  options.quantisation.group = pick(random, 0, 3) == 0 ? 32 : 128;
  options.quantisation.scale = pick(random, 0, 1) == 0 ? ScaleFormat::f32 : ScaleFormat::ue8m0;
  options.clamp = pick(random, 0, 1) == 0 ? std::nullopt : std::optional<float>(5.0f);
  options.weight_at = pick(random, 0, 1) == 0 ? WeightAt::activation : WeightAt::combine;
  return options;
}

/// Choices of count tokens: distinct experts within a token, some -1.
struct Routing {
  std::vector<int> ids;
  std::vector<float> weights;

  Routing(Random& random, int count, int topk, int experts) {
    std::vector<int> all(size(experts));
    std::iota(all.begin(), all.end(), 0);
    for (int token = 0; token < count; ++token) {
      std::shuffle(all.begin(), all.end(), random);
      for (int choice = 0; choice < topk; ++choice) {
        ids.push_back(choice < experts && pick(random, 0, 3) != 0 ? all[size(choice)] : -1);
        weights.push_back(std::uniform_real_distribution<float>(0.0f, 1.0f)(random));
      }
    }
  }
};

}  // namespace heddle::testing
