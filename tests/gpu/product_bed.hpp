// A bed for tests of the bare product: weights and tokens of small whole numbers and powers of two, so that every sum is exact and
// every wrong value can be told where it came from.
#pragma once

#include <cmath>
#include <functional>
#include <memory>
#include <numeric>
#include <sstream>
#include <string>
#include <vector>

#include "experts/sm90/launch.hpp"
#include "experts/sm90/tile.hpp"
#include "experts/sm90/weights.hpp"
#include "experts_support.hpp"
#include "gpu/buffers.hpp"
#include "gpu/waiting.hpp"

namespace heddle::sm90 {

using heddle::testing::name_of;
using heddle::testing::OwnedWeights;
using heddle::testing::Random;
using heddle::testing::size;

using ValueAt = std::function<float(int row, int column)>;

/// A stored matrix of given values, which the kind has to have exactly, under scales of 1, or of what `scale` says: of fp8_block's
/// block, of a row's group of 32 (mxfp) or of 16 (nvfp4), by the group's first row and column.
inline OwnedWeights matrix_of(WeightKind kind, int rows, int cols, const ValueAt& value, const ValueAt& scale = {},
                              float tensor_scale = 1.0f) {
  OwnedWeights out;
  const auto scale_at = [&](int row, int column) { return scale ? scale(row, column) : 1.0f; };
  const auto append = [](std::vector<std::byte>& to, const auto& thing) {
    const auto* bytes = reinterpret_cast<const std::byte*>(&thing);
    to.insert(to.end(), bytes, bytes + sizeof thing);
  };
  for (int n = 0; n < rows; ++n) {
    for (int k = 0; k < cols; ++k) {
      if (kind == WeightKind::bf16) {
        append(out.values, to_bf16(value(n, k)));
      } else if (kind == WeightKind::mxfp4 || kind == WeightKind::nvfp4) {
        if (k % 2 == 0) append(out.values, static_cast<std::uint8_t>(to_e2m1(value(n, k)) | to_e2m1(value(n, k + 1)) << 4));
      } else {
        append(out.values, to_e4m3(value(n, k)));
      }
    }
    const int group = kind == WeightKind::nvfp4 ? 16 : kind == WeightKind::fp8_block ? 128 : 32;
    if (kind == WeightKind::bf16 || (kind == WeightKind::fp8_block && n % 128 != 0)) continue;
    for (int k = 0; k < cols; k += group) {
      const float s = scale_at(n, k);
      if (kind == WeightKind::fp8_block) append(out.scales, s);
      if (kind == WeightKind::nvfp4) append(out.scales, to_e4m3(s));
      if (kind == WeightKind::mxfp4 || kind == WeightKind::mxfp8) append(out.scales, ue8m0_at_least(s));
    }
  }
  out.view = {kind, rows, cols, out.values, out.scales, ScaleFormat::f32, kind == WeightKind::nvfp4 ? tensor_scale : 1.0f};
  return out;
}

/// Tokens of given values, and scales by 128 or 32 where the operand has them.
struct Tokens {
  int count = 0;
  int cols = 0;
  ValueAt value;
  TokenScales scaling = TokenScales::none;
  ScaleFormat format = ScaleFormat::ue8m0;
  ValueAt scale;  ///< by token and group; none: 1

  int group() const { return scaling == TokenScales::by_32 ? 32 : 128; }
  float scale_at(int token, int k) const { return scaling == TokenScales::none || !scale ? 1.0f : scale(token, k / group()); }
};

/// A product on the GPU: experts' matrices (one each, or gate and up), tokens in flat order.
class ProductBed {
 public:
  ProductBed(WeightKind kind, std::vector<std::vector<OwnedWeights>> experts) : kind_(kind), experts_(std::move(experts)) {
    const WeightMatrix& one = experts_[0][0].view;
    rows_ = one.rows;
    cols_ = one.cols;
    const OwnedWeights filler = matrix_of(kind, cols_, rows_, [](int, int) { return 0.0f; });
    std::vector<ExpertWeights> views;
    for (const auto& expert : experts_) {
      if (paired()) {
        views.push_back({expert[0].view, expert[1].view, filler.view});
      } else {
        views.push_back({filler.view, filler.view, expert[0].view});
      }
    }
    const int hidden = paired() ? cols_ : rows_;
    const int intermediate = paired() ? rows_ : cols_;
    weights_ = std::make_unique<DeviceWeights>(views, hidden, intermediate, DeviceWeightsOptions{});
    prepare_products(kind);
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream");
  }
  ~ProductBed() { cudaStreamDestroy(stream_); }
  ProductBed(const ProductBed&) = delete;
  ProductBed& operator=(const ProductBed&) = delete;

  bool paired() const { return experts_[0].size() == 2; }
  int width() const { return paired() ? 2 * rows_ : rows_; }
  Operand operand() const { return slab_shape(kind_).operand; }
  WeightKind kind() const { return kind_; }
  cudaStream_t stream() const { return stream_; }
  const OrderedMatrix& matrix() const { return paired() ? weights_->gate_up() : weights_->down(); }

  bool in_boxes = true;  ///< rows that lie one behind another are copied in boxes

