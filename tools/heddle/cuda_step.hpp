// heddle bench step on GPUs: all layers of a step in one CUDA graph, kernels that wait in the gaps.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "bench_mega.hpp"
#include "bench_mega_bed.hpp"
#include "bench_run.hpp"
#include "step.hpp"

namespace heddle::tool {

class StepRun {
 public:
  /// `layer`: what the flags ask for, and the lanes' ranks and GPUs.
  StepRun(const StepArguments& a, const MegaArguments& layer, Lanes& lanes);

  /// Throws Error if something went wrong on the GPUs. What does not fit, or gives wrong outputs, is reported in its place. `save`
  /// is called now and then; `give_up` when a GPU does not come to an end, and does not return.
  void all(const std::function<void()>& save, const std::function<void()>& give_up);
  /// What has been measured so far, with its provenance.
  Json json() const;
  int wrong() const { return wrong_; }                         ///< ways whose outputs were wrong
  const std::string& under_way() const { return under_way_; }  ///< what is being measured

 private:
  void size(const MegaShape& shape, const LayerSource& drawn, int tokens);
  void way(const std::string& name, Batch& batch, const LayerSource& source, const ExchangeMemory& memory, int tokens);
  void gap(MegaBed& bed, const Json& line, int microseconds);
  /// Gaps of a step by themselves.
  const std::vector<double>& gaps_alone(int microseconds);
  std::vector<double> replay(int gap, const std::function<void(int layer)>& layer, const std::function<void()>& check,
                             int* kernels);

  const StepArguments& a_;
  const MegaArguments& layer_;
  Lanes& lanes_;
  int layers_;
  MegaShape shape_;
  std::function<void()> give_up_;
  std::map<int, std::vector<double>> gaps_;  ///< by length
  std::string under_way_, routing_note_;
  int wrong_ = 0;
  Json machine_, rows_ = Json::array();
};

}  // namespace heddle::tool
