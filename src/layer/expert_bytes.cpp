#include "layer/expert_bytes.hpp"

#include "layer/arrived_rows.hpp"

namespace heddle {

namespace {

std::uint64_t stored_bytes(const WeightMatrix& weights) { return weights.values.size() + weights.scales.size(); }

}  // namespace

void add_expert_bytes(LayerReport& report, const LayerWeights& weights, const ExpertOptions& arithmetic, int intermediate,
                      const std::vector<bool>& touched) {
  const auto part = static_cast<std::uint64_t>(intermediate);
  for (std::size_t e = 0; e < touched.size(); ++e) {
    if (!touched[e]) continue;
    const ExpertWeights& expert = weights.experts[e];
    const auto whole = static_cast<std::uint64_t>(expert.gate.rows);
    report.gemm1.local_bytes += (stored_bytes(expert.gate) + stored_bytes(expert.up)) * part / whole;
    report.gemm2.local_bytes += stored_bytes(expert.down) * part / whole;
  }
  const auto bytes_of = [&](int values) {
    return static_cast<std::uint64_t>(activation_format(values, arithmetic.activation, arithmetic.quantisation).reported_bytes());
  };
  const std::uint64_t in = bytes_of(weights.shape.hidden);
  const std::uint64_t middle = bytes_of(intermediate);
  report.gemm1.local_bytes += report.rows_real * (in + 4 * part);
  report.activation.local_bytes += report.rows_real * (4 * part + middle);
  report.gemm2.local_bytes += report.rows_real * (middle + 2 * static_cast<std::uint64_t>(weights.shape.hidden));
}

void fuse_activation_bytes(LayerReport& report, int intermediate) {
  const std::uint64_t gate_up = report.rows_real * 4 * static_cast<std::uint64_t>(intermediate);
  report.gemm1.local_bytes = report.gemm1.local_bytes + report.activation.local_bytes - 2 * gate_up;
  report.activation.local_bytes = 0;
}

}  // namespace heddle
