#include "layer/layer_kernels.hpp"

#include "group/cuda_driver.hpp"
#include "signal/device_rows.cuh"

namespace heddle {

namespace {

constexpr int threads = 256;
constexpr int lanes = 32;
constexpr int warps_a_cta = threads / lanes;
constexpr int lane_columns = 8;
constexpr int warp_columns = lanes * lane_columns;
constexpr unsigned all_lanes = 0xFFFFFFFFu;

__device__ int lane_of_thread() { return static_cast<int>(threadIdx.x) % lanes; }
__device__ int warp_of_grid() { return static_cast<int>(blockIdx.x) * warps_a_cta + static_cast<int>(threadIdx.x) / lanes; }
__device__ int warps_of_grid() { return static_cast<int>(gridDim.x) * warps_a_cta; }

/// One row by a warp, eight columns a lane.
template <Wire wire>
__device__ void widen_row(const WidenCall& call, int row) {
  const std::byte* from = call.rows + static_cast<std::size_t>(row) * call.row_stride;
  bf16* to = call.to + static_cast<std::size_t>(row) * static_cast<std::size_t>(call.wire.hidden);
  for (int at = lane_of_thread() * lane_columns; at < call.wire.hidden; at += warp_columns) {
    RawEight<wire> raw;
    raw.load(from, at, call.wire);
    std::uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = ptx::to_bf16_pair(raw.value(2 * i, call.wire), raw.value(2 * i + 1, call.wire));
    *reinterpret_cast<uint4*>(to + at) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
}

/// A row of CTAs an expert.
template <Wire wire>
__global__ void __launch_bounds__(threads) widen_by_expert(const __grid_constant__ WidenCall call) {
  const int begin = call.begins[blockIdx.y];
  const int count = call.counts[blockIdx.y];
  for (int i = warp_of_grid(); i < count; i += warps_of_grid()) {
    const int row = begin + i;
    if (row < 0 || row >= call.room) return;  // of a call that was given up
    widen_row<wire>(call, row);
  }
}

template <Wire wire>
__global__ void __launch_bounds__(threads) widen_routed(const __grid_constant__ WidenCall call) {
  for (int row = warp_of_grid(); row < call.room; row += warps_of_grid()) {
    bool own = false;
    for (int choice = lane_of_thread(); choice < call.topk; choice += lanes) {
      own |= call.local_ids[static_cast<std::ptrdiff_t>(row) * call.topk + choice] >= 0;
    }
    if (__any_sync(all_lanes, own)) widen_row<wire>(call, row);
  }
}

__global__ void __launch_bounds__(threads) limit_runs(const __grid_constant__ RunsCall call) {
  const int expert = static_cast<int>(blockIdx.x) * threads + static_cast<int>(threadIdx.x);
  if (expert >= call.experts) return;
  const std::int32_t begin = call.begins[expert];
  const std::int32_t count = call.counts[expert];
  const bool inside = begin >= 0 && count >= 0 && begin <= call.room && count <= call.room - begin;
  call.begins_out[expert] = inside ? begin : 0;
  call.counts_out[expert] = inside ? count : 0;
}

/// A warp a token.
__global__ void __launch_bounds__(threads) gate_tokens(const __grid_constant__ GateCall call) {
  const int tokens = min(*call.tokens, call.most_tokens);
  for (int token = warp_of_grid(); token < tokens; token += warps_of_grid()) {
    const auto* row = reinterpret_cast<const std::byte*>(call.hidden + static_cast<std::size_t>(token) *
                                                                           static_cast<std::size_t>(call.hidden_size));
    const RowFormat plain{Wire::bf16, call.hidden_size, {}, 1.0f};
    float sum = 0.0f;
    for (int at = lane_of_thread() * lane_columns; at < call.hidden_size; at += warp_columns) {
      RawEight<Wire::bf16> raw;
      raw.load(row, at, plain);
#pragma unroll
      for (int i = 0; i < lane_columns; ++i) sum = __fmaf_rn(call.gate[at + i], raw.value(i, plain), sum);
    }
#pragma unroll
    for (int distance = lanes / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(all_lanes, sum, distance);
    if (lane_of_thread() == 0) call.factors[token] = __fdiv_rn(1.0f, 1.0f + expf(-sum));
  }
}

__global__ void store_numbers(const __grid_constant__ NumbersCall call) {
  if (static_cast<int>(threadIdx.x) < call.count) call.to[threadIdx.x] = call.values[threadIdx.x];
}

template <class Call>
void launch(void (*kernel)(const Call), const Call& call, dim3 grid, int block, cudaStream_t stream, const char* what) {
  void* arguments[] = {const_cast<Call*>(&call)};
  cuda::check(
      cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid, dim3(static_cast<unsigned>(block)), arguments, 0, stream),
      what);
}

/// CTAs for so many items of a warp, four a SM at most.
unsigned ctas_for(long long items, int sms) {
  const long long wanted = (items + warps_a_cta - 1) / warps_a_cta;
  const long long most = 4LL * sms;
  return static_cast<unsigned>(wanted < 1 ? 1 : wanted < most ? wanted : most);
}

}  // namespace

void launch_widen(const WidenCall& call, int sms, cudaStream_t stream) {
  const bool fp8 = call.wire.wire == Wire::fp8;
  if (call.begins != nullptr) {
    if (call.experts == 0) return;
    const unsigned ctas_an_expert = ctas_for(call.room / call.experts, (sms + call.experts - 1) / call.experts);
    launch(fp8 ? widen_by_expert<Wire::fp8> : widen_by_expert<Wire::nvfp4>, call,
           dim3(ctas_an_expert, static_cast<unsigned>(call.experts)), threads, stream, "launch of the kernel that widens rows");
    return;
  }
  if (call.room == 0) return;
  launch(fp8 ? widen_routed<Wire::fp8> : widen_routed<Wire::nvfp4>, call, dim3(ctas_for(call.room, sms)), threads, stream,
         "launch of the kernel that widens rows");
}

void launch_runs(const RunsCall& call, cudaStream_t stream) {
  if (call.experts == 0) return;
  const auto ctas = static_cast<unsigned>((call.experts + threads - 1) / threads);
  launch(limit_runs, call, dim3(ctas), threads, stream, "launch of the kernel that limits runs");
}

void launch_gate(const GateCall& call, int sms, cudaStream_t stream) {
  if (call.most_tokens == 0) return;
  launch(gate_tokens, call, dim3(ctas_for(call.most_tokens, sms)), threads, stream,
         "launch of the kernel of the shared expert's gate");
}

void launch_numbers(const NumbersCall& call, cudaStream_t stream) {
  launch(store_numbers, call, dim3(1), NumbersCall::most, stream, "launch of the kernel that stores numbers of tokens");
}

void prepare_layer_kernels() {
  const void* const kernels[] = {reinterpret_cast<const void*>(&widen_by_expert<Wire::fp8>),
                                 reinterpret_cast<const void*>(&widen_by_expert<Wire::nvfp4>),
                                 reinterpret_cast<const void*>(&widen_routed<Wire::fp8>),
                                 reinterpret_cast<const void*>(&widen_routed<Wire::nvfp4>),
                                 reinterpret_cast<const void*>(&gate_tokens),
                                 reinterpret_cast<const void*>(&limit_runs),
                                 reinterpret_cast<const void*>(&store_numbers)};
  for (const void* kernel : kernels) {
    cudaFuncAttributes attributes;
    cuda::check(cudaFuncGetAttributes(&attributes, kernel), "loading the kernels of a layer");
  }
}

}  // namespace heddle
