// Holds the formats to their promise of one source for host and device: every header of this room goes through the device
// compiler (warnings are errors, so a host function called from a device one is caught), and a kernel uses what is public.
#include <cstdint>

#include "heddle/formats.hpp"
#include "shared_headers.hpp"

namespace heddle {

/// Widens and narrows `count` bf16 codes; every code must come back as it was, NaN apart.
__global__ void bf16_round_trip(const std::uint16_t* codes, std::uint16_t* results, int count) {
  const int index = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (index < count) {
    results[index] = to_bf16(to_float(bf16{codes[index]})).bits;
  }
}

}  // namespace heddle
