// Ranks as processes of a test: one fork a rank, and what a group may leave behind.
#pragma once

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

namespace heddle {

/// Processes that run one function each, with their rank. They end with status 1 where an expectation
/// failed and 3 where an exception left the function.
class Processes {
 public:
  void start(int ranks, const std::function<void(int)>& body) {
    for (int rank = 0; rank < ranks; ++rank) {
      std::fflush(nullptr);  // or the child prints it again
      const pid_t child = fork();
      if (child == 0) run(rank, body);
      children_.push_back(child);
    }
  }

  /// Exit statuses in the order of the starts; -signal for those that a signal ended.
  std::vector<int> wait() {
    std::vector<int> statuses;
    for (const pid_t child : children_) {
      int status = 0;
      waitpid(child, &status, 0);
      statuses.push_back(WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status));
    }
    children_.clear();
    return statuses;
  }

 private:
  [[noreturn]] static void run(int rank, const std::function<void(int)>& body) {
    int status = 3;
    try {
      body(rank);
      status = testing::Test::HasFailure() ? 1 : 0;
    } catch (const std::exception& error) {
      std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
    }
    std::fflush(nullptr);
    _exit(status);
  }

  std::vector<pid_t> children_;
};

inline std::vector<int> run_processes(int ranks, const std::function<void(int)>& body) {
  Processes processes;
  processes.start(ranks, body);
  return processes.wait();
}

/// Files of this library in the folders where shared memory and sockets could leave any.
inline std::size_t files_left() {
  std::error_code ignored;
  std::size_t files = 0;
  for (const char* folder : {"/dev/shm", "/tmp", "."}) {
    for (auto i = std::filesystem::directory_iterator(folder, ignored); i != std::filesystem::directory_iterator(); ++i) {
      const std::string name = i->path().filename().string();
      // What tests that run at the same time make is called heddle-something.
      files += name.find("heddle") != std::string::npos && name.find("heddle-") == std::string::npos ? 1 : 0;
    }
  }
  return files;
}

/// Sockets of groups whose name begins with `name`.
inline int sockets_left(const std::string& name) {
  std::ifstream file("/proc/net/unix");
  int found = 0;
  for (std::string line; std::getline(file, line);) found += line.find("heddle." + name) != std::string::npos ? 1 : 0;
  return found;
}

}  // namespace heddle
