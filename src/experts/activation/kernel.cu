#include "experts/activation/flat_list.hpp"
#include "experts/activation/group.cuh"
#include "experts/activation/kernel.hpp"
#include "signal/ptx.cuh"

namespace heddle {

namespace {

constexpr int lanes_of_warp = 32;
constexpr unsigned all_lanes = 0xFFFFFFFFu;

struct Shared {
  int row_end[most_activation_experts];
  int warp_ends[most_activation_threads / lanes_of_warp];
};

/// Inclusive prefix sum over the lanes.
__device__ int sum_up_to_lane(int value) {
  const int lane = static_cast<int>(threadIdx.x % lanes_of_warp);
#pragma unroll
  for (int distance = 1; distance < lanes_of_warp; distance *= 2) {
    const int before = __shfl_up_sync(all_lanes, value, static_cast<unsigned>(distance));
    if (lane >= distance) value += before;
  }
  return value;
}

/// prefix_sum of flat_list.hpp by all threads, into shared.row_end, which a barrier has to follow. Returns the number of rows.
__device__ int scan(const ActivationCall& call, Shared& shared) {
  const int thread = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  const int warp = thread / lanes_of_warp;
  int rows = 0;
#pragma unroll 1
  for (int first = 0; first < call.experts; first += threads) {
    const int expert = first + thread;
    const int busy_warps = (min(threads, call.experts - first) + lanes_of_warp - 1) / lanes_of_warp;
    int end = 0;
    if (warp < busy_warps) {
      const int count = expert < call.experts ? call.counts[expert] : 0;
      end = sum_up_to_lane(min(max(count, 0), call.most_count));
      if (thread % lanes_of_warp == lanes_of_warp - 1) shared.warp_ends[warp] = end;
    }
    __syncthreads();
    end += rows;
#pragma unroll 1
    for (int other = 0; other < busy_warps; ++other) {
      const int others = shared.warp_ends[other];
      rows += others;
      if (other < warp) end += others;
    }
    if (expert < call.experts) shared.row_end[expert] = end;
    if (first + threads < call.experts) __syncthreads();
  }
  return rows;
}

__device__ int place_of(const ActivationCall& call, const FlatRow& row) {
  if (call.row_begin != nullptr) return call.row_begin[row.expert] + row.row;
  return static_cast<int>(row.place(call.block_rows));
}

/// A row's eight gates and the eight ups beside them, as they lie in memory.
struct Loaded {
  uint4 gates, ups;
};

/// The largest of the lanes that hold a group: 16 of 128 values, 4 of 32.
__device__ inline float largest_of_group(float largest, int group) {
  largest = fmaxf(largest, __shfl_xor_sync(all_lanes, largest, 1));
  largest = fmaxf(largest, __shfl_xor_sync(all_lanes, largest, 2));
  if (group == 128) {
    largest = fmaxf(largest, __shfl_xor_sync(all_lanes, largest, 4));
    largest = fmaxf(largest, __shfl_xor_sync(all_lanes, largest, 8));
  }
  return largest;
}

/// Eight columns, of one row after the other. Lanes whose columns do not exist read others' and write nothing.
template <Activation format, ScaleFormat scale_format>
class Columns {
 public:
  __device__ Columns(const ActivationCall& call, int column) : call_(call), there_(column < call.intermediate) {
    const int mine = there_ ? column : 0;
    const auto at = static_cast<unsigned>(mine);
    gates_ = call.gate_up + at * sizeof(bf16);
    values_ = call.values + at * value_bytes;
    if constexpr (format == Activation::fp8) {
      const int group = mine / call.group;
      speaks_ = there_ && mine % call.group == 0;
      scales_ = call.scales + call.scale_layout.group_offset(group);
      zeros_ = call.scale_layout.zeros_behind(group);
    }
  }

  __device__ Loaded load(unsigned place) const {
    const unsigned half = static_cast<unsigned>(call_.intermediate) * static_cast<unsigned>(sizeof(bf16));
    const std::byte* gates = gates_ + std::uint64_t{place} * (2 * half);
    return {*reinterpret_cast<const uint4*>(gates), *reinterpret_cast<const uint4*>(gates + half)};
  }

  __device__ void compute(const Loaded& loaded, unsigned place, float weight) const {
    std::uint32_t gates[4] = {loaded.gates.x, loaded.gates.y, loaded.gates.z, loaded.gates.w};
    std::uint32_t ups[4] = {loaded.ups.x, loaded.ups.y, loaded.ups.z, loaded.ups.w};
    float values[8];
    activate(gates, ups, call_.clamp, weight, values);
    std::byte* to = values_ + std::uint64_t{place} * (value_bytes * static_cast<unsigned>(call_.intermediate));
    if constexpr (format == Activation::bf16) {
      store_bf16(values, to);
    } else {
      store_fp8(values, to, scales_ + std::uint64_t{place} * call_.scale_row_stride);
    }
  }

