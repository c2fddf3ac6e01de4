// What the benchmark can ask beyond the round trip: the floor of an empty call, the cost of laying rows out, how much of an
// exchange hides behind other work, and how it depends on the number of SMs. Times are microseconds of the slower GPU.
#pragma once

#include <vector>

#include "bench_setup.hpp"

namespace heddle::tool {

/// A round trip of two launches that do nothing, in the graph form of the others: `ctas` CTAs a GPU over its ranks.
double time_empty(Lanes& lanes, int ranks_a_gpu, int ctas, bool cluster, int round_trips, int replays);

/// The receiving halves when everything has arrived before they begin: what is left to do before experts can run
/// (dispatch_receive), and the sums at home (combine_receive). One launch that does nothing, taken alike: `empty`.
struct ReceiveTimes {
  double receive = 0, collect = 0, empty = 0;
};
ReceiveTimes time_receiving(Setup& setup, double transfer_us, int round_trips, int replays);

/// Halves of a round trip around other work of `ctas` CTAs, once behind dispatch_send and once behind combine_send.
struct OverlapTimes {
  double work = 0;         ///< the other work alone, twice, as in a round trip
  double exchange = 0;     ///< the four halves alone
  double one_stream = 0;   ///< send, work, receive on one stream
  double two_streams = 0;  ///< the work on a second stream, beside both halves
};
OverlapTimes time_overlap(Setup& setup, double work_us, int ctas, int round_trips, int replays);

/// Medians by CTAs a GPU, `sms` of them in turn; 0 is the library's rule.
std::vector<double> time_sweep(Setup& setup, const std::vector<int>& sms, int round_trips, int replays);

}  // namespace heddle::tool
