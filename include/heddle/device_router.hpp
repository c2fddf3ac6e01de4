// A router on a GPU: the choices of route() as kernels on a stream, for a layer on GPUs or for any caller. Built with HEDDLE_CUDA
// only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "heddle/device.hpp"
#include "heddle/routing.hpp"

namespace heddle {

/// The ids and weights of router_logits() and route(), bit for bit: the same products, sums and functions in the same order. Where
/// all weights are bf16 values they are kept as such, half the bytes, and a product and its sum are one operation; the bits are the
/// same, unless products leave the range of f32 (below 2^-126 or above 2^128). Which NaN a weight is may differ.
class DeviceRouter {
 public:
  /// weights: [experts, hidden_size], bias: [experts] or empty, read here and not needed later. Takes all memory, on CUDA's
  /// `device`, for calls of up to `most_tokens` tokens. Throws InputError where sizes do not match, for more than 1,024 experts, a
  /// hidden size that is no multiple of 64, and for options that route() does not take.
  DeviceRouter(int device, std::span<const float> weights, std::span<const float> bias, int experts, int hidden_size,
               const RouterOptions& options, int most_tokens);
  ~DeviceRouter();
  DeviceRouter(DeviceRouter&&) noexcept;
  DeviceRouter& operator=(DeviceRouter&&) noexcept;

  /// Queues two kernels and returns; may be captured in a graph. Of `input`, tokens and hidden matter: the number is read on the
  /// device, at most max_tokens of it. ids [tokens, topk] and weights [tokens, topk], in device memory, are written, and nothing
  /// behind them. Calls of a router follow each other: they share its logits. Throws InputError, before a launch, for max_tokens
  /// that are negative or above most_tokens, null pointers and hidden states that are not 16-byte aligned.
  void route(const DeviceInput& input, int max_tokens, std::int32_t* ids, float* weights, DeviceStream stream) const;

  bool keeps_bf16() const;           ///< all weights are bf16 values
  std::size_t weight_bytes() const;  ///< of device memory
  std::size_t buffer_bytes() const;  ///< of device memory, beside: logits

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace heddle
