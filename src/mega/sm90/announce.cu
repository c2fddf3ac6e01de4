#include "exchange/cuda_call.cuh"
#include "mega/sm90/call.hpp"

namespace heddle::sm90 {

namespace {

/// A kernel of its own, before the fused one: its warps part and meet in ways after which the compiler would keep nothing uniform
/// in the products' loops. Any wire: rows are quantised here.
__global__ void __launch_bounds__(threads_a_cta, 1) announce(const __grid_constant__ MegaAnnounceCall call) {
  ptx::wait_for_earlier_kernels();
  ptx::let_next_kernel_launch();
  extern __shared__ std::byte memory[];
  DeviceWorker<RowMover::any, SpreadCta> w(call.team, CallPart::dispatch_send, memory, call.squad_bytes);
  if (!w.live(w.heap().rank)) return;
  MegaCall mine;
  mine.layout = call.layout;
  mine.input = send_input(call);
  mine.placement = call.placement;
  mine.local_experts = call.placement.experts_on[w.heap().rank];
  mine.scratch.sent = of_this_rank(call.scratch.sent, call);
  if (check_input(w, call, mine.input)) mega_announce(w, mine);
}

}  // namespace

const void* mega_announce_kernel() { return reinterpret_cast<const void*>(&announce); }

}  // namespace heddle::sm90
