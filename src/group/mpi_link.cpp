#include "group/mpi_link.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

namespace heddle {

namespace {

/// Throws where MPI says no.
void check(int status, const char* what, int peer) {
  if (status == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  MPI_Error_string(status, text, &length);
  const std::string with = peer == MPI_ANY_SOURCE ? "any rank" : fmt::format("rank {}", peer);
  throw Error(ErrorKind::fault,
              fmt::format("MPI cannot {} {}: {}", what, with, std::string_view(text, static_cast<std::size_t>(length))));
}

constexpr int nobodys_tag = 7;  // in no era a NodeTag

bool done(MPI_Request& request, int peer) {
  int flag = 0;
  check(MPI_Test(&request, &flag, MPI_STATUS_IGNORE), "finish a message with", peer);
  return flag != 0;
}

}  // namespace

MpiLink::~MpiLink() {
  abandon();
  if (abandoned_.empty() && arriving_.empty()) return;
  // Nobody may free what a transfer under way still reads or writes.
  new std::list<Transfer>(std::move(abandoned_));
  new std::list<Transfer>(std::move(arriving_));
}

std::size_t MpiLink::most_bytes() const { return static_cast<std::size_t>(std::numeric_limits<int>::max()); }

void MpiLink::post(int peer, int tag, NodeMessage message) {
  Transfer& transfer = leaving_.emplace_back(Transfer{peer, tag, std::move(message), MPI_REQUEST_NULL});
  const auto bytes = static_cast<int>(transfer.message.size());
  check(MPI_Isend(transfer.message.data(), bytes, MPI_BYTE, peer, tag, comm_, &transfer.request), "send a message to", peer);
}

std::optional<NodeMessage> MpiLink::take_from(int peer, int tag) {
  idle();
  const auto wanted = [&](const Transfer& one) { return one.tag == tag && (peer == MPI_ANY_SOURCE || one.peer == peer); };
  auto arriving = std::find_if(arriving_.begin(), arriving_.end(), wanted);
  if (arriving == arriving_.end()) {
    int found = 0;
    MPI_Message probed = MPI_MESSAGE_NULL;
    MPI_Status status;
    check(MPI_Improbe(peer, tag, comm_, &found, &probed, &status), "look for a message of", peer);
    if (found == 0) return std::nullopt;
    int bytes = 0;
    MPI_Get_count(&status, MPI_BYTE, &bytes);
    arriving = arriving_.insert(arriving_.end(),
                                Transfer{status.MPI_SOURCE, tag, NodeMessage(static_cast<std::size_t>(bytes)), MPI_REQUEST_NULL});
    check(MPI_Imrecv(arriving->message.data(), bytes, MPI_BYTE, &probed, &arriving->request), "receive a message of",
          arriving->peer);
  }
  if (!done(arriving->request, arriving->peer)) return std::nullopt;
  NodeMessage message = std::move(arriving->message);
  arriving_.erase(arriving);
  return message;
}

bool MpiLink::idle() {
  std::erase_if(abandoned_, [](Transfer& transfer) {
    int flag = 0;
    return MPI_Test(&transfer.request, &flag, MPI_STATUS_IGNORE) != MPI_SUCCESS || flag != 0;
  });
  std::erase_if(leaving_, [](Transfer& transfer) { return done(transfer.request, transfer.peer); });
  return leaving_.empty();
}

// A send that MPI_Test calls complete may still need its sender: Open MPI moves bytes only while it is called, and the word that
// ends a large message may wait behind a full socket. So MPI must be called although there is nothing to test, and a probe in vain
// is a call that has it move whatever waits.
bool MpiLink::progress() {
  int found = 0;
  MPI_Iprobe(MPI_ANY_SOURCE, nobodys_tag, comm_, &found, MPI_STATUS_IGNORE);
  return true;
}

}  // namespace heddle
