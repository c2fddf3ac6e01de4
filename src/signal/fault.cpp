#include "signal/fault.hpp"

#include <fmt/format.h>

#include <atomic>

#include "signal/doorbell.hpp"

namespace heddle {

WordText word_text(WordKind kind) {
  switch (kind) {
    case WordKind::none:
      return {"no phase", "no word"};
    case WordKind::refused:
      return {"input check", "its tokens, which were refused there"};
    case WordKind::failed:
      return {"call", "the rest of its call, which failed there"};
    case WordKind::team:
      return {"team barrier", "arrivals of this rank's workers"};
    case WordKind::gather_count:
      return {"gather dispatch", "token count"};
    case WordKind::gather_arrived:
      return {"gather dispatch", "arrival flag"};
    case WordKind::gather_reduced:
      return {"gather dispatch", "flag of the summed rows"};
    case WordKind::gather_partial:
      return {"gather combine", "flag of the partial sums"};
    case WordKind::normal_count:
      return {"normal dispatch", "row count"};
    case WordKind::normal_tail:
      return {"normal dispatch", "queue tail"};
    case WordKind::normal_head:
      return {"normal dispatch", "queue head"};
    case WordKind::normal_return_tail:
      return {"normal combine", "queue tail"};
    case WordKind::normal_return_head:
      return {"normal combine", "queue head"};
    case WordKind::low_latency_arrived:
      return {"low_latency dispatch", "arrival flag"};
    case WordKind::low_latency_returned:
      return {"low_latency combine", "return flag"};
    case WordKind::elastic_count:
      return {"elastic dispatch", "row count"};
    case WordKind::elastic_returned:
      return {"elastic combine", "return flag"};
    case WordKind::elastic_node_rows:
      return {"elastic dispatch", "message of node"};
    case WordKind::elastic_node_results:
      return {"elastic combine", "message of node"};
    case WordKind::one_sided_arrived:
      return {"one_sided dispatch", "arrival flag"};
    case WordKind::one_sided_ready:
      return {"one_sided combine", "ready flag"};
    case WordKind::all_gather_arrived:
      return {"all-gather of the outputs", "arrival flag"};
    case WordKind::mega_announced:
      return {"mega dispatch", "announcement"};
    case WordKind::mega_row_count:
      return {"mega dispatch", "row count, at most the cap, of local expert"};
    case WordKind::mega_counted:
      return {"mega tasks", "row counts of this rank's experts"};
    case WordKind::mega_filled:
      return {"mega tasks", "arrived rows of ring block"};
    case WordKind::mega_freed:
      return {"mega dispatch", "finished tasks that free ring block"};
    case WordKind::mega_step:
      return {"mega tasks", "activations of ring block"};
    case WordKind::mega_shared_step:
      return {"mega tasks", "shared expert's activations of row block"};
    case WordKind::mega_ready:
      return {"mega combine", "ready flag"};
  }
  return {"unknown phase", "unknown word"};
}

Fault describe(const FaultRecord& record) {
  const WordText text = word_text(record.name.kind);
  Fault fault;
  fault.rank = record.rank;
  fault.peer = record.name.peer;
  fault.phase = text.phase;
  fault.word = record.name.index < 0 ? text.word : fmt::format("{} {}", text.word, record.name.index);
  fault.expected = record.expected;
  fault.seen = record.seen;
  return fault;
}

void raise_abort(const HeapView& heap, const FaultRecord& record) {
  auto* mine = heap.mine<HeapHeader>(0);
  Word none = 0;
  const Word code = static_cast<Word>(heap.rank) + 1;
  // The record is written once: only by the worker that claims this rank's own abort word, before
  // the other ranks can see it. If somebody else's abort is already there, theirs is the story.
  const Word claim = ~Word{0};
  if (!std::atomic_ref<Word>(mine->abort).compare_exchange_strong(none, claim)) return;
  mine->fault = record;
  std::atomic_ref<Word>(mine->abort).store(code, std::memory_order_release);
  for (int peer = 0; peer < heap.ranks; ++peer) {
    if (peer != heap.rank) {
      Word free = 0;
      std::atomic_ref<Word>(heap.at<HeapHeader>(peer, 0)->abort).compare_exchange_strong(free, code);
    }
    ring(*heap.at<HeapHeader>(peer, 0));
  }
}

void throw_if_aborted(const HeapView& heap) {
  const std::atomic_ref<Word> abort(heap.mine<HeapHeader>(0)->abort);
  Word code = abort.load(std::memory_order_acquire);
  if (code == 0) return;
  while (code == ~Word{0}) {
    code = abort.load(std::memory_order_acquire);  // ends: the claimer is a thread of this process that copies a record
  }
  throw FaultError(describe(heap.at<HeapHeader>(static_cast<int>(code - 1), 0)->fault));
}

}  // namespace heddle
