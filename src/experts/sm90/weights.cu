#include "experts/sm90/weight_scales.hpp"
#include "experts/sm90/weights_kernels.hpp"

namespace heddle::sm90 {
namespace {

__global__ void survey_rows(WeightPlan plan, WeightSource source, float* row_scales, unsigned* first_fault) {
  const int row = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (row >= plan.rows) return;
  const RowSurvey survey = survey_row(plan, source, row);
  row_scales[row] = survey.scale;
  if (survey.fault != RowFault::none) atomicMin(first_fault, static_cast<unsigned>(row));
}

/// One CTA a step (x) and slab (y).
template <WeightKind kind>
__global__ void order_slabs(WeightPlan plan, WeightSource source, const float* row_scales, std::byte* chunks) {
  const int step = static_cast<int>(blockIdx.x);
  const int slab = static_cast<int>(blockIdx.y);
  const int thread = static_cast<int>(threadIdx.x);
  std::byte* data = chunks + plan.slab_data(slab, step);
  for (int vector = 0; vector < slab_shape(kind).vectors; ++vector) {
    *reinterpret_cast<Vector*>(data + vector * vector_stride + thread * vector_bytes) =
        ordered_vector<kind>(plan, source, slab, step, vector, thread);
  }
  if (thread >= slab_rows) return;
  const float row_scale = plan.row_scales() == 0 ? 1.0f : row_scales[slab * slab_rows + thread];
  order_scales(plan, source, row_scale, slab, step, thread, chunks + plan.slab_scales(slab, step));
}

}  // namespace

cudaError_t launch_survey(const WeightPlan& plan, const WeightSource& source, float* row_scales, unsigned* first_fault,
                          cudaStream_t stream) {
  if (plan.row_scales() == 0) return cudaSuccess;
  const auto blocks = static_cast<unsigned>(plan.slabs());
  survey_rows<<<blocks, slab_rows, 0, stream>>>(plan, source, row_scales, first_fault);
  return cudaGetLastError();
}

cudaError_t launch_order(const WeightPlan& plan, const WeightSource& source, const float* row_scales, std::byte* chunks,
                         cudaStream_t stream) {
  if (plan.slabs() == 0 || plan.steps() == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(plan.steps()), static_cast<unsigned>(plan.slabs()));
  with_kind(plan.kind,
            [&]<WeightKind kind>() { order_slabs<kind><<<grid, slab_threads, 0, stream>>>(plan, source, row_scales, chunks); });
  return cudaGetLastError();
}

}  // namespace heddle::sm90
