// The routed runner's GEMM rate against the BLAS library's own, in one run: 96 rows an expert, 4096 x 4096,
// weights in their storage format and widening included. The ratio is what to look at.
#include <benchmark/benchmark.h>
#include <cblas.h>
#include <time.h>

#include <algorithm>
#include <limits>
#include <random>
#include <vector>

#include "../tests/experts_support.hpp"
#include "heddle/experts.hpp"

namespace heddle {
namespace {

constexpr int rows = 96;
constexpr int size = 4096;
constexpr double operations = 2.0 * rows * size * size;

/// Seconds this thread has computed: the machine may be busy with other things.
double now() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

/// The library's own product on f32 operands.
class Blas {
 public:
  Blas() : a_(static_cast<std::size_t>(rows) * size), b_(static_cast<std::size_t>(size) * size), c_(a_.size()) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    std::generate(a_.begin(), a_.end(), [&] { return normal(random); });
    std::generate(b_.begin(), b_.end(), [&] { return normal(random); });
  }
  double run() {
    const double start = now();
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, rows, size, size, 1.0f, a_.data(), size, b_.data(), size, 0.0f, c_.data(),
                size);
    return now() - start;
  }

 private:
  std::vector<float> a_;
  std::vector<float> b_;
  std::vector<float> c_;
};

/// A layer of one expert with gate, up and down of 4096 x 4096, and 96 tokens that all choose it.
void routed(benchmark::State& state, WeightKind kind, Activation activation, int group) {
  testing::Random random(2);
  const testing::OwnedWeights weights = testing::random_weights(random, kind, size, size);
  ExpertOptions options;
  options.activation = activation;
  options.quantisation.group = group;
  const HostExperts experts({{weights.view, weights.view, weights.view}}, size, size, options);
  const testing::OwnedRows tokens = testing::random_rows(random, rows, size, activation, options.quantisation);
  const std::vector<int> ids(rows, 0);
  const std::vector<float> ones(rows, 1.0f);
  std::vector<bf16> out(static_cast<std::size_t>(rows) * size);
  Blas blas;
  // Taken in turns, the best of each.
  double best_blas = std::numeric_limits<double>::infinity();
  double best = best_blas;
  double best_call = best_blas;
  for (auto _ : state) {
    best_blas = std::min({best_blas, blas.run(), blas.run(), blas.run()});
    ExpertReport report;
    const double start = now();
    experts.routed(tokens.view, rows, 1, ids.data(), ones.data(), RoutedOutput::sum, {out.data()}, &report);
    const double all = now() - start;
    const double phases = report.gemm1 + report.activation + report.gemm2 + report.sum;
    best = std::min(best, all * (report.gemm1 + report.gemm2) / phases / 3);
    best_call = std::min(best_call, all / 3);
    benchmark::DoNotOptimize(out.data());
  }
  state.counters["of_blas"] = best_blas / best;
  state.counters["whole_call_of_blas"] = best_blas / best_call;
  state.counters["GFLOPs"] = operations / best / 1e9;
  state.counters["blas_GFLOPs"] = operations / best_blas / 1e9;
}

void add(const char* name, WeightKind kind, Activation activation, int group) {
  benchmark::RegisterBenchmark(name, routed, kind, activation, group)->Iterations(8)->Unit(benchmark::kMillisecond);
}

const bool registered = [] {
  add("bf16_weights/bf16_activations", WeightKind::bf16, Activation::bf16, 128);
  add("fp8_block/fp8_128", WeightKind::fp8_block, Activation::fp8, 128);
  add("mxfp4/fp8_128", WeightKind::mxfp4, Activation::fp8, 128);
  add("nvfp4/fp8_128", WeightKind::nvfp4, Activation::fp8, 128);
  add("mxfp8/fp8_128", WeightKind::mxfp8, Activation::fp8, 128);
  add("mxfp4/fp8_32", WeightKind::mxfp4, Activation::fp8, 32);
  return true;
}();

}  // namespace
}  // namespace heddle
