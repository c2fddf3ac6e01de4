// Ranks as threads and as processes: meeting, configuration checks, deadlines, reset, nothing left behind.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <thread>

#include "heddle/group.hpp"
#include "processes.hpp"
#include "ranks.hpp"
#include "signal/host_worker.hpp"

namespace heddle {
namespace {

using std::chrono::milliseconds;

TEST(Group, ThreadsExchangeTextsInRankOrder) {
  for (const int ranks : {1, 2, 3, 8, 72}) {
    run_ranks(ranks, {}, [ranks](Group& group) {
      for (int round = 0; round < 3; ++round) {
        const auto all = group.exchange(std::to_string(group.rank() * 100 + round), "test");
        for (int rank = 0; rank < ranks; ++rank) ASSERT_EQ(all[static_cast<std::size_t>(rank)], std::to_string(rank * 100 + round));
      }
    });
  }
}

TEST(Group, HeapIsZeroedAndSymmetric) {
  run_ranks(4, {}, [](Group& group) {
    const HeapMapping heap = group.create_heap(10000);
    EXPECT_EQ(*heap.view.at<int>(2, 9996), 0);
    group.barrier("before the writes");
    *heap.view.at<int>((group.rank() + 1) % 4, 5000) = group.rank();
    group.barrier("after the writes");
    EXPECT_EQ(*heap.view.mine<int>(5000), (group.rank() + 3) % 4);
    EXPECT_EQ(heap.view.owner(heap.view.at<int>(3, 0)), 3);
    EXPECT_EQ(heap.view.owner(&heap), -1);
    group.release_heap(heap);
  });
}

TEST(Group, HeapThatDoesNotFitIsRefusedOnEveryRank) {
  run_ranks(2, {}, [](Group& group) {
    EXPECT_THROW(group.create_heap(std::size_t{1} << 50), InputError);
    EXPECT_NO_THROW(group.create_heap(4096));  // and the group still works
  });
}

TEST(Group, DifferentConfigurationsAreNamed) {
  run_ranks(3, {}, [](Group& group) {
    const std::string mine = group.rank() == 2 ? "hidden=640\ncap=128\n" : "hidden=640\ncap=64\n";
    try {
      Workspace workspace(group, 4096, mine);
      ADD_FAILURE() << "rank " << group.rank() << " saw no difference";
    } catch (const InputError& error) {
      EXPECT_STREQ(error.what(), "ranks disagree: rank 2 was created with cap=128, rank 0 with cap=64; all ranks need the same");
    }
    EXPECT_NO_THROW(Workspace(group, 4096, "cap=64\n"));
  });
}

/// A context with many layers has a long configuration.
TEST(Group, LongConfigurationsAreComparedToTheirEnds) {
  std::string common;
  for (int layer = 0; layer < 600; ++layer) common += "layer_" + std::to_string(layer) + "=normal\n";
  run_ranks(3, {}, [&common](Group& group) {
    for (const std::size_t length : {std::size_t{3999}, std::size_t{4000}, std::size_t{4001}, common.size()}) {
      EXPECT_NO_THROW(Workspace(group, 4096, common.substr(0, length)));
    }
    const std::string mine = common + (group.rank() == 1 ? "cap=8\n" : "");
    try {
      Workspace workspace(group, 4096, mine);
      ADD_FAILURE() << "rank " << group.rank() << " saw no difference";
    } catch (const InputError& error) {
      EXPECT_THAT(error.what(), testing::HasSubstr("rank 1 was created with cap=8")) << error.what();
    }
  });
}

TEST(Group, AbsentRankIsNamedWithinTwiceTheDeadline) {
  const milliseconds deadline(1500);
  run_ranks(3, {deadline}, [deadline](Group& group) {
    if (group.rank() == 1) return;
    const auto since = std::chrono::steady_clock::now();
    try {
      group.barrier("roll call");
      ADD_FAILURE() << "the barrier opened without rank 1";
    } catch (const FaultError& error) {
      EXPECT_EQ(error.fault().peer, 1);
      EXPECT_EQ(error.fault().phase, "roll call");
    }
    EXPECT_LT(std::chrono::steady_clock::now() - since, 2 * deadline);
  });
}

TEST(Group, ResetThatFailedCanBeMadeAgain) {
  run_ranks(3, {milliseconds(300)}, [](Group& group) {
    // Rank 1 comes a whole reset too late; whoever fails tries again, and all end in step.
    if (group.rank() == 1) std::this_thread::sleep_for(milliseconds(1100));
    int failed = 0;
    for (; failed < 10; ++failed) {
      try {
        group.reset({true, true, true});
        group.barrier("after the reset");
        break;
      } catch (const FaultError&) {
      }
    }
    EXPECT_LT(failed, 10) << "rank " << group.rank() << " never met the others again";
    EXPECT_TRUE(group.rank() == 1 || failed > 0) << "a reset opened without rank 1";
    for (int round = 0; round < 3; ++round) {
      const auto all = group.exchange(std::to_string(10 * group.rank() + round), "test");
      for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(all[static_cast<std::size_t>(rank)], std::to_string(10 * rank + round));
    }
  });
}

TEST(Signal, StaleEpochDoesNotSatisfyAWait) {
  run_ranks(2, {milliseconds(500)}, [](Group& group) {
    Workspace workspace(group, 8192, "");
    HostTeam team{workspace.view(), 1, group.deadline(), nullptr, 0, nullptr};
    Word* word = workspace.view().at<Word>(0, 4096);
    if (group.rank() == 1) {
      HostWorker worker(team, 0);
      worker.start(CallPart::dispatch_send);
      worker.publish(word, 7);
      group.barrier("published");
      EXPECT_THROW(
          {
            while (worker.begin()) std::this_thread::yield();
            workspace.throw_if_aborted();
          },
          FaultError);
    } else {
      group.barrier("published");
      std::uint32_t value = 0;
      HostWorker first(team, 0);
      first.start(CallPart::dispatch_send);
      ASSERT_TRUE(first.acquire(word, {WordKind::elastic_count, 1, -1}, value));
      EXPECT_EQ(value, 7u);
      first.start(CallPart::combine);
      HostWorker second(team, 0);
      second.start(CallPart::dispatch_send);
      EXPECT_FALSE(second.acquire(word, {WordKind::elastic_count, 1, 5}, value)) << "epoch 1's word satisfied epoch 2";
      try {
        workspace.throw_if_aborted();
      } catch (const FaultError& error) {
        EXPECT_STREQ(error.what(),
                     "rank 0 gave up in elastic dispatch: waited for row count 5 from rank 1, expected 8589934592, saw 4294967303");
      }
    }
  });
}

TEST(Signal, EveryRankLearnsWhyAndWorksAgainAfterAReset) {
  run_ranks(4, {milliseconds(1000)}, [](Group& group) {
    Workspace workspace(group, 8192, "");
    HostTeam team{workspace.view(), 1, group.deadline(), nullptr, 0, nullptr};
    const auto ring_round = [&](bool silent) {
      HostWorker worker(team, 0);
      worker.start(CallPart::dispatch_send);
      const int next = (group.rank() + 1) % group.ranks();
      if (!silent) worker.publish(workspace.view().at<Word>(next, 4096), 1);
      std::uint32_t value = 0;
      const bool arrived =
          worker.acquire(workspace.view().mine<Word>(4096), {WordKind::normal_count, (group.rank() + 3) % 4, -1}, value);
      if (!arrived) workspace.throw_if_aborted();
      worker.start(CallPart::combine);
    };
    ring_round(false);
    group.barrier("between");
    try {
      ring_round(group.rank() == 2);
      // Ranks whose own neighbour published may finish this round; the abort is still there for the next.
    } catch (const FaultError& error) {
      EXPECT_EQ(error.fault().rank, 3);
      EXPECT_EQ(error.fault().peer, 2);
    }
    workspace.reset();
    for (int round = 0; round < 3; ++round) {
      EXPECT_NO_THROW(ring_round(false));
      group.barrier("between");
    }
  });
}

TEST(ProcessGroup, KilledProcessIsNamedAndTheOthersGoOn) {
  const std::string name = "test.kill." + std::to_string(getpid());
  const auto statuses = run_processes(3, [&name](int rank) {
    const auto group = join_process_group(name, rank, 3, {milliseconds(10000)});
    Workspace workspace(*group, 8192, "");
    if (rank == 1) kill(getpid(), SIGKILL);
    group->set_deadline(milliseconds(1500));
    const auto since = std::chrono::steady_clock::now();
    try {
      group->barrier("after the kill");
      ADD_FAILURE() << "the barrier opened without rank 1";
    } catch (const FaultError& error) {
      EXPECT_EQ(error.fault().peer, 1);
    }
    EXPECT_LT(std::chrono::steady_clock::now() - since, milliseconds(3000));
    workspace.reset({true, false, true});
    const auto all = group->exchange(std::to_string(rank), "survivors");
    EXPECT_EQ(all[0], "0");
    EXPECT_EQ(all[1], "");
    EXPECT_EQ(all[2], "2");
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, -SIGKILL, 0}));
}

TEST(ProcessGroup, NothingIsLeftAfterKill) {
  const std::size_t before = files_left();
  const std::string name = "test.left." + std::to_string(getpid());
  const auto statuses = run_processes(2, [&name](int rank) {
    const auto group = join_process_group(name, rank, 2, {milliseconds(5000)});
    Workspace workspace(*group, 1 << 20, "");
    kill(getpid(), SIGKILL);
  });
  EXPECT_EQ(statuses, (std::vector<int>{-SIGKILL, -SIGKILL}));
  EXPECT_EQ(files_left(), before);
  EXPECT_EQ(sockets_left(name), 0);
}

TEST(ProcessGroup, MissingRankAndWrongSizeAreNamed) {
  const std::string name = "test.size." + std::to_string(getpid());
  try {
    join_process_group(name, 0, 2, {milliseconds(100)});
    ADD_FAILURE() << "joined alone";
  } catch (const FaultError& error) {
    EXPECT_EQ(error.fault().peer, 1);
  }
  EXPECT_THROW(join_process_group("", 0, 1), InputError);
  EXPECT_THROW(join_process_group("x", 3, 2), InputError);
  const auto statuses = run_processes(
      2, [&name](int rank) { EXPECT_THROW(join_process_group(name, rank, rank == 0 ? 2 : 3, {milliseconds(2000)}), Error); });
  EXPECT_EQ(statuses, (std::vector<int>{0, 0}));
}

/// An abstract socket on which nobody answers as rank 0 would.
int listen_as_rank_0(const std::string& name) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string text = "heddle." + name;
  text.copy(address.sun_path + 1, text.size());
  const int listener = socket(AF_UNIX, SOCK_STREAM, 0);
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + text.size());
  EXPECT_EQ(0, bind(listener, reinterpret_cast<const sockaddr*>(&address), length));
  EXPECT_EQ(0, listen(listener, 4));
  return listener;
}

