#include "explorer/verb.hpp"

namespace heddle::explorer {

void Verb::reset(VerbKind to) {
  kind = to;
  accesses.clear();
  name = {};
  value = 0;
  any_tag = false;
  word = 0;
  version = 0;
  rung = 0;
  team = 0;
  generation = 0;
}

bool Verb::satisfied_by(Word seen) const {
  const bool tag = any_tag ? word_tag(seen) != 0 : word_tag(seen) == word_tag(value);
  return tag && word_value(seen) >= word_value(value);
}

namespace {
bool conflict(const Access& a, const Access& b) {
  if (a.to != b.to || !(a.writes || b.writes)) return false;
  if (a.to == Access::To::bell && a.writes && b.writes) return false;  // two rings commute
  return a.range.begin < b.range.end && b.range.begin < a.range.end;
}
}  // namespace

bool dependent(const Verb& a, const Verb& b) {
  for (const Access& one : a.accesses) {
    for (const Access& other : b.accesses) {
      if (conflict(one, other)) return true;
    }
  }
  return false;
}

}  // namespace heddle::explorer
