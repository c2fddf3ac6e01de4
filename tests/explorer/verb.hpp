// What a worker is about to do, known before it does it: what it touches and what it waits for.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "explorer/memory.hpp"
#include "signal/words.hpp"

namespace heddle::explorer {

enum class VerbKind : std::uint8_t {
  local,
  read,
  write,
  copy,
  reduce,
  add,
  publish,
  count,
  wait,
  peek,
  look,
  rest,
  barrier,
  arrive
};

struct Access {
  /// bell: [part, part + 1), rung by every word store into a part; team: [team, team + 1), counts its workers.
  enum class To : std::uint8_t { plain, word, bell, team };
  Range range;
  To to = To::plain;
  bool writes = false;
};

struct Verb {
  VerbKind kind = VerbKind::local;
  std::vector<Access> accesses;
  WordName name;                 ///< of the word waited for
  Word value = 0;                ///< stored, or the tag and least value waited for
  bool any_tag = false;          ///< wait (a planted bug): every tag but 0 will do
  std::size_t word = 0;          ///< heap offset of the word of publish, count, wait, peek
  std::size_t version = 0;       ///< publish, count: which version of its word it made
  std::uint32_t rung = 0;        ///< rest: rings already seen; publish, count: rings of the part after it
  std::size_t team = 0;          ///< barrier: whose
  std::uint64_t generation = 0;  ///< barrier: the one that lets this worker pass

  void reset(VerbKind to);
  /// Would this wait end with this value of its word?
  bool satisfied_by(Word seen) const;
};

/// Does the order of the two matter?
bool dependent(const Verb& a, const Verb& b);

/// One executed verb.
struct Step {
  int worker = -1;
  int number = 0;       ///< of this worker's steps, from 1
  int alternative = 0;  ///< which of what it could have seen
  Verb verb;
};

}  // namespace heddle::explorer
