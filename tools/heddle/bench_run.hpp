// One run of `heddle bench exchange`: every configuration that was asked for, a line of a table and an entry of the JSON each.
#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "bench_bytes.hpp"
#include "bench_setup.hpp"

namespace heddle::tool {

using Json = nlohmann::ordered_json;

/// A way in the words of the command line, with what distinguishes its variants.
struct Row {
  std::string way;
  Configuration configuration;
};

class Run {
 public:
  Run(const BenchArguments& a, Lanes& lanes) : a_(a), lanes_(lanes) {}

  /// Throws FaultError or Error if something went wrong on the GPUs. A configuration that does not fit together or does not fit
  /// the memory is reported in its place. `save` is called before NCCL's turn: other people's code can end a process.
  void all(const std::function<void()>& save);
  /// What has been measured so far, with its provenance.
  Json json() const;

 private:
  void measure_floor();
  void round_trips(Batch& batch);
  void round_trip(Batch& batch, const Row& row);
  void nccl(Batch& batch);
  void nccl_round_trip(Batch& batch, int tokens);
  void layout_costs(Batch& batch);
  void layout_cost(Batch& batch, const Row& row, double& routed_dispatch);
  void sweeps(Batch& batch);
  void overlaps(Batch& batch);
  bool wants(const std::string& way) const { return std::find(a_.ways.begin(), a_.ways.end(), way) != a_.ways.end(); }
  std::vector<Row> rows(const std::vector<std::string>& ways) const;

  Json entry_of(const Batch& batch, const Row& row) const;
  void add_times(Json& entry, const Times& times, const Traffic& traffic) const;
  /// What was counted, and what the counting cost; the end of the line that says so.
  std::string add_counted(Json& entry, const Counted& counted, double median_us) const;
  double floor_us(const Traffic& traffic) const { return 1e6 * (traffic.floor_seconds + word_seconds(lanes_)) + empty_us_; }
  int ranks_a_gpu() const { return (a_.ranks + static_cast<int>(lanes_.gpus()) - 1) / static_cast<int>(lanes_.gpus()); }

  const BenchArguments& a_;
  Lanes& lanes_;
  double empty_us_ = 0;
  Json machine_;
  std::string routing_note_;
  int topk_ = 0;
  std::shared_ptr<NcclCommunicators> communicators_;
  std::string no_nccl_;                 ///< why there are none
  std::optional<double> uncounted_us_;  ///< median of the line before, if it is the same without counters
  Json floor_ = Json::object(), rows_ = Json::array(), layouts_ = Json::array(), sweeps_ = Json::array(), overlaps_ = Json::array();
};

/// The first columns of every table, and what they are called.
std::string label_of(const Row& row);
std::string label_title();
/// Does one configuration; what does not fit together or lacks memory becomes a line and an entry of `to` with the reason.
void attempt(Json& to, const Json& entry, const std::string& label, const std::function<void()>& work);

extern const std::map<std::string, Way> own_ways;
extern const std::map<std::string, bool> off_on;

}  // namespace heddle::tool
