// The benchmark's own kernels: the empty call, the gate that starts all GPUs together, other work to hide an
// exchange behind, and random values. Launches throw Error.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "heddle/formats.hpp"

namespace heddle::tool {

/// A kernel that returns at once, launched as the largest of an exchange are: cooperative, `ctas` x `ranks` CTAs of 512 threads;
/// as one cluster a rank if asked (up to 16 CTAs).
void launch_empty(int ctas, int ranks, bool cluster, cudaStream_t stream);

/// A kernel that returns at once, launched as any other.
void launch_nothing(int ctas, int threads, cudaStream_t stream);

/// Holds a stream until the host has written `number` or more to *gate (pinned memory); at most two seconds.
void launch_gate(const std::uint32_t* gate, std::uint32_t number, cudaStream_t stream);

/// Does nothing but wait, on one SM, so that transfers under way come to their end.
void launch_pause(std::uint64_t nanoseconds, cudaStream_t stream);

/// Other work: every thread of `ctas` CTAs does `steps` dependent steps of eight multiply-adds. It takes longer
/// where it shares its SM. `sink`: a float that is never written.
void launch_work(int ctas, std::uint64_t steps, float* sink, cudaStream_t stream);

/// The same by CTAs with so much shared memory (160 KiB) that none of them, and no CTA of the library's products, has its SM beside
/// another: as attention kernels are.
void launch_wide_work(int ctas, std::uint64_t steps, float* sink, cudaStream_t stream);

/// Normally distributed values.
void fill_normal(bf16* values, std::size_t count, std::uint64_t seed, cudaStream_t stream);

/// Adds to *bad how many of the values are not finite.
void count_not_finite(const bf16* values, std::size_t count, unsigned long long* bad, cudaStream_t stream);

}  // namespace heddle::tool
