// heddle bench balance on GPUs: a layer that follows the load, its calls replayed with events between them.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "balance.hpp"
#include "bench_mega.hpp"
#include "bench_mega_bed.hpp"
#include "bench_mega_outputs.hpp"
#include "bench_run.hpp"
#include "heddle/device_balancing.hpp"

namespace heddle::tool {

/// A layer of one way and what drives it, call by call.
class BalanceBed {
 public:
  BalanceBed(Lanes& lanes, Batch& batch, const LayerSource& source, const BalanceArguments& a, Way way, int tokens);
  ~BalanceBed();
  BalanceBed(const BalanceBed&) = delete;
  BalanceBed& operator=(const BalanceBed&) = delete;

  DeviceBalancedLayer& layer() { return *layer_; }
  bool is_eager() const { return graphs_.empty(); }
  /// Queues a call on all GPUs, and what follows it.
  void call();
  /// Calls until the placement has changed, `behind` more have passed and another look has found nothing to change; or until two
  /// looks have not led to a change, or 20,000 have passed. Ends where a look begins to count. `marks`: before and behind each
  /// call. Times follow by take_times.
  std::vector<BalanceCall> calls_of_a_load(Marks& marks, int behind);
  /// Once the GPUs are at rest.
  static void take_times(const Marks& marks, std::span<BalanceCall> calls);

 private:
  void queue();
  void launch();
  BalanceCall call(Marks& marks);

  Lanes& lanes_;
  Step step_;
  int every_;
  std::vector<std::vector<DeviceInput>> inputs_;  ///< a GPU
  std::vector<std::vector<bf16*>> outputs_;
  std::vector<DeviceStream> streams_;
  std::unique_ptr<DeviceBalancedLayer> layer_;
  std::vector<Graph> graphs_;  ///< a GPU; none where the host waits in a call
};

class BalanceRun {
 public:
  /// `layer`: what the flags ask for, and the lanes' ranks and GPUs.
  BalanceRun(const BalanceArguments& a, const MegaArguments& layer, Lanes& lanes);

  /// Throws Error if something went wrong on the GPUs. What does not fit, or gives wrong outputs, is reported in its place. `save`
  /// is called now and then; `give_up` when a GPU does not come to an end, and does not return.
  void all(const std::function<void()>& save, const std::function<void()>& give_up);
  /// What has been measured so far, with its provenance.
  Json json() const;
  int wrong() const { return wrong_; }                         ///< changes behind which outputs were wrong
  const std::string& under_way() const { return under_way_; }  ///< what is being measured

 private:
  void way(const std::string& name, const LayerSource& drawn, int tokens);
  void load(BalanceBed& bed, Batch& batch, const BatchRouting& routing, Json line, int tokens);
  /// The routing of load number `load`, from 0.
  BatchRouting routing(int load, int tokens) const;
  RankRows rows_of(const ReplicaMap& map, const BatchRouting& routing, int tokens) const;
  /// Of a call more.
  RankOutputs fresh_outputs(BalanceBed& bed, Batch& batch, int tokens) const;
  /// Of a call more; empty: they are as they were, as far as the way promises.
  std::string wrong_outputs(BalanceBed& bed, Batch& batch, const RankOutputs& expected, int tokens) const;

  const BalanceArguments& a_;
  const MegaArguments& layer_;
  Lanes& lanes_;
  MegaShape shape_;
  std::function<void()> give_up_;
  std::string under_way_;
  int wrong_ = 0;
  Json machine_, rows_ = Json::array();
};

}  // namespace heddle::tool
