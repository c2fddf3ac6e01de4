// The loops of kernels.hpp, compiled once an instruction set: kernels.cpp includes this file inside a
// namespace that names the set and defines `lanes`, widen_e4m3_vector and widen_e2m1_vector: so many
// values at once, times a scale, where the compiler needs help. No include guard, for that reason.

void widen_bf16(const std::byte* in, int count, float* out) {
  for (int i = 0; i < count; ++i) {
    out[i] = float_from_bits(static_cast<std::uint32_t>(load<std::uint16_t>(in + 2 * i)) << 16);
  }
}

[[gnu::always_inline]] inline void widen_e4m3_scaled(const std::byte* in, int count, float scale, float* out) {
  int i = 0;
  if constexpr (lanes > 1) {
    for (; i + lanes <= count; i += lanes) {
      widen_e4m3_vector(in + i, scale, out + i);
    }
  }
  for (; i < count; ++i) {
    out[i] = from_e4m3(static_cast<std::uint8_t>(in[i])) * scale;
  }
}

void widen_e4m3(const std::byte* in, int count, float* out) { widen_e4m3_scaled(in, count, 1.0f, out); }

[[gnu::always_inline]] inline void widen_e2m1_scaled(const std::byte* in, int count, float scale, float* out) {
  int i = 0;
  if constexpr (lanes > 1) {
    for (; i + lanes <= count; i += lanes) {
      widen_e2m1_vector(in + i / 2, scale, out + i);
    }
  }
  for (int j = i / 2; j < count / 2; ++j) {
    const auto pair = static_cast<std::uint8_t>(in[j]);
    out[2 * j] = from_e2m1(pair) * scale;
    out[2 * j + 1] = from_e2m1(static_cast<std::uint8_t>(pair >> 4)) * scale;
  }
}

/// The columns of one row, `group` of them sharing a scale whose value a table gives.
template <int group, int bits>
[[gnu::always_inline]] inline void widen_groups(const std::byte* values, const std::byte* scales, const float* table, int count,
                                                float* out) {
  const auto widen = [](const std::byte* in, int length, float scale, float* to) __attribute__((always_inline)) {
    if constexpr (bits == 8) {
      widen_e4m3_scaled(in, length, scale, to);
    } else {
      widen_e2m1_scaled(in, length, scale, to);
    }
  };
  int i = 0;
  for (; i + group <= count; i += group) {
    widen(values + i * bits / 8, group, table[static_cast<std::uint8_t>(scales[i / group])], out + i);
  }
  if (i < count) {
    widen(values + i * bits / 8, count - i, table[static_cast<std::uint8_t>(scales[i / group])], out + i);
  }
}

void widen_weights(const WeightMatrix& weights, int first, int rows, int begin, int count, float* out) {
  const auto cols = static_cast<std::size_t>(weights.cols);
  const ScaleTables& tables = scale_tables();
  const int bits = bits_a_value(weights.kind);
  const auto values_at = [&](int row) {
    return weights.values.data() + (static_cast<std::size_t>(first + row) * cols + static_cast<std::size_t>(begin)) * bits / 8;
  };
  const auto scales_at = [&](int row, int group) {
    return weights.scales.data() + static_cast<std::size_t>(first + row) * ((cols + group - 1) / group) + begin / group;
  };
  for (int row = 0; row < rows; ++row, out += tile::step) {
    // Rows are far apart and a tile takes a few lines of each: no hardware prefetcher follows.
    if (row + prefetch_rows < rows) {
      const std::byte* ahead = values_at(row + prefetch_rows);
      const int bytes = count * bits / 8;
      for (int offset = 0; offset < bytes; offset += 64) {
        __builtin_prefetch(ahead + offset);
      }
      __builtin_prefetch(ahead + bytes - 1);  // the values need not begin with a line
    }
    switch (weights.kind) {
      case WeightKind::bf16:
        widen_bf16(values_at(row), count, out);
        break;
      case WeightKind::fp8_block:
        widen_e4m3_scaled(values_at(row), count, 1.0f, out);
        break;
      case WeightKind::mxfp8:
        widen_groups<32, 8>(values_at(row), scales_at(row, 32), tables.ue8m0.data(), count, out);
        break;
      case WeightKind::mxfp4:
        widen_groups<32, 4>(values_at(row), scales_at(row, 32), tables.ue8m0.data(), count, out);
        break;
      case WeightKind::nvfp4:
        widen_groups<16, 4>(values_at(row), scales_at(row, 16), tables.e4m3.data(), count, out);
        break;
    }
  }
}

void promote(const float* partial, float scale, int count, float* sum) {
  for (int i = 0; i < count; ++i) {
    sum[i] = std::fma(partial[i], scale, sum[i]);
  }
}

void round(const float* in, int count, bf16* out) {
  for (int i = 0; i < count; ++i) {
    out[i] = to_bf16(in[i]);
  }
}
