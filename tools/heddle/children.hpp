// The processes that a job runs its ranks in.
#pragma once

#include <sys/types.h>

#include <functional>
#include <string>
#include <vector>

namespace heddle::tool {

/// Child processes numbered from 0; those that are left at the end of this object's life are ended.
class Children {
 public:
  explicit Children(int count);
  ~Children();
  Children(const Children&) = delete;
  Children& operator=(const Children&) = delete;

  /// Forks process `number`, which runs `body` and ends. Whoever kills this process takes it along.
  void start(int number, const std::function<void()>& body);
  /// Until all have ended. Once one has failed, as `failed` says of those that have ended, the others end by their
  /// deadlines; one that does not (it was stopped, say) is ended after twice that time.
  void wait(int deadline_ms, const std::function<bool(int)>& failed);
  /// " (process 2 was ended by signal 9, Killed)" for the first that a signal ended, or nothing; `called` is what they are
  /// called, "the process of rank".
  std::string killed(const std::string& called) const;

 private:
  bool reap();
  void end();

  std::vector<pid_t> running_;  ///< 0: ended
  std::vector<int> signals_;    ///< what ended a process; 0: its own exit, or end()
};

}  // namespace heddle::tool
