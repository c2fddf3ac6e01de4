#include "experts/sm90/rows.cuh"

#include "group/cuda_driver.hpp"

namespace heddle::sm90 {
namespace {

using Kernel = void (*)(const RowsCall);

template <RowChange change>
Kernel kernel_of(ScaleFormat format) {
  return format == ScaleFormat::ue8m0 ? &rows::change_rows<change, ScaleFormat::ue8m0>
                                      : &rows::change_rows<change, ScaleFormat::f32>;
}

Kernel find_rows_kernel(RowChange change, ScaleFormat format) {
  switch (change) {
    case RowChange::quantise:
      return kernel_of<RowChange::quantise>(format);
    case RowChange::quantise_widely:
      return kernel_of<RowChange::quantise_widely>(format);
    case RowChange::widen:
      return kernel_of<RowChange::widen>(format);
    case RowChange::none:
      break;
  }
  return &rows::change_rows<RowChange::none, ScaleFormat::ue8m0>;
}

}  // namespace

void launch_rows(const RowsCall& call, RowChange change, int most_rows, int ctas, cudaStream_t stream) {
  const int items_a_row = rows::items_of_row(change, call.columns);
  const long long wanted = (static_cast<long long>(most_rows) * items_a_row + rows::warps_a_cta - 1) / rows::warps_a_cta;
  const auto grid = static_cast<unsigned>(wanted < ctas ? (wanted < 1 ? 1 : wanted) : ctas);
  void* arguments[] = {const_cast<RowsCall*>(&call)};
  cuda::check(cudaLaunchKernel(reinterpret_cast<const void*>(find_rows_kernel(change, call.quantisation.scale)), dim3(grid),
                               dim3(rows::threads_a_cta), arguments, 0, stream),
              "launch of the kernel that brings rows into an operand's format");
}

void prepare_rows_kernels() {
  for (const RowChange change : {RowChange::none, RowChange::quantise, RowChange::quantise_widely, RowChange::widen}) {
    for (const ScaleFormat format : {ScaleFormat::ue8m0, ScaleFormat::f32}) {
      cudaFuncAttributes attributes;
      cuda::check(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(find_rows_kernel(change, format))),
                  "loading the kernels of rows");
    }
  }
}

}  // namespace heddle::sm90
