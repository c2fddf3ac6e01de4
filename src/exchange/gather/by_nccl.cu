#include "exchange/gather/by_nccl.hpp"
#include "group/cuda_driver.hpp"
#include "signal/device_worker.cuh"

namespace heddle {

namespace {

constexpr int threads = 256;
constexpr int warps_a_cta = threads / 32;

using Packer = DeviceWorker<RowMover::any>;

__device__ std::int32_t* ids_of(std::byte* record, const NcclGather& call) {
  return reinterpret_cast<std::int32_t*>(record + call.wire.row_bytes());
}

/// Raises a fault for each bad id of a token; the same answer for all lanes.
__device__ bool ids_are_good(Packer& w, const NcclGather& call, const std::int32_t* ids, int token) {
  bool bad_here = false;
  for (int choice = w.lane(); choice < call.topk; choice += Packer::lanes_of_warp) {
    const std::int32_t id = ids[choice];
    bool bad = id < -1 || id >= call.placement.experts;
    for (int other = 0; other < choice; ++other) bad |= id >= 0 && id == ids[other];
    if (bad)
      w.fail({WordKind::refused, -1, token}, static_cast<std::uint64_t>(call.placement.experts),
             static_cast<std::uint64_t>(static_cast<std::int64_t>(id)));
    bad_here |= bad;
  }
  return __any_sync(Packer::all_lanes, bad_here) == 0;
}

__global__ void __launch_bounds__(threads) pack_kernel(const __grid_constant__ NcclGather call) {
  Packer w(call.team, CallPart::dispatch_receive, nullptr, 0);
  int tokens = *static_cast<const volatile int*>(call.input.tokens);
  if (tokens < 0 || tokens > call.max_tokens) {
    if (w.index() == 0 && w.lane() == 0) {
      w.fail({WordKind::refused, -1, -1}, static_cast<std::uint64_t>(call.max_tokens), static_cast<std::uint64_t>(tokens));
    }
    tokens = 0;
  }
  for (int token = w.index(); token < call.max_tokens; token += w.count()) {
    std::byte* record = call.records + static_cast<std::size_t>(token) * call.record_bytes();
    const std::ptrdiff_t first = static_cast<std::ptrdiff_t>(token) * call.topk;
    const bool real = token < tokens && ids_are_good(w, call, call.input.ids + first, token);
    if (real) w.quantise_row(record, call.input.hidden + static_cast<std::ptrdiff_t>(token) * call.wire.hidden, call.wire);
    std::int32_t* ids = ids_of(record, call);
    auto* weights = reinterpret_cast<float*>(ids + call.topk);
    for (int choice = w.lane(); choice < call.topk; choice += Packer::lanes_of_warp) {
      ids[choice] = real ? call.input.ids[first + choice] : -1;
      weights[choice] = real ? call.input.weights[first + choice] : 0.0f;
    }
    __syncwarp();
  }
}

__global__ void __launch_bounds__(threads) list_kernel(const __grid_constant__ NcclGather call) {
  const int pairs = call.ranks * call.max_tokens * call.topk;
  for (int pair = static_cast<int>(blockIdx.x * threads + threadIdx.x); pair < pairs;
       pair += static_cast<int>(gridDim.x) * threads) {
    const int row = pair / call.topk;
    const int choice = pair % call.topk;
    const std::int32_t* ids = ids_of(call.gathered + static_cast<std::size_t>(row) * call.record_bytes(), call);
    call.local_ids[pair] = call.placement.local_id(ids[choice], call.rank);
    call.weights[pair] = reinterpret_cast<const float*>(ids + call.topk)[choice];
  }
}

/// Eight values a thread; H is a multiple of 64, so they are of one row.
__global__ void __launch_bounds__(threads) finish_kernel(const __grid_constant__ NcclGather call) {
  const int tokens = min(max(*static_cast<const volatile int*>(call.input.tokens), 0), call.max_tokens);
  const std::size_t hidden = static_cast<std::size_t>(call.wire.hidden);
  const std::size_t values = static_cast<std::size_t>(tokens) * hidden;
  const std::size_t step = static_cast<std::size_t>(gridDim.x) * threads * 8;
  for (std::size_t at = (static_cast<std::size_t>(blockIdx.x) * threads + threadIdx.x) * 8; at < values; at += step) {
    uint4 eight = *reinterpret_cast<const uint4*>(call.reduced + at);
    if (call.output.shared != nullptr) {
      const float factor = call.output.shared_factors == nullptr ? 1.0f : call.output.shared_factors[at / hidden];
      const uint4 shared = *reinterpret_cast<const uint4*>(call.output.shared + at);
      auto* sums = reinterpret_cast<bf16*>(&eight);
      const auto* terms = reinterpret_cast<const bf16*>(&shared);
      for (int i = 0; i < 8; ++i) sums[i] = to_bf16(to_float(sums[i]) + __fmul_rn(factor, to_float(terms[i])));
    }
    *reinterpret_cast<uint4*>(call.output.out + at) = eight;
  }
}

unsigned ctas_for(const NcclGather& call, std::size_t items, std::size_t items_a_cta) {
  const std::size_t wanted = (items + items_a_cta - 1) / items_a_cta;
  const auto most = static_cast<std::size_t>(call.ctas);
  return static_cast<unsigned>(wanted < 1 ? 1 : (wanted < most ? wanted : most));
}

}  // namespace

void pack_records(const NcclGather& call, cudaStream_t stream) {
  pack_kernel<<<ctas_for(call, static_cast<std::size_t>(call.max_tokens), warps_a_cta), threads, 0, stream>>>(call);
  cuda::check(cudaGetLastError(), "launch of gather's packing");
}

void list_gathered(const NcclGather& call, cudaStream_t stream) {
  const std::size_t pairs = static_cast<std::size_t>(call.ranks) * static_cast<std::size_t>(call.max_tokens * call.topk);
  list_kernel<<<ctas_for(call, pairs, threads), threads, 0, stream>>>(call);
  cuda::check(cudaGetLastError(), "launch of gather's listing");
}

void finish_sums(const NcclGather& call, cudaStream_t stream) {
  const std::size_t values = static_cast<std::size_t>(call.max_tokens) * static_cast<std::size_t>(call.wire.hidden);
  finish_kernel<<<ctas_for(call, values, 8 * threads), threads, 0, stream>>>(call);
  cuda::check(cudaGetLastError(), "launch of gather's last step");
}

}  // namespace heddle
