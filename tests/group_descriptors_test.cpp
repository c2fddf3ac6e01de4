// Descriptors over abstract sockets, and what a group settles before it shares memory.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <thread>

#include "group/agreement.hpp"
#include "group/descriptor_exchange.hpp"
#include "group/descriptors.hpp"
#include "processes.hpp"
#include "ranks.hpp"

namespace heddle {
namespace {

using std::chrono::milliseconds;

WaitEnd in(milliseconds wait) { return std::chrono::steady_clock::now() + wait; }

std::size_t open_descriptors() {
  return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {}));
}

std::string name_of(const char* test) { return std::string("test.descriptors.") + test + "." + std::to_string(getpid()); }

/// A file's number that every descriptor of it shares, in whatever process.
ino_t identity(int descriptor) {
  struct stat status {};
  EXPECT_EQ(fstat(descriptor, &status), 0);
  return status.st_ino;
}

TEST(Descriptors, TravelInTheirOrderAndCloseThemselves) {
  const std::size_t before = open_descriptors();
  for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{5}, std::size_t{253}}) {
    const Descriptor listener = listen_on(name_of("order"), 1);
    ASSERT_TRUE(listener);
    const Descriptor caller = call(name_of("order"));
    ASSERT_TRUE(caller);
    std::vector<Descriptor> files;
    std::vector<int> numbers;
    for (std::size_t i = 0; i < count; ++i) {
      files.emplace_back(static_cast<int>(memfd_create("test", MFD_CLOEXEC)));
      ASSERT_TRUE(files.back());
      numbers.push_back(files.back().number());
    }
    ASSERT_TRUE(send_greeting(caller, {17, 3, 4}, numbers));
    const Descriptor connection = accept_caller(listener, in(milliseconds(5000)));
    const auto message = receive_message(connection, sizeof(Greeting), 253, in(milliseconds(5000)));
    ASSERT_TRUE(message);
    Greeting greeting;
    std::copy_n(message->bytes.data(), sizeof greeting, reinterpret_cast<std::byte*>(&greeting));
    EXPECT_EQ(greeting.key, 17u);
    EXPECT_EQ(greeting.member, 3);
    ASSERT_EQ(message->descriptors.size(), count);
    for (std::size_t i = 0; i < count; ++i) EXPECT_EQ(identity(message->descriptors[i].number()), identity(numbers[i])) << i;
  }
  EXPECT_EQ(open_descriptors(), before);
  EXPECT_EQ(sockets_left("test.descriptors."), 0);
}

TEST(Descriptors, MoreThanWereExpectedAreNotTaken) {
  const std::size_t before = open_descriptors();
  {
    const Descriptor listener = listen_on(name_of("more"), 1);
    const Descriptor caller = call(name_of("more"));
    const std::vector<int> numbers(3, listener.number());
    ASSERT_TRUE(send_greeting(caller, {}, numbers));
    const Descriptor connection = accept_caller(listener, in(milliseconds(5000)));
    EXPECT_FALSE(receive_message(connection, sizeof(Greeting), 1, in(milliseconds(5000))));
  }
  EXPECT_EQ(open_descriptors(), before) << "a descriptor that nobody wanted stayed open";
}

TEST(Descriptors, AnEndIsSeenBehindWhatIsLeft) {
  const Descriptor listener = listen_on(name_of("end"), 1);
  const Descriptor caller = call(name_of("end"));
  Descriptor other = accept_caller(listener, in(milliseconds(1000)));
  ASSERT_TRUE(other);
  EXPECT_FALSE(has_ended(caller));
  const std::byte word{7};
  ASSERT_TRUE(send_message(other, {&word, 1}));
  other = Descriptor();
  EXPECT_FALSE(has_ended(caller));
  EXPECT_TRUE(receive_message(caller, 1, 0, in(milliseconds(1000))));
  EXPECT_TRUE(has_ended(caller));
}

TEST(Descriptors, WaitsEnd) {
  const Descriptor listener = listen_on(name_of("ends"), 1);
  const auto since = std::chrono::steady_clock::now();
  EXPECT_FALSE(accept_caller(listener, in(milliseconds(50))));
  const Descriptor caller = call(name_of("ends"));
  const Descriptor connection = accept_caller(listener, in(milliseconds(5000)));
  EXPECT_FALSE(receive_message(connection, 1, 0, in(milliseconds(50))));
  EXPECT_GE(std::chrono::steady_clock::now() - since, milliseconds(90));
  EXPECT_FALSE(call(name_of("nobody")));
  EXPECT_FALSE(listen_on(name_of("ends"), 1)) << "a name was taken twice";
  EXPECT_THROW(call(std::string(200, 'x')), InputError);
}

