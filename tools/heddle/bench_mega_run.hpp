// One run of `heddle bench mega`: a line of a table and an entry of the JSON for every layer, size and way.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bench_mega.hpp"
#include "bench_mega_batches.hpp"
#include "bench_mega_bed.hpp"
#include "bench_mega_power.hpp"
#include "bench_run.hpp"

namespace heddle::tool {

class MegaRun {
 public:
  MegaRun(const MegaArguments& a, Lanes& lanes) : a_(a), lanes_(lanes) {}

  /// Throws Error if something went wrong on the GPUs, and InputError if the fused layer refused every configuration. What does not
  /// fit, or gives wrong results, is reported in its place. `save` is called now and then; `give_up` when a GPU does not come to an
  /// end, and does not return.
  void all(const std::function<void()>& save, const std::function<void()>& give_up);
  /// What has been measured so far, with its provenance.
  Json json() const;
  int wrong() const { return wrong_; }                         ///< configurations whose results were wrong
  const std::string& under_way() const { return under_way_; }  ///< what is being measured

 private:
  /// What a line is of.
  struct Variant {
    std::string name;   ///< in the table
    std::string place;  ///< of the fused layer's shared expert, empty without a choice
    LayerWay way;
    std::string combine = "slots";

    bool is_fused() const { return way.way == Way::mega; }
    bool is_auto() const { return way.way == Way::automatic; }
  };
  /// One layer and one size of batch, and what its ways have shown so far.
  struct Size {
    const MegaShape& layer;
    const LayerSource& source;
    Batch& batch;
    int tokens = 0;
    ExchangeMemory memory;
    MegaLoad load;
    std::string routing;
    TwoBatches* two = nullptr;  ///< null: not wanted
    ExchangeMemory memory_of_both = {};
    double floor_us = 0;
    double stream_us = 0;  ///< 0: not measured
    int copies = 1;
    std::vector<std::vector<bf16>> expected = {};     ///< low_latency's outputs by rank; empty: there are none
    std::vector<std::vector<bf16>> unquantised = {};  ///< those of bf16 slots, where another combine is measured
    std::string best_chain = {};
    double best_us = 0;
    std::string fastest = {};  ///< of all, the fused layer among them
    double fastest_us = 0;
    double inside_us = 0;  ///< of the fused layer with the shared expert inside; 0: not measured yet
  };

  void layer(const MegaShape& shape);
  void size(const MegaShape& shape, const LayerSource& source, int tokens);
  void stream(Size& size);
  void reference(Size& size, const LayerWay& way = {Way::low_latency});
  void way(Size& size, const Variant& variant);
  void measure(Size& size, const Variant& variant, Json& entry);
  /// One way, its shared expert as the layer has it.
  void chain(Size& size, const std::string& name, const LayerWay& what);
  void fused(Size& size, const std::string& place);
  void without_shared(const Size& size);
  void combined(const Size& size, const std::string& combine);
  /// Outputs of the last call by rank; empty, after a line, if they are wrong.
  std::vector<std::vector<bf16>> right(Size& size, const Variant& variant, Json& entry, const char* when);
  /// A call's microseconds, a sample a replay; with --power also a loop, which becomes an entry.
  std::vector<double> time(const Size& size, const Variant& variant, MegaBed& bed, Json& entry);
  /// With --batches 2.
  void two_batches(const Size& size, const Variant& variant, std::unique_ptr<MegaBed> alone, Json& entry);
  void add_lines(const Size& size, const Variant& variant, const Json& entry) const;
  void add_parts(MegaBed& bed, Json& entry);
  void report(Size& size, const std::string& name, Json& entry, const std::vector<double>& samples);
  LayerWay automatic() const;
  std::string compare_auto(const Size& size, Json& entry, double median_us) const;
  std::string compare_fused(Size& size, Json& entry, double median_us) const;

  /// What is under way from now on.
  void begin(const Size& size, const std::string& what);
  Json entry_of(const Size& size, const std::string& way) const;
  void add_copies(const Size& size, int copies, Json& entry) const;
  /// Calls a replay, every copy as often as the others.
  int calls_of(int copies) const { return (a_.calls + copies - 1) / copies * copies; }
  double tensor_rate(WeightKind kind) const;
  double floor_of(const Size& size) const;  ///< us
  std::vector<LayerWay> ways() const;       ///< all that share the heap
  std::string label_of(const Size& size, const std::string& way) const;

  const MegaArguments& a_;
  Lanes& lanes_;
  std::function<void()> save_, give_up_;
  std::string under_way_;
  std::unique_ptr<PowerLoops> power_;            ///< null: not wanted
  std::unique_ptr<AttentionStandIn> attention_;  ///< null: not wanted, or not made yet
  bool awake_ = false;
  int wrong_ = 0;
  int fused_ = 0;        ///< configurations of the fused layer that were measured or found wrong
  std::string refusal_;  ///< what it said to the others
  Json machine_, rows_ = Json::array();
};

}  // namespace heddle::tool
