// Small random layers on disk, in any naming and weight kind, with the exact values they hold: for
// tests that start from a file. Written without the library's conversions, so that it can check them.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "folder.hpp"
#include "heddle/checkpoint.hpp"

namespace heddle::testing {

using heddle::TempFolder;

/// splitmix64: the same numbers on every machine.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next() {
    std::uint64_t z = (state_ += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  /// In [0, bound).
  int below(int bound) { return static_cast<int>(next() % static_cast<std::uint64_t>(bound)); }
  /// In [-1, 1).
  float symmetric() { return static_cast<float>(static_cast<std::int64_t>(next() >> 40) - (1 << 23)) * 0x1p-23f; }

 private:
  std::uint64_t state_;
};

/// A tensor that owns its bytes.
struct OwnedTensor {
  std::string name, dtype;
  std::vector<std::int64_t> shape;
  std::vector<std::byte> data;
};

template <typename T>
OwnedTensor make_tensor(std::string name, std::string dtype, std::vector<std::int64_t> shape, const std::vector<T>& values) {
  OwnedTensor tensor{std::move(name), std::move(dtype), std::move(shape), {}};
  tensor.data.resize(values.size() * sizeof(T));
  if (!values.empty()) std::memcpy(tensor.data.data(), values.data(), tensor.data.size());
  return tensor;
}

inline void write_tensors(const std::string& path, const std::vector<OwnedTensor>& tensors) {
  std::vector<TensorOut> out;
  for (const OwnedTensor& tensor : tensors) out.push_back({tensor.name, tensor.dtype, tensor.shape, tensor.data});
  write_safetensors(path, out);
}

/// A matrix as it is meant: values * scales, exact in f32, row-major [rows, cols].
struct MatrixValues {
  int rows = 0;
  int cols = 0;
  std::vector<float> values;
};

struct ExpertValues {
  MatrixValues gate, up, down;  ///< [D, H], [D, H], [H, D]
};

/// How names are built. Any kind goes with the first three; the fused ones hold bf16 only.
enum class Naming { hugging_face, mixtral, deepseek_v4, fused, fused_transposed };

struct LayerFileSpec {
  LayerShape shape;  ///< topk and clamp go into config.json
  WeightKind kind = WeightKind::bf16;
  Naming naming = Naming::hugging_face;
  std::uint64_t seed = 1;
  std::optional<WeightKind> shared;  ///< its kind; none: no shared expert
  int shared_intermediate = 0;       ///< 0: like the routed experts
  bool shared_gate = false;
  bool router = true;
  bool router_f32 = false;
  bool bias = false;
  bool packed_names = false;                   ///< nvfp4: weight_packed and weight_global_scale
  ScaleFormat block_scale = ScaleFormat::f32;  ///< fp8_block
  std::string prefix = "model.layers.3.";
  std::optional<RouterOptions> config;  ///< writes config.json with these settings
  int shards = 1;                       ///< more: a sharded index
};

/// The tensors of a layer and what they mean; nothing is written yet, so a test can damage them first.
struct LayerTensors {
  std::vector<OwnedTensor> tensors;
  std::vector<ExpertValues> experts;
  std::optional<ExpertValues> shared;
  std::vector<float> shared_gate, router, bias;  ///< [H], [E, H], [E] as far as asked for
};

/// A layer on disk.
struct LayerFile : LayerTensors {
  TempFolder folder;
  std::string path;  ///< the file, or the folder where there are shards
};

namespace layer_detail {

inline float e4m3_value(int code) {
  const int exponent = (code >> 3) & 15;
  const float significand = exponent == 0 ? static_cast<float>(code & 7) / 8.0f : 1.0f + static_cast<float>(code & 7) / 8.0f;
  const float magnitude = std::ldexp(significand, (exponent == 0 ? 1 : exponent) - 7);
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}

inline float e2m1_value(int code) {
  constexpr float magnitudes[] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  return (code & 8) != 0 ? -magnitudes[code & 7] : magnitudes[code & 7];
}

/// Draws stored tensors and keeps what they mean. Values have a deviation near 1/sqrt(cols).
class MatrixWriter {
 public:
  MatrixWriter(const LayerFileSpec& spec, Random& random, std::vector<OwnedTensor>& out)
      : spec_(spec), random_(random), out_(out) {}

  MatrixValues write(const std::string& stem, WeightKind kind, int rows, int cols) {
    MatrixValues result{rows, cols, std::vector<float>(static_cast<std::size_t>(rows) * static_cast<std::size_t>(cols))};
    switch (kind) {
      case WeightKind::bf16:
        bf16_matrix(stem, result);
        break;
      case WeightKind::fp8_block:
        fp8_block(stem, result);
        break;
      case WeightKind::mxfp4:
        four_bits(stem, result, 32);
        break;
      case WeightKind::nvfp4:
        four_bits(stem, result, 16);
        break;
      case WeightKind::mxfp8:
        mxfp8(stem, result);
        break;
    }
    return result;
  }

