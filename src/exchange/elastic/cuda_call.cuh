// What elastic's kernels share, on one node and over several: a rank's scratch, and the copy epilogue.
#pragma once

#include "exchange/cuda_counters.cuh"
#include "exchange/elastic/cuda_exchange.hpp"

namespace heddle {

__device__ inline ElasticScratch scratch_of(const ElasticCall& call) {
  ElasticScratch scratch = call.scratch;
  scratch.sent = of_this_rank(scratch.sent, call);
  scratch.arrived = of_this_rank(scratch.arrived, call);
  scratch.home_tokens = of_this_rank(scratch.home_tokens, call.arrivals_stride);
  scratch.routing.local_ids = of_this_rank(scratch.routing.local_ids, call.arrivals_stride);
  scratch.routing.weights = of_this_rank(scratch.routing.weights, call.arrivals_stride);
  return scratch;
}

__device__ inline ExpertLayout experts_of(const ElasticCall& call, int rank) {
  ExpertLayout to = call.experts_layout;
  to.local_experts = call.placement.experts_on[rank];
  to.begins = of_this_rank(to.begins, call.arrivals_stride);
  to.counts = of_this_rank(to.counts, call.arrivals_stride);
  to.places = of_this_rank(to.places, call.arrivals_stride);
  to.row_weights = of_this_rank(to.row_weights, call.arrivals_stride);
  to.rows = of_this_rank(to.rows, call.arrivals_stride);
  to.numbers = of_this_rank(to.numbers, call.arrivals_stride);
  to.before = of_this_rank(to.before, call.arrivals_stride);
  return to;
}

/// What goes home of this rank's results.
__device__ inline ElasticResults results_of(const ElasticCall& call) {
  ElasticResults results;
  results.rows = call.ranks[blockIdx.y].results;
  results.weighted = call.weighted;
  results.summed = !call.by_expert;
  if (call.by_expert) {
    results.places = of_this_rank(call.experts_layout.places, call.arrivals_stride);
    results.sums = of_this_rank(call.sums, call.arrivals_stride);
  }
  return results;
}

/// The copy epilogue of the rows that arrived, `arrived` from each rank.
template <RowMover mover>
__device__ void lay_out(DeviceWorker<mover>& w, const ElasticCall& call, const ElasticScratch& scratch,
                        const std::int32_t* arrived) {
  const int n = w.sum_values(w.heap().ranks, arrived);
  PairCount pairs(w, call);
  if (!elastic_list(w, call.layout, arrived, n, n < call.room ? call.room : n, call.placement, scratch, pairs)) return;
  pairs.add_up();
  if (call.by_expert) {
    if (!elastic_expand(w, call.layout, arrived, n, call.placement, scratch, experts_of(call, w.heap().rank))) return;
  } else {
    elastic_copy_out(w, call.layout, arrived, n, of_this_rank(call.rows, call.arrivals_stride));
  }
  const std::int32_t* rows = of_this_rank(call.experts_layout.counts, call.arrivals_stride);
  tally_dispatch(
      call, [&](int d) { return scratch.sent.totals[d]; }, [&](int s) { return arrived[s]; }, [&](int e) { return rows[e]; });
}

}  // namespace heddle
