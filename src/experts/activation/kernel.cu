#include "experts/activation/flat_list.hpp"
#include "experts/activation/group.cuh"
#include "experts/activation/kernel.hpp"
#include "signal/ptx.cuh"

namespace heddle {

namespace {

constexpr int lanes_of_warp = 32;
constexpr unsigned all_lanes = 0xFFFFFFFFu;
/// Rows whose places a CTA works out together, a thread each.
constexpr int rows_a_turn = 256;

struct Shared {
  int row_end[most_activation_experts];
  int warp_ends[most_activation_threads / lanes_of_warp];
  int places[rows_a_turn];
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

/// What a thread loads of one row: eight gates, the eight ups beside them, the row's weight.
struct Loaded {
  uint4 gates, ups;
  float weight;
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

/// Eight columns of rows: the same columns of one row after the other.
template <Activation format, ScaleFormat scale_format>
class Columns {
 public:
  /// Lanes whose columns do not exist read others' and write nothing.
  __device__ Columns(const ActivationCall& call, int column)
      : call_(call), there_(column < call.intermediate), column_(static_cast<unsigned>(there_ ? column : 0)) {
    const int group = (there_ ? column : 0) / call.group;
    speaks_ = there_ && column % call.group == 0;
    row_stride_ = static_cast<unsigned>(call.scale_layout.row_stride());
    scale_at_ = call.scales + call.scale_layout.group_offset(group);
    zeros_ = call.scale_layout.zeros_behind(group);
  }

  __device__ Loaded load(int place) const {
    const std::byte* row = call_.gate_up + row_offset(place, 2 * static_cast<unsigned>(sizeof(bf16)));
    return {*reinterpret_cast<const uint4*>(row + 2 * column_),
            *reinterpret_cast<const uint4*>(row + 2 * static_cast<unsigned>(call_.intermediate) + 2 * column_),
            call_.weights == nullptr ? 1.0f : call_.weights[place]};
  }

  __device__ void compute(const Loaded& loaded, int place) const {
    float values[8];
    // Four and four: a thread that computes all eight side by side needs more registers than it is worth.
    activate_four(loaded.gates.x, loaded.gates.y, loaded.ups.x, loaded.ups.y, loaded.weight, values);
    activate_four(loaded.gates.z, loaded.gates.w, loaded.ups.z, loaded.ups.w, loaded.weight, values + 4);
    if constexpr (format == Activation::bf16) {
      store_bf16(values, place);
    } else {
      store_fp8(values, place);
    }
  }

 private:
  /// Where a row of D values of so many bytes begins.
  __device__ std::uint64_t row_offset(int place, unsigned bytes) const {
    return static_cast<std::uint64_t>(static_cast<unsigned>(place)) * (bytes * static_cast<unsigned>(call_.intermediate));
  }
  __device__ void activate_four(std::uint32_t gate01, std::uint32_t gate23, std::uint32_t up01, std::uint32_t up23, float weight,
                                float* to) const {
    std::uint32_t gates[2] = {gate01, gate23}, ups[2] = {up01, up23};
    float values[4];
    activate(gates, ups, call_.clamp, weight, values);
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = values[i];
  }

  __device__ void store_bf16(const float (&values)[8], int place) const {
    if (!there_) return;
    std::byte* row = call_.values + row_offset(place, sizeof(bf16));
    *reinterpret_cast<uint4*>(row + 2 * column_) =
        make_uint4(ptx::to_bf16_pair(values[0], values[1]), ptx::to_bf16_pair(values[2], values[3]),
                   ptx::to_bf16_pair(values[4], values[5]), ptx::to_bf16_pair(values[6], values[7]));
  }

  __device__ void store_fp8(const float (&values)[8], int place) const {
    float largest = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) largest = largest_magnitude(largest, values[i]);
    const auto scale = GroupScale<scale_format>::of(largest_of_group(there_ ? largest : 0, call_.group));
    const auto four = [&](int i) {
      return codes_of_pair(scale, values[i], values[i + 1]) | codes_of_pair(scale, values[i + 2], values[i + 3]) << 16;
    };
    if (there_) {
      std::byte* row = call_.values + row_offset(place, 1);
      *reinterpret_cast<uint2*>(row + column_) = make_uint2(four(0), four(4));
    }
    if (speaks_) store_scale(scale, scale_at_ + static_cast<std::uint64_t>(static_cast<unsigned>(place)) * row_stride_);
  }
  __device__ void store_scale(const GroupScale<scale_format>& scale, std::byte* to) const {
    if constexpr (scale_format == ScaleFormat::f32) {
      *reinterpret_cast<float*>(to) = scale.scale;
    } else {
      to[0] = static_cast<std::byte>(scale.byte);
      for (int i = 1; i <= zeros_; ++i) to[i] = std::byte{0};
    }
  }

  const ActivationCall& call_;
  bool there_, speaks_;
  unsigned column_, row_stride_;
  int zeros_;
  std::byte* scale_at_;
};

/// CTA c computes the flat rows c, c + CTAs, ...: one row, or none, where there are as many CTAs as there can be rows.
template <Activation format, ScaleFormat scale_format>
__global__ void __maxnreg__(40) activation(const __grid_constant__ ActivationCall call) {
  __shared__ Shared shared;
  ptx::wait_for_earlier_kernels();
  ptx::let_next_kernel_launch();
  const int rows = min(scan(call, shared), call.most_rows);
  const int thread = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  const int ctas = static_cast<int>(gridDim.x);
  const int together = min(threads, rows_a_turn);
#pragma unroll 1
  for (std::int64_t first = blockIdx.x; first < rows; first += static_cast<std::int64_t>(together) * ctas) {
    const std::int64_t mine = first + static_cast<std::int64_t>(thread) * ctas;
    __syncthreads();  // row_end is complete, and nobody needs the places before
    if (thread < together && mine < rows) {
      shared.places[thread] = place_of(call, find_row(shared.row_end, call.experts, static_cast<int>(mine)));
    }
    __syncthreads();
    const int turn = min(together, (rows - static_cast<int>(first) + ctas - 1) / ctas);
#pragma unroll 1
    for (int column = activation_columns * thread; column - activation_columns * thread < call.intermediate;
         column += activation_columns * threads) {
      const Columns<format, scale_format> columns(call, column);
      // The next row is on its way while one is computed.
      Loaded next = columns.load(shared.places[0]);
#pragma unroll 1
      for (int i = 0; i < turn; ++i) {
        const Loaded loaded = next;
        if (i + 1 < turn) next = columns.load(shared.places[i + 1]);
        columns.compute(loaded, shared.places[i]);
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
