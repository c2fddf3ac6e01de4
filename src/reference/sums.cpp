#include "reference/sums.hpp"

#include <algorithm>
#include <cmath>
#include <set>
#include <vector>

#include "reference/rounding.hpp"

namespace heddle::reference {

namespace {
/// What the home rank reads of a bf16 row that travelled over the combine wire.
std::vector<double> received(std::span<const bf16> row, const ReferenceOptions& options) {
  std::vector<float> values(row.size());
  std::transform(row.begin(), row.end(), values.begin(), to_float);
  if (options.combine_wire == Wire::fp8) {
    std::vector<double> rounded(row.size());
    round_to_fp8(values, {128, options.quantisation.scale}, rounded);
    return rounded;
  }
  if (options.combine_wire == Wire::nvfp4) {
    round_to_nvfp4(values, options.wire_global_scale, values);
  }
  return {values.begin(), values.end()};
}

void round_row(std::span<const double> sums, std::span<bf16> out) {
  std::transform(sums.begin(), sums.end(), out.begin(), round_to_bf16);
}

/// Adds one choice's result. A bf16 times an f32 is exact in double, so this is the fused multiply-add of the rules.
void add_choice(std::span<const double> result, float weight, WeightAt weight_at, std::span<double> sums) {
  const double factor = weight_at == WeightAt::combine ? weight : 1.0;
  for (std::size_t h = 0; h < sums.size(); ++h) {
    sums[h] += factor * result[h];
  }
}

void add_slots(const TokenResults& token, const ReferenceOptions& options, std::span<double> sums) {
  const std::size_t hidden = sums.size();
  for (std::size_t choice = 0; choice < token.ids.size(); ++choice) {
    if (token.ids[choice] >= 0) {
      const std::vector<double> result = received(token.pairs.subspan(choice * hidden, hidden), options);
      add_choice(result, token.weights[choice], options.weight_at, sums);
    }
  }
}

/// The partial sum of one rank, rounded to the bf16 row that it sends home.
std::vector<bf16> partial_sum(const TokenResults& token, int rank, std::span<const int> rank_of, WeightAt weight_at) {
  const std::size_t hidden = token.hidden.size();
  std::vector<double> sums(hidden, 0.0);
  std::vector<double> result(hidden);
  for (std::size_t choice = 0; choice < token.ids.size(); ++choice) {
    if (token.ids[choice] >= 0 && rank_of[static_cast<std::size_t>(token.ids[choice])] == rank) {
      const std::span<const bf16> row = token.pairs.subspan(choice * hidden, hidden);
      std::transform(row.begin(), row.end(), result.begin(), to_float);
      add_choice(result, token.weights[choice], weight_at, sums);
    }
  }
  std::vector<bf16> partial(hidden);
  round_row(sums, partial);
  return partial;
}

void add_two_stage(const TokenResults& token, std::span<const int> rank_of, const ReferenceOptions& options,
                   std::span<double> sums) {
  std::set<int> ranks;  // ascending, as the home rank adds them
  for (const std::int32_t id : token.ids) {
    if (id >= 0) {
      ranks.insert(rank_of[static_cast<std::size_t>(id)]);
    }
  }
  for (const int rank : ranks) {
    const std::vector<double> partial = received(partial_sum(token, rank, rank_of, options.weight_at), options);
    add_choice(partial, 1.0f, WeightAt::activation, sums);
  }
}

/// sigmoid(gate · x), rounded to f32; 1 without a gate.
float shared_factor(std::span<const float> gate, std::span<const bf16> hidden) {
  if (gate.empty()) {
    return 1.0f;
  }
  double logit = 0.0;
  for (std::size_t h = 0; h < hidden.size(); ++h) {
    logit += static_cast<double>(gate[h]) * to_float(hidden[h]);
  }
  return static_cast<float>(1.0 / (1.0 + std::exp(-logit)));
}
}  // namespace

void token_output(const TokenResults& token, const ReferenceInput& input, const ReferenceOptions& options, std::span<bf16> out) {
  std::vector<double> sums(out.size(), 0.0);
  if (options.sum == Sum::slots) {
    add_slots(token, options, sums);
  } else {
    add_two_stage(token, input.rank_of, options, sums);
  }
  if (!token.shared.empty()) {
    const float factor = shared_factor(input.shared->gate, token.hidden);
    for (std::size_t h = 0; h < out.size(); ++h) {
      sums[h] += to_float(token.shared[h]) * factor;  // an f32 product
    }
  }
  round_row(sums, out);
}

}  // namespace heddle::reference
