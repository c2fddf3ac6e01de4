// A group over nodes whose ranks are the processes of an MPI launch (docs/nodes.md). In the library heddle_mpi, which is built
// where CMake finds MPI; libheddle itself knows nothing of it.
#pragma once

#include <memory>
#include <optional>

#include "heddle/group.hpp"
#include "heddle/nodes.hpp"

namespace heddle {

struct MpiOptions : GroupOptions {
  /// Nodes that share the ranks equally, instead of what the launcher says: several of them may then be on one machine. Taken from
  /// the environment, HEDDLE_NODES, where it is empty.
  std::optional<int> nodes;
  /// Words that all ranks reach (open_directory_store); recovery needs them.
  std::shared_ptr<Store> store = {};
};

/// This process's rank of MPI_COMM_WORLD as a rank of a group over nodes. The caller has initialised MPI, with
/// MPI_THREAD_FUNNELED at least, and makes all calls of the group and of what is made on it on the thread that did. Which ranks
/// share a node follows from the launcher's environment (Open MPI's, PMI's or Slurm's local rank and size); they must be
/// neighbours, as mpirun --map-by slot places them. Messages go over a duplicate of MPI_COMM_WORLD whose errors are returned;
/// nothing ever waits inside of MPI. Throws InputError where nodes cannot be told, FaultError within the deadline.
///
/// MPI may write to the sockets of ranks that are gone: the process should ignore SIGPIPE, which would end it without a word.
/// After a fault MPI_Finalize may wait for a rank that is gone: end the process by MPI_Abort or std::_Exit.
std::unique_ptr<Group> join_mpi(const MpiOptions& options = {});

}  // namespace heddle
