// Workers with one order bug each, planted in a verb, so that the protocol sources themselves run with it.
#pragma once

#include <functional>
#include <vector>

#include "explorer/worker.hpp"

namespace heddle::explorer {

/// A count is published before its rows: rows for the heap leave only after the next publish.
class CountBeforeRows : public ExplorerWorker {
 public:
  using ExplorerWorker::ExplorerWorker;
  Ticket copy_row(std::byte* to, const std::byte* from, const RowFormat& format) {
    if (heap().owner(to) < 0) return ExplorerWorker::copy_row(to, from, format);
    late_.push_back([this, to, from, format] { complete(ExplorerWorker::copy_row(to, from, format)); });
    return {};
  }
  void publish(Word* word, std::uint32_t value) {
    ExplorerWorker::publish(word, value);
    for (const auto& copy : late_) copy();
    late_.clear();
  }

 private:
  std::vector<std::function<void()>> late_;
};

/// A count is published while its rows are still under way: copies are never waited for.
class CopiesNotCompleted : public ExplorerWorker {
 public:
  using ExplorerWorker::ExplorerWorker;
  void complete_all() {}
};

/// A word is reset too early: the words that this call waited for are zeroed at its end, when the
/// next call's may already be there.
class EarlyReset : public ExplorerWorker {
 public:
  using ExplorerWorker::ExplorerWorker;
  bool acquire(const Word* word, const WordName& name, std::uint32_t& value) {
    waited_for_.push_back(const_cast<Word*>(word));
    return ExplorerWorker::acquire(word, name, value);
  }
  void finish_epoch() {
    ExplorerWorker::finish_epoch();
    for (Word* word : waited_for_) store_word(word, 0, true);
    waited_for_.clear();
  }

 private:
  std::vector<Word*> waited_for_;
};

/// A missing acquire: waits see the word and nothing that came before it.
class MissingAcquire : public ExplorerWorker {
 public:
  using ExplorerWorker::ExplorerWorker;
  bool acquire(const Word* word, const WordName& name, std::uint32_t& value) {
    wait_for(word, name, 0, value, {.acquires = false, .any_tag = false});
    return true;
  }
};

/// A reused slot: at the end of a call only ranks that rows were sent to are waited for, so slots are
/// written again while a rank that has not been heard from still reads them.
class ReusedSlot : public ExplorerWorker {
 public:
  using ExplorerWorker::ExplorerWorker;
  Ticket copy_row(std::byte* to, const std::byte* from, const RowFormat& format) {
    const int owner = heap().owner(to);
    if (owner >= 0) sent_to_ |= 1u << owner;
    return ExplorerWorker::copy_row(to, from, format);
  }
  bool acquire(const Word* word, const WordName& name, std::uint32_t& value) {
    const bool end_of_call = name.kind == WordKind::one_sided_ready || name.kind == WordKind::low_latency_returned;
    if (end_of_call && (sent_to_ >> name.peer & 1u) == 0) return true;
    return ExplorerWorker::acquire(word, name, value);
  }
  void finish_epoch() {
    sent_to_ = 0;
    ExplorerWorker::finish_epoch();
  }

 private:
  std::uint32_t sent_to_ = 0;
};

/// A barrier passed by a stale epoch: any earlier call's word ends a wait.
class StaleEpoch : public ExplorerWorker {
 public:
  using ExplorerWorker::ExplorerWorker;
  bool acquire(const Word* word, const WordName& name, std::uint32_t& value) {
    wait_for(word, name, 0, value, {.acquires = true, .any_tag = true});
    return true;
  }
};

/// A rank's workers do not meet before one of them speaks for all.
class NoTeamBarrier : public ExplorerWorker {
 public:
  using ExplorerWorker::ExplorerWorker;
  bool team_barrier() { return true; }
};

}  // namespace heddle::explorer
