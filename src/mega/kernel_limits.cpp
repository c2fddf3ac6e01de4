#include "mega/kernel_limits.hpp"

#include <fmt/format.h>

#include "exchange/host_exchange.hpp"
#include "experts/words.hpp"
#include "heddle/device_experts.hpp"
#include "mega/options.hpp"

namespace heddle {

namespace {

std::string refused_arithmetic(const ExchangeOptions& options, WeightKind kind) {
  if (!has_fused_kernel(kind, kind)) {
    return fmt::format("{} weights have no fused kernel, mxfp4, fp8 block and bf16 have; take way = low_latency", kind_text(kind));
  }
  const bool fp8 = kind != WeightKind::bf16;
  const Activation activation = options.mega.activation;
  if (fp8 && activation != Activation::fp8)
    return "mxfp4 and fp8 block weights are multiplied as e4m3; take fp8 activations, or the host engine";
  if (!fp8 && activation != Activation::bf16)
    return "bf16 weights take bf16 activations in the fused kernel; for fp8 ones take way = low_latency";
  if (options.wire != (fp8 ? Wire::fp8 : Wire::bf16))
    return fmt::format("rows enter the product as they arrive; take wire = {}", fp8 ? "fp8" : "bf16");
  return "";
}

std::string refused_sizes(const ExchangeOptions& options) {
  const ExchangeShape shape = make_mega_layout(options, options.workers, {}).shape;
  const int counts = shape.max_local_experts * (shape.ranks + 3);
  if (counts > sm90::most_mega_counts) {
    return fmt::format("{} local experts on {} ranks need {} counts in the memory of a CTA, which has {}; take way = low_latency",
                       shape.max_local_experts, shape.ranks, counts, sm90::most_mega_counts);
  }
  const std::size_t pairs_here = worst_rows(shape);
  if (pairs_here > static_cast<std::size_t>(most_device_pairs)) {
    return fmt::format("up to {} rows can come to a rank, at most {} are possible; take a smaller cap than {}", pairs_here,
                       most_device_pairs, options.cap);
  }
  return "";
}

}  // namespace

std::string refused_by_kernel(const ExchangeOptions& options, WeightKind kind) {
  std::string reason = refused_arithmetic(options, kind);
  return reason.empty() ? refused_sizes(options) : reason;
}

}  // namespace heddle
