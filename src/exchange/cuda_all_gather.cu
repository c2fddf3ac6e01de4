// The all-gather of outputs on GPUs: a launch of its own behind combine's, because it sends rows that other CTAs of the rank
// have summed, and kernels do not end with a barrier.
#include "exchange/cuda_call.cuh"

namespace heddle {

namespace {

// Outputs are bf16, whatever the wires.
template <RowMover mover>
__global__ void __launch_bounds__(threads_a_cta, 1) share_outputs(const __grid_constant__ AllGatherCall call) {
  HEDDLE_DEVICE_WORKER(w, call, CallPart::combine);
  const DeviceOutput& output = call.ranks[blockIdx.y].output;
  const int tokens = send_input(call).tokens;
  const bool sliced = call.slices != nullptr;
  const BatchSlice own = sliced ? slice_of(w, tokens) : BatchSlice{output.first, tokens};
  const int all = sliced ? tokens : output.all_tokens;
  if (own.first + own.rows > all) {
    if (w.index() == 0 && w.lane() == 0)
      w.fail({WordKind::refused, -1, -1}, static_cast<std::uint64_t>(all), static_cast<std::uint64_t>(own.first + own.rows));
    return;
  }
  const bf16* mine = sliced ? of_this_rank(call.slices, call) : output.out;
  all_gather_rows(w, call.layout, own.first, own.rows, all, mine, output.all_out);
}

}  // namespace

const void* all_gather_kernel(bool bulk) {
  return bulk ? reinterpret_cast<const void*>(share_outputs<RowMover::bulk>)
              : reinterpret_cast<const void*>(share_outputs<RowMover::plain>);
}

}  // namespace heddle
