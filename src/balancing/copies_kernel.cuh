// Copies chosen by one CTA: warps count runs of pairs by expert, one warp levels the shares, warps number their pairs again. In a
// header, so that the emulator can run it (tests/emulator_copies_test.cpp).
#pragma once

#include "balancing/copies_kernel.hpp"
#include "balancing/shares.hpp"

namespace heddle::copies_kernel {

inline constexpr int threads = 256;
inline constexpr int lanes = 32;
inline constexpr int warps = threads / lanes;
inline constexpr unsigned all_lanes = 0xFFFFFFFFu;

struct Shared {
  int counts[warps][most_balanced_experts];  ///< pairs of a warp's run; then those before it, which become its next number
  int totals[most_balanced_experts];
  int shares[most_balanced_copies];  ///< in the order of CopiesTable::copies
  int levels[most_balanced_ranks];
};

__device__ inline int lane_of_thread() { return static_cast<int>(threadIdx.x) % lanes; }
__device__ inline int warp_of_thread() { return static_cast<int>(threadIdx.x) / lanes; }

template <class Add>
__device__ int over_lanes(int value, Add add) {
  for (int distance = lanes / 2; distance > 0; distance /= 2) value = add(value, __shfl_xor_sync(all_lanes, value, distance));
  return value;
}

/// The expert of a pair; -1: none, -2: an id that is none or repeats.
__device__ inline int expert_of(const CopiesCall& call, int pair) {
  const int id = call.ids[pair];
  if (id < -1 || id >= call.table.experts) return -2;
  for (int other = pair - pair % call.topk; id >= 0 && other < pair; ++other) {
    if (call.ids[other] == id) return -2;
  }
  return id;
}

/// visit(pair, expert, number, count, leads) for the pairs of this warp's run, in order, 32 at a time: number among them of the
/// same expert, of which `count` are; one lane leads.
template <class Visit>
__device__ void for_run(const CopiesCall& call, int pairs, Visit visit) {
  const int steps = (pairs + threads - 1) / threads;
  const int begin = warp_of_thread() * steps * lanes;
  for (int step = 0; step < steps; ++step) {
    const int pair = begin + step * lanes + lane_of_thread();
    const int expert = pair < pairs ? expert_of(call, pair) : -3;
    const unsigned same = __match_any_sync(all_lanes, static_cast<unsigned>(expert));
    const unsigned lower = same & ((1u << lane_of_thread()) - 1u);
    visit(pair, expert, __popc(lower), __popc(same), lower == 0);
    __syncwarp();
  }
}

/// Deals an expert's rows to its copies, as Levels::deal. By one warp, together.
__device__ inline void deal(const CopiesCall& call, Shared& shared, int expert) {
  const CopiesTable& table = call.table;
  const int first = table.begins[expert], end = table.begins[expert + 1];
  const int rows = shared.totals[expert];
  const auto level = [&](int i) { return shared.levels[table.ranks_of[i]]; };
  int top = 0, sum = 0, reached = 0;
  for (int i = first + lane_of_thread(); i < end; i += lanes) {
    long long fill = 0;
    for (int j = first; j < end; ++j) fill += max(0, level(i) - level(j));
    if (fill > rows) continue;
    top = max(top, level(i));
    sum += level(i);
    ++reached;
  }
  const auto plus = [](int a, int b) { return a + b; };
  top = over_lanes(top, [](int a, int b) { return max(a, b); });
  const Dealt dealt{static_cast<std::int64_t>(rows) + over_lanes(sum, plus), over_lanes(reached, plus)};
  for (int i = first + lane_of_thread(); i < end; i += lanes) {
    const int place = places_behind(table.ranks_of[i], call.source, table.ranks);
    int before = 0;
    for (int j = first; j < end; ++j) {
      const int other = places_behind(table.ranks_of[j], call.source, table.ranks);
      before += level(j) <= top && (other < place || (other == place && j < i)) ? 1 : 0;
    }
    shared.shares[i] = level(i) <= top ? dealt.share(level(i), before) : 0;
  }
  __syncwarp();
  for (int i = first + lane_of_thread(); i < end; i += lanes) atomicAdd(&shared.levels[table.ranks_of[i]], shared.shares[i]);
  __syncwarp();
}

/// By one warp.
__device__ inline void level_rows(const CopiesCall& call, Shared& shared) {
  const CopiesTable& table = call.table;
  for (int rank = lane_of_thread(); rank < table.ranks; rank += lanes) shared.levels[rank] = 0;
  for (int i = lane_of_thread(); i < table.physical; i += lanes) shared.shares[i] = 0;
  __syncwarp();
  for (int expert = lane_of_thread(); expert < table.experts; expert += lanes) {
    const int first = table.begins[expert];
    if (table.begins[expert + 1] - first > 1) continue;
    shared.shares[first] = shared.totals[expert];
    atomicAdd(&shared.levels[table.ranks_of[first]], shared.totals[expert]);
  }
  __syncwarp();
  for (int round = 0; round < levelling_rounds; ++round) {
    for (int n = 1; n <= table.several[0]; ++n) {
      const int expert = table.several[n];
      for (int i = table.begins[expert] + lane_of_thread(); i < table.begins[expert + 1]; i += lanes)
        atomicAdd(&shared.levels[table.ranks_of[i]], -shared.shares[i]);
      __syncwarp();
      deal(call, shared, expert);
    }
  }
}

__device__ inline void take_turns(const CopiesCall& call, Shared& shared) {
  for (int expert = static_cast<int>(threadIdx.x); expert < call.table.experts; expert += threads) {
    const int first = call.table.begins[expert], count = call.table.begins[expert + 1] - first;
    for (int i = 0; i < count; ++i) shared.shares[first + i] = turns_of_copy(shared.totals[expert], i, count, call.source, expert);
  }
}

/// The copy that takes an expert's pair number `number`.
__device__ inline int copy_of(const CopiesTable& table, const Shared& shared, int expert, int number) {
  int i = table.begins[expert];
  while (number >= shared.shares[i]) number -= shared.shares[i++];
  return table.copies[i];
}

__global__ inline void __launch_bounds__(threads) choose(const __grid_constant__ CopiesCall call) {
  __shared__ Shared shared;
  const int pairs = max(0, min(*call.tokens, call.most_tokens)) * call.topk;
  for (int i = static_cast<int>(threadIdx.x); i < warps * most_balanced_experts; i += threads)
    shared.counts[i / most_balanced_experts][i % most_balanced_experts] = 0;
  __syncthreads();
  int* const mine = shared.counts[warp_of_thread()];
  for_run(call, pairs, [&](int, int expert, int, int count, bool leads) {
    if (leads && expert >= 0) mine[expert] += count;
  });
  __syncthreads();
  for (int expert = static_cast<int>(threadIdx.x); expert < call.table.experts; expert += threads) {
    int total = 0;
    for (int warp = 0; warp < warps; ++warp) {
      const int count = shared.counts[warp][expert];
      shared.counts[warp][expert] = total;
      total += count;
    }
    shared.totals[expert] = total;
    if (call.counts != nullptr) call.counts[expert] += static_cast<unsigned long long>(total);
  }
  __syncthreads();
  if (call.rule == CopyRule::turns) take_turns(call, shared);
  if (call.rule == CopyRule::levelled && warp_of_thread() == 0) level_rows(call, shared);
  __syncthreads();
  for_run(call, pairs, [&](int pair, int expert, int number, int count, bool leads) {
    const int before = expert >= 0 ? mine[expert] : 0;
    __syncwarp();
    if (leads && expert >= 0) mine[expert] = before + count;
    if (expert == -3) return;
    call.chosen[pair] = expert >= 0    ? copy_of(call.table, shared, expert, before + number)
                        : expert == -1 ? -1
                                       : call.table.physical;
  });
}

}  // namespace heddle::copies_kernel
