// The machine's texts: what went wrong, the schedule that shows it, and its steps for people.
#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "explorer/machine.hpp"
#include "signal/fault.hpp"

namespace heddle::explorer {

namespace {
std::string word_text_of(Word word) {
  return word == 0 ? "nothing" : fmt::format("epoch {} value {}", word_tag(word), word_value(word));
}

const char* verb_text(VerbKind kind) {
  switch (kind) {
    case VerbKind::local:
      return "local verb";
    case VerbKind::read:
      return "read";
    case VerbKind::write:
      return "write";
    case VerbKind::copy:
      return "copy";
    case VerbKind::reduce:
      return "reduce_rows";
    case VerbKind::add:
      return "add_words";
    case VerbKind::publish:
      return "publish";
    case VerbKind::count:
      return "add";
    case VerbKind::wait:
      return "acquire";
    case VerbKind::peek:
      return "peek";
    case VerbKind::look:
      return "look";
    case VerbKind::rest:
      return "rest";
    case VerbKind::barrier:
      return "team_barrier";
    case VerbKind::arrive:
      return "last_of_team";
  }
  return "?";
}
}  // namespace

std::string Machine::worker_name(int worker) const {
  return rank_size() == 1 ? fmt::format("rank {}", worker)
                          : fmt::format("rank {} worker {}", worker / rank_size(), worker % rank_size());
}

std::string Machine::describe(std::size_t heap_offset) const {
  return fmt::format("{} of rank {}'s part", scenario_.describe(heap_offset % stride_), heap_offset / stride_);
}

std::string Machine::describe(const Step& step) const {
  std::string text = fmt::format("{:<18} {}", worker_name(step.worker), verb_text(step.verb.kind));
  if (step.verb.name.kind != WordKind::none) {
    const WordText words = word_text(step.verb.name.kind);
    text += fmt::format(" [{}, {} from rank {}]", words.phase, words.word, step.verb.name.peer);
  }
  for (const Access& access : step.verb.accesses) {
    if (access.to == Access::To::bell) continue;
    text += fmt::format(" {} {}", access.writes ? "to" : "from", describe(access.range.begin));
  }
  if (step.verb.kind == VerbKind::publish || step.verb.kind == VerbKind::count)
    text += fmt::format(" := {}", word_text_of(step.verb.value));
  if (step.alternative != 0) text += "  (sees the oldest it may)";
  return text;
}

std::string Machine::trace() const {
  std::string text;
  for (int i = 0; i < step_count_; ++i) text += fmt::format("{:5}  {}\n", i, describe(steps_[static_cast<std::size_t>(i)]));
  return text;
}

std::string Machine::schedule() const {
  std::string text;
  for (int i = 0; i < step_count_;) {
    const Step& step = steps_[static_cast<std::size_t>(i)];
    int length = 1;
    while (i + length < step_count_ && steps_[static_cast<std::size_t>(i + length)].worker == step.worker &&
           steps_[static_cast<std::size_t>(i + length)].alternative == step.alternative) {
      ++length;
    }
    text += fmt::format("{}{}{}", text.empty() ? "" : ",", step.worker, step.alternative != 0 ? "s" : "");
    if (length > 1) text += fmt::format("x{}", length);
    i += length;
  }
  return text;
}

Violation Machine::report() const { return {*violation_, schedule(), trace()}; }

std::string Machine::deadlock() const {
  std::string text = "deadlock:";
  for (int worker = 0; worker < workers(); ++worker) {
    if (workers_[static_cast<std::size_t>(worker)].coroutine.finished()) continue;
    const Verb& verb = pending(worker);
    text += fmt::format(" {} in {}", worker_name(worker), verb_text(verb.kind));
    if (verb.name.kind != WordKind::none) {
      const WordText words = word_text(verb.name.kind);
      text += fmt::format(" ({}, {} from rank {})", words.phase, words.word, verb.name.peer);
    }
    if (verb.kind == VerbKind::wait) {
      text += fmt::format(" for {}, its word holds {}", word_text_of(verb.value),
                          word_text_of(memory_.word(verb.word, memory_.newest_version(verb.word)).value));
    }
    text += ";";
  }
  return text;
}

}  // namespace heddle::explorer
