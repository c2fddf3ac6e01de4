// Where the threads of several ranks meet: the last to come works for all of them, once. Ranks that share a GPU are called
// one by one but launched together.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

namespace heddle {

class Meeting {
 public:
  /// For ranks [first_rank, first_rank + members).
  Meeting(int first_rank, int members, std::chrono::nanoseconds deadline);

  /// Waits for all members; the last one runs its `work` while the others wait, then all return. What `work` throws, all
  /// throw. FaultError naming a rank that did not come within the deadline after this one. After either the meeting has
  /// ended: whoever comes later throws the same.
  void meet(int rank, const std::string& what, const std::function<void()>& work);

  /// Ends the meeting from outside: all who wait for a member, and all who come later, throw `error`. The first one stays.
  void end(const std::exception_ptr& error);

  /// After its end, when no member is inside: members meet anew.
  void begin_again();

 private:
  bool complete() const { return came_ == here_.size(); }
  void work_for_all(std::unique_lock<std::mutex>& lock, const std::function<void()>& work);
  void wait(std::unique_lock<std::mutex>& lock, int rank, const std::string& what);

  int first_rank_;
  std::chrono::nanoseconds deadline_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<bool> here_;
  std::size_t came_ = 0;
  std::uint64_t meetings_ = 0;  ///< that all have left
  std::exception_ptr over_;
};

}  // namespace heddle
