// The protocol sources under the schedule explorer.
#include <gtest/gtest.h>
#include "explorer/search.hpp"
#include "explorer/trips/low_latency.hpp"
#include "explorer/trips/gather.hpp"
#include "explorer/trips/normal.hpp"
#include "explorer/trips/elastic.hpp"
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
template <class T> void all() {
  one<T>({});
  Problem p; p.workers=2; p.topk=2; p.experts=4; p.tokens={{2,2},{1,2},{2,0}};
  one<T>(p);
}
TEST(Explorer, OneSided) { all<OneSidedTrip>(); }
TEST(Explorer, LL) { all<LowLatencyTrip>(); }
TEST(Explorer, E1) { all<ElasticTrip<Reduce::rank,false>>(); }
TEST(Explorer, E2) { all<ElasticTrip<Reduce::rank,true>>(); }
TEST(Explorer, E3) { all<ElasticTrip<Reduce::home,false>>(); }
TEST(Explorer, E4) { all<ElasticTrip<Reduce::home,true>>(); }
TEST(Explorer, G1) { all<GatherTrip<Gathering::padded>>(); }
TEST(Explorer, G2) { all<GatherTrip<Gathering::uneven>>(); }
TEST(Explorer, G3) { all<GatherTrip<Gathering::zero_filled>>(); }
TEST(Explorer, TP) { all<TensorParallelTrip>(); }
TEST(Explorer, N) { all<NormalTrip>(); }
TEST(Explorer, AG) { all<WithAllGather<OneSidedTrip>>(); }
}
}
