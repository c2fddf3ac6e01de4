// Memory operations of the device whose names state order and scope: everything that another rank can see goes
// through these. And the few other instructions that the language has no name for.
#pragma once

#include <cstdint>

namespace heddle::ptx {

__device__ inline void store_release_system(std::uint64_t* address, std::uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}
__device__ inline void store_relaxed_system(std::uint64_t* address, std::uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}
__device__ inline std::uint64_t load_acquire_system(const std::uint64_t* address) {
  std::uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}
__device__ inline std::uint64_t load_relaxed_system(const std::uint64_t* address) {
  std::uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}
/// Two words side by side, aligned to both: one access of 16 bytes, of which each word by itself is whole.
struct WordPair {
  std::uint64_t first = 0;
  std::uint64_t second = 0;
};
__device__ inline void store_relaxed_system(std::uint64_t* address, const WordPair& pair) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(address), "l"(pair.first), "l"(pair.second) : "memory");
}
__device__ inline WordPair load_pair_relaxed_system(const std::uint64_t* address) {
  WordPair pair;
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(pair.first), "=l"(pair.second) : "l"(address) : "memory");
  return pair;
}
__device__ inline std::uint64_t load_acquire_gpu(const std::uint64_t* address) {
  std::uint64_t value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}
__device__ inline std::uint64_t add_acquire_release_gpu(std::uint64_t* address, std::uint64_t value) {
  std::uint64_t old;
  asm volatile("atom.add.acq_rel.gpu.global.u64 %0, [%1], %2;" : "=l"(old) : "l"(address), "l"(value) : "memory");
  return old;
}
__device__ inline std::uint64_t fetch_add_relaxed_gpu(std::uint64_t* address, std::uint64_t value) {
  std::uint64_t old;
  asm volatile("atom.add.relaxed.gpu.global.u64 %0, [%1], %2;" : "=l"(old) : "l"(address), "l"(value) : "memory");
  return old;
}
__device__ inline void store_release_gpu(std::uint64_t* address, std::uint64_t value) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}
/// In shared memory, for the CTA, by those lanes that are asked to; 0 for the others. Without a branch.
__device__ inline int add_acq_rel_cta(std::uint32_t address, int value, bool asked) {
  int old;
  asm volatile(
      "{\n\t.reg .pred asked;\n\tsetp.ne.s32 asked, %3, 0;\n\tmov.s32 %0, 0;\n\t"
      "@asked atom.add.acq_rel.cta.shared::cta.s32 %0, [%1], %2;\n\t}"
      : "=&r"(old)
      : "r"(address), "r"(value), "r"(static_cast<int>(asked))
      : "memory");
  return old;
}
__device__ inline void fence_acquire_release_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
/// A value that all lanes have, in a way that the compiler knows it: loops and products that hang on it stay uniform.
__device__ inline int uniform(int value) { return static_cast<int>(__reduce_or_sync(0xFFFFFFFFu, static_cast<unsigned>(value))); }
/// A value that the compiler finds only here: what is worked out from it keeps no registers before.
__device__ inline int only_here(int value) {
  asm volatile("" : "+r"(value));
  return value;
}
/// Nobody waits for it.
__device__ inline void add_relaxed_gpu(std::uint64_t* address, std::uint64_t value) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}
__device__ inline void max_relaxed_gpu(std::uint64_t* address, std::uint64_t value) {
  asm volatile("red.relaxed.gpu.global.max.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}
/// Returns what was there.
__device__ inline std::uint64_t exchange_relaxed_gpu(std::uint64_t* address, std::uint64_t value) {
  std::uint64_t old;
  asm volatile("atom.relaxed.gpu.global.exch.b64 %0, [%1], %2;" : "=l"(old) : "l"(address), "l"(value) : "memory");
  return old;
}
/// Returns what was there; the exchange happened if that equals `expected`.
__device__ inline std::uint64_t compare_exchange_system(std::uint64_t* address, std::uint64_t expected, std::uint64_t value) {
  std::uint64_t old;
  asm volatile("atom.cas.acq_rel.sys.global.b64 %0, [%1], %2, %3;"
               : "=l"(old)
               : "l"(address), "l"(expected), "l"(value)
               : "memory");
  return old;
}
/// Waits until the kernels before this one on its stream have ended, where it was launched ahead of their end.
__device__ inline void wait_for_earlier_kernels() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
/// The next kernel of the stream may be launched, if it waits as above.
__device__ inline void let_next_kernel_launch() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
/// CTAs of this cluster.
__device__ inline std::uint32_t cluster_ctas() {
  std::uint32_t value;
  asm volatile("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(value));
  return value;
}
/// All threads of the cluster that have not left meet; what they wrote before, all see after.
__device__ inline void cluster_barrier_release_acquire() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// --- Bulk copies: the copy engine of an SM, which reaches memory through a proxy of its own. Sizes are multiples of 16 bytes, and
// addresses of 16; `shared` addresses are those of shared_address(). ---

__device__ inline std::uint32_t shared_address(const void* address) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(address));
}
/// What this thread did with ordinary loads and stores, or knows of others, comes before its bulk copies, and the reverse.
__device__ inline void fence_proxies() { asm volatile("fence.proxy.async;" ::: "memory"); }
/// The same for global memory alone. The one above waits for all that this thread has stored, too.
__device__ inline void fence_global_proxies() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
/// The same for the CTA's shared memory alone.
__device__ inline void fence_shared_proxies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
/// To a word of shared memory that others of the CTA may do the same to.
__device__ inline void min_relaxed_cta(std::int32_t* address, std::int32_t value) {
  asm volatile("red.relaxed.cta.shared::cta.min.s32 [%0], %1;" ::"r"(shared_address(address)), "r"(value) : "memory");
}
/// A barrier in shared memory whose phase ends when `arrivals` threads have come and the bytes that they expect are there.
__device__ inline void make_barrier(std::uint32_t barrier, std::uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
/// New barriers are seen by the copy engine.
__device__ inline void fence_new_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ inline void arrive_expecting(std::uint32_t barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
/// Waits for the end of the phase of this parity, at most for as long as the hardware likes; true when it has ended.
__device__ inline bool wait_for_phase(std::uint32_t barrier, std::uint32_t parity) {
  std::uint32_t ended;
  asm volatile(
      "{\n.reg .pred ended;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 ended, [%1], %2;\n"
      "selp.u32 %0, 1, 0, ended;\n}"
      : "=r"(ended)
      : "r"(barrier), "r"(parity)
      : "memory");
  return ended != 0;
}
/// Memory of any GPU to shared memory; `barrier` counts the bytes.
__device__ inline void load_bulk(std::uint32_t to, const void* from, std::uint32_t bytes, std::uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
               "r"(bytes), "r"(barrier)
               : "memory");
}
/// The same of what is read once: it makes room in the L2 before anything else does, code and other data stay.
__device__ inline void load_bulk_once(void* to, const void* from, std::uint32_t bytes, std::uint64_t* barrier) {
  constexpr std::uint64_t evict_first = 0x12F0000000000000;
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(evict_first)
               : "memory");
}
/// Shared memory to memory of any GPU; belongs to this thread's next group.
__device__ inline void store_bulk(void* to, std::uint32_t from, std::uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}
/// 16 bytes by ordinary means.
__device__ inline uint4 load_shared(std::uint32_t address) {
  uint4 value;
  asm volatile("ld.shared::cta.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address)
               : "memory");
  return value;
}
__device__ inline void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
/// All but the last `groups` groups of this thread have read what they store.
template <int groups>
__device__ inline void wait_until_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(groups) : "memory");
}
/// All groups of this thread have been written where they go.
__device__ inline void wait_until_written() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

