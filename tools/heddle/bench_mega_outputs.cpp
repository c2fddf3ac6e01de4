#include "bench_mega_outputs.hpp"

#include <cmath>

#include "group/cuda_driver.hpp"

namespace heddle::tool {

RankOutputs outputs_of(const Batch& batch, int tokens) {
  const auto values = static_cast<std::size_t>(tokens) * static_cast<std::size_t>(batch.hidden());
  RankOutputs outputs;
  for (int rank = 0; rank < batch.ranks(); ++rank) {
    outputs.emplace_back(values);
    cuda::check(cudaMemcpy(outputs.back().data(), batch.output(rank).out, values * sizeof(bf16), cudaMemcpyDeviceToHost),
                "outputs");
  }
  return outputs;
}

std::size_t different(const RankOutputs& a, const RankOutputs& b) {
  std::size_t count = 0;
  for (std::size_t rank = 0; rank < a.size(); ++rank) {
    for (std::size_t i = 0; i < a[rank].size(); ++i) count += a[rank][i].bits != b[rank][i].bits ? 1 : 0;
  }
  return count;
}

double relative_error(const RankOutputs& a, const RankOutputs& b) {
  double error = 0;
  double norm = 0;
  for (std::size_t rank = 0; rank < a.size(); ++rank) {
    for (std::size_t i = 0; i < a[rank].size(); ++i) {
      const double wanted = to_float(b[rank][i]);
      error += std::pow(to_float(a[rank][i]) - wanted, 2);
      norm += wanted * wanted;
    }
  }
  return norm > 0 ? std::sqrt(error / norm) : std::sqrt(error);
}

}  // namespace heddle::tool
