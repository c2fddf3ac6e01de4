// Numbers of pairs by squads that wait for each other nowhere: whatever order they run in, they are those of one worker.
#include <gtest/gtest.h>

#include <barrier>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "mega/shares.hpp"
#include "routing/random.hpp"
#include "signal/host_worker.hpp"

namespace heddle {
namespace {

/// What the warps of a squad share.
struct Squad {
  explicit Squad(int warps) : barrier(warps) {}
  std::barrier<> barrier;
  std::mutex mutex;
  std::vector<std::unique_ptr<std::int32_t[]>> arrays;
  std::vector<int> sizes;
};

/// A warp of a squad, a thread here.
class SquadWarp : public HostWorker {
 public:
  static constexpr bool is_warp = true;
  SquadWarp(const HostTeam& team, Squad& shared, int squad, int squads, int warp, int warps)
      : HostWorker(team, 0), shared_(shared), squad_(squad), squads_(squads), warp_(warp), warps_(warps) {}

  int squad() const { return squad_; }
  int squads() const { return squads_; }
  int squad_index() const { return warp_; }
  int squad_count() const { return warps_; }
  bool squad_barrier() {
    shared_.barrier.arrive_and_wait();
    return true;
  }
  std::int32_t* squad_array(int n) {
    const std::lock_guard lock(shared_.mutex);
    if (arrays_ == shared_.arrays.size()) {
      shared_.arrays.push_back(std::make_unique<std::int32_t[]>(static_cast<std::size_t>(n)));
      shared_.sizes.push_back(n);
    }
    return shared_.arrays[arrays_++].get();
  }
  void prefix_columns(int worker, int workers, int rows, int columns, std::int32_t* values, std::int32_t* totals) {
    for (int c = worker; c < columns; c += workers) totals[c] = prefix_sums(rows, values + c, columns);
  }
  template <class ClassOf>
  void add_kinds(int n, ClassOf class_of, std::int32_t* counts) {
    const std::lock_guard lock(shared_.mutex);
    for (int i = warp_; i < n; i += warps_) {
      if (class_of(i) >= 0) ++counts[class_of(i)];
    }
  }

 private:
  Squad& shared_;
  int squad_, squads_, warp_, warps_;
  std::size_t arrays_ = 0;
};

/// What a batch of pairs is numbered by one worker.
struct Expected {
  std::vector<int> numbers, totals;

  Expected(const std::vector<int>& experts_of, int experts) : totals(static_cast<std::size_t>(experts)) {
    for (const int expert : experts_of) numbers.push_back(expert < 0 ? -1 : totals[static_cast<std::size_t>(expert)]++);
  }
};

/// All that a squad's warps say of their share, in the order of pairs; counts of the last squad.
void number_share(const std::vector<int>& experts_of, int experts, int squad, int squads, int warps, int together,
                  std::vector<int>& numbers, std::vector<int>& counts) {
  const TokenShare share = share_of(static_cast<int>(experts_of.size()), squad, squads);
  Squad shared(warps);
  HostTeam team;
  std::vector<std::thread> threads;
  for (int warp = 0; warp < warps; ++warp) {
    threads.emplace_back([&, warp] {
      SquadWarp w(team, shared, squad, squads, warp, warps);
      ShareNumbers own(w, experts, [&](int pair) { return experts_of[static_cast<std::size_t>(pair)]; });
      own.begin(share.begin);
      for (int first = share.begin; first < share.end; first += together) {
        const int end = std::min(share.end, first + together);
        own.number(first, end - first);
        for (int pair = first + warp; pair < end; pair += warps) {
          const auto at = static_cast<std::size_t>(pair);
          if (experts_of[at] >= 0) numbers[at] = own.of(pair);
        }
        own.finish();
      }
      if (squad == squads - 1 && warp == 0) counts.assign(own.counts(), own.counts() + experts);
    });
  }
  for (std::thread& thread : threads) thread.join();
  int values = 0;
  for (const int size : shared.sizes) values += size;
  EXPECT_LE(values, share_values(experts));
}

TEST(MegaShares, NumbersAreThoseOfOneWorker) {
  struct Size {
    int pairs, experts, squads, warps, together;
  };
  for (const Size& size : {Size{0, 3, 2, 2, 8}, Size{1, 1, 3, 1, 8}, Size{40, 5, 7, 2, 3}, Size{3000, 16, 4, 4, 256},
                           Size{9000, 256, 3, 8, share_pairs}, Size{9000, 2560, 2, 8, share_pairs}}) {
    Random random(static_cast<std::uint64_t>(size.pairs) + 5);
    std::vector<int> experts_of(static_cast<std::size_t>(size.pairs));
    for (int& expert : experts_of) expert = static_cast<int>(random.below(static_cast<std::uint64_t>(size.experts) + 1)) - 1;
    const Expected expected(experts_of, size.experts);
    std::vector<int> numbers(experts_of.size(), -1), counts;
    for (int squad = size.squads - 1; squad >= 0; --squad)
      number_share(experts_of, size.experts, squad, size.squads, size.warps, size.together, numbers, counts);
    EXPECT_EQ(numbers, expected.numbers) << size.pairs << " pairs, " << size.experts << " experts";
    EXPECT_EQ(counts, expected.totals) << size.pairs << " pairs, " << size.experts << " experts";
  }
}

TEST(MegaShares, SharesFollowEachOther) {
  for (const int tokens : {0, 1, 5, 131, 132, 133, 8192, (1 << 24) - 1}) {
    for (const int squads : {1, 2, 132}) {
      int before = 0;
      for (int squad = 0; squad < squads; ++squad) {
        const TokenShare share = share_of(tokens, squad, squads);
        EXPECT_EQ(share.begin, before);
        EXPECT_LE(share.end - share.begin, tokens / squads + 1);
        before = share.end;
      }
      EXPECT_EQ(before, tokens);
    }
  }
}

}  // namespace
}  // namespace heddle
