// A rank of a group over nodes, started by MPI on every machine:
//   mpirun --host a:8,b:8 -n 16 --map-by slot example_mpi_nodes
// On one machine, as two nodes: HEDDLE_NODES=2 mpirun -n 4 example_mpi_nodes
#include <mpi.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>

#include "heddle/error.hpp"
#include "heddle/mpi.hpp"

int main(int count, char** words) {
  std::signal(SIGPIPE, SIG_IGN);  // MPI writes to the sockets of ranks that are gone
  int level = 0;
  MPI_Init_thread(&count, &words, MPI_THREAD_FUNNELED, &level);
  try {
    const auto group = heddle::join_mpi();
    heddle::Workspace workspace(*group, 1 << 20, "example=nodes\n");
    std::printf("rank %d of %d, on one of %d nodes\n", group->rank(), group->ranks(), group->nodes());
    // ... create_exchange, or a MoeLayer, with Way::elastic and NodeMode::hybrid, as on one node ...
    workspace.close();
  } catch (const heddle::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    std::_Exit(static_cast<int>(error.kind()));  // MPI_Finalize might wait for a rank that is gone
  }
  MPI_Finalize();
  return 0;
}
