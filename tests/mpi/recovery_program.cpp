// One rank of a group over nodes by MPI under recovery, as the tests start it: steps until some ranks have been lost and a few more
// have been made without them, each compared bit for bit with a group of those alone. Exit status: 0 well, 1 different bits, 2 bad
// arguments, 3 this rank is out, or another fault.
//   recovery_program STORE direct|hybrid DEADLINE_MS
#include <mpi.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "heddle/mpi.hpp"
#include "recovery_support.hpp"

namespace heddle::layer_test {
namespace {

struct Arguments {
  std::string store;
  NodeMode mode = NodeMode::direct;
  std::chrono::milliseconds deadline{1000};
};

struct Done {
  std::vector<bool> live;
  std::uint32_t batch = 0;
  std::vector<bf16> out;
};

int run(const Arguments& arguments) {
  int ranks = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  MpiOptions options;
  options.store = open_directory_store(arguments.store, ranks);
  const auto group = join_mpi(options);
  const int rank = group->rank();
  Case c = recovery_case(ranks, {Way::elastic, Reduce::rank}, 0);
  c.options.mode = arguments.mode;
  SyntheticLayer layer(c.layer);
  const LayerSource source = source_of(layer, c);
  RecoveryOptions recovery;
  recovery.grace = arguments.deadline;  // both sides of a cut suspect each other: nobody shall be given up before it has noticed
  RecoveringLayers layers(*group, {{&source, c.placement, c.options}}, recovery);
  group->set_deadline(arguments.deadline);
  std::vector<Done> steps;
  const std::vector<bool> all = layers.members().live;
  for (std::optional<std::uint32_t> last; !last || layers.steps() < *last;) {
    Done& done = steps.emplace_back();
    layers.step([&] {
      done.live = layers.members().live;
      done.batch = layers.steps() % 3;
      done.out = call(c, layers.layer(0), draw_tokens(c, done.batch), rank);
    });
    if (layers.members().live != all && !last) last = layers.steps() + 10;
    if (steps.size() == 3) std::printf("rank %d of %d on %d nodes runs\n", rank, ranks, group->nodes());
    std::fflush(stdout);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  Wanted wanted(source, c);
  std::size_t different = 0;
  for (const Done& done : steps) different += different_bits(done.out, wanted.of(rank, done.live, done.batch));
  const Interruption& first = layers.interruptions().front();
  std::string mask;
  for (const bool live : layers.members().live) mask += live ? '1' : '0';
  std::printf("mask %s: %zu different values in %zu steps; lost after %s\n", mask.c_str(), different, steps.size(),
              first.reason.c_str());
  return different == 0 ? 0 : 1;
}

}  // namespace
}  // namespace heddle::layer_test

int main(int count, char** words) {
  if (count != 4) return 2;
  const heddle::layer_test::Arguments arguments{
      words[1], words[2] == std::string("hybrid") ? heddle::NodeMode::hybrid : heddle::NodeMode::direct,
      std::chrono::milliseconds(std::stoi(words[3]))};
  std::signal(SIGPIPE, SIG_IGN);  // MPI writes to the sockets of ranks that are gone
  int level = 0, status = 3;
  MPI_Init_thread(&count, &words, MPI_THREAD_FUNNELED, &level);
  try {
    status = heddle::layer_test::run(arguments);
  } catch (const heddle::Error& error) {
    std::printf("error: %s\n", error.what());
  }
  std::fflush(stdout);
  std::_Exit(status);  // to finalise MPI would be to wait for those who are gone
}
