#include "balancing/part_way.hpp"

#include <algorithm>

namespace heddle {

namespace {

std::size_t index(int value) { return static_cast<std::size_t>(value); }

class PartWay {
 public:
  PartWay(const ReplicaMap& current, const ReplicaMap& wanted, int most)
      : wanted_(wanted), copies_(index(current.experts()), 0), left_(index(current.ranks()), most) {
    for (int place = 0; place < current.physical(); ++place) {
      now_.push_back(current.logical_of(place));
      ++copies_[index(now_.back())];
    }
  }

  /// Changes a place. An expert that loses its last copy by that gets one where it is wanted, and so on. Nothing where that has no
  /// end.
  void change(int place) {
    std::vector<Changed> changed;
    for (;;) {
      if (!can_change(place)) return undo(changed);
      const int lost = now_[index(place)];
      changed.push_back({place, lost});
      set(place, wanted_.logical_of(place));
      --left_[index(rank_of(place))];
      if (copies_[index(lost)] > 0) return;
      const auto places = wanted_.copies_of(lost);
      const auto next = std::ranges::find_if(places, [this](int other) { return can_change(other); });
      if (next == places.end()) return undo(changed);
      place = *next;
    }
  }

  ReplicaMap map() const {
    std::vector<std::vector<int>> experts_of(left_.size());
    for (int place = 0; place < wanted_.physical(); ++place) experts_of[index(rank_of(place))].push_back(now_[index(place)]);
    return ReplicaMap::from_ranks(experts_of, wanted_.experts());
  }

 private:
  struct Changed {
    int place, before;
  };
  int rank_of(int place) const { return wanted_.placement().rank_of(place); }
  bool can_change(int place) const { return now_[index(place)] != wanted_.logical_of(place) && left_[index(rank_of(place))] > 0; }
  void set(int place, int expert) {
    --copies_[index(now_[index(place)])];
    ++copies_[index(expert)];
    now_[index(place)] = expert;
  }
  void undo(const std::vector<Changed>& changed) {
    for (auto it = changed.rbegin(); it != changed.rend(); ++it) {
      set(it->place, it->before);
      ++left_[index(rank_of(it->place))];
    }
  }

  const ReplicaMap& wanted_;
  std::vector<int> now_;     ///< the expert at each place
  std::vector<int> copies_;  ///< of each expert
  std::vector<int> left_;    ///< changes of each rank
};

bool changes_more(const ReplicaMap& current, const ReplicaMap& wanted, int most) {
  for (int rank = 0; rank < current.ranks(); ++rank) {
    const auto now = current.experts_of(rank), then = wanted.experts_of(rank);
    int changed = 0;
    for (std::size_t place = 0; place < now.size(); ++place) changed += now[place] != then[place] ? 1 : 0;
    if (changed > most) return true;
  }
  return false;
}

}  // namespace

ReplicaMap part_way(const ReplicaMap& current, const ReplicaMap& wanted, int most) {
  if (!changes_more(current, wanted, most)) return wanted;
  PartWay way(current, wanted, most);
  for (int place = 0; place < current.physical(); ++place) way.change(place);
  return way.map();
}

}  // namespace heddle
