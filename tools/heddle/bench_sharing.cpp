#include "bench_sharing.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "heddle/error.hpp"

namespace heddle::tool {

SmShare share_of_two(bool waits_with_products, int sms, int ranks_a_gpu, std::optional<int> asked) {
  const int half = sms / 2;
  if (ranks_a_gpu > half) {
    throw InputError(
        fmt::format("two batches in flight have {} of {} SMs each, too few for the {} ranks of a GPU, which need one each: "
                    "the batches could wait for each other's SMs",
                    half, sms, ranks_a_gpu));
  }
  if (waits_with_products) return {half, sms - half};
  const int exchange = asked.value_or(std::max(sms / 4, ranks_a_gpu));
  if (exchange < ranks_a_gpu)
    throw InputError(fmt::format("--batch-sms {}: the {} ranks of a GPU need one each", exchange, ranks_a_gpu));
  if (exchange > half) {
    throw InputError(
        fmt::format("--batch-sms {}: two batches in flight need {} SMs for what waits for other GPUs, a GPU has {}, and the "
                    "batches could wait for each other's; at most {}",
                    exchange, 2 * exchange, sms, half));
  }
  return {exchange, sms - exchange};
}

}  // namespace heddle::tool
