// Who is on which node, by the launcher, and how the ranks of a node meet.
#include <fmt/format.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <random>

#include "group/mpi_link.hpp"
#include "group/node_wait.hpp"
#include "heddle/mpi.hpp"

namespace heddle {

namespace {

using Clock = std::chrono::steady_clock;

std::optional<int> number_in(const char* variable) {
  const char* text = std::getenv(variable);
  if (text == nullptr || *text == 0) return std::nullopt;
  char* end = nullptr;
  const long value = std::strtol(text, &end, 10);
  if (*end != 0) throw InputError(fmt::format("{} is \"{}\"; a whole number is wanted", variable, text));
  return static_cast<int>(value);
}

std::optional<int> first_of(std::initializer_list<const char*> variables) {
  for (const char* variable : variables) {
    if (const auto value = number_in(variable)) return value;
  }
  return std::nullopt;
}

/// Ranks of a node: as many as are asked for, or as the launcher says, and then it must say so of neighbours.
int ranks_a_node(const MpiOptions& options, int rank, int ranks) {
  const auto nodes = options.nodes ? options.nodes : number_in("HEDDLE_NODES");
  if (nodes) {
    if (*nodes < 1 || ranks % *nodes != 0) throw InputError(fmt::format("{} nodes do not divide {} ranks", *nodes, ranks));
    return ranks / *nodes;
  }
  const auto size = first_of({"OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE"});
  const auto place = first_of({"OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"});
  if (!size || !place)
    throw InputError("the launcher does not say which ranks share a node; set HEDDLE_NODES to the number of nodes");
  if (*size < 1 || ranks % *size != 0 || rank % *size != *place) {
    throw InputError(fmt::format(
        "rank {} of {} is rank {} of {} on its node; nodes need equally many ranks, neighbours together (mpirun --map-by slot)",
        rank, ranks, *place, *size));
  }
  return *size;
}

/// A duplicate whose errors are returned.
MPI_Comm own_communicator(int rank, const MpiOptions& options) {
  MPI_Comm comm = MPI_COMM_NULL;
  MPI_Request request = MPI_REQUEST_NULL;
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  if (MPI_Comm_idup(MPI_COMM_WORLD, &comm, &request) != MPI_SUCCESS)
    throw Error(ErrorKind::fault, fmt::format("rank {}: MPI gives no communicator", rank));
  const auto end = Clock::now() + options.deadline;
  int done = 0;
  for (PollPause pause; done == 0; pause.rest()) {
    if (MPI_Test(&request, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS)
      throw Error(ErrorKind::fault, fmt::format("rank {}: MPI gives no communicator", rank));
    if (done == 0 && Clock::now() >= end) throw FaultError({rank, -1, "joining by MPI", "a communicator of all ranks", 1, 0});
  }
  MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
  return comm;
}

/// A name that only the ranks of this node hear, drawn by the first of them.
std::string name_of_node(MpiLink& link, int rank, int first, int inside, const MpiOptions& options) {
  std::uint64_t drawn = 0;
  if (rank == first) {
    std::random_device device;
    drawn = static_cast<std::uint64_t>(device()) << 32 | device();
    NodeMessage message(sizeof drawn);
    std::memcpy(message.data(), &drawn, sizeof drawn);
    for (int peer = first + 1; peer < first + inside; ++peer) link.post(peer, node_meeting, message);
  } else {
    const auto end = Clock::now() + options.deadline;
    std::optional<NodeMessage> message;
    for (PollPause pause; !(message = link.take(first, node_meeting)); pause.rest()) {
      if (Clock::now() >= end) throw FaultError({rank, first, "joining by MPI", "name of the node's group", 1, 0});
    }
    if (message->size() == sizeof drawn) std::memcpy(&drawn, message->data(), sizeof drawn);
  }
  return fmt::format("mpi.{:016x}", drawn);
}

/// A first message to and from every rank of the other nodes. MPI connects when it first sends, and where that is after a link has
/// gone it ends the process instead of returning an error.
void greet_all(MpiLink& link, int rank, int ranks, int inside, const MpiOptions& options) {
  const auto elsewhere = [&](int peer) { return peer / inside != rank / inside; };
  for (int peer = 0; peer < ranks; ++peer) {
    if (elsewhere(peer)) link.post(peer, node_hello, {});
  }
  const auto end = Clock::now() + options.deadline;
  PollPause pause;
  for (int peer = 0; peer < ranks;) {
    if (!elsewhere(peer) || link.take(peer, node_hello)) {
      ++peer;
      continue;
    }
    if (Clock::now() >= end)
      throw FaultError({rank, peer, "joining by MPI", fmt::format("greeting of node {}", peer / inside), 1, 0});
    pause.rest();
  }
}

}  // namespace

std::unique_ptr<Group> join_mpi(const MpiOptions& options) {
  int there = 0, level = 0;
  MPI_Initialized(&there);
  if (there == 0) throw InputError("MPI is not initialised; call MPI_Init_thread before join_mpi");
  MPI_Query_thread(&level);
  if (level < MPI_THREAD_FUNNELED) throw InputError("MPI was initialised without threads; MPI_THREAD_FUNNELED is needed");
  int rank = 0, ranks = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  const int inside = ranks_a_node(options, rank, ranks);
  auto link = std::make_shared<MpiLink>(own_communicator(rank, options));
  const int node = rank / inside;
  greet_all(*link, rank, ranks, inside, options);
  const std::string name = name_of_node(*link, rank, node * inside, inside, options);
  return join_nodes(name, {.node = node, .rank = rank % inside, .nodes = ranks / inside, .ranks_a_node = inside}, std::move(link),
                    options, options.store);
}

}  // namespace heddle
