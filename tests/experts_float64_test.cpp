// The routed runner against float64 arithmetic that rounds where docs/numerics.md says so.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "experts_expected.hpp"
#include "experts_support.hpp"
#include "heddle/experts.hpp"

namespace heddle {
namespace {

using testing::Expected;
using testing::Layer;
using testing::OwnedRows;
using testing::pick;
using testing::Random;
using testing::random_options;
using testing::Routing;
using testing::size;
using testing::widened_row;

/// One random layer through the routed runner: squared error relative to the squared norm, of how many products.
struct Comparison {
  double error = 0;
  double norm = 0;
  double size = 0;
};

Comparison compare_routed(Random& random, WeightKind kind, const ExpertOptions& options) {
  const int experts = pick(random, 1, 4);
  const int topk = pick(random, 1, 5);
  const int count = pick(random, 20, 40);
  const Layer layer(random, experts, 64 * pick(random, 2, 4), 64 * pick(random, 2, 4), kind);
  // fp8 activations also from bf16 rows, which the runner then quantises itself.
  const Activation arrived = pick(random, 0, 1) == 0 ? Activation::bf16 : options.activation;
  const OwnedRows rows = testing::random_rows(random, count, layer.hidden, arrived, options.quantisation, 0);
  const Routing routing(random, count, topk, experts);
  std::vector<bf16> out(size(count * layer.hidden));
  layer.experts(options).routed(rows.view, count, topk, routing.ids.data(), routing.weights.data(), RoutedOutput::sum,
                                {out.data()});
  const Expected expected(layer, options);
  Comparison result;
  for (int token = 0; token < count; ++token) {
    std::vector<double> sum(size(layer.hidden));
    for (int choice = token * topk; choice < (token + 1) * topk; ++choice) {
      if (routing.ids[size(choice)] < 0) {
        continue;
      }
      const bool early = options.weight_at == WeightAt::activation;
      const float weight = routing.weights[size(choice)];
      const auto y =
          expected.pair(routing.ids[size(choice)], widened_row(rows, options, token, layer.hidden), early ? weight : 1.0f);
      for (std::size_t i = 0; i < sum.size(); ++i) {
        sum[i] += y[i] * (early ? 1.0 : static_cast<double>(weight));
      }
      result.size += layer.intermediate;
    }
    for (std::size_t i = 0; i < sum.size(); ++i) {
      result.error += std::pow(to_float(out[size(token * layer.hidden) + i]) - sum[i], 2);
      result.norm += sum[i] * sum[i];
    }
  }
  return result;
}

/// Pooled over small layers up to tokens x k x D = 2^17: a single value that rounds the other way between
/// the GEMMs weighs too much in a small one.
TEST(Float64, RoutedSumsAgreeWithFloat64) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  Random random(seed);
  for (const Activation activation : {Activation::fp8, Activation::bf16}) {
    double error = 0;
    double size = 0;
    for (int round = 0; size < 0x1p17; ++round) {
      ExpertOptions options = random_options(random);
      options.activation = activation;
      const Comparison one = compare_routed(random, testing::all_kinds[round % 5], options);
      error += one.error / std::max(one.norm, 1e-30) * one.size;
      size += one.size;
    }
    EXPECT_LE(std::sqrt(error / size), activation == Activation::fp8 ? 6e-3 : 4e-3);
    RecordProperty(activation == Activation::fp8 ? "fp8" : "bf16", std::to_string(std::sqrt(error / size)));
  }
}

}  // namespace
}  // namespace heddle
