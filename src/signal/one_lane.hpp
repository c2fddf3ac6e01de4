// The verbs that for a worker of one lane are plain loops: shared by the host's thread and the schedule
// explorer's coroutine. A warp has its own (device_worker.cuh).
#pragma once

#include <cstdint>

namespace heddle {

/// W has index() and count().
template <class W>
class OneLane {
 public:
  int chunk(int, int n) const { return n > 0 ? n : 1; }
  int row_parts(int, int) const { return 1; }
  int prefix_sums(int n, std::int32_t* values, int stride) {
    std::int32_t sum = 0;
    for (int i = 0; i < n; ++i) {
      const std::int32_t own = values[i * stride];
      values[i * stride] = sum;
      sum += own;
    }
    return sum;
  }
  template <class F>
  void lanes(int n, F f) {
    for (int i = 0; i < n; ++i) f(i);
  }
  template <class F>
  void once(F f) {
    f();
  }
  template <class CountOf, class Visit>
  int deal(int regions, int group, CountOf count_of, Visit visit) {
    const W& worker = static_cast<const W&>(*this);
    int row = 0;
    int next = worker.index();
    int before = 0;
    for (int region = 0; region < regions; ++region) {
      if (region % group == 0) before = 0;
      const int rows = count_of(region);
      for (; next < row + rows; next += worker.count()) visit(region, next - row, before);
      row += rows;
      before += rows;
    }
    return before;
  }
};

}  // namespace heddle
