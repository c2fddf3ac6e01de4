// Messages between nodes by MPI: nonblocking sends, matched probes and tests, never a call that waits.
#pragma once

#include <mpi.h>

#include <list>

#include "heddle/nodes.hpp"

namespace heddle {

class MpiLink final : public NodeLink {
 public:
  /// Takes a communicator whose errors are returned over, for good: it is not freed, since that is collective.
  explicit MpiLink(MPI_Comm comm) : comm_(comm) {}
  /// Messages that have not left, or not arrived, stay where MPI may still reach them.
  ~MpiLink() override;
  MpiLink(const MpiLink&) = delete;
  MpiLink& operator=(const MpiLink&) = delete;

  std::size_t most_bytes() const override;
  void post(int peer, int tag, NodeMessage message) override;
  std::optional<NodeMessage> take(int peer, int tag) override { return take_from(peer, tag); }
  std::optional<NodeMessage> take_any(int tag) override { return take_from(MPI_ANY_SOURCE, tag); }
  bool idle() override;
  bool progress() override;
  void abandon() override { abandoned_.splice(abandoned_.end(), leaving_); }

 private:
  struct Transfer {
    int peer = 0;
    int tag = 0;
    NodeMessage message;
    MPI_Request request = MPI_REQUEST_NULL;
  };
  std::optional<NodeMessage> take_from(int peer, int tag);

  MPI_Comm comm_;
  std::list<Transfer> leaving_, arriving_;
  std::list<Transfer> abandoned_;  ///< sends that nobody waits for: they leave, or stay where MPI may still reach them
};

}  // namespace heddle