TEST(ProcessGroup, Rank0ThatDiesBeforeItAnswersIsAFault) {
  const std::string name = "group_test.silent." + std::to_string(getpid());
  const int listener = listen_as_rank_0(name);
  std::thread rank_0([&] { close(accept(listener, nullptr, nullptr)); });
  try {
    join_process_group(name, 1, 2, {milliseconds(5000)});
    ADD_FAILURE() << "nothing was thrown";
  } catch (const FaultError& error) {
    EXPECT_EQ(error.fault().peer, 0) << error.what();
  }
  rank_0.join();
  close(listener);
}

TEST(ProcessGroup, GreetingThatCannotBeTakenEndsAtTheDeadline) {
  const std::string name = "group_test.full." + std::to_string(getpid());
  const auto statuses = run_processes(2, [&name](int rank) {
    const int next = dup(0);
    close(next);
    const auto room = static_cast<rlim_t>(next) + 2;  // rank 0's socket and its memory, and no connection
    const rlimit limit{room, room};
    if (rank == 0) {
      ASSERT_EQ(0, setrlimit(RLIMIT_NOFILE, &limit));
    }
    const auto since = std::chrono::steady_clock::now();
    EXPECT_THROW(join_process_group(name, rank, 2, {milliseconds(200)}), FaultError);
    EXPECT_LT(std::chrono::steady_clock::now() - since, std::chrono::seconds(5));
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 0}));
}

}  // namespace
}  // namespace heddle
