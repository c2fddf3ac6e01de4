// The dispatch warps: hear the announcements, count, and fetch rows. One a CTA, whose counts are its own.
#pragma once

#include "mega/sm90/pull.cuh"

namespace heddle::sm90 {

/// By a warp; `place`: one of as many as there are CTAs.
template <class Shape>
__device__ void dispatch_rows(MegaShared<Shape>& shared, const DeviceTeam& team, const RoleWarp& place) {
  const MegaCall& call = shared.known.call;
  PullWorker w(team, shared.begun, place, shared.pulled, shared.counted);
  trace::WarpSpan span(trace::Kind::count);
  const bool counted = mega_hear(w, call.layout) && mega_take_counts(w, call);
  span.turn(trace::Kind::fetch);
  if (!counted || !mega_pull(w, call)) shared.stop();
  w.complete_all();  // whichever way it ends, nothing is under way
}

}  // namespace heddle::sm90
