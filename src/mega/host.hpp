// The fused layer of one rank on the host engine: threads in the roles of a kernel's warps, half of them dispatch, half of them run
// tasks and then sum. All are under way at once, and meet in words alone.
#pragma once

#include <functional>

#include "exchange/host_exchange.hpp"
#include "mega/host_products.hpp"
#include "mega/options.hpp"

namespace heddle {

/// What the last call did on this rank. Phases overlap; seconds are of the slowest thread of the role, its waits left out of the
/// products' and the shared expert's.
struct MegaReport {
  double dispatch_seconds = 0;  ///< until the last row was fetched
  double gemm1_seconds = 0;     ///< activation included
  double gemm2_seconds = 0;
  double shared_seconds = 0;
  double sum_seconds = 0;
  ExchangeTraffic fetched, pushed;
  std::uint64_t announced = 0;  ///< pairs of own tokens whose experts' ranks are live
  std::vector<int> rows;        ///< of each local expert
  int blocks = 0;               ///< row blocks
};

class HostMega : private HostRank {
 public:
  /// `options` of way mega; `memory` as for create_exchange. The experts, an extra one behind the others, must outlive this.
  HostMega(Workspace& workspace, const ExchangeOptions& options, const ExchangeMemory& memory, const MegaExperts& experts);

  /// Factors of the shared expert's results, a token each; null: 1.
  using SharedFactors = std::function<const float*()>;
  /// The whole call: from tokens to outputs. Of `output` the shared expert's fields are left alone, all_out is as in any exchange.
  /// `factors` is called when the input has been checked, since a gate reads the tokens; what it throws ends the others' waits.
  void forward(const ExchangeInput& input, const Step& step, const CombineOutput& output, const SharedFactors& factors);
  const MegaReport& report() const { return report_; }

 private:
  struct TaskWorker;
  MegaCall call() const;
  const float* ask(const SharedFactors& factors) const;
  bool dispatch(HostWorker& w, const MegaCall& call, double& seconds);
  void note(const MegaCall& call);

  MegaLayout layout_;
  Placement all_experts_;  ///< with extra ones
  std::vector<int> experts_each_;
  MegaExperts experts_;
  HostNumbering sent_;
  Array<std::int32_t> arrived_, rows_, ends_, row_ends_;
  MegaReport report_;
};

}  // namespace heddle
