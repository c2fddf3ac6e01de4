// One rank of a group over nodes by MPI, as the tests start it: round trips of elastic over random shapes, each checked bit for bit
// against what one machine computes alone. Exit status: 0 well, 1 different bits, 2 bad arguments, 3 a fault.
//   nodes_program SEED CASES ROUNDS DEADLINE_MS [PAUSE_MS]
#include <mpi.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>

#include "exchange_support.hpp"
#include "heddle/error.hpp"
#include "heddle/mpi.hpp"

namespace heddle {
namespace {

struct Arguments {
  std::uint64_t seed = 1;
  int cases = 1, rounds = 1, deadline_ms = 1000, pause_ms = 0;
};

/// The same on all ranks.
Case draw_case(std::mt19937_64& random, int ranks) {
  const auto pick = [&random](auto... values) {
    const std::vector<std::common_type_t<decltype(values)...>> list{values...};
    return list[random() % list.size()];
  };
  Case c;
  const int experts = pick(3, 8, 16, 40), cap = pick(1, 5, 33);
  c.options = options_for(Way::elastic, pick(64, 192, 2048), experts, ranks, 1 + static_cast<int>(random() % 3), cap);
  c.options.mode = pick(NodeMode::direct, NodeMode::hybrid);
  c.options.reduce = pick(Reduce::rank, Reduce::home);
  c.options.wire = pick(Wire::bf16, Wire::fp8);
  c.options.arrived = pick(ArrivedLayout::contiguous, ArrivedLayout::routed);
  c.options.workers = pick(1, 2);
  c.none = pick(0.0, 0.1, 0.6);
  for (int r = 0; r < ranks; ++r)
    c.tokens.push_back(pick(0, 1, 1) * static_cast<int>(random() % static_cast<std::uint64_t>(cap + 1)));
  c.seed = random();
  return c;
}

int differences_of(Exchange& exchange, const Case& c, int rank, int round) {
  const RankData data = draw(c, rank, round);
  const Arrived arrived = exchange.dispatch(data.input(c.tokens_of(rank)), {c.most_tokens(), Phase::decode});
  const std::vector<bf16> results = run_experts(c, arrived, rank);
  const std::vector<bf16> want = expected(c, data);
  std::vector<bf16> out(want.size() + 1, poison);
  CombineOutput output;
  output.out = out.data();
  exchange.combine(results.data(), output);
  return differences(want, out.data());
}

int run(const Arguments& arguments) {
  const auto group = join_mpi({{std::chrono::milliseconds(arguments.deadline_ms)}, {}});
  const int rank = group->rank();
  std::mt19937_64 random(arguments.seed);
  ExchangeTraffic traffic;
  int different = 0;
  for (int i = 0; i < arguments.cases; ++i) {
    const Case c = draw_case(random, group->ranks());
    const ExchangeMemory memory = exchange_memory(c.options);
    Workspace workspace(*group, memory.heap_bytes(c.ranks()), describe(c.options));
    const auto exchange = create_exchange(workspace, c.options, memory);
    for (int round = 0; round < arguments.rounds; ++round) {
      different += differences_of(*exchange, c, rank, round);
      std::this_thread::sleep_for(std::chrono::milliseconds(arguments.pause_ms));
      if (round == 1) std::printf("rank %d of %d on %d nodes runs\n", rank, group->ranks(), group->nodes());
      std::fflush(stdout);
    }
    const ExchangeTraffic one = exchange->take_traffic();
    traffic.remote_rows += one.remote_rows;
    traffic.between_rows += one.between_rows;
    workspace.close();
  }
  std::printf("rank %d of %d on %d nodes: %d different values, %llu rows to other nodes, %llu inside\n", rank, group->ranks(),
              group->nodes(), different, static_cast<unsigned long long>(traffic.between_rows),
              static_cast<unsigned long long>(traffic.remote_rows - traffic.between_rows));
  return different == 0 ? 0 : 1;
}

/// After a fault MPI is left alone: to finalise it would be to wait for those who are gone.
[[noreturn]] void leave(const Error& error) {
  std::printf("error: %s\n", error.what());
  std::fflush(stdout);
  std::_Exit(static_cast<int>(error.kind()));
}

}  // namespace
}  // namespace heddle

int main(int count, char** words) {
  if (count < 5) return 2;
  heddle::Arguments arguments{std::stoull(words[1]), std::stoi(words[2]), std::stoi(words[3]), std::stoi(words[4]),
                              count > 5 ? std::stoi(words[5]) : 0};
  std::signal(SIGPIPE, SIG_IGN);  // MPI writes to the sockets of ranks that are gone
  int level = 0;
  MPI_Init_thread(&count, &words, MPI_THREAD_FUNNELED, &level);
  int status = 0;
  try {
    status = heddle::run(arguments);
  } catch (const heddle::Error& error) {
    heddle::leave(error);
  }
  MPI_Finalize();
  return status;
}
