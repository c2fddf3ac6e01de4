// Workers with one order bug each, planted in a verb, so that the protocol sources themselves run with it.
#pragma once

#include <functional>
#include <vector>

#include "exchange/normal/layout.hpp"
#include "explorer/squad_worker.hpp"
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
  void end_call() {
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
    wait_for(word, name, 0, value, {.acquires = false, .any_tag = false, .epoch = 0});
    return true;
  }
};

/// A reused slot: ranks that no rows were sent to are not heard at the end of a call, but only after
/// the next call's rows have been written, into slots that they may still be reading.
class ReusedSlot : public ExplorerWorker {
 public:
  using ExplorerWorker::ExplorerWorker;
  Ticket copy_row(std::byte* to, const std::byte* from, const RowFormat& format) {
    const int owner = heap().owner(to);
    if (owner >= 0) sent_to_ |= 1u << owner;
    return ExplorerWorker::copy_row(to, from, format);
  }
  bool acquire(const Word* word, const WordName& name, std::uint32_t& value) {
    if (name.kind != WordKind::one_sided_ready || (sent_to_ >> name.peer & 1u) != 0)
      return ExplorerWorker::acquire(word, name, value);
    late_.push_back({word, name, epoch()});
    return true;
  }
  void publish(Word* word, std::uint32_t value) {
    for (const Late& wait : late_) {
      std::uint32_t ignored = 0;
      if (wait.epoch != epoch())
        wait_for(wait.word, wait.name, 0, ignored, {.acquires = true, .any_tag = false, .epoch = wait.epoch});
    }
    std::erase_if(late_, [this](const Late& wait) { return wait.epoch != epoch(); });
    ExplorerWorker::publish(word, value);
  }
  void end_call() { sent_to_ = 0; }

 private:
  struct Late {
    const Word* word = nullptr;
    WordName name;
    std::uint32_t epoch = 0;
  };
  std::uint32_t sent_to_ = 0;
  std::vector<Late> late_;
};

/// A reused slot of a bounded queue: senders take it for one row longer than it is.
class RoomyQueue : public ExplorerWorker {
 public:
  using ExplorerWorker::ExplorerWorker;
  bool peek(const Word* word, std::uint32_t& value) {
    const bool fresh = ExplorerWorker::peek(word, value);
    if (!is_head(word)) return fresh;
    value = fresh ? value + 1 : 1;
    return true;
  }

 private:
  bool is_head(const Word* word) const {
    NormalLayout layout;
    layout.shape.ranks = heap().ranks;
    for (int peer = 0; peer < heap().ranks; ++peer) {
      if (word == heap().mine<Word>(layout.head_word(peer)) || word == heap().mine<Word>(layout.return_head_word(peer)))
        return true;
    }
    return false;
  }
};

/// A barrier passed by a stale epoch: any earlier call's word ends a wait.
class StaleEpoch : public ExplorerWorker {
 public:
  using ExplorerWorker::ExplorerWorker;
  bool acquire(const Word* word, const WordName& name, std::uint32_t& value) {
    wait_for(word, name, 0, value, {.acquires = true, .any_tag = true, .epoch = 0});
    return true;
  }
};

/// Words of rows are taken whatever their tag: those of an earlier call look like rows.
class TagsNotLookedAt : public ExplorerWorker {
 public:
  TagsNotLookedAt(Machine& machine, int rank, int index) : ExplorerWorker(machine, rank, index) { tagged_wait_.any_tag = true; }
};

/// A rank's workers do not meet before one of them speaks for all.
class NoTeamBarrier : public ExplorerWorker {
 public:
  using ExplorerWorker::ExplorerWorker;
  bool team_barrier() { return true; }
  bool last_of_team() { return index() == 0; }
};

/// One squad's word is taken for those of all.
class HearsOneSquad : public SquadWorker<true> {
 public:
  using SquadWorker<true>::SquadWorker;

 protected:
  std::uint32_t hear_all_of(const Word* words, const WordName& name) override {
    std::uint32_t first = 0;
    acquire(words, name, first);
    return first;
  }
};

/// The first squad speaks for its rank without having met the others.
class OneSquadSpeaks : public SquadWorker<true> {
 public:
  using SquadWorker<true>::SquadWorker;
  template <class WordOf, class Value>
  void announce(int n, WordOf word, Value value) {
    if (first_squad()) announce_alone(n, word, value);
  }
};

}  // namespace heddle::explorer
