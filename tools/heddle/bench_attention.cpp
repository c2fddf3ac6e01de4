#include "bench_attention.hpp"

#include "bench_kernels.hpp"
#include "group/cuda_driver.hpp"

namespace heddle::tool {

namespace {

constexpr int ctas_an_sm = 4, kernels_a_replay = 10;

}  // namespace

AttentionStandIn::AttentionStandIn(Lanes& lanes, int microseconds, const std::function<void()>& give_up)
    : lanes_(lanes), microseconds_(microseconds) {
  for (std::size_t gpu = 0; gpu < lanes.gpus(); ++gpu) sinks_.push_back(std::make_unique<Block>(lanes.device(gpu), sizeof(float)));
  steps_ = steps_that_last(microseconds, [&](std::uint64_t steps) { return median(alone(steps, give_up)); });
  samples_ = alone(steps_, give_up);
}

std::vector<double> AttentionStandIn::alone(std::uint64_t steps, const std::function<void()>& give_up) {
  steps_ = steps;
  Replay replay(lanes_, [&] {
    for (std::size_t gpu = 0; gpu < lanes_.gpus(); ++gpu) {
      for (int i = 0; i < kernels_a_replay; ++i) queue(gpu, 1, lanes_.stream(gpu));
    }
  });
  std::vector<double> samples = replay.run(
      10, [] {}, give_up);
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
