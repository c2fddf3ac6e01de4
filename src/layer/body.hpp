// What every layer on the host does around its core: checks of the batch, this rank's slice of it, the shared expert's gate. The
// core is the chain (dispatch, experts, combine), or the fused layer.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "heddle/layer.hpp"

namespace heddle {

/// Seconds between laps.
class LapWatch {
 public:
  double lap() {
    const auto now = std::chrono::steady_clock::now();
    return std::chrono::duration<double>(now - std::exchange(last_, now)).count();
  }

 private:
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

class LayerBody {
 public:
  /// refuse: tells the others that this rank refused its input (LayerSeat).
  LayerBody(int rank, std::function<void(std::uint64_t, std::uint64_t)> refuse, LayerWeights weights, const LayerOptions& options);
  virtual ~LayerBody() = default;
  LayerBody(const LayerBody&) = delete;
  LayerBody& operator=(const LayerBody&) = delete;

  void forward(const LayerInput& input, const Step& step, bf16* out);
  /// Before the first pass of a call that is split: does the whole of it fit the step and its outputs? Throws InputError, after
  /// telling the others where only this rank can see it.
  void check_whole(const LayerInput& input, const Step& step, const bf16* out) const;
  const LayerReport& report() const { return report_; }
  Way way() const { return options_.way; }
  /// As MoeLayer's.
  void update_expert(int local, const ExpertWeights& weights);

 protected:
  /// One call on this rank's own tokens, to where `output` says.
  virtual void run(const LayerInput& own, const Step& step, CombineOutput output) = 0;
  virtual HostExperts& experts() = 0;

  std::size_t hidden() const { return static_cast<std::size_t>(weights_.shape.hidden); }
  ExpertOptions arithmetic() const;
  /// sigmoid(gate . x) of each own token; null where the shared expert has no gate.
  const float* gate_shared(const LayerInput& own);

  LayerWeights weights_;
  LayerOptions options_;
  ExchangeOptions exchange_options_;
  int rank_;
  LayerReport report_;
  LapWatch watch_;

 private:
  void check_outputs(const LayerInput& input, const bf16* out) const;
  void check_batch(const LayerInput& input, const Step& step, const bf16* out) const;
  void check_whole_batch(const LayerInput& input, const Step& step) const;

  std::function<void(std::uint64_t, std::uint64_t)> refuse_;
  std::vector<bf16> slice_out_;
  std::vector<float> shared_factors_;
};

/// The chain over a seat's exchange, and the fused layer.
std::unique_ptr<LayerBody> make_chain(LayerSeat seat, LayerWeights weights, const LayerOptions& options);
std::unique_ptr<LayerBody> make_fused(Workspace& workspace, const ExchangeMemory& memory, LayerWeights weights,
                                      const LayerOptions& options);

}  // namespace heddle
