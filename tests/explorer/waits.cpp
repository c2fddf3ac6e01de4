// The verbs on words: publish, the waits, and the barrier of a rank's workers.
#include <fmt/format.h>

#include "explorer/worker.hpp"
#include "signal/fault.hpp"

namespace heddle::explorer {

void ExplorerWorker::store_word(Word* word, Word value, bool release) {
  const std::size_t offset = machine_.range(word, sizeof(Word)).begin;
  const auto part = static_cast<std::size_t>(heap_.owner(word));
  Verb& verb = machine_.prepare(id_, VerbKind::publish);
  verb.word = offset;
  verb.value = value;
  verb.accesses.push_back({{offset, offset + sizeof(Word)}, Access::To::word, true});
  verb.accesses.push_back({{part, part + 1}, Access::To::bell, true});
  machine_.step(id_);
  HeapMemory& memory = machine_.memory();
  if (!memory.make_word(offset))
    machine_.violate(fmt::format("{} was plain memory before it was a word", machine_.describe(offset)));
  memory.store_word(id_, offset, value, release);
  machine_.happening().version = memory.newest_version(offset);
  machine_.happening().rung = memory.rings(static_cast<int>(part));
}

std::uint32_t ExplorerWorker::add(Word* word, std::uint32_t n) {
  HeapMemory& memory = machine_.memory();
  const std::size_t offset = machine_.range(word, sizeof(Word)).begin;
  const auto part = static_cast<std::size_t>(heap_.rank);
  if (heap_.owner(word) != heap_.rank)
    machine_.violate(fmt::format("{} adds to a counter of another rank", machine_.worker_name(id_)));
  if (!memory.make_word(offset))
    machine_.violate(fmt::format("{} was plain memory before it was a word", machine_.describe(offset)));
  Verb& verb = machine_.prepare(id_, VerbKind::count);
  verb.word = offset;
  verb.accesses.push_back({{offset, offset + sizeof(Word)}, Access::To::word, true});
  verb.accesses.push_back({{part, part + 1}, Access::To::bell, true});
  machine_.step(id_);
  const Word before = memory.add_to_word(id_, offset, n);
  if (word_tag(before) != epoch_) {
    machine_.violate(
        fmt::format("{} adds to {} before this call has begun it", machine_.worker_name(id_), machine_.describe(offset)));
  }
  machine_.happening().value = before + n;
  machine_.happening().version = memory.newest_version(offset);
  machine_.happening().rung = memory.rings(heap_.rank);
  return word_value(before);
}

bool ExplorerWorker::fail(const WordName& name, std::uint64_t expected, std::uint64_t seen) {
  machine_.violate(fmt::format("{} gave up over {} from rank {}: expected {}, saw {}", machine_.worker_name(id_),
                               word_text(name.kind).word, name.peer, expected, seen));
}

std::size_t ExplorerWorker::choose_version(std::size_t oldest, std::size_t newest) {
  return oldest < newest && machine_.options().late_words && machine_.choose(2) == 1 ? oldest : newest;
}

void ExplorerWorker::wait_for(const Word* word, const WordName& name, std::uint32_t least, std::uint32_t& value, const Wait& how) {
  HeapMemory& memory = machine_.memory();
  const std::size_t offset = machine_.range(word, sizeof(Word)).begin;
  if (!memory.make_word(offset))
    machine_.violate(fmt::format("{} was plain memory before it was a word", machine_.describe(offset)));
  Verb& verb = machine_.prepare(id_, VerbKind::wait);
  verb.word = offset;
  verb.value = pack_word(how.epoch == 0 ? epoch_ : how.epoch, least);
  verb.any_tag = how.any_tag;
  verb.name = name;
  verb.accesses.push_back({{offset, offset + sizeof(Word)}, Access::To::word, false});
  machine_.step(id_);
  // Enabled by the newest version; an older one that also satisfies may be what it saw.
  const std::size_t newest = memory.newest_version(offset);
  std::size_t oldest = memory.oldest_version(id_, offset);
  while (!machine_.happening().satisfied_by(memory.word(offset, oldest).value)) ++oldest;
  const std::size_t seen = choose_version(oldest, newest);
  memory.see_word(id_, offset, seen, how.acquires);
  value = word_value(memory.word(offset, seen).value);
}

bool ExplorerWorker::peek(const Word* word, std::uint32_t& value) {
  HeapMemory& memory = machine_.memory();
  const std::size_t offset = machine_.range(word, sizeof(Word)).begin;
  if (!memory.make_word(offset))
    machine_.violate(fmt::format("{} was plain memory before it was a word", machine_.describe(offset)));
  Verb& verb = machine_.prepare(id_, VerbKind::peek);
  verb.word = offset;
  verb.accesses.push_back({{offset, offset + sizeof(Word)}, Access::To::word, false});
  machine_.step(id_);
  const std::size_t newest = memory.newest_version(offset);
  const std::size_t seen = choose_version(memory.oldest_version(id_, offset), newest);
  memory.see_word(id_, offset, seen, true);
  value = word_value(memory.word(offset, seen).value);
  return word_tag(memory.word(offset, seen).value) == epoch_;
}

ExplorerWorker::Patience ExplorerWorker::look() {
  const auto part = static_cast<std::size_t>(heap_.rank);
  machine_.prepare(id_, VerbKind::look).accesses.push_back({{part, part + 1}, Access::To::bell, false});
  machine_.step(id_);
  machine_.memory().look_at_part(id_, heap_.rank);
  return {machine_.memory().rings(heap_.rank)};
}

bool ExplorerWorker::rest(Patience& patience, const WordName& name, Word, Word) {
  const auto part = static_cast<std::size_t>(heap_.rank);
  Verb& verb = machine_.prepare(id_, VerbKind::rest);
  verb.rung = patience.rung;
  verb.name = name;
  verb.accesses.push_back({{part, part + 1}, Access::To::bell, false});
  machine_.step(id_);
  machine_.memory().look_at_part(id_, heap_.rank);
  patience.rung = machine_.memory().rings(heap_.rank);
  return true;
}

bool ExplorerWorker::last_of_team() {
  if (count() == 1) return true;
  const auto team = static_cast<std::size_t>(id_ - index_);  // its first worker stands for it
  machine_.prepare(id_, VerbKind::arrive).accesses.push_back({{team, team + 1}, Access::To::team, true});
  machine_.step(id_);
  return machine_.arrive_last(id_);
}

bool ExplorerWorker::meet(Machine::Meeting meeting) {
  machine_.prepare(id_, VerbKind::barrier);
  machine_.arrive(id_, meeting);
  machine_.step(id_);
  machine_.pass(id_);
  return true;
}

}  // namespace heddle::explorer
