#include "children.hpp"

#include <fmt/format.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <optional>
#include <thread>

#include "heddle/error.hpp"

namespace heddle::tool {

Children::Children(int count) : running_(static_cast<std::size_t>(count), 0), signals_(running_.size(), 0) {}

Children::~Children() { end(); }

void Children::start(int number, const std::function<void()>& body) {
  const pid_t parent = getpid();
  const pid_t child = fork();
  if (child < 0) throw InputError(fmt::format("cannot start process {}: {}", number, std::strerror(errno)));
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);  // who is killed takes its ranks along
    if (getppid() == parent) body();
    _exit(0);
  }
  running_[static_cast<std::size_t>(number)] = child;
}

std::string Children::killed(const std::string& called) const {
  for (std::size_t number = 0; number < signals_.size(); ++number) {
    const int signal = signals_[number];
    if (signal != 0) return fmt::format(" ({} {} was ended by signal {}, {})", called, number, signal, strsignal(signal));
  }
  return "";
}

void Children::wait(int deadline_ms, const std::function<bool(int)>& failed) {
  const auto patience = std::chrono::milliseconds(2 * static_cast<long long>(deadline_ms) + 1000);
  std::optional<std::chrono::steady_clock::time_point> since;
  const auto one_failed = [&] {
    for (std::size_t number = 0; number < running_.size(); ++number) {
      if (running_[number] == 0 && failed(static_cast<int>(number))) return true;
    }
    return false;
  };
  while (reap()) {
    const auto now = std::chrono::steady_clock::now();
    if (!since && one_failed()) since = now;
    if (since && now - *since > patience) return end();
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

/// Is any still running?
bool Children::reap() {
  for (std::size_t number = 0; number < running_.size(); ++number) {
    int status = 0;
    if (running_[number] == 0 || waitpid(running_[number], &status, WNOHANG) == 0) continue;
    if (WIFSIGNALED(status)) signals_[number] = WTERMSIG(status);
    running_[number] = 0;
  }
  return std::any_of(running_.begin(), running_.end(), [](pid_t child) { return child != 0; });
}

void Children::end() {
  for (pid_t& child : running_) {
    if (child == 0) continue;
    kill(child, SIGKILL);
    while (waitpid(child, nullptr, 0) < 0 && errno == EINTR) {
    }
    child = 0;
  }
}

}  // namespace heddle::tool