 private:
  static constexpr unsigned value_bytes = format == Activation::bf16 ? 2 : 1;

  __device__ void store_bf16(const float (&values)[8], std::byte* to) const {
    if (!there_) return;
    *reinterpret_cast<uint4*>(to) = make_uint4(ptx::to_bf16_pair(values[0], values[1]), ptx::to_bf16_pair(values[2], values[3]),
                                               ptx::to_bf16_pair(values[4], values[5]), ptx::to_bf16_pair(values[6], values[7]));
  }

  __device__ void store_fp8(const float (&values)[8], std::byte* to, std::byte* scale_to) const {
    float largest = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) largest = largest_magnitude(largest, values[i]);
    const auto scale = GroupScale<scale_format>::of(largest_of_group(there_ ? largest : 0, call_.group));
    const auto four = [&](int i) {
      return codes_of_pair(scale, values[i], values[i + 1]) | codes_of_pair(scale, values[i + 2], values[i + 3]) << 16;
    };
    if (there_) *reinterpret_cast<uint2*>(to) = make_uint2(four(0), four(4));
    if (!speaks_) return;
    if constexpr (scale_format == ScaleFormat::f32) {
      *reinterpret_cast<float*>(scale_to) = scale.scale;
    } else {
      scale_to[0] = static_cast<std::byte>(scale.byte);
      if (zeros_ == 0) return;
      scale_to[1] = std::byte{0};
      if (zeros_ > 1) scale_to[2] = std::byte{0};
      if (zeros_ > 2) scale_to[3] = std::byte{0};
    }
  }

  const ActivationCall& call_;
  const std::byte* gates_;
  std::byte* values_;
  std::byte* scales_;
  int zeros_;
  bool there_, speaks_;
};

/// CTA c computes the flat rows c, c + CTAs, ...: one row, or none, where there are as many CTAs as there can be rows. Behind
/// the scan its warps go their own ways. They take 32 rows at a time, each lane finding one of them, and pass the places round.
/// 48 registers: none is spilled where it costs, and an SM holds 40 warps.
template <Activation format, ScaleFormat scale_format>
__global__ void __maxnreg__(48) activation(const __grid_constant__ ActivationCall call) {
  __shared__ Shared shared;
  ptx::wait_for_earlier_kernels();
  ptx::let_next_kernel_launch();
  const int rows = min(scan(call, shared), call.most_rows);
  const int ctas = static_cast<int>(gridDim.x);
  const int first = static_cast<int>(blockIdx.x);
  if (first >= rows) return;
  __syncthreads();
  const int own_rows = (rows - first + ctas - 1) / ctas;
  const int thread = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  const int lane = thread % lanes_of_warp;
#pragma unroll 1
  for (int done = 0; done < own_rows; done += lanes_of_warp) {
    const int turn = min(own_rows - done, lanes_of_warp);
    int place = 0;
    float weight = 1;
    if (lane < turn) {
      place = place_of(call, find_row(shared.row_end, call.experts, first + (done + lane) * ctas));
      if (call.weights != nullptr) weight = call.weights[place];
    }
#pragma unroll 1
    for (int begin = activation_columns * (thread - lane); begin < call.intermediate; begin += activation_columns * threads) {
      const Columns<format, scale_format> columns(call, begin + activation_columns * lane);
      const auto place_of_row = [&](int i) { return static_cast<unsigned>(__shfl_sync(all_lanes, place, i)); };
      unsigned at = place_of_row(0);
      Loaded next = columns.load(at);
#pragma unroll 1
      for (int i = 0; i < turn; ++i) {
        const Loaded loaded = next;
        const unsigned here = at;
        if (i + 1 < turn) {  // the next row is on its way while this one is computed
          at = place_of_row(i + 1);
          next = columns.load(at);
        }
        columns.compute(loaded, here, __shfl_sync(all_lanes, weight, i));
      }
    }
  }
}

}  // namespace

const void* activation_kernel(Activation format, ScaleFormat scale) {
  if (format == Activation::bf16) return reinterpret_cast<const void*>(activation<Activation::bf16, ScaleFormat::f32>);
  return scale == ScaleFormat::f32 ? reinterpret_cast<const void*>(activation<Activation::fp8, ScaleFormat::f32>)
                                   : reinterpret_cast<const void*>(activation<Activation::fp8, ScaleFormat::ue8m0>);
}

}  // namespace heddle
