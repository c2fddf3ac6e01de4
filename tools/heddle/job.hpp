// One call of a layer on all ranks, as threads or processes of this command, on the host or on GPUs.
#pragma once

#include <string>
#include <vector>

#include "heddle/layer.hpp"
#include "inputs.hpp"
#include "trace/recorder.hpp"

namespace heddle::tool {

struct JobResult {
  std::vector<bf16> output;          ///< [T, H], tokens in the batch's order
  std::vector<LayerReport> reports;  ///< a rank
  LayerOptions options;              ///< of the way that it went
  ExchangeOptions exchange;
  std::string choice;          ///< way auto: what the layer says of it
  std::size_t heap_bytes = 0;  ///< a rank
  std::uint64_t kernels = 0;   ///< launched by the exchange on all GPUs; 0 on the host engine
  double seconds = 0;          ///< of the slowest rank, creation not counted
  double copies = 0;           ///< a token, as sent

  /// Sum over ranks, and the slowest rank's time.
  PhaseReport total(PhaseReport LayerReport::*phase) const;
  double slowest(double LayerReport::*part) const;  ///< of the slowest rank
};

/// What is recorded of a job: its last call.
struct JobTrace {
  trace::Recorder* recorder = nullptr;  ///< null: nothing
  int warm_calls = 0;                   ///< before it
};

/// Runs inputs through options.way. Throws InputError or FaultError of the rank that explains most.
JobResult run_job(const Inputs& inputs, const LayerOptions& options, const JobTrace& trace = {});

}  // namespace heddle::tool
