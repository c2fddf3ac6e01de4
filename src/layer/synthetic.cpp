#include "layer/synthetic.hpp"

#include <cmath>
#include <cstring>
#include <numbers>

#include "formats/codes.hpp"
#include "routing/random.hpp"

namespace heddle {

namespace {

/// A seed's own sequence for each thing that is drawn; neighbouring seeds and streams have nothing in common.
Random random_of(std::uint64_t seed, std::uint64_t stream) { return Random(splitmix64(splitmix64(seed) + stream)); }

double uniform(Random& random) { return static_cast<double>(random.next() >> 11) * 0x1p-53; }

double normal(Random& random) {
  const double radius = std::sqrt(-2.0 * std::log(1.0 - uniform(random)));
  return radius * std::cos(2.0 * std::numbers::pi * uniform(random));
}

constexpr std::uint64_t shared_stream = 1u << 20;
constexpr std::uint64_t router_stream = shared_stream + 1;
constexpr std::uint64_t hidden_stream = shared_stream + 2;

/// The exponent that gives weights of about 1 / sqrt(cols), where stored values are about `typical`.
int usual_exponent(int cols, double typical) { return static_cast<int>(std::lround(std::log2(1.0 / (std::sqrt(cols) * typical)))); }

void put_float(std::vector<std::byte>& bytes, float value) {
  const std::size_t at = bytes.size();
  bytes.resize(at + sizeof value);
  std::memcpy(bytes.data() + at, &value, sizeof value);
}

std::size_t ceil_divide(int a, int b) { return static_cast<std::size_t>((a + b - 1) / b); }

void draw_e2m1(Random& random, std::size_t count, std::vector<std::byte>& values) {
  values.resize(count / 2);
  std::uint64_t bits = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (i % 8 == 0) bits = random.next();
    values[i] = static_cast<std::byte>(bits & 0xFF);
    bits >>= 8;
  }
}

/// e4m3 codes of about 16 times a normal value, none of them NaN.
void draw_e4m3(Random& random, std::size_t count, std::vector<std::byte>& values) {
  values.resize(count);
  for (auto& value : values) {
    // The sum of three uniform values is near enough to a normal one, and fast.
    const std::uint64_t bits = random.next();
    const double sum =
        static_cast<double>(bits & 0xFFFF) + static_cast<double>(bits >> 16 & 0xFFFF) + static_cast<double>(bits >> 32 & 0xFFFF);
    value = static_cast<std::byte>(to_e4m3(static_cast<float>((sum / 65536.0 - 1.5) * 32.0)));
  }
}

void draw_matrix(Random& random, WeightKind kind, int rows, int cols, std::vector<std::byte>& values,
                 std::vector<std::byte>& scales, WeightMatrix& out) {
  const std::size_t count = static_cast<std::size_t>(rows) * static_cast<std::size_t>(cols);
  const auto scale_byte = [&random](int exponent) {
    return static_cast<std::byte>(127 + exponent - 1 + static_cast<int>(random.next() % 3));
  };
  switch (kind) {
    case WeightKind::bf16: {
      values.resize(count * sizeof(bf16));
      const double spread = 1.0 / std::sqrt(cols);
      for (std::size_t i = 0; i < count; ++i) {
        const bf16 value = to_bf16(static_cast<float>(normal(random) * spread));
        std::memcpy(values.data() + i * sizeof value, &value, sizeof value);
      }
      break;
    }
    case WeightKind::fp8_block:
      draw_e4m3(random, count, values);
      for (std::size_t i = 0; i < ceil_divide(rows, 128) * ceil_divide(cols, 128); ++i) {
        put_float(scales, static_cast<float>((0.75 + 0.5 * uniform(random)) / (std::sqrt(cols) * 16.0)));
      }
      break;
    case WeightKind::mxfp4:
      draw_e2m1(random, count, values);
      for (std::size_t i = 0; i < count / 32; ++i) scales.push_back(scale_byte(usual_exponent(cols, 2.9)));
      break;
    case WeightKind::mxfp8:
      draw_e4m3(random, count, values);
      for (std::size_t i = 0; i < count / 32; ++i) scales.push_back(scale_byte(usual_exponent(cols, 16.0)));
      break;
    case WeightKind::nvfp4:
      draw_e2m1(random, count, values);
      for (std::size_t i = 0; i < count / 16; ++i)
        scales.push_back(static_cast<std::byte>(to_e4m3(static_cast<float>(1.0 + uniform(random)))));
      out.tensor_scale = static_cast<float>(1.0 / (std::sqrt(cols) * 2.9 * 1.5));
      break;
  }
  out.kind = kind;
  out.rows = rows;
  out.cols = cols;
  out.values = values;
  out.scales = scales;
}

}  // namespace

SyntheticLayer::SyntheticLayer(const SyntheticOptions& options) : options_(options) {
  if (options.shared_kind) shared_ = draw(shared_stream, *options.shared_kind, options.shared_intermediate);
  Random random = random_of(options.seed, router_stream);
  const auto experts = static_cast<std::size_t>(options.shape.experts);
  const double spread = 1.0 / std::sqrt(options.shape.hidden);
  for (std::size_t i = 0; i < experts * static_cast<std::size_t>(options.shape.hidden); ++i) {
    router_weights_.push_back(to_float(to_bf16(static_cast<float>(normal(random) * spread))));
  }
  for (std::size_t e = 0; options.selection_bias && e < experts; ++e)
    router_bias_.push_back(static_cast<float>(normal(random) * 0.05));
}

std::unique_ptr<SyntheticLayer::Stored> SyntheticLayer::draw(std::uint64_t number, WeightKind kind, int intermediate) const {
  auto stored = std::make_unique<Stored>();
  Random random = random_of(options_.seed, number);
  const int hidden = options_.shape.hidden;
  draw_matrix(random, kind, intermediate, hidden, stored->values[0], stored->scales[0], stored->weights.gate);
  draw_matrix(random, kind, intermediate, hidden, stored->values[1], stored->scales[1], stored->weights.up);
  draw_matrix(random, kind, hidden, intermediate, stored->values[2], stored->scales[2], stored->weights.down);
  return stored;
}

ExpertWeights SyntheticLayer::expert(int id) {
  {
    const std::lock_guard lock(mutex_);
    if (const auto known = experts_.find(id); known != experts_.end()) return known->second->weights;
  }
  auto drawn = draw(static_cast<std::uint64_t>(id), options_.kind, options_.shape.intermediate);
  const std::lock_guard lock(mutex_);
  return experts_.try_emplace(id, std::move(drawn)).first->second->weights;
}

LayerSource SyntheticLayer::source() {
  LayerSource source;
  source.shape = options_.shape;
  source.kind = options_.kind;
  source.expert = [this](int id) { return expert(id); };
  if (shared_) source.shared = SharedExpert{shared_->weights, options_.shared_intermediate, {}, nullptr};
  return source;
}

std::vector<bf16> draw_hidden_states(int tokens, int hidden, HiddenStates kind, std::uint64_t seed) {
  Random random = random_of(seed, hidden_stream);
  std::vector<float> channels(static_cast<std::size_t>(hidden), 1.0f);
  if (kind == HiddenStates::heavy_tailed) {
    for (int i = 0; i < hidden / 128 + 1; ++i) channels[random.next() % channels.size()] = 20.0f;
  }
  std::vector<bf16> values(static_cast<std::size_t>(tokens) * channels.size());
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = to_bf16(static_cast<float>(normal(random)) * channels[i % channels.size()]);
  return values;
}

}  // namespace heddle
