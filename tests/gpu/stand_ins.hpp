// The experts of the tests on a GPU, so that a whole round trip can lie in a graph: per row what run_experts of
// exchange_support.hpp computes on the host, bit for bit; and a comparison that counts what differs.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "formats/row_format.hpp"
#include "heddle/exchange.hpp"

namespace heddle {

/// What arrived at one rank, and what its stand-ins are. All pointers are into device memory.
struct StandIns {
  ArrivedLayout layout = ArrivedLayout::routed;
  RowFormat format;
  int topk = 1;
  int local_experts = 0;
  const int* experts = nullptr;       ///< [local experts]: their ids
  bool weights_at_activation = true;  ///< or in the sum, of routed rows
  bool slots_wanted = false;          ///< routed: [room, topk, H] instead of sums
  bool zeros_without_expert = false;  ///< gather: a row that chose nobody here gives zeros, others leave it alone
  const std::byte* rows = nullptr;
  std::size_t row_stride = 0;
  int room = 0;
  const std::int32_t* begins = nullptr;
  const std::int32_t* counts = nullptr;
  const float* row_weights = nullptr;
  const std::int32_t* local_ids = nullptr;
  const float* weights = nullptr;
};

/// `experts`: this rank's, in device memory.
inline StandIns stand_ins_of(const ExchangeOptions& options, const RowFormat& format, const Arrived& arrived, const int* experts,
                             int local_experts) {
  StandIns all;
  all.layout = arrived.layout;
  all.format = format;
  all.topk = options.topk;
  all.local_experts = local_experts;
  all.experts = experts;
  all.weights_at_activation = options.weight_at == WeightAt::activation;
  all.slots_wanted = arrived.slots_wanted;
  all.zeros_without_expert = options.way == Way::gather;
  all.rows = arrived.rows;
  all.row_stride = arrived.row_stride;
  all.room = arrived.room;
  all.begins = arrived.begins;
  all.counts = arrived.counts;
  all.row_weights = arrived.row_weights;
  all.local_ids = arrived.local_ids;
  all.weights = arrived.weights;
  return all;
}

/// Results as a runner leaves them, on the stream's GPU, which is current; rows without an expert are not written.
void run_stand_ins(const StandIns& all, bf16* results, cudaStream_t stream);

/// What a comparison found: how many values, and the first of them (none: all bits set).
struct Difference {
  unsigned long long count = 0;
  unsigned long long first = ~0ull;
};

/// Adds to `found` where have [size] is not want [wanted] followed by `rest`.
void compare(const bf16* have, const bf16* want, std::size_t wanted, std::size_t size, bf16 rest, Difference* found,
             cudaStream_t stream);

/// Loads these kernels on the current GPU: loading one later might wait for kernels that wait for each other.
void load_test_kernels();

}  // namespace heddle
