// A link may say that a message has left although its end still needs the sender, as Open MPI does where a socket is full. Whoever
// waits in shared memory or on the store, in a call or in a barrier, gives the link time; else others wait for that end until their
// deadline.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "exchange_support.hpp"
#include "folder.hpp"
#include "group/memory_link.hpp"
#include "group/node_group.hpp"
#include "group/node_wait.hpp"

namespace heddle {
namespace {

/// Says of a message to rank 0 with results that it has left, and lets it go when it is given time: by progress(), or by a look for
/// a message that is not there.
class LateLink final : public NodeLink {
 public:
  explicit LateLink(std::shared_ptr<NodeLink> inner) : inner_(std::move(inner)) {}
  std::size_t most_bytes() const override { return inner_->most_bytes(); }
  void post(int peer, int tag, NodeMessage message) override {
    if (peer == 0 && tag == node_results) {
      late_.push_back(std::move(message));
    } else {
      inner_->post(peer, tag, std::move(message));
    }
  }
  std::optional<NodeMessage> take(int peer, int tag) override { return looked(inner_->take(peer, tag)); }
  std::optional<NodeMessage> take_any(int tag) override { return looked(inner_->take_any(tag)); }
  bool idle() override { return true; }
  bool progress() override {
    EXPECT_EQ(thread_, std::this_thread::get_id()) << "a link is used by its rank's thread";
    for (NodeMessage& message : late_) inner_->post(0, node_results, std::move(message));
    late_.clear();
    return true;
  }

 private:
  std::optional<NodeMessage> looked(std::optional<NodeMessage> message) {
    if (!message) progress();
    return message;
  }

  std::shared_ptr<NodeLink> inner_;
  std::vector<NodeMessage> late_;
  const std::thread::id thread_ = std::this_thread::get_id();
};

constexpr std::chrono::seconds deadline(3);

/// Two nodes of two ranks, of which one has a late link. What each rank ended with, "" for well.
std::vector<std::string> run_late(int late_rank, const std::function<void(Group&)>& body,
                                  const std::shared_ptr<Store>& store = nullptr) {
  const auto queues = create_memory_links(4);
  const std::shared_ptr<HostMemory> memories[] = {create_group_memory(2), create_group_memory(2)};
  std::vector<std::string> errors(4);
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < 4; ++rank) {
    threads.emplace_back([&, rank] {
      const auto at = static_cast<std::size_t>(rank);
      std::shared_ptr<NodeLink> link = queues[at];
      if (rank == late_rank) link = std::make_shared<LateLink>(link);
      NodeGroup group(std::make_unique<HostGroup>(memories[rank / 2], rank % 2, 2, GroupOptions{deadline}), link, rank / 2, 2,
                      store);
      try {
        body(group);
      } catch (const std::exception& error) {
        errors[at] = error.what();
      }
    });
  }
  threads.clear();
  return errors;
}

/// Outside of the group.
template <class Holds>
void await(Holds holds) {
  const auto end = std::chrono::steady_clock::now() + deadline;
  for (PollPause pause; !holds(); pause.rest()) {
    if (std::chrono::steady_clock::now() >= end) throw std::runtime_error("what a test waited for did not come");
  }
}

// Rank 0 waits for results of rank 3, which is in the next dispatch already and waits for its node's rank 2 to pass rows of rank 0
// on.
TEST(LateLinks, ACallThatWaitsInSharedMemoryGivesThemTime) {
  const std::uint64_t seed = test_seed();
  for (const int workers : {1, 3}) {
    SCOPED_TRACE(testing::Message() << workers << " workers");
    Case c;
    c.options = options_for(Way::elastic, 64, 8, 4, 3, 16);
    c.options.mode = NodeMode::hybrid;
    c.options.reduce = Reduce::home;
    c.options.workers = workers;
    c.tokens = {16, 15, 16, 3};
    c.seed = seed;
    std::atomic<int> results_sent = 0, rows_sent = 0;  // by ranks 0 to 2; by rank 1. Rank 3 never looks in vain.
    const auto errors = run_late(3, [&](Group& group) {
      const int rank = group.rank();
      const ExchangeMemory memory = exchange_memory(c.options);
      Workspace workspace(group, memory.heap_bytes(4), describe(c.options));
      const auto exchange = create_exchange(workspace, c.options, memory);
      for (int round = 0; round < 3; ++round) {
        const RankData data = draw(c, rank, round);
        if (rank == 3 && round > 0) await([&] { return rows_sent > round; });
        exchange->dispatch_send(data.input(c.tokens_of(rank)), {c.most_tokens(), Phase::decode});
        rows_sent += rank == 1 ? 1 : 0;
        const std::vector<bf16> results = run_experts(c, exchange->dispatch_receive(), rank);
        if (rank == 3) await([&] { return results_sent >= 3 * (round + 1); });
        exchange->combine_send(results.data());
        results_sent += rank < 3 ? 1 : 0;
        const std::vector<bf16> want = expected(c, data);
        std::vector<bf16> out(want.size() + 1, poison);
        exchange->combine_receive({out.data()});
        EXPECT_EQ(0, differences(want, out.data())) << "rank " << rank << ", round " << round;
      }
      workspace.close();
    });
    for (const std::string& error : errors) EXPECT_EQ(error, "");
  }
}

// Rank 2 is in a barrier and waits for rank 3, which waits for rank 0, which waits for rank 2's message.
TEST(LateLinks, ABarrierGivesThemTime) {
  std::atomic<bool> heard = false;
  const auto errors = run_late(2, [&](Group& group) {
    if (group.rank() == 2) group.link()->post(0, node_results, NodeMessage(8));
    if (group.rank() == 0) await([&] { return heard = group.link()->take(2, node_results).has_value(); });
    if (group.rank() == 3) await([&] { return heard.load(); });
    group.barrier("test");
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

// Rank 2 waits on the store for a word of rank 0, which waits for rank 2's message.
TEST(LateLinks, AWaitOnTheStoreGivesThemTime) {
  const TempFolder folder;
  const auto errors = run_late(
      2,
      [&](Group& group) {
        const StoreKey key{StoreKey::Kind::called, 0};
        if (group.rank() == 2) {
          group.link()->post(0, node_results, NodeMessage(8));
          EXPECT_TRUE(group.store().wait([&] { return group.store().get(key) == 1; }, Store::Clock::now() + deadline));
        }
        if (group.rank() != 0) return;
        await([&] { return group.link()->take(2, node_results).has_value(); });
        std::uint64_t none = 0;
        EXPECT_TRUE(group.store().compare_set(key, none, 1));
      },
      open_directory_store(folder.file("store"), 4));
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

}  // namespace
}  // namespace heddle