TEST(Descriptors, GoFromEveryProcessToEveryOther) {
  const std::string name = name_of("all");
  const auto statuses = run_processes(4, [&name](int rank) {
    const auto group = join_process_group(name, rank, 4, {milliseconds(20000)});
    const std::size_t before = open_descriptors();
    for (int round = 0; round < 2; ++round) {
      // Member m gives m files, in each of which its number stands once for every place.
      std::vector<Descriptor> files;
      std::vector<int> numbers;
      for (int i = 0; i < rank; ++i) {
        files.emplace_back(memfd_create("test", MFD_CLOEXEC));
        numbers.push_back(files.back().number());
        for (int place = 0; place <= i; ++place) EXPECT_EQ(write(numbers.back(), &rank, sizeof rank), 4);
      }
      const auto taken = exchange_descriptors(*group, numbers, "files of the test");
      for (int peer = 0; peer < 4; ++peer) {
        const auto& from = taken[static_cast<std::size_t>(peer)];
        ASSERT_EQ(from.size(), static_cast<std::size_t>(peer == rank ? 0 : peer));
        for (std::size_t i = 0; i < from.size(); ++i) {
          int found = -1;
          EXPECT_EQ(pread(from[i].number(), &found, sizeof found, 0), 4);
          EXPECT_EQ(found, peer);
          EXPECT_EQ(lseek(from[i].number(), 0, SEEK_END), static_cast<off_t>(4 * (i + 1)));
        }
      }
    }
    EXPECT_EQ(open_descriptors(), before);
    group->barrier("nobody has left before");
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 0, 0, 0}));
  EXPECT_EQ(sockets_left("pass."), 0);
}

TEST(Descriptors, AMemberThatDoesNotComeIsNamed) {
  const milliseconds deadline(700);
  run_ranks(3, {deadline}, [deadline](Group& group) {
    const auto since = std::chrono::steady_clock::now();
    if (group.rank() == 1) {
      // Takes part up to the names, as one that dies then would, and never sends.
      step_together(group, "files", [] {});
      const Descriptor listener = listen_on(name_of("absent"), 3);
      ASSERT_TRUE(listener);
      group.exchange(name_of("absent") + " 5 0", "files");
      std::this_thread::sleep_for(2 * deadline);
      return;
    }
    try {
      exchange_descriptors(group, {}, "files");
      ADD_FAILURE() << "rank 1 was not missed";
    } catch (const FaultError& error) {
      EXPECT_EQ(error.fault().rank, group.rank());
      EXPECT_EQ(error.fault().peer, 1);
      EXPECT_EQ(error.fault().phase, "files");
    }
    EXPECT_LT(std::chrono::steady_clock::now() - since, 2 * deadline);
  });
}

TEST(Descriptors, ADeadMemberIsNotWaitedFor) {
  run_ranks(3, {milliseconds(5000)}, [](Group& group) {
    if (group.rank() == 0) return;
    group.reset({false, true, true});
    const auto taken = exchange_descriptors(group, std::vector<int>{0}, "files");
    EXPECT_TRUE(taken[0].empty());
    EXPECT_EQ(taken[static_cast<std::size_t>(3 - group.rank())].size(), 1u);
  });
}

TEST(Agreement, OneMembersTroubleIsThrownOnAll) {
  run_ranks(3, {milliseconds(20000)}, [](Group& group) {
    EXPECT_NO_THROW(step_together(group, "a step", [] {}));
    try {
      step_together(group, "a step", [&] {
        if (group.rank() == 1) throw InputError("GPU 7 is on fire");
      });
      ADD_FAILURE() << "rank " << group.rank() << " heard of no trouble";
    } catch (const InputError& error) {
      EXPECT_STREQ(error.what(), "GPU 7 is on fire");
    }
    group.barrier("and the group still meets");
  });
}

TEST(Agreement, MembersAreCalledWhatTheyAre) {
  run_ranks(2, {milliseconds(20000)}, [](Group& group) {
    try {
      compare_configurations(group, group.rank() == 0 ? "hidden=64\n" : "hidden=128\n", "process");
      ADD_FAILURE() << "no difference seen";
    } catch (const InputError& error) {
      EXPECT_STREQ(
          error.what(),
          "processes disagree: process 1 was created with hidden=128, process 0 with hidden=64; all processes need the same");
    }
  });
}

}  // namespace
}  // namespace heddle