  /// bf16 values without writing a tensor.
  std::vector<std::uint16_t> draw_bf16(MatrixValues& result) {
    std::vector<std::uint16_t> stored(result.values.size());
    const float deviation = 1.7f / std::sqrt(static_cast<float>(result.cols));
    for (std::size_t i = 0; i < stored.size(); ++i) {
      stored[i] = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(random_.symmetric() * deviation) >> 16);
      result.values[i] = std::bit_cast<float>(static_cast<std::uint32_t>(stored[i]) << 16);
    }
    return stored;
  }

 private:
  static std::size_t at(int row, int cols, int col) {
    return static_cast<std::size_t>(row) * static_cast<std::size_t>(cols) + static_cast<std::size_t>(col);
  }
  /// Exponent of the scale that brings values of size `typical` to 1/sqrt(cols), moved by -1, 0 or 1.
  int scale_exponent(int cols, float typical) {
    return static_cast<int>(std::lround(-std::log2(typical * std::sqrt(static_cast<float>(cols))))) + random_.below(3) - 1;
  }
  /// A finite e4m3 code of medium size, zero now and then.
  std::uint8_t e4m3_code() {
    return static_cast<std::uint8_t>((random_.below(2) << 7) | (random_.below(64) == 0 ? 0 : 0x20 + random_.below(0x30)));
  }
  std::string scale_name() const { return spec_.naming == Naming::deepseek_v4 ? ".scale" : ".weight_scale"; }

  void bf16_matrix(const std::string& stem, MatrixValues& result) {
    const auto stored = draw_bf16(result);
    out_.push_back(make_tensor(stem + ".weight", "BF16", {result.rows, result.cols}, stored));
  }

  void fp8_block(const std::string& stem, MatrixValues& result) {
    const int block_rows = (result.rows + 127) / 128, block_cols = (result.cols + 127) / 128;
    const bool power_of_two = spec_.block_scale == ScaleFormat::ue8m0;
    std::vector<float> scales;
    std::vector<std::uint8_t> scale_bytes, codes;
    for (int i = 0; i < block_rows * block_cols; ++i) {
      const int exponent = scale_exponent(result.cols, 3.0f);
      // Few significant bits: value times scale is then exact in f32.
      const float significand = power_of_two ? 1.0f : 1.0f + static_cast<float>(random_.below(1024)) / 1024.0f;
      scales.push_back(std::ldexp(significand, exponent));
      scale_bytes.push_back(static_cast<std::uint8_t>(exponent + 127));
    }
    for (int row = 0; row < result.rows; ++row) {
      for (int col = 0; col < result.cols; ++col) {
        codes.push_back(e4m3_code());
        result.values[at(row, result.cols, col)] = e4m3_value(codes.back()) * scales[at(row / 128, block_cols, col / 128)];
      }
    }
    const std::string name = stem + (spec_.naming == Naming::deepseek_v4 ? ".scale" : ".weight_scale_inv");
    out_.push_back(make_tensor(stem + ".weight", "F8_E4M3", {result.rows, result.cols}, codes));
    if (power_of_two) {
      out_.push_back(make_tensor(name, "F8_E8M0", {block_rows, block_cols}, scale_bytes));
    } else {
      out_.push_back(make_tensor(name, "F32", {block_rows, block_cols}, scales));
    }
  }

  void four_bits(const std::string& stem, MatrixValues& result, int group) {
    const bool nvfp4 = group == 16;
    const float tensor_scale = nvfp4 ? std::ldexp(1.0f, -random_.below(4) - 9) : 1.0f;
    std::vector<std::uint8_t> scales, pairs;
    for (int row = 0; row < result.rows; ++row) {
      float scale = 1.0f;
      for (int col = 0; col < result.cols; ++col) {
        if (col % group == 0) {
          const int exponent = scale_exponent(result.cols, 2.9f);
          const int code = nvfp4 ? 0x60 + random_.below(16) : exponent + 127;
          scale = nvfp4 ? e4m3_value(code) * tensor_scale : std::ldexp(1.0f, exponent);
          scales.push_back(static_cast<std::uint8_t>(code));
        }
        const int code = random_.below(16);
        if (col % 2 == 0)
          pairs.push_back(static_cast<std::uint8_t>(code));
        else
          pairs.back() = static_cast<std::uint8_t>(pairs.back() | (code << 4));
        result.values[at(row, result.cols, col)] = e2m1_value(code) * scale;
      }
    }
    const bool packed = nvfp4 && spec_.packed_names;
    const std::string dtype = nvfp4 || spec_.naming != Naming::deepseek_v4 ? "U8" : "I8";
    out_.push_back(make_tensor(stem + (packed ? ".weight_packed" : ".weight"), dtype, {result.rows, result.cols / 2}, pairs));
    if (!nvfp4) {
      out_.push_back(make_tensor(stem + scale_name(), spec_.naming == Naming::deepseek_v4 ? "F8_E8M0" : "U8",
                                 {result.rows, result.cols / group}, scales));
      return;
    }
    out_.push_back(make_tensor(stem + ".weight_scale", "F8_E4M3", {result.rows, result.cols / group}, scales));
    if (packed)
      out_.push_back(make_tensor(stem + ".weight_global_scale", "F32", {1}, std::vector<float>{1.0f / tensor_scale}));
    else
      out_.push_back(make_tensor(stem + ".weight_scale_2", "F32", {}, std::vector<float>{tensor_scale}));
  }

