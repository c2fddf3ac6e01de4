// elastic over several nodes by batches of one size, as GPUs do it, with its protocol run by host workers: bytes are swapped by
// copies between barriers. What comes home is what the same ranks on one node get, bit for bit, over random shapes; who swaps what
// with whom fits on both sides.
#include <gtest/gtest.h>

#include <random>
#include <thread>

#include "exchange/elastic/host.hpp"
#include "exchange/nodes/batch_protocol.hpp"
#include "exchange_support.hpp"
#include "exchange_trip.hpp"
#include "heddle/nodes.hpp"
#include "random_nodes.hpp"

namespace heddle {
namespace {

/// What ranks show each other: where their batches and their parts of the heap lie.
struct Board {
  struct Entry {
    std::byte* batch = nullptr;
    std::byte* part = nullptr;
  };
  explicit Board(int ranks) : entries(static_cast<std::size_t>(ranks)) {}
  Entry& of(int rank) { return entries[static_cast<std::size_t>(rank)]; }
  std::vector<Entry> entries;
};

class BatchesExchange final : public ElasticExchange {
 public:
  BatchesExchange(Workspace& workspace, const ExchangeOptions& options, const ExchangeMemory& memory, Board& board)
      : ElasticExchange(workspace, options, memory), batches_{{layout_, workspace.group().nodes(), options.mode}}, board_(board) {
    mail_.stride = align_up(batches_.batch_bytes(options.cap), 128);
    const auto peers = static_cast<std::size_t>(batches_.peers());
    const std::size_t results = batches_.result(batches_.strangers(), 0);
    memory_.resize((1 + peers) * mail_.stride + results + 128, std::byte{0xFF});
    const auto at = reinterpret_cast<std::uintptr_t>(memory_.data());
    mail_.out = memory_.data() + (align_up(at, 128) - at);
    mail_.arrived = mail_.out + mail_.stride;
    mail_.results = mail_.arrived + peers * mail_.stride;
    board_.of(rank()) = {mail_.out, workspace.view().mine<std::byte>(0)};
  }

  void dispatch_send(const ExchangeInput& input, const Step& step) override {
    accept(input, step);
    run(CallPart::dispatch_send, [&](HostWorker& w) { return batch_send(w, batches_, input_, placement_, scratch_, mail_.out); });
    *reinterpret_cast<BatchHead*>(mail_.out) = {worker().epoch(), static_cast<std::uint32_t>(input.tokens), 0, {}};
  }

 private:
  void await_rows() override {
    workspace_.group().barrier("batches are there");
    for (int i = 0; i < batches_.peers(); ++i)
      std::memcpy(mail_.arrived + static_cast<std::size_t>(i) * mail_.stride, board_.of(batches_.peer(rank(), i)).batch,
                  batches_.batch_bytes(step_.max_tokens));
    workspace_.group().barrier("batches are taken");
    run(CallPart::dispatch_receive, [&](HostWorker& w) { return batch_forward(w, batches_, mail_); });
    ElasticExchange::await_rows();
  }
  void send_results(const ElasticResults& results) override {
    run(CallPart::combine, [&](HostWorker& w) { return nodes_return(w, batches_.nodes, results, scratch_, {}); });
  }
  void collect(const CombineOutput& output) override {
    run(CallPart::combine, [&](HostWorker& w) { return nodes_hear_results(w, batches_.nodes); });
    workspace_.group().barrier("results are there");
    const int me = rank();
    for (int i = 0; i < batches_.strangers(); ++i) {
      // Which region it is there: of this node, as many regions from its first one on.
      const int region = batches_.stranger(me, i);
      const int peer = batches_.peer_of_region(me, region);
      const int there = batches_.nodes.results_forwarded()
                            ? batches_.nodes.rank_of(batches_.nodes.node_of(me), batches_.nodes.place_of(region))
                            : me;
      std::memcpy(mail_.results + batches_.result(i, 0), board_.of(peer).part + layout_.summed_row(there, 0),
                  static_cast<std::size_t>(step_.max_tokens) * layout_.returned.row_bytes());
    }
    workspace_.group().barrier("results are taken");
    run(CallPart::combine,
        [&](HostWorker& w) { return batch_collect(w, batches_, input_, scratch_, mail_, shared_rows(output), output.out); });
  }

