// gather's kernels for few tokens (tagged.hpp). All that counts here is the way to the first store: what the launch's parameters
// point to is asked for before the worker looks at its header, and choices are looked at when the rows are on their way. A refused
// batch may so arrive; the fault ends the call that it belongs to.
#include "exchange/cuda_counters.cuh"
#include "exchange/gather/cuda_call.hpp"

namespace heddle {

namespace {

constexpr RowMover mover = RowMover::plain;

__global__ void __launch_bounds__(threads_a_cta, 1) gather_dispatch_tagged(const __grid_constant__ GatherCall call) {
  ptx::wait_for_earlier_kernels();
  const SendInput input = send_input(call);
  HEDDLE_DEVICE_WORKER(w, call, call.send ? CallPart::dispatch_send : CallPart::dispatch_receive);
  if (call.send) {
    if (!check_tokens(w, call, input)) return;
    if (!gather_send_tagged(w, call.layout, call.tagged, call.max_tokens, input)) return;
    if (!check_choices(w, call, input)) return;
  }
  if (!call.receive) return;
  std::int32_t* counts = of_this_rank(call.counts, call);
  const ArrivedRouting routing{call.topk, of_this_rank(call.routing.local_ids, call), of_this_rank(call.routing.weights, call)};
  PairCount pairs(w, call);
  const bool all_here =
      gather_take_tagged(w, call.layout, call.tagged, call.max_tokens, input, call.placement, counts, routing, pairs);
  pairs.add_up();  // by all warps, also those that gave up
  if (!all_here) return;
  tally_dispatch(
      call, [&](int d) { return w.live(d) ? input.tokens : 0; }, [&](int s) { return w.live(s) ? counts[s] : 0; },
      [](int) { return 0; });
}

__global__ void __launch_bounds__(threads_a_cta, 1) gather_combine_tagged(const __grid_constant__ GatherCall call) {
  ptx::wait_for_earlier_kernels();
  const int tokens = send_input(call).tokens;
  HEDDLE_DEVICE_WORKER(w, call, CallPart::combine);
  const DeviceRank& rank = call.ranks[blockIdx.y];
  const std::int32_t* counts = of_this_rank(call.counts, call);
  if (call.send && !gather_return_tagged(w, call.layout, call.tagged, call.max_tokens, counts, rank.results)) return;
  if (!call.receive) return;
  if (gather_collect_tagged(w, call.layout, call.tagged, tokens, shared_rows(call), rank.output.out)) tally_combine(call);
}

}  // namespace

const void* tagged_gather_dispatch() { return reinterpret_cast<const void*>(gather_dispatch_tagged); }
const void* tagged_gather_combine() { return reinterpret_cast<const void*>(gather_combine_tagged); }

}  // namespace heddle
