// The protocol sources under the schedule explorer.
#include <gtest/gtest.h>
#include "explorer/search.hpp"
#include "explorer/trips/low_latency.hpp"
#include "explorer/trips/one_sided.hpp"
namespace heddle::explorer {
namespace {
template <class T> void one(const Problem& p) {
  RoundTrips<T> s(p);
  fmt::print("{}\n", s.name());
  for (auto r : {explore_all(s, 100000), explore_bounded(s, 1, 20000), explore_random(s, 5, 2000), explore_random(s, 5, 2000, {.races=false,.every_verb=true})}) {
    fmt::print("  {}\n", r.line());
    if (r.violation) { fmt::print("{}\n", r.violation->trace); ADD_FAILURE(); }
  }
}
TEST(Explorer, X) {
  one<OneSidedTrip>({});
  one<LowLatencyTrip>({});
  Problem p; p.workers=2; p.topk=2; p.experts=4; p.tokens={{2,2},{1,2},{2,0}};
  one<OneSidedTrip>(p);
  one<LowLatencyTrip>(p);
}
}
}
