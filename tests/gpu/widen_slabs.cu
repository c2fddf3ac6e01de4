#include "gpu/widen_slabs.hpp"

#include "experts/sm90/widen.hpp"

namespace heddle::sm90 {
namespace {

/// One CTA a step (x) and slab (y).
template <WeightKind kind>
__global__ void widen_slabs(WeightPlan plan, const std::byte* chunks, std::uint32_t* registers) {
  const int step = static_cast<int>(blockIdx.x);
  const int slab = static_cast<int>(blockIdx.y);
  const int thread = static_cast<int>(threadIdx.x);
  constexpr int most_scale_bytes = 320;
  __shared__ __align__(16) std::byte data[slab_shape(kind).data_bytes()];
  __shared__ __align__(16) std::byte scales[most_scale_bytes];
  for (int i = thread; i < slab_shape(kind).data_bytes(); i += slab_threads) data[i] = chunks[plan.slab_data(slab, step) + i];
  for (int i = thread; i < plan.scale_bytes(); i += slab_threads) scales[i] = chunks[plan.slab_scales(slab, step) + i];
  __syncthreads();
  std::uint32_t a[slab_registers];
  load_slab<kind>(data, scales, thread, a);
  std::uint32_t* to = registers + ((slab * plan.steps() + step) * slab_threads + thread) * slab_registers;
  for (int i = 0; i < slab_registers; ++i) to[i] = a[i];
}

}  // namespace

cudaError_t launch_widen(const WeightPlan& plan, const std::byte* chunks, std::uint32_t* registers) {
  const dim3 grid(static_cast<unsigned>(plan.steps()), static_cast<unsigned>(plan.slabs()));
  with_kind(plan.kind, [&]<WeightKind kind>() { widen_slabs<kind><<<grid, slab_threads>>>(plan, chunks, registers); });
  return cudaGetLastError();
}

}  // namespace heddle::sm90
