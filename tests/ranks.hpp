// Runs a function on every rank of a thread group and hands exceptions of any rank to the test.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "heddle/group.hpp"

namespace heddle {

inline void run_ranks(int ranks, const GroupOptions& options, const std::function<void(Group&)>& body) {
  const auto group = create_thread_group(ranks, options);
  std::vector<std::string> errors(static_cast<std::size_t>(ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(*group[static_cast<std::size_t>(rank)]);
      } catch (const std::exception& error) {
        errors[static_cast<std::size_t>(rank)] = error.what();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (int rank = 0; rank < ranks; ++rank) {
    EXPECT_EQ(errors[static_cast<std::size_t>(rank)], "") << "rank " << rank;
  }
}

}  // namespace heddle
