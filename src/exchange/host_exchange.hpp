// What the ways share on the host: workers, checks of the input, the options as layouts need them.
#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "exchange/all_gather.hpp"
#include "exchange/arrivals.hpp"
#include "exchange/call_order.hpp"
#include "exchange/sending.hpp"
#include "heddle/exchange.hpp"
#include "signal/host_worker.hpp"

namespace heddle {

/// An array that is not touched before it is used, so that room for the worst case costs no pages.
template <class T>
class Array {
 public:
  Array() = default;
  explicit Array(std::size_t size) { grow(size); }
  /// Room for `size` values, whatever was in it lost. Memory that suffices is kept: new pages cost more than copies.
  void grow(std::size_t size) {
    if (size <= size_) return;
    values_.reset();
    values_ = std::make_unique_for_overwrite<T[]>(size);
    size_ = size;
  }
  T* data() const { return values_.get(); }
  T& operator[](std::size_t i) const { return values_[i]; }

 private:
  std::unique_ptr<T[]> values_;
  std::size_t size_ = 0;
};

ExchangeShape shape_of(const ExchangeOptions& options);
RowFormat wire_format(const ExchangeOptions& options);
RowFormat returned_format(const ExchangeOptions& options);
Areas areas_of(const ExchangeMemory& memory, int ranks);
struct GatherTagged;
GatherTagged tagged_of(const ExchangeOptions& options, const ExchangeMemory& memory, int ranks);

/// A way's layout with `areas` filled in.
template <class Layout>
Layout make_layout(const ExchangeOptions& options, const Areas& areas) {
  Layout layout;
  layout.shape = shape_of(options);
  layout.wire = wire_format(options);
  layout.returned = returned_format(options);
  layout.areas = areas;
  return layout;
}

/// Tests only: called by every worker of the exchanges that this thread creates afterwards, on the worker's own
/// thread, before every verb that copies, counts, sums, publishes, looks or waits. An empty one: no longer.
void set_verb_hook(std::function<void()> hook);

/// Memory of a numbering by one worker: n numbers in some classes.
class HostNumbering {
 public:
  HostNumbering() = default;
  HostNumbering(std::size_t numbers, std::size_t classes) : numbers_(numbers), totals_(classes), before_(classes) {}
  Numbering view() const { return {numbers_.data(), totals_.data(), before_.data()}; }

 private:
  Array<std::int32_t> numbers_, totals_, before_;
};

/// One rank's side of a call, whatever is done in it: its workers, its checks, its accounts.
class HostRank {
 public:
  HostRank(Workspace& workspace, const ExchangeOptions& options, const ExchangeMemory& memory);

 protected:
  using Half = std::function<bool(HostWorker&)>;
  /// Runs a half on all workers; throws the fault if one gave up, and what one threw.
  void run(CallPart part, const Half& half);
  /// The same of n tasks, each on a thread of its own, the first on this one. Before: nobody is in a barrier of this rank.
  void run_side_by_side(std::size_t n, const std::function<bool(std::size_t)>& task);
  /// From now on the first worker has a link make progress while it waits. It does for as long as any worker waits for another
  /// rank, since who has heard one meets the team (hear_each).
  void drive(NodeLink& link) { team_.link = &link; }
  /// Checks the input before anything is written. What all ranks see alike is thrown alike; what only
  /// this rank sees also ends the others' waits.
  void accept(const ExchangeInput& input, const Step& step);
  /// Before combine_send: there was a dispatch.
  void accept_results() const { order_.need_dispatch(false, name(options_.way)); }
  /// Likewise before combine_receive; and outputs have a place, slices fit the batch.
  void accept(const CombineOutput& output);
  /// Notes rows that this rank pushed to `peer`, or pulled from it.
  void count_rows(int peer, std::int64_t rows, std::size_t bytes_a_row);
  /// Notes rows that this rank sent to another node.
  void count_between(std::int64_t rows, std::size_t bytes_a_row);
  /// Gives all outputs to all ranks where that is wanted.
  void share_outputs(const CombineOutput& output);

  bool tensor_parallel() const { return options_.way == Way::gather && options_.gather == GatherMode::tensor_parallel; }
  int ranks() const { return shape_.ranks; }
  int rank() const { return workspace_.view().rank; }
  const HostWorker& worker() const { return workers_[0]; }
  HostWorker& worker(std::size_t index) { return workers_[index]; }
  /// The workers' team, which workers with another role may be of as long as they use none of its barriers.
  const HostTeam& team() const { return team_; }
  ExchangeTraffic take_counts() { return std::exchange(traffic_, {}); }
  int local_experts() const { return local_experts_; }
  const AllGatherLayout& all_gather_layout() const { return all_gather_; }

  Workspace& workspace_;
  ExchangeOptions options_;
  ExchangeShape shape_;
  PlacementView placement_;
  SendInput input_;
  ExchangeInput offered_;
  Step step_;

 private:
  /// Throws, after telling the others not to wait.
  [[noreturn]] void refuse(const InputError& error, int expected, int seen);

  HostTeam team_;
  std::vector<HostWorker> workers_;
  std::function<void()> hook_;
  AllGatherLayout all_gather_;
  std::vector<int> experts_on_;
  ExchangeTraffic traffic_;
  CallOrder order_;
  int local_experts_ = 0;
  int most_tokens_ = 0;
};

class HostExchange : public Exchange, protected HostRank {
 public:
  using HostRank::HostRank;
  ExchangeTraffic take_traffic() override { return take_counts(); }
};

/// Most rows that `rows_arrived` rows can become when they are laid out by expert, runs padded.
std::size_t expanded_room(const ExchangeOptions& options, int experts, std::size_t rows_arrived);

/// Rows laid out by expert in this rank's ordinary memory, and the pair bookkeeping that goes with it.
struct ExpandedRows {
  Array<std::int32_t> begins, counts, places, numbers, before;
  Array<float> row_weights;
  Array<std::byte> rows;
  std::size_t room = 0;

  /// Room for `rows_arrived` rows of a rank with `local_experts` experts.
  void reserve(const ExchangeOptions& options, int local_experts, std::size_t rows_arrived, std::size_t row_bytes);
  ExpertLayout layout(const ExchangeOptions& options, int local_experts, int ranks) const;
  /// Fills the by-expert fields of what arrived.
  void describe(const ExchangeOptions& options, int local_experts, int ranks, const RowFormat& format, Arrived& arrived) const;
};

inline SharedRows shared_rows(const CombineOutput& output) { return {output.shared, output.shared_factors}; }

/// Pairs of a row and one of this rank's experts among routed rows.
int count_pairs(const Arrived& arrived, int topk);

std::unique_ptr<Exchange> create_gather(Workspace& workspace, const ExchangeOptions& options, const ExchangeMemory& memory);
std::unique_ptr<Exchange> create_normal(Workspace& workspace, const ExchangeOptions& options, const ExchangeMemory& memory);
std::unique_ptr<Exchange> create_low_latency(Workspace& workspace, const ExchangeOptions& options, const ExchangeMemory& memory);
std::unique_ptr<Exchange> create_elastic(Workspace& workspace, const ExchangeOptions& options, const ExchangeMemory& memory);
std::unique_ptr<Exchange> create_one_sided(Workspace& workspace, const ExchangeOptions& options, const ExchangeMemory& memory);

}  // namespace heddle
