// gather whose rows and sums NCCL moves: what its kernels are given, and when it is possible. The way is gather's padded mode
// (docs/protocols/gather.md) with collectives in the place of words: blocks of the step's largest batch, a record a row.
#pragma once

#include <cuda_runtime.h>

#include <memory>
#include <string>
#include <vector>

#include "exchange/areas.hpp"
#include "exchange/sending.hpp"
#include "formats/row_format.hpp"
#include "group/cuda_map.hpp"
#include "heddle/device.hpp"
#include "signal/device_team.hpp"

namespace heddle {

/// Ordinary memory of one rank, all of it device memory.
struct NcclGather {
  DeviceTeam team;  ///< for faults alone
  RowFormat wire;
  int rank = 0;
  int ranks = 1;
  int topk = 1;
  int max_tokens = 0;
  int ctas = 1;  ///< most that a launch has
  PlacementView placement;
  std::byte* records = nullptr;       ///< [cap]: a wire row and its routing behind it
  std::byte* gathered = nullptr;      ///< [ranks * cap] records
  std::int32_t* local_ids = nullptr;  ///< [ranks * cap, topk]
  float* weights = nullptr;           ///< [ranks * cap, topk]
  bf16* reduced = nullptr;            ///< [cap, H]
  DeviceInput input;
  DeviceOutput output;

  HEDDLE_HOST_DEVICE std::size_t record_bytes() const { return wire.row_bytes() + routing_bytes(topk); }
};

/// Own tokens into records; what is beyond them up to max_tokens gets no experts. Bad ids and too many tokens raise a
/// fault and travel as no experts: the collective behind this kernel takes place in any case, or the other ranks would wait.
void pack_records(const NcclGather& call, cudaStream_t stream);
/// Local ids and weights of everything that was gathered.
void list_gathered(const NcclGather& call, cudaStream_t stream);
/// Own rows of the sum, and the shared expert's, to where the caller wants them.
void finish_sums(const NcclGather& call, cudaStream_t stream);

/// Why options or ranks are not what NCCL can serve; empty: they are. `group` says where the workspace's ranks are, `of_nccl` where
/// the communicators' are. The same on all ranks, since processes make NCCL's communicators together or not at all.
std::string refused_by_nccl(const ExchangeOptions& options, const cuda::DeviceMap& group, const cuda::DeviceMap& of_nccl);
/// Why NCCL cannot serve these ranks at present; empty: it can. `live`: by rank, the same on all.
std::string refused_while_masked(const std::vector<bool>& live);

std::unique_ptr<DeviceExchange> create_device_gather_by_nccl(DeviceWorkspace& workspace, std::size_t gpu,
                                                             const ExchangeOptions& options, const DeviceExchangeOptions& device);

}  // namespace heddle
