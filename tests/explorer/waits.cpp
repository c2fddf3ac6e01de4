// The verbs on words: publish, the waits, and the barrier of a rank's workers.
#include <fmt/format.h>

#include "explorer/worker.hpp"

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
  const auto rank = static_cast<std::size_t>(heap_.rank);
  machine_.prepare(id_, VerbKind::arrive).accesses.push_back({{rank, rank + 1}, Access::To::team, true});
  machine_.step(id_);
  return machine_.arrive_last(id_);
}

bool ExplorerWorker::team_barrier() {
  if (count() == 1) return true;
  machine_.prepare(id_, VerbKind::barrier);
  machine_.arrive(id_);
  machine_.step(id_);
  machine_.pass(id_);
  return true;
}

}  // namespace heddle::explorer
