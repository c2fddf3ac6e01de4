#include <cuda_runtime.h>
#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "exchange/cuda_exchange.hpp"
#include "heddle/device_router.hpp"
#include "heddle/error.hpp"
#include "routing/router_kernel.hpp"

namespace heddle {

namespace {

std::size_t product(int a, int b) { return static_cast<std::size_t>(a) * static_cast<std::size_t>(b); }

template <class T>
DeviceArray<T> stored(int device, std::span<const T> values) {
  DeviceArray<T> array(device, values.size());
  cuda::check(cudaMemcpy(array.data(), values.data(), values.size_bytes(), cudaMemcpyHostToDevice),
              "copying of a router's weights");
  cuda::check(cudaStreamSynchronize(nullptr), "copying of a router's weights");
  return array;
}

void check_router_sizes(std::span<const float> weights, std::span<const float> bias, int experts, int hidden_size,
                        const RouterOptions& options, int most_tokens) {
  if (experts < 1 || experts > most_routed_experts)
    throw InputError(fmt::format("router: {} experts; a router on a GPU has 1 to {}", experts, most_routed_experts));
  if (hidden_size < 1 || hidden_size % 64 != 0)
    throw InputError(fmt::format("router: a hidden size of {}; on a GPU it is a multiple of 64", hidden_size));
  if (weights.size() != product(experts, hidden_size)) {
    throw InputError(fmt::format("router: {} weights; {} experts of hidden size {} want {}", weights.size(), experts, hidden_size,
                                 product(experts, hidden_size)));
  }
  if (most_tokens < 0) throw InputError(fmt::format("router: room for {} tokens", most_tokens));
  route({}, bias, 0, experts, options);
}

}  // namespace

struct DeviceRouter::Impl {
  int device, experts, hidden_size, most_tokens;
  RouterOptions options;
  int sms = 0;
  DeviceArray<float> weights_f32;  ///< [experts, hidden_size], or
  DeviceArray<bf16> weights_bf16;
  DeviceArray<float> bias;    ///< [experts], or none
  DeviceArray<float> logits;  ///< [most_tokens, experts]

  Impl(int on, std::span<const float> weights, std::span<const float> added, int expert_count, int hidden,
       const RouterOptions& router, int most)
      : device(on), experts(expert_count), hidden_size(hidden), most_tokens(most), options(router) {
    cuda::check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device), "number of SMs");
    std::vector<bf16> narrow(weights.size());
    std::transform(weights.begin(), weights.end(), narrow.begin(), to_bf16);
    const auto is_kept = [](float wide, bf16 value) { return to_float(value) == wide; };
    if (std::equal(weights.begin(), weights.end(), narrow.begin(), is_kept)) {
      weights_bf16 = stored<bf16>(device, narrow);
    } else {
      weights_f32 = stored<float>(device, weights);
    }
    if (!added.empty()) bias = stored<float>(device, added);
    logits = DeviceArray<float>(device, product(most_tokens, experts));
  }
};

DeviceRouter::DeviceRouter(int device, std::span<const float> weights, std::span<const float> bias, int experts, int hidden_size,
                           const RouterOptions& options, int most_tokens) {
  check_router_sizes(weights, bias, experts, hidden_size, options, most_tokens);
  const cuda::DeviceScope scope(device);
  prepare_router_kernels();
  impl_ = std::make_unique<Impl>(device, weights, bias, experts, hidden_size, options, most_tokens);
}
DeviceRouter::~DeviceRouter() = default;
DeviceRouter::DeviceRouter(DeviceRouter&&) noexcept = default;
DeviceRouter& DeviceRouter::operator=(DeviceRouter&&) noexcept = default;

void DeviceRouter::route(const DeviceInput& input, int max_tokens, std::int32_t* ids, float* weights, DeviceStream stream) const {
  if (max_tokens < 0 || max_tokens > impl_->most_tokens)
    throw InputError(fmt::format("router: {} tokens; it was made for 0 to {}", max_tokens, impl_->most_tokens));
  if (max_tokens == 0) return;
  if (input.tokens == nullptr || input.hidden == nullptr || ids == nullptr || weights == nullptr)
    throw InputError("router: the number of tokens, hidden states, ids and weights need places in device memory; one is null");
  if (reinterpret_cast<std::uintptr_t>(input.hidden) % 16 != 0)
    throw InputError("router: hidden states are not aligned to 16 bytes");
  const cuda::DeviceScope scope(impl_->device);
  RouterCall call;
  call.tokens = input.tokens;
  call.most_tokens = max_tokens;
  call.hidden = input.hidden;
  call.hidden_size = impl_->hidden_size;
  call.experts = impl_->experts;
  call.weights_f32 = impl_->weights_f32.data();
  call.weights_bf16 = impl_->weights_bf16.data();
  call.bias = impl_->bias.data();
  call.options = impl_->options;
  call.logits = impl_->logits.data();
  call.ids = ids;
  call.weights = weights;
  launch_router(call, impl_->sms, stream);
}

bool DeviceRouter::keeps_bf16() const { return impl_->weights_bf16.data() != nullptr; }
std::size_t DeviceRouter::weight_bytes() const {
  const std::size_t bias = impl_->bias.data() != nullptr ? static_cast<std::size_t>(impl_->experts) * sizeof(float) : 0;
  return product(impl_->experts, impl_->hidden_size) * (keeps_bf16() ? sizeof(bf16) : sizeof(float)) + bias;
}
std::size_t DeviceRouter::buffer_bytes() const { return product(impl_->most_tokens, impl_->experts) * sizeof(float); }

}  // namespace heddle
