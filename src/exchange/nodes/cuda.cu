// elastic on GPUs of several nodes, the kernels (docs/protocols/nodes.md, "On GPUs"). What lies between two of them on the stream
// is a swap with other nodes; none waits for anything but ranks of its own node.
#include "exchange/elastic/cuda_call.cuh"
#include "exchange/nodes/batch_protocol.hpp"
#include "exchange/nodes/cuda_call.hpp"

namespace heddle {

namespace {

constexpr RowMover mover = RowMover::any;
using Mailer = DeviceWorker<mover>;

__device__ BatchMail mail_of(const NodesCall& call) {
  BatchMail mail = call.mail;
  mail.out = of_this_rank(mail.out, call.mail_stride);
  mail.arrived = of_this_rank(mail.arrived, call.mail_stride);
  mail.results = of_this_rank(mail.results, call.mail_stride);
  mail.results_head = of_this_rank(mail.results_head, call.mail_stride);
  mail.results_heads = of_this_rank(mail.results_heads, call.mail_stride);
  return mail;
}

__device__ const BatchHead* head_of_peer(const NodesCall& call, const BatchMail& mail, int peer, bool results) {
  if (results) return mail.results_heads + peer;
  return reinterpret_cast<const BatchHead*>(mail.arrived + static_cast<std::size_t>(peer) * mail.stride);
}

/// A swap is over. Its heads: a fault that another node has met ends this one's call, too, and so does what is of another call.
__device__ bool take_heads(Mailer& w, const NodesCall& call, const BatchMail& mail, bool results) {
  if (blockIdx.x == 0 && threadIdx.x == 0)
    ptx::store_relaxed_system(&call.progress[blockIdx.y].ended, 2 * static_cast<Word>(w.epoch()) + (results ? 1 : 0));
  if (!w.begin()) return false;
  const int rank = w.heap().rank;
  bool fine = true;
  for (int i = static_cast<int>(threadIdx.x); i < call.batches.peers(); i += static_cast<int>(blockDim.x)) {
    const BatchHead& head = *head_of_peer(call, mail, i, results);
    if (head.gave_up != 0) {
      give_up(call.team, rank, head.fault);
    } else if (head.epoch != w.epoch() || head.tokens > static_cast<std::uint32_t>(call.max_tokens)) {
      const int peer = call.batches.peer(rank, i);
      const WordKind kind = results ? WordKind::elastic_node_results : WordKind::elastic_node_rows;
      w.fail({kind, peer, call.batches.nodes.node_of(peer)}, pack_word(w.epoch(), 0), pack_word(head.epoch, head.tokens));
    } else {
      continue;
    }
    fine = false;
  }
  return __syncthreads_and(static_cast<int>(fine)) != 0;
}

__global__ void __launch_bounds__(threads_a_cta, 1) send_batches(const __grid_constant__ NodesCall call) {
  HEDDLE_DEVICE_WORKER(w, call, CallPart::dispatch_send);
  const SendInput input = send_input(call);
  if (!check_input(w, call, input)) return;
  batch_send(w, call.batches, input, call.placement, scratch_of(call), mail_of(call).out);
}

__global__ void __launch_bounds__(threads_a_cta, 1) take_batches(const __grid_constant__ NodesCall call) {
  HEDDLE_DEVICE_WORKER(w, call, CallPart::dispatch_receive);
  const BatchMail mail = mail_of(call);
  if (!take_heads(w, call, mail, false) || !batch_forward(w, call.batches, mail)) return;
  const ElasticScratch scratch = scratch_of(call);
  const std::int32_t* arrived = elastic_receive(w, call.layout, scratch);
  if (arrived != nullptr) lay_out(w, call, scratch, arrived);
}

__global__ void __launch_bounds__(threads_a_cta, 1) return_results(const __grid_constant__ NodesCall call) {
  HEDDLE_DEVICE_WORKER(w, call, CallPart::combine);
  nodes_return(w, call.batches.nodes, results_of(call), scratch_of(call), {});
}

__global__ void __launch_bounds__(threads_a_cta, 1) hear_results(const __grid_constant__ NodesCall call) {
  HEDDLE_DEVICE_WORKER(w, call, CallPart::combine);
  nodes_hear_results(w, call.batches.nodes);
}

__global__ void __launch_bounds__(threads_a_cta, 1) collect_results(const __grid_constant__ NodesCall call) {
  HEDDLE_DEVICE_WORKER(w, call, CallPart::combine);
  const BatchMail mail = mail_of(call);
  if (!take_heads(w, call, mail, true)) return;
  if (batch_collect(w, call.batches, send_input(call), scratch_of(call), mail, shared_rows(call),
                    call.ranks[blockIdx.y].output.out))
    tally_combine(call);
}

/// One lane a rank.
__global__ void write_heads(const __grid_constant__ NodesCall call, bool results) {
  const int rank = call.team.heap.rank + static_cast<int>(blockIdx.y);
  const BatchMail mail = mail_of(call);
  const auto* header = call.team.heap.at<HeapHeader>(rank, 0);
  BatchHead head;
  head.epoch = static_cast<std::uint32_t>(ptx::load_relaxed_system(&header->call));
  head.tokens = static_cast<std::uint32_t>(*static_cast<const volatile int*>(call.ranks[blockIdx.y].input.tokens));
  Word code = ptx::load_acquire_system(&header->abort);
  while (code == ~Word{0}) code = ptx::load_acquire_system(&header->abort);  // ends: a lane that is writing its record
  if (code != 0) {
    head.gave_up = 1;
    head.fault = call.team.heap.at<HeapHeader>(static_cast<int>(code) - 1, 0)->fault;
  }
  *(results ? mail.results_head : reinterpret_cast<BatchHead*>(mail.out)) = head;
  ptx::store_relaxed_system(&call.progress[blockIdx.y].begun, 2 * static_cast<Word>(head.epoch) + (results ? 1 : 0));
}

}  // namespace

const void* nodes_kernel(NodesKernel which) {
  switch (which) {
    case NodesKernel::send:
      return reinterpret_cast<const void*>(send_batches);
    case NodesKernel::receive:
      return reinterpret_cast<const void*>(take_batches);
    case NodesKernel::give_back:
      return reinterpret_cast<const void*>(return_results);
    case NodesKernel::hear:
      return reinterpret_cast<const void*>(hear_results);
    case NodesKernel::collect:
      return reinterpret_cast<const void*>(collect_results);
  }
  return nullptr;
}

cudaError_t load_head_kernel() {
  cudaFuncAttributes attributes{};
  return cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(write_heads));
}

cudaError_t launch_heads(const NodesCall& call, int local_ranks, bool results, cudaStream_t stream) {
  write_heads<<<dim3(1, static_cast<unsigned>(local_ranks)), 1, 0, stream>>>(call, results);
  return cudaGetLastError();
}

}  // namespace heddle
