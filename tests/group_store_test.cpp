// A store in a directory: words that processes change by compare-and-set, killed anywhere, each change made by one of them.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <atomic>
#include <random>
#include <thread>

#include "folder.hpp"
#include "group/directory_store.hpp"
#include "heddle/error.hpp"
#include "processes.hpp"

namespace heddle {
namespace {

using Kind = StoreKey::Kind;

TEST(DirectoryStore, WordsBeginAtZeroAndChangeByCompareAndSet) {
  const TempFolder folder;
  const auto first = open_directory_store(folder.file("words"), 40), second = open_directory_store(folder.file("words"), 40);
  for (const StoreKey& key :
       {StoreKey{Kind::called, 0}, {Kind::asked, 0}, {Kind::mask, 1}, {Kind::here, 39}, {Kind::finished, 7}, {Kind::unheard, 3}}) {
    EXPECT_EQ(second->get(key), 0u);
    std::uint64_t expected = 0;
    EXPECT_TRUE(first->compare_set(key, expected, ~std::uint64_t{0}));
    EXPECT_EQ(second->get(key), ~std::uint64_t{0});
    EXPECT_FALSE(second->compare_set(key, expected, 5));
    EXPECT_EQ(expected, ~std::uint64_t{0});
    EXPECT_TRUE(second->compare_set(key, expected, 0));
    EXPECT_EQ(first->get(key), 0u);
  }
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 1) << "what the store was made in is left";
}

TEST(DirectoryStore, WaitsEnd) {
  const TempFolder folder;
  const auto store = open_directory_store(folder.path().string(), 2);
  EXPECT_FALSE(store->wait([] { return false; }, Store::Clock::now() + std::chrono::milliseconds(5)));
  EXPECT_TRUE(store->wait([] { return true; }, Store::Clock::now()));
  std::jthread other([&] {
    std::uint64_t expected = 0;
    store->compare_set({Kind::called, 0}, expected, 1);
  });
  EXPECT_TRUE(store->wait([&] { return store->get({Kind::called, 0}) == 1; }, Store::Clock::now() + std::chrono::seconds(60)));
}

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

TEST(DirectoryStore, WhatCannotBeOneIsNamed) {
  const TempFolder folder;
  const std::string directory = folder.file("words");
  const auto store = open_directory_store(directory, 4);
  EXPECT_NE(message_of([&] { open_directory_store(directory, 3); }).find("one of 4 ranks, not of 3"), std::string::npos);
  EXPECT_NE(message_of([&] { open_directory_store(folder.path().string(), 4); }).find("new or empty"), std::string::npos);
  EXPECT_NE(message_of([&] { open_directory_store(folder.file("file/words"), 4); }).find("No such file"), std::string::npos)
      << "only the last folder is made";
  EXPECT_NE(message_of([&] { open_directory_store(folder.file(std::string(300, 'x')), 4); }).find("name too long"),
            std::string::npos);
  EXPECT_THROW(open_directory_store(directory, 0), InputError);
  std::filesystem::rename(directory, directory + ".gone");
  std::uint64_t expected = 0;
  EXPECT_NE(message_of([&] { store->get({Kind::called, 0}); }).find("the store cannot be reached"), std::string::npos);
  EXPECT_NE(message_of([&] { store->compare_set({Kind::called, 0}, expected, 1); }).find("cannot be reached"), std::string::npos);
}

constexpr int writers = 4, changes = 2000;

/// Who made which change; shared by all processes.
struct Ledger {
  std::atomic<int> winner[writers * changes + 1];  ///< of the change to that value: 1 + writer
  std::atomic<int> twice;
};

/// Raises one word by 1, again and again; before, leaves a note in another word, which whoever sees the change must see.
void raise(Store& store, int writer, Ledger& ledger) {
  std::uint64_t note = 0;
  for (int i = 0; i < changes;) {
    std::uint64_t word = store.get({Kind::called, 0});
    EXPECT_TRUE(store.compare_set({Kind::here, writer}, note, word + 1));
    note = word + 1;
    if (!store.compare_set({Kind::called, 0}, word, word + 1)) continue;
    ++i;
    if (ledger.winner[word + 1].exchange(writer + 1) != 0) ledger.twice += 1;
    const std::uint64_t seen = store.get({Kind::called, 0});
    std::uint64_t latest = 0;
    for (int other = 0; other < writers; ++other) latest = std::max(latest, store.get({Kind::here, other}));
    EXPECT_GE(latest, seen) << "a change was seen, and not the note that was left before it";
  }
}

TEST(DirectoryStore, EveryChangeIsMadeOnceAlsoWhereProcessesAreKilled) {
  const char* given = std::getenv("HEDDLE_SEED");
  const std::uint64_t seed = given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device{}();
  std::printf("HEDDLE_SEED=%llu\n", static_cast<unsigned long long>(seed));
  std::mt19937_64 random(seed);
  const TempFolder folder;
  auto* ledger = new (mmap(nullptr, sizeof(Ledger), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) Ledger{};
  std::vector<pid_t> children;
  for (int writer = 0; writer < writers; ++writer) {
    std::fflush(nullptr);
    const pid_t child = fork();
    if (child == 0) {
      const auto store = open_directory_store(folder.file("words"), writers);  // all at once
      raise(*store, writer, *ledger);
      _exit(testing::Test::HasFailure() ? 1 : 0);
    }
    children.push_back(child);
  }
  for (int killed = 0; killed < 2; ++killed) {
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 20000));
    kill(children[static_cast<std::size_t>(killed)], SIGKILL);
  }
  for (std::size_t i = 0; i < children.size(); ++i) {
    int status = 0;
    waitpid(children[i], &status, 0);
    EXPECT_TRUE(status == 0 || i < 2) << "writer " << i << " ended with " << status;
  }
  const std::uint64_t last = open_directory_store(folder.file("words"), writers)->get({Kind::called, 0});
  EXPECT_EQ(ledger->twice, 0);
  EXPECT_GE(last, 2u * changes);
  int unsigned_for = 0;
  for (std::uint64_t value = 1; value <= last; ++value) unsigned_for += ledger->winner[value] == 0 ? 1 : 0;
  EXPECT_LE(unsigned_for, 2) << "a killed process may have changed the word and not said so, once";
  munmap(ledger, sizeof(Ledger));
}

}  // namespace
}  // namespace heddle