  void mxfp8(const std::string& stem, MatrixValues& result) {
    std::vector<std::uint8_t> scales, codes;
    for (int row = 0; row < result.rows; ++row) {
      int exponent = 0;
      for (int col = 0; col < result.cols; ++col) {
        if (col % 32 == 0) {
          exponent = scale_exponent(result.cols, 3.0f);
          scales.push_back(static_cast<std::uint8_t>(exponent + 127));
        }
        codes.push_back(e4m3_code());
        result.values[at(row, result.cols, col)] = std::ldexp(e4m3_value(codes.back()), exponent);
      }
    }
    out_.push_back(make_tensor(stem + ".weight", "F8_E4M3", {result.rows, result.cols}, codes));
    out_.push_back(make_tensor(stem + scale_name(), "U8", {result.rows, result.cols / 32}, scales));
  }

  const LayerFileSpec& spec_;
  Random& random_;
  std::vector<OwnedTensor>& out_;
};

struct Names {
  std::string block, gate, up, down, shared, bias;
};

inline Names names_of(const LayerFileSpec& spec) {
  switch (spec.naming) {
    case Naming::mixtral:
      return {spec.prefix + "block_sparse_moe.", "w1", "w3", "w2", "shared_experts.", "gate.e_score_correction_bias"};
    case Naming::deepseek_v4:
      return {spec.prefix + "ffn.", "w1", "w3", "w2", "shared_experts.", "gate.bias"};
    default:
      break;
  }
  const std::string shared = spec.shared_gate ? "shared_expert." : "shared_experts.";
  return {spec.prefix + "mlp.", "gate_proj", "up_proj", "down_proj", shared, "gate.e_score_correction_bias"};
}

/// gate above up [2D, H] and down [H, D] of all experts in two tensors, or each expert's transposed.
inline void write_fused(const LayerFileSpec& spec, const Names& names, MatrixWriter& writer, LayerTensors& layer) {
  const int hidden = spec.shape.hidden, inner = spec.shape.intermediate, experts = spec.shape.experts;
  const bool transposed = spec.naming == Naming::fused_transposed;
  std::vector<std::uint16_t> gate_up, down;
  const auto append = [transposed](std::vector<std::uint16_t>& all, const std::vector<std::uint16_t>& matrix, int rows, int cols) {
    for (int i = 0; i < rows * cols; ++i) {
      const int source = transposed ? (i % rows) * cols + i / rows : i;
      all.push_back(matrix[static_cast<std::size_t>(source)]);
    }
  };
  for (int expert = 0; expert < experts; ++expert) {
    const auto elements = static_cast<std::size_t>(inner) * static_cast<std::size_t>(hidden);
    ExpertValues values{{inner, hidden, std::vector<float>(elements)},
                        {inner, hidden, std::vector<float>(elements)},
                        {hidden, inner, std::vector<float>(elements)}};
    auto both = writer.draw_bf16(values.gate);
    const auto up = writer.draw_bf16(values.up);
    both.insert(both.end(), up.begin(), up.end());
    append(gate_up, both, 2 * inner, hidden);
    append(down, writer.draw_bf16(values.down), hidden, inner);
    layer.experts.push_back(std::move(values));
  }
  const std::vector<std::int64_t> gate_up_shape{experts, transposed ? hidden : 2 * inner, transposed ? 2 * inner : hidden};
  const std::vector<std::int64_t> down_shape{experts, transposed ? inner : hidden, transposed ? hidden : inner};
  layer.tensors.push_back(make_tensor(names.block + "experts.gate_up_proj", "BF16", gate_up_shape, gate_up));
  layer.tensors.push_back(make_tensor(names.block + "experts.down_proj", "BF16", down_shape, down));
}

inline ExpertValues write_expert(MatrixWriter& writer, const Names& names, const std::string& stem, WeightKind kind, int inner,
                                 int hidden) {
  ExpertValues values;
  values.gate = writer.write(stem + names.gate, kind, inner, hidden);
  values.up = writer.write(stem + names.up, kind, inner, hidden);
  values.down = writer.write(stem + names.down, kind, hidden, inner);
  return values;
}

}  // namespace layer_detail

