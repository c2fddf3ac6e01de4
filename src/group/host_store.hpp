// The store of host ranks: words of the control segment. The segment belongs to the group and not to rank 0, so there is no server
// that could die, and a compare-and-set is one instruction, so nobody can be stopped in the middle of one.
#pragma once

#include "group/control.hpp"
#include "heddle/group.hpp"
#include "heddle/store.hpp"

namespace heddle {

class HostStore final : public Store {
 public:
  explicit HostStore(const HeapView& control) : control_(control) {}
  std::uint64_t get(const StoreKey& key) const override;
  bool compare_set(const StoreKey& key, std::uint64_t& expected, std::uint64_t desired) override;
  bool wait(const std::function<bool()>& there, Clock::time_point end) override;

 private:
  RankControl& part(int rank) const { return *control_.at<RankControl>(rank, 0); }
  Word& word(const StoreKey& key) const;

  HeapView control_;
};

}  // namespace heddle