  /// The tokens in device memory, each row with a gap behind it; `tokens.scaling` as the operand needs it.
  TokenRows upload(const Tokens& tokens) {
    const int value_bytes = operand() == Operand::e4m3 ? 1 : 2;
    const std::size_t stride = (size(tokens.cols) * size(value_bytes) + 15) / 16 * 16 + 16;
    const int groups = (tokens.cols + tokens.group() - 1) / tokens.group();
    const std::size_t scale_stride = (size(groups) * (tokens.format == ScaleFormat::f32 ? 4 : 1) + 3) / 4 * 4 + 4;
    std::vector<std::byte> values(size(tokens.count) * stride, std::byte{0xFF});
    std::vector<std::byte> scales(size(tokens.count) * scale_stride, std::byte{0xFF});
    for (int t = 0; t < tokens.count; ++t) {
      std::byte* to = values.data() + size(t) * stride;
      for (int k = 0; k < tokens.cols; ++k) {
        const bf16 wide = to_bf16(tokens.value(t, k));
        if (value_bytes == 1) {
          to[k] = static_cast<std::byte>(to_e4m3(tokens.value(t, k)));
        } else {
          std::memcpy(to + 2 * k, &wide, 2);
        }
      }
      for (int g = 0; g < groups; ++g) {
        const float scale = tokens.scale_at(t, g * tokens.group());
        std::byte* at = scales.data() + size(t) * scale_stride;
        if (tokens.format == ScaleFormat::f32) {
          std::memcpy(at + 4 * g, &scale, 4);
        } else {
          at[g] = static_cast<std::byte>(ue8m0_at_least(scale));
        }
      }
    }
    values_ = std::make_unique<Buffer<std::byte>>(0, values);
    scales_ = std::make_unique<Buffer<std::byte>>(0, scales);
    return {values_->data(), stride, scales_->data(), scale_stride, tokens.scaling, tokens.format, {}, in_boxes ? tokens.count : 0};
  }

  /// [places, stride], poisoned where nothing was written.
  std::vector<bf16> run(const Tokens& tokens, const std::vector<int>& counts, RowBlocks blocks, int ctas,
                        const RowMap& token_map = {}, const RowMap& result_map = {}, int places = -1) {
    const std::size_t stride = result_stride();
    const Buffer<bf16> out(0, size(places < 0 ? tokens.count : places) * stride);
    const Buffer<int> device_counts(0, counts);
    ProductCall call;
    call.weights = matrix();
    call.tokens = upload(tokens);
    call.tokens.map = token_map;
    call.counts = device_counts.data();
    call.experts = static_cast<int>(counts.size());
    call.results = {out.data(), stride, rows_, result_map};
    check(cudaDeviceSynchronize(), "inputs");
    launch_product(call, blocks, false, ctas, stream_);
    wait_for(stream_, "product of " + name_of(kind_) + " weights, " + name(blocks) + " row blocks");
    out.expect_guards("results");
    return out.read();
  }
  std::size_t result_stride() const { return size(width()) + 8; }

  /// A sum in the engine's order; exact for whole numbers and powers of two.
  float expected(const Tokens& tokens, int expert, int token, int n) const {
    const WeightMatrix& weights = experts_[size(expert)][n < rows_ ? 0 : 1].view;
    const int row = n % rows_;
    std::vector<float> wide(size(cols_));
    widen_row(weights, row, 0, cols_, wide.data());
    float total = 0;
    for (int begin = 0; begin < cols_; begin += tokens.group()) {
      double partial = 0;
      for (int k = begin; k < std::min(begin + tokens.group(), cols_); ++k) {
        partial += static_cast<double>(wide[size(k)]) * static_cast<double>(tokens.value(token, k));
      }
      total =
          std::fma(static_cast<float>(partial), tokens.scale_at(token, begin) * promotion_scale(weights, row, begin / 128), total);
    }
    return total;
  }

 private:
  WeightKind kind_;
  std::vector<std::vector<OwnedWeights>> experts_;
  int rows_ = 0;
  int cols_ = 0;
  std::unique_ptr<DeviceWeights> weights_;
  std::unique_ptr<Buffer<std::byte>> values_;
  std::unique_ptr<Buffer<std::byte>> scales_;
  cudaStream_t stream_ = nullptr;
};

/// Wrong values, and which coordinates they share: the part of the engine that is wrong shows as bits that matter.
class Wrongs {
 public:
  /// Of weight row n (of a slab's 64) and token t.
  void add(int t, int n, const std::string& text) {
    tokens_.push_back(t);
    rows_.push_back(n);
    if (texts_.size() < 12) texts_.push_back(text);
  }
  bool any() const { return !tokens_.empty(); }

  std::string explain(int of, int tokens, int rows) const {
    std::ostringstream out;
    out << tokens_.size() << " of " << of << " values are wrong.\n";
    tell(out, "weight row / 64 (slab)", rows_, 64, (rows + 63) / 64);
    tell(out, "weight row % 64 / 16 (warp)", rows_, 16, 4);
    tell(out, "weight row % 16 / 8 (upper half of a warp's rows)", rows_, 8, 2);
    tell(out, "weight row % 8 (lane / 4)", rows_, 1, 8);
    tell(out, "token / 32", tokens_, 32, (tokens + 31) / 32);
    tell(out, "token % 32 / 8 (group of a fragment)", tokens_, 8, 4);
    tell(out, "token % 8", tokens_, 1, 8);
    for (const std::string& text : texts_) out << "  " << text << "\n";
    return out.str();
  }

 private:
  static void tell(std::ostream& out, const char* what, const std::vector<int>& places, int divisor, int count) {
    std::vector<int> wrong(size(count));
    for (const int place : places) ++wrong[size(place / divisor % count)];
    out << "  by " << what << ":";
    for (const int number : wrong) out << " " << number;
    out << "\n";
  }
  std::vector<int> tokens_;
  std::vector<int> rows_;
  std::vector<std::string> texts_;
};

}  // namespace heddle::sm90