/// Draws a layer from spec.seed.
inline LayerTensors make_layer(const LayerFileSpec& spec) {
  using namespace layer_detail;
  LayerTensors layer;
  Random random(spec.seed);
  MatrixWriter writer(spec, random, layer.tensors);
  const Names names = names_of(spec);
  const LayerShape& shape = spec.shape;
  if (spec.naming == Naming::fused || spec.naming == Naming::fused_transposed) {
    if (spec.kind != WeightKind::bf16) throw std::invalid_argument("fused namings hold bf16");
    write_fused(spec, names, writer, layer);
  } else {
    for (int expert = 0; expert < shape.experts; ++expert) {
      const std::string stem = names.block + "experts." + std::to_string(expert) + ".";
      layer.experts.push_back(write_expert(writer, names, stem, spec.kind, shape.intermediate, shape.hidden));
    }
  }
  if (spec.shared) {
    const int inner = spec.shared_intermediate > 0 ? spec.shared_intermediate : shape.intermediate;
    layer.shared = write_expert(writer, names, names.block + names.shared, *spec.shared, inner, shape.hidden);
    if (spec.shared_gate)
      layer.shared_gate = writer.write(names.block + "shared_expert_gate", WeightKind::bf16, 1, shape.hidden).values;
  }
  if (spec.router) {
    MatrixValues router{shape.experts, shape.hidden,
                        std::vector<float>(static_cast<std::size_t>(shape.experts) * static_cast<std::size_t>(shape.hidden))};
    const auto stored = writer.draw_bf16(router);
    if (spec.router_f32)
      layer.tensors.push_back(make_tensor(names.block + "gate.weight", "F32", {router.rows, router.cols}, router.values));
    else
      layer.tensors.push_back(make_tensor(names.block + "gate.weight", "BF16", {router.rows, router.cols}, stored));
    layer.router = std::move(router.values);
  }
  if (spec.bias) {
    for (int expert = 0; expert < shape.experts; ++expert) layer.bias.push_back(random.symmetric() * 0.1f);
    layer.tensors.push_back(make_tensor(names.block + names.bias, "F32", {shape.experts}, layer.bias));
  }
  return layer;
}

/// config.json as DeepSeek's models spell it.
inline nlohmann::json make_config(const LayerFileSpec& spec, const RouterOptions& router) {
  constexpr const char* scores[] = {"softmax", "sigmoid", "sqrtsoftplus", "softmax_topk"};
  nlohmann::json config{{"hidden_size", spec.shape.hidden},
                        {"moe_intermediate_size", spec.shape.intermediate},
                        {"n_routed_experts", spec.shape.experts},
                        {"num_experts_per_tok", spec.shape.topk},
                        {"scoring_func", scores[static_cast<int>(router.score)]},
                        {"n_group", router.groups},
                        {"topk_group", router.topk_groups},
                        {"norm_topk_prob", router.renormalise},
                        {"routed_scaling_factor", router.scale}};
  if (spec.shape.clamp) config["swiglu_limit"] = *spec.shape.clamp;
  return config;
}

/// Writes tensors into a file, or round-robin into shards with an index, and config.json if asked for.
inline LayerFile write_layer(const LayerFileSpec& spec, LayerTensors layer) {
  LayerFile file{std::move(layer), {}, {}};
  if (spec.config) std::ofstream(file.folder.file("config.json")) << make_config(spec, *spec.config).dump(1);
  if (spec.shards <= 1) {
    file.path = file.folder.file("model.safetensors");
    write_tensors(file.path, file.tensors);
    return file;
  }
  std::vector<std::vector<OwnedTensor>> shards(static_cast<std::size_t>(spec.shards));
  nlohmann::json map = nlohmann::json::object();
  for (std::size_t i = 0; i < file.tensors.size(); ++i) {
    shards[i % shards.size()].push_back(file.tensors[i]);
    map[file.tensors[i].name] = "model-" + std::to_string(i % shards.size()) + ".safetensors";
  }
  for (std::size_t i = 0; i < shards.size(); ++i)
    write_tensors(file.folder.file("model-" + std::to_string(i) + ".safetensors"), shards[i]);
  std::ofstream(file.folder.file("model.safetensors.index.json"))
      << nlohmann::json{{"metadata", nlohmann::json::object()}, {"weight_map", map}}.dump(1);
  file.path = file.folder.path().string();
  return file;
}

inline LayerFile write_layer(const LayerFileSpec& spec) { return write_layer(spec, make_layer(spec)); }

}  // namespace heddle::testing