  BatchLayout batches_;
  BatchMail mail_;
  std::vector<std::byte> memory_;
  Board& board_;
};

void check(const Case& c, int nodes, int rounds) {
  SCOPED_TRACE(testing::Message() << describe(c.options) << "ranks=" << c.ranks() << " nodes=" << nodes << " seed=" << c.seed);
  Board board(c.ranks());
  auto group = create_virtual_nodes(nodes, c.ranks() / nodes);
  std::vector<std::string> errors(group.size());
  std::vector<std::jthread> threads;
  for (std::size_t rank = 0; rank < group.size(); ++rank) {
    threads.emplace_back([&, rank] {
      try {
        const ExchangeMemory memory = exchange_memory(c.options);
        Workspace workspace(*group[rank], memory.heap_bytes(c.ranks()), describe(c.options));
        poison_heap(workspace, memory);
        BatchesExchange exchange(workspace, c.options, memory, board);
        for (int round = 0; round < rounds; ++round) {
          TripOptions trip;
          trip.shared = round % 2 == 1 ? Shared::rows : Shared::none;
          round_trip(exchange, c, static_cast<int>(rank), round, trip);
        }
        workspace.close();
      } catch (const std::exception& error) {
        errors[rank] = error.what();
      }
    });
  }
  threads.clear();
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

TEST(Batches, RandomShapesComeHomeAsOnOneNode) {
  std::mt19937_64 random(test_seed());
  for (int i = 0; i < (sanitized ? 20 : 60); ++i) {
    auto [nodes, c] = random_nodes_case(random, {{1, 2, 3, 4}, {1, 3, 7, 8, 16, 40}, {1, 5, 16, 33}, {64, 128, 192, 320}});
    c.options.workers = Picks(random)(1, 1, 2, 3);
    check(c, nodes, 3);
    if (testing::Test::HasFailure()) return;
  }
}

// By the numbers of the layout alone: what a rank sends to a peer, number by number, is what that one expects from it.
TEST(Batches, BothSidesOfASwapMeanTheSame) {
  for (const NodeMode mode : {NodeMode::direct, NodeMode::hybrid}) {
    for (const auto& [nodes, inside] : {std::pair{2, 1}, std::pair{2, 3}, std::pair{3, 2}, std::pair{4, 2}}) {
      SCOPED_TRACE(testing::Message() << nodes << " nodes of " << inside << (mode == NodeMode::hybrid ? ", hybrid" : ", direct"));
      BatchLayout layout;
      layout.nodes = {{}, nodes, mode};
      layout.nodes.elastic.shape.ranks = nodes * inside;
      for (int rank = 0; rank < layout.ranks(); ++rank) {
        ASSERT_EQ(layout.peers(), static_cast<int>(layout.nodes.peers(layout.nodes.rows_forwarded())));
        for (int i = 0; i < layout.peers(); ++i) {
          const int peer = layout.peer(rank, i);
          ASSERT_TRUE(layout.nodes.is_peer(rank, peer, layout.nodes.rows_forwarded()));
          // Results: this rank's regions for that peer, in order, and that one's for this rank.
          std::vector<int> here, there;
          for (int j = 0; j < layout.strangers(); ++j) {
            ASSERT_EQ(layout.number_of_stranger(rank, layout.stranger(rank, j)), j);
            if (layout.peer_of_region(rank, layout.stranger(rank, j)) == peer) here.push_back(layout.stranger(rank, j));
            if (layout.peer_of_region(peer, layout.stranger(peer, j)) == rank) there.push_back(layout.stranger(peer, j));
          }
          ASSERT_EQ(here.size(), there.size());
          for (std::size_t j = 0; j < here.size(); ++j) {
            // The j-th row of results that comes here is of the rank whose results wait in the peer's j-th region.
            ASSERT_EQ(layout.nodes.node_of(here[j]), layout.nodes.node_of(peer));
            ASSERT_EQ(layout.nodes.node_of(there[j]), layout.nodes.node_of(rank));
            ASSERT_EQ(layout.nodes.place_of(here[j]),
                      mode == NodeMode::hybrid ? layout.nodes.place_of(there[j]) : layout.nodes.place_of(peer));
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace heddle
