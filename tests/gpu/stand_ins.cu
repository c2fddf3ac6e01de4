#include "gpu/stand_ins.hpp"

#include "formats/group.hpp"
#include "group/cuda_driver.hpp"

namespace heddle {

namespace {

constexpr int threads = 128;

/// Value i of a wire row, by the rules of widen_row.
__device__ float widened(const std::byte* row, const RowFormat& format, int i) {
  const auto* codes = reinterpret_cast<const std::uint8_t*>(row);
  const std::byte* scales = row + format.scale_offset();
  if (format.wire == Wire::bf16) return to_float(reinterpret_cast<const bf16*>(row)[i]);
  const int group = i / format.group_size();
  if (format.wire == Wire::fp8) {
    const float scale = format.quantisation.scale == ScaleFormat::ue8m0 ? from_ue8m0(static_cast<std::uint8_t>(scales[group]))
                                                                        : reinterpret_cast<const float*>(scales)[group];
    return __fmul_rn(from_e4m3(codes[i]), scale);
  }
  const auto code = static_cast<std::uint8_t>(codes[i / 2] >> (4 * (i & 1)));
  return nvfp4_value(code, static_cast<std::uint8_t>(scales[group]), format.global_scale);
}

/// The stand-in for an expert, as stand_in of exchange_support.hpp.
__device__ bf16 stand_in(float value, int expert, float weight) {
  const float factor = float_from_bits(static_cast<std::uint32_t>(127 + expert % 5 - 2) << 23);
  return to_bf16(__fmul_rn(__fadd_rn(__fmul_rn(value, factor), static_cast<float>(expert % 7)), weight));
}

/// What a broken exchange may hand over must not lead these kernels out of their arrays.
__device__ bf16 nonsense() { return bf16{0x7FFF}; }

__global__ void by_expert(const StandIns all, bf16* results) {
  const int e = static_cast<int>(blockIdx.y);
  const std::int32_t begin = all.begins[e];
  for (int i = static_cast<int>(blockIdx.x); i < all.counts[e] && i < all.room; i += static_cast<int>(gridDim.x)) {
    const std::int32_t row = begin + i;
    if (row < 0 || row >= all.room) return;
    const float weight = all.weights_at_activation ? all.row_weights[row] : 1.0f;
    const std::byte* bytes = all.rows + static_cast<std::size_t>(row) * all.row_stride;
    bf16* result = results + static_cast<std::size_t>(row) * static_cast<std::size_t>(all.format.hidden);
    for (int h = static_cast<int>(threadIdx.x); h < all.format.hidden; h += threads) {
      result[h] = stand_in(widened(bytes, all.format, h), all.experts[e], weight);
    }
  }
}

/// Column h of a routed row: a result a choice, or their sum.
__device__ void routed_column(const StandIns& all, int row, int h, bf16* results) {
  const auto hidden = static_cast<std::size_t>(all.format.hidden);
  const std::size_t first = static_cast<std::size_t>(row) * static_cast<std::size_t>(all.topk);
  const std::byte* bytes = all.rows + static_cast<std::size_t>(row) * all.row_stride;
  float sum = 0.0f;
  bool any = false, broken = false;
  for (int choice = 0; choice < all.topk; ++choice) {
    const std::size_t pair = first + static_cast<std::size_t>(choice);
    const std::int32_t id = all.local_ids[pair];
    if (id < 0) continue;
    any = true;
    broken = broken || id >= all.local_experts;
    const float weight = all.weights[pair];
    const bf16 result =
        broken ? nonsense() : stand_in(widened(bytes, all.format, h), all.experts[id], all.weights_at_activation ? weight : 1.0f);
    if (all.slots_wanted) results[pair * hidden + static_cast<std::size_t>(h)] = result;
    sum = all.weights_at_activation ? __fadd_rn(sum, to_float(result)) : __fmaf_rn(weight, to_float(result), sum);
  }
  if (all.slots_wanted || !(any || all.zeros_without_expert)) return;
  results[static_cast<std::size_t>(row) * hidden + static_cast<std::size_t>(h)] = broken ? nonsense() : to_bf16(sum);
}

__global__ void routed(const StandIns all, bf16* results) {
  for (int row = static_cast<int>(blockIdx.x); row < all.room; row += static_cast<int>(gridDim.x)) {
    for (int h = static_cast<int>(threadIdx.x); h < all.format.hidden; h += threads) routed_column(all, row, h, results);
  }
}

__global__ void count_differences(const bf16* have, const bf16* want, std::size_t wanted, std::size_t size, bf16 rest,
                                  Difference* found) {
  for (std::size_t i = blockIdx.x * threads + threadIdx.x; i < size; i += static_cast<std::size_t>(gridDim.x) * threads) {
    if (have[i].bits == (i < wanted ? want[i] : rest).bits) continue;
    atomicAdd(&found->count, 1ull);
    atomicMin(&found->first, static_cast<unsigned long long>(i));
  }
}

}  // namespace

void run_stand_ins(const StandIns& all, bf16* results, cudaStream_t stream) {
  if (all.local_experts == 0 && !all.zeros_without_expert) return;
  if (all.room == 0) return;
  constexpr int most_blocks = 64;
  const auto blocks = static_cast<unsigned>(all.room < most_blocks ? all.room : most_blocks);
  if (all.layout == ArrivedLayout::routed) {
    routed<<<blocks, threads, 0, stream>>>(all, results);
  } else {
    by_expert<<<dim3(blocks, static_cast<unsigned>(all.local_experts)), threads, 0, stream>>>(all, results);
  }
  cuda::check(cudaGetLastError(), "launch of the stand-ins");
}

void compare(const bf16* have, const bf16* want, std::size_t wanted, std::size_t size, bf16 rest, Difference* found,
             cudaStream_t stream) {
  count_differences<<<32, threads, 0, stream>>>(have, want, wanted, size, rest, found);
  cuda::check(cudaGetLastError(), "launch of a comparison");
}

void load_test_kernels() {
  cudaFuncAttributes attributes{};
  for (const void* kernel : {reinterpret_cast<const void*>(by_expert), reinterpret_cast<const void*>(routed),
                             reinterpret_cast<const void*>(count_differences)}) {
    cuda::check(cudaFuncGetAttributes(&attributes, kernel), "loading of a test kernel");
  }
}

}  // namespace heddle
