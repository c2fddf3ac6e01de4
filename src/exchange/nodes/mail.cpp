#include "exchange/nodes/mail.hpp"

#include <atomic>
#include <cstring>
#include <type_traits>

#include "group/counterparts.hpp"
#include "group/node_wait.hpp"
#include "signal/fault.hpp"

namespace heddle {

namespace {

struct Header {
  std::uint32_t epoch = 0;
  std::uint32_t rows = 0;
  std::uint64_t bytes = 0;
};
static_assert(sizeof(Header) == NodesLayout::header_bytes);

/// Of a message that is too short to have one nothing is right.
Header header_of(const NodeMessage& message) {
  Header header;
  if (message.size() >= sizeof header) std::memcpy(&header, message.data(), sizeof header);
  return header;
}

}  // namespace

void NodeMail::head(NodeMessage& message, std::uint32_t epoch, std::uint32_t rows) {
  const Header header{epoch, rows, message.size()};
  std::memcpy(message.data(), &header, sizeof header);
}

std::uint32_t NodeMail::rows_of(const NodeMessage& message) { return header_of(message).rows; }

WordName NodeMail::name_of(int peer, NodeTag tag) const {
  return {tag == node_rows ? WordKind::elastic_node_rows : WordKind::elastic_node_results, peer, layout_.node_of(peer)};
}

bool NodeMail::take(HostWorker& w, int peer, NodeTag tag, std::chrono::nanoseconds deadline, NodeMessage& message) {
  const auto end = std::chrono::steady_clock::now() + deadline;
  for (PollPause pause;; pause.rest()) {
    if (auto taken = link_.take(peer, tag)) {
      message = std::move(*taken);
      const Header header = header_of(message);
      if (header.epoch == w.epoch() && header.bytes == message.size()) return true;
      return w.fail(name_of(peer, tag), pack_word(w.epoch(), 0), pack_word(header.epoch, header.rows));
    }
    if (someone_gave_up(w)) return false;
    if (std::chrono::steady_clock::now() >= end) return w.fail(name_of(peer, tag), pack_word(w.epoch(), 0), 0);
  }
}

bool NodeMail::drain(HostWorker& w, NodeTag tag, int last, std::chrono::nanoseconds deadline) {
  const auto end = std::chrono::steady_clock::now() + deadline;
  for (PollPause pause; !link_.idle(); pause.rest()) {
    if (someone_gave_up(w)) return false;
    if (std::chrono::steady_clock::now() >= end) return w.fail(name_of(last, tag), 0, 0);
  }
  return true;
}

// The record says who gave up, so it may stand in this rank's part.
bool NodeMail::someone_gave_up(HostWorker& w) {
  if (!w.begin()) return true;
  const auto told = link_.take_any(node_abort);
  if (!told) return false;
  FaultRecord record;
  if (told->size() == sizeof record) std::memcpy(&record, told->data(), sizeof record);
  raise_abort(heap_, record);
  return true;
}

void NodeMail::tell_fault() noexcept {
  auto* header = heap_.mine<HeapHeader>(0);
  const Word code = std::atomic_ref<Word>(header->abort).load(std::memory_order_acquire);
  if (code != static_cast<Word>(heap_.rank) + 1 || header->fault.rank != heap_.rank) return;
  tell_nodes(link_, live_, layout_.ranks_a_node(), heap_.rank, header->fault);
}

void tell_nodes(NodeLink& link, const std::vector<bool>& live, int ranks_a_node, int rank, const FaultRecord& record) noexcept {
  static_assert(std::is_trivially_copyable_v<FaultRecord>);
  try {
    NodeMessage message(sizeof record);
    std::memcpy(message.data(), &record, sizeof record);
    for (const int peer : counterparts(live, ranks_a_node, rank)) link.post(peer, node_abort, message);
    link.idle();
  } catch (...) {
    // The others find out by their deadlines.
  }
}

}  // namespace heddle
