// Kernels that lay out weights: what weight_words.hpp and weight_scales.hpp say, one thread a row or a vector.
#pragma once

#include <cuda_runtime.h>

#include "experts/sm90/weight_order.hpp"
#include "experts/sm90/weight_words.hpp"

namespace heddle::sm90 {

inline constexpr unsigned no_fault = 0xFFFFFFFFu;

/// Surveys every row of a source in device memory: row scales to row_scales [plan.row_scales()], and *first_fault becomes the least
/// of itself and the rows that cannot be laid out. Kinds without row scales have nothing to survey.
cudaError_t launch_survey(const WeightPlan& plan, const WeightSource& source, float* row_scales, unsigned* first_fault,
                          cudaStream_t stream);

/// Writes all chunks but their padding. row_scales: as surveyed. Rows with a fault get bytes without a meaning.
cudaError_t launch_order(const WeightPlan& plan, const WeightSource& source, const float* row_scales, std::byte* chunks,
                         cudaStream_t stream);

}  // namespace heddle::sm90
