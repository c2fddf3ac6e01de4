#include "exchange/cuda_call.cuh"
#include "mega/sm90/call.hpp"

namespace heddle::sm90 {

namespace {

static_assert(share_values(most_mega_counts) * sizeof(std::int32_t) <= squad_bytes, "shares of as many experts as there can be");

/// A kernel of its own, before the fused one: its warps part and meet in ways after which the compiler would keep nothing uniform
/// in the products' loops. Any wire: rows are quantised here. No CTA waits for another one, so they need not be there together.
__global__ void __launch_bounds__(threads_a_cta, 1) announce(const __grid_constant__ MegaAnnounceCall call) {
  ptx::wait_for_earlier_kernels();
  ptx::let_next_kernel_launch();
  extern __shared__ std::byte memory[];
  DeviceWorker<RowMover::any, SpreadCta> w(call.team, CallPart::dispatch_send, memory, call.squad_bytes);
  if (!w.live(w.heap().rank)) return;
  const trace::WarpLane lane(trace::trace_of(call.team), trace::Role::dispatch, w.squad_index());
  const trace::WarpSpan span(trace::Kind::announce);
  MegaCall mine;
  mine.layout = call.layout;
  mine.input = send_input(call);
  mine.placement = call.placement;
  mine.local_experts = call.placement.experts_on[w.heap().rank];
  if (check_input(w, call, mine.input)) mega_announce(w, mine);
}

}  // namespace

const void* mega_announce_kernel() { return reinterpret_cast<const void*>(&announce); }

}  // namespace heddle::sm90