/// Nearest bf16 values, `low` in the lower half; NaN has its own bits.
__device__ inline std::uint32_t to_bf16_pair(float low, float high) {
  std::uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
/// Adds to two bf16 values that others may add to at the same time, on any GPU: each is rounded at once. At a multiple of 4 bytes.
__device__ inline void add_bf16_pair_system(void* to, std::uint32_t values) {
  asm volatile("red.relaxed.sys.global.add.noftz.bf16x2 [%0], %1;" ::"l"(to), "r"(values) : "memory");
}
/// To eight, at a multiple of 16 bytes; each two by themselves.
__device__ inline void add_bf16_eight_system(void* to, const uint4& values) {
  asm volatile("red.relaxed.sys.global.add.noftz.v4.bf16x2 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(values.x), "r"(values.y),
               "r"(values.z), "r"(values.w)
               : "memory");
}
/// Nearest e4m3 codes, `low` in bits 0-7, `high` in bits 8-15: the codes of to_e4m3.
__device__ inline std::uint32_t to_e4m3_pair(float low, float high) {
  std::uint16_t codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
}
// Minima and maxima that NaN passes, of two f32 or of two pairs of bf16.
__device__ inline float lesser(float a, float b) {
  float least;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(a), "f"(b));
  return least;
}
__device__ inline float greater(float a, float b) {
  float most;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
  return most;
}
__device__ inline std::uint32_t lesser_pair(std::uint32_t a, std::uint32_t b) {
  std::uint32_t least;
  asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(least) : "r"(a), "r"(b));
  return least;
}
__device__ inline std::uint32_t greater_pair(std::uint32_t a, std::uint32_t b) {
  std::uint32_t most;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
  return most;
}
/// Nanoseconds of a clock that all SMs share.
__device__ inline std::uint64_t nanoseconds() {
  std::uint64_t value;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value));
  return value;
}

}  // namespace heddle::ptx
