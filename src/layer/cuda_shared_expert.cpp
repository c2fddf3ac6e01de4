#include "layer/cuda_shared_expert.hpp"

#include <cuda_runtime.h>

#include "layer/arrived_rows.hpp"
#include "layer/layer_kernels.hpp"
#include "layer/options.hpp"

namespace heddle {

using cuda::check;

namespace {

DeviceExperts make_expert(int gpu, const LayerWeights& weights, const LayerOptions& options, int most_tokens,
                          const DeviceLayerOptions& device) {
  ExpertOptions arithmetic = expert_options(weights, options);
  arithmetic.activation_grid = device.activation_grid;
  DeviceExpertsOptions on;
  on.device = gpu;
  on.most_rows = most_tokens;
  on.ctas = device.shared_ctas;
  on.fused_activation = device.fused_activation;
  on.row_blocks = device.row_blocks;
  return DeviceExperts({&weights.shared->weights, 1}, weights.shape.hidden, weights.shared->intermediate, arithmetic, on);
}

}  // namespace

DeviceEvent::DeviceEvent(bool timed) {
  check(cudaEventCreateWithFlags(&event_, timed ? cudaEventDefault : cudaEventDisableTiming), "cudaEventCreate");
}
DeviceEvent::~DeviceEvent() {
  if (event_ != nullptr) cudaEventDestroy(event_);
}
void DeviceEvent::record(DeviceStream stream) const { check(cudaEventRecord(event_, stream), "cudaEventRecord"); }
void DeviceEvent::make_wait(DeviceStream stream) const { check(cudaStreamWaitEvent(stream, event_, 0), "cudaStreamWaitEvent"); }
bool DeviceEvent::has_happened() const {
  const cudaError_t status = cudaEventQuery(event_);
  if (status == cudaErrorNotReady) return false;
  check(status, "cudaEventQuery");
  return true;
}
void DeviceEvent::wait() const { check(cudaEventSynchronize(event_), "cudaEventSynchronize"); }
double DeviceEvent::seconds_until(const DeviceEvent& later) const {
  float milliseconds = 0;
  check(cudaEventElapsedTime(&milliseconds, event_, later.event_), "cudaEventElapsedTime");
  return static_cast<double>(milliseconds) * 1e-3;
}

SharedExpertStream::SharedExpertStream(int gpu, const LayerWeights& weights, const LayerOptions& options, int local_ranks,
                                       int most_tokens, const DeviceLayerOptions& device)
    : hidden_(static_cast<std::size_t>(weights.shape.hidden)),
      most_tokens_(static_cast<std::size_t>(most_tokens)),
      gated_(!weights.shared->gate.empty()),
      expert_(make_expert(gpu, weights, options, most_tokens, device)),
      forked_(false),
      joined_(false),
      began_(true),
      ended_(true) {
  check(cudaDeviceGetAttribute(&sms_, cudaDevAttrMultiProcessorCount, gpu), "number of SMs");
  const std::size_t tokens = static_cast<std::size_t>(local_ranks) * most_tokens_;
  rows_ = DeviceArray<bf16>(gpu, tokens * hidden_);
  bytes_ = tokens * hidden_ * sizeof(bf16);
  if (gated_) {
    factors_ = DeviceArray<float>(gpu, tokens);
    gate_ = DeviceArray<float>(gpu, hidden_);
    check(cudaMemcpy(gate_.data(), weights.shared->gate.data(), hidden_ * sizeof(float), cudaMemcpyHostToDevice),
          "copying of the shared expert's gate");
    check(cudaStreamSynchronize(nullptr), "copying of the shared expert's gate");
    bytes_ += (tokens + hidden_) * sizeof(float);
  }
  check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
}

SharedExpertStream::~SharedExpertStream() {
  if (stream_ == nullptr) return;
  cudaStreamSynchronize(stream_);
  cudaStreamDestroy(stream_);
}

// The second stream waits only when there is something to run: a refused call must not draw it into a capture.
void SharedExpertStream::fork(DeviceStream stream) { forked_.record(stream); }

void SharedExpertStream::run(std::span<const DeviceInput> inputs, int max_tokens, bool timed) {
  forked_.make_wait(stream_);
  if (timed) began_.record(stream_);
  const RowFormat plain{Wire::bf16, static_cast<int>(hidden_), {}, 1.0f};
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const DeviceInput& input = inputs[i];
    if (input.hidden == nullptr) continue;  // no tokens
    const int local = static_cast<int>(i);
    const RowView rows = view_of(reinterpret_cast<const std::byte*>(input.hidden), plain.row_bytes(), plain);
    expert_.dense(rows, max_tokens, {rows_of(local), 0}, stream_, 0, input.tokens);
    if (!gated_) continue;
    GateCall gate;
    gate.hidden = input.hidden;
    gate.hidden_size = static_cast<int>(hidden_);
    gate.tokens = input.tokens;
    gate.most_tokens = max_tokens;
    gate.gate = gate_.data();
    gate.factors = factors_of(local);
    launch_gate(gate, sms_, stream_);
  }
  if (timed) ended_.record(stream_);
}

void SharedExpertStream::join(DeviceStream stream) {
  joined_.record(stream_);
  joined_.make_wait(stream);
}

void SharedExpertStream::add_to(DeviceOutput& output, int local) const {
  output.shared = rows_of(local);
  if (gated_) output.shared_factors = factors_of(local);
}

}  // namespace heddle
