// What a layer on a GPU does beside the exchange and the products. Launches for code that is not compiled for a device; they
// allocate nothing and may be captured.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "formats/row_format.hpp"

namespace heddle {

/// Arrived rows in another format than the products take, to bf16 at the same row numbers; real ones alone. Every value of a wire
/// but fp8 with f32 scales is a bf16 value.
struct WidenCall {
  const std::byte* rows = nullptr;  ///< 16-byte aligned
  std::size_t row_stride = 0;
  RowFormat wire;
  bf16* to = nullptr;  ///< [room, hidden]
  int room = 0;
  // Rows by expert; or, without begins, routed rows: those with a local expert.
  int experts = 0;
  const std::int32_t* begins = nullptr;  ///< [experts]
  const std::int32_t* counts = nullptr;
  const std::int32_t* local_ids = nullptr;  ///< [room, topk]
  int topk = 0;
};
void launch_widen(const WidenCall& call, int sms, cudaStream_t stream);

/// Runs as they were written, but those that do not lie in [0, room) are empty: behind a dispatch that was given up anything may be
/// found there, and results are written by it.
struct RunsCall {
  const std::int32_t* begins = nullptr;  ///< [experts]
  const std::int32_t* counts = nullptr;
  int experts = 0;
  int room = 0;
  std::int32_t* begins_out = nullptr;
  std::int32_t* counts_out = nullptr;
};
void launch_runs(const RunsCall& call, cudaStream_t stream);

/// factors[t] = sigmoid(gate . hidden[t]) in f32.
struct GateCall {
  const bf16* hidden = nullptr;  ///< [tokens, hidden_size], 16-byte aligned
  int hidden_size = 0;           ///< a multiple of 64
  const int* tokens = nullptr;   ///< on the device, at most most_tokens
  int most_tokens = 0;
  const float* gate = nullptr;  ///< [hidden_size], 16-byte aligned
  float* factors = nullptr;
};
void launch_gate(const GateCall& call, int sms, cudaStream_t stream);

/// Numbers that the host knows, to where kernels read them.
struct NumbersCall {
  static constexpr int most = 32;
  int* to = nullptr;
  int count = 0;
  int values[most] = {};
};
void launch_numbers(const NumbersCall& call, cudaStream_t stream);

/// The tokens of one pass of a call that is split: to[i] = what is left of *tokens[i] behind `first`, at most `most`; in the last
/// pass all of it, so that too many are found. A negative number stays, for the same reason.
struct PassCall {
  static constexpr int most_ranks = 32;
  const int* tokens[most_ranks] = {};
  int* to = nullptr;
  int count = 0;
  int first = 0;
  int most = 0;
  bool last = false;
};
void launch_pass(const PassCall& call, cudaStream_t stream);

/// Loads these kernels on the current device.
void prepare_layer_kernels();

}  // namespace heddle
