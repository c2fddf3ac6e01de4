// The steps between the rows of a call and its results, whichever runner brought them: operands, two products, the activation
// between them. docs/numerics.md, "One pair through one expert".
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "experts/activation/device.hpp"
#include "experts/sm90/cuda_stage.hpp"
#include "experts/sm90/launch.hpp"
#include "experts/sm90/rows.hpp"
#include "experts/sm90/weights.hpp"
#include "heddle/device_experts.hpp"

namespace heddle::sm90 {

/// What a runner makes of its layout.
struct RunnerCall {
  RowView rows;
  int first_expert = 0;
  int experts = 0;
  const int* counts = nullptr;  ///< null: an_expert each
  int an_expert = 0;            ///< rows that one can have
  int most_rows = 0;            ///< that all can have
  int expected_rows = 0;        ///< an expert; 0: most_rows spread evenly
  RowMap source;                ///< of rows
  const float* weights = nullptr;
  RowMap weight_places;
  bf16* results = nullptr;
  std::size_t result_stride = 0;
  RowMap result_places;

  // Routed calls: rows are tokens, listed by expert.
  const std::int32_t* ids = nullptr;
  TokenCount tokens;
  int topk = 0;
  const float* flat_weights = nullptr;
};

/// The SMs of a GPU. Throws InputError unless it is one that can run these kernels.
int sms_of(int device);

/// The word in which kernels report a count, in host memory that they write to.
class RefusedWord {
 public:
  RefusedWord();
  RefusedWord(const RefusedWord&) = delete;
  RefusedWord& operator=(const RefusedWord&) = delete;
  ~RefusedWord();
  unsigned long long* on_device() const { return on_device_; }
  unsigned long long take();

 private:
  unsigned long long* word_ = nullptr;
  unsigned long long* on_device_ = nullptr;
};

/// Rows of an operand: values and, with fp8, scales, both at 16-byte multiples.
struct OperandRows {
  loading::DeviceMemory<std::byte> values;
  loading::DeviceMemory<std::byte> scales;
  std::size_t value_stride = 0;
  std::size_t scale_stride = 0;
  int rows = 0;

  RowView view() const { return {{}, values.get(), value_stride, scales.get(), scale_stride, rows}; }
};

/// The chain of one DeviceExperts with its buffers, on the current device.
class ExpertChain {
 public:
  ExpertChain(const DeviceWeights& weights, const ExpertOptions& options, const DeviceExpertsOptions& device, int sms);

  void run(const RunnerCall& call, cudaStream_t stream);
  std::size_t bytes() const { return bytes_; }
  RefusedWord& refused() { return refused_; }

 private:
  OperandRows make_rows(std::size_t rows, int columns, const char* what);
  template <class T>
  loading::DeviceMemory<T> take(std::size_t count, const char* what);
  RowChange change_of(const RowView& rows) const;
  /// Ahead of kernels that only compute: the listing of pairs, the first product. A dispatch waits for other ranks, and who waits
  /// for it on SMs may keep those ranks' kernels from them. Nor where SMs are set apart: there it would be on those of others.
  bool may_start_ahead() const { return ctas_ == sms_; }
  RowBlocks blocks_of(const RunnerCall& call) const;
  RowLimits limits_of(const RunnerCall& call, bool reports);
  TokenRows prepare(const RunnerCall& call, cudaStream_t stream);
  TokenRows operand(const RowView& rows, const RowMap& map) const;
  ProductCall product(const OrderedMatrix& weights, const RunnerCall& call, const TokenRows& tokens);
  void activate(const RunnerCall& call, cudaStream_t stream);
  DeviceActivation activation_step(const RunnerCall& call) const;

  const DeviceWeights& weights_;
  ExpertOptions options_;
  bool fused_;
  DeviceRowBlocks row_blocks_;
  int most_rows_;
  Operand operand_;
  int sms_;
  int ctas_;
  std::size_t bytes_ = 0;
  RefusedWord refused_;
  OperandRows rows_;       ///< of the first product, where rows do not come as it wants them
  OperandRows activated_;  ///< of the second
  loading::DeviceMemory<bf16> gate_up_;
  loading::DeviceMemory<std::byte> codes_;  ///< activated rows that have yet to be widened
  loading::DeviceMemory<float> flat_weights_;
  loading::DeviceMemory<int> flat_counts_;
  int slots_ = 0;
};

}  // namespace heddle::sm90
