#include "bench_attention.hpp"

#include <algorithm>

#include "bench_kernels.hpp"
#include "group/cuda_driver.hpp"

namespace heddle::tool {

namespace {

constexpr int ctas_an_sm = 4, kernels_a_replay = 10;

}  // namespace

AttentionStandIn::AttentionStandIn(Lanes& lanes, int microseconds, const std::function<void()>& give_up)
    : lanes_(lanes), microseconds_(microseconds) {
  for (std::size_t gpu = 0; gpu < lanes.gpus(); ++gpu) sinks_.push_back(std::make_unique<Block>(lanes.device(gpu), sizeof(float)));
  // From two lengths, so that the launch does not count; the longer one comes first, for the clocks to rise.
  constexpr std::uint64_t few = 1000, many = 5000;
  const double of_many = median(alone(many, 10, give_up)), of_few = median(alone(few, 10, give_up));
  const double a_step = std::max(1e-6, (of_many - of_few) / static_cast<double>(many - few));
  steps_ = static_cast<std::uint64_t>(std::max(1.0, microseconds / a_step));
  samples_ = alone(steps_, 10, give_up);
}

std::vector<double> AttentionStandIn::alone(std::uint64_t steps, int replays, const std::function<void()>& give_up) {
  steps_ = steps;
  Replay replay(lanes_, [&] {
    for (std::size_t gpu = 0; gpu < lanes_.gpus(); ++gpu) {
      for (int i = 0; i < kernels_a_replay; ++i) queue(gpu, 1, lanes_.stream(gpu));
    }
  });
  std::vector<double> samples = replay.run(
      replays, [] {}, give_up);
  for (double& sample : samples) sample /= kernels_a_replay;
  return samples;
}

void AttentionStandIn::queue(std::size_t gpu, int batches, cudaStream_t stream) const {
  const cuda::DeviceScope scope(lanes_.device(gpu));
  launch_wide_work(ctas_an_sm * lanes_.sms() * batches, steps_, sinks_[gpu]->as<float>(), stream);
}

nlohmann::ordered_json AttentionStandIn::json() const {
  nlohmann::ordered_json json{{"us", microseconds_}, {"ctas", ctas_an_sm * lanes_.sms()}};
  json["alone"] = summary(samples_);
  return json;
}

}  // namespace heddle::tool
