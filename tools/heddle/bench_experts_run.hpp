// One run of `heddle bench experts`: a line of a table and an entry of the JSON for everything that is measured.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "bench_experts.hpp"
#include "bench_run.hpp"

namespace heddle::tool {

class ExpertsRun {
 public:
  ExpertsRun(const ExpertsArguments& a, const std::vector<RowCounts>& counts, Lanes& lanes);

  /// Throws Error if something went wrong on the GPU. What does not fit, or gives wrong results, is reported in its place. `save`
  /// is called now and then; `give_up` when the GPU does not come to an end, and does not return.
  void all(const std::function<void()>& save, const std::function<void()>& give_up);
  /// What has been measured so far, with its provenance.
  Json json() const;
  int wrong() const { return wrong_; }                         ///< results that were off
  const std::string& under_way() const { return under_way_; }  ///< what is being measured

 private:
  /// The least that the counts at hand can take.
  struct Floor {
    double stream_us = 0;  ///< to bring the weights in
    double flops_us = 0;
    double us() const { return std::max(stream_us, flops_us); }
  };
  /// One line: what is measured, by whom.
  struct Line {
    std::string product, by;
    int ctas = 0;
    bool rule = false;  ///< what the rule takes
  };
  struct Touched {
    std::string label;
    int rows = 0, experts = 0;
    double us = 0;
  };
  using Queue = std::function<void(int call)>;

  void measure_launches();
  void matrix(const ExpertsShape& shape, WeightKind kind, bool down);
  void products(ProductBed& bed, const RowCounts& counts);
  void own(ProductBed& bed, const Floor& floor, const std::string& product);
  void cutlass(ProductBed& bed, const Floor& floor);
  void cublas(ProductBed& bed);

  Floor floor_of(ProductBed& bed);
  /// Calls a replay, about `us` each.
  int calls_of(const ProductBed& bed, double us) const;
  std::vector<double> time(int calls, int replays, const Queue& queue);
  /// False, after a line, if the results are wrong.
  bool right(ProductBed& bed, Json& entry, const std::string& label, bool activates, const Queue& queue);
  Json entry_of(const ProductBed& bed, const Line& line) const;
  void report(Json& entry, const std::string& label, const ProductBed& bed, const std::vector<double>& samples, double bytes,
              const Floor& floor);
  void touched_costs(const ProductBed& bed);
  bool wants(const std::vector<std::string>& words, const char* word) const;

  const ExpertsArguments& a_;
  std::vector<RowCounts> counts_;
  Lanes& lanes_;
  std::function<void()> give_up_;
  ExpertsShape shape_;  ///< at hand
  std::string under_way_;
  int wrong_ = 0;
  std::vector<Touched> touched_;  ///< of the matrix at hand
  Json machine_, launches_ = Json::object(), rows_ = Json::array(), costs_ = Json::array();
};

}  // namespace heddle::tool
