#include "recovery/agreement.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "signal/words.hpp"

namespace heddle {

namespace {

// Words of the store have the form of protocol words: a generation beside a value. That of `here` and `finished` is 31 bits of
// steps, and whether the rank comes late, so that its steps say nothing.
constexpr auto generation_of = word_tag;
constexpr std::uint32_t step_mask = 0x7fffffff;
constexpr std::uint32_t late_bit = 1u << 31;
std::uint32_t steps_of(std::uint64_t word) { return word_value(word) & step_mask; }
bool is_late(std::uint64_t word) { return (word_value(word) & late_bit) != 0; }

/// Steps are counted modulo 2^31; ranks are never more than a few apart.
bool is_before(std::uint32_t a, std::uint32_t b) { return static_cast<std::int32_t>((a - b) << 1) < 0; }

std::string text_of(const std::vector<bool>& live) {
  std::string text;
  for (std::size_t rank = 0; rank < live.size(); ++rank) {
    if (live[rank]) text += fmt::format("{}{}", text.empty() ? "" : ", ", rank);
  }
  return text.empty() ? "nobody" : text;
}

}  // namespace

LostRankError::LostRankError(int rank, std::uint32_t generation, const Members& now)
    : Error(ErrorKind::fault,
            fmt::format(
                "rank {} is out: it was last counted in generation {}, the others are in generation {} without it (ranks {}); "
                "its outputs of this step are void, it may come back",
                rank, generation, now.generation, text_of(now.live))),
      rank_(rank),
      members_(now) {}

Agreement::Agreement(Store& store, int rank, int ranks, std::optional<int> ranks_a_node)
    : store_(store),
      rank_(rank),
      ranks_(ranks),
      ranks_a_node_(ranks_a_node.value_or(ranks)),
      members_{0, std::vector<bool>(static_cast<std::size_t>(ranks), true)},
      here_word_(get(Kind::here, rank)),
      finished_word_(get(Kind::finished, rank)) {}

/// Only this rank writes these words; where one is not as it was left, another process has taken its place.
void Agreement::publish(Kind kind, std::uint64_t& last, std::uint32_t generation) {
  const std::uint64_t word = pack_word(generation, finished_ | (late_ ? late_bit : 0));
  if (!store_.compare_set({kind, rank_}, last, word)) throw lost();
  last = word;
}

/// `called` or `asked`, which only go up.
void Agreement::raise(Kind kind, std::uint32_t generation) {
  std::uint64_t last = get(kind, 0);
  while (last < generation && !store_.compare_set({kind, 0}, last, generation)) continue;
}

bool Agreement::should_meet() const { return called() || (finished_ != adopted_at_ && get(Kind::asked, 0) > members_.generation); }

void Agreement::call() { raise(Kind::called, members_.generation + 1); }

bool Agreement::came(int rank, std::uint32_t generation) const { return generation_of(get(Kind::here, rank)) >= generation; }

/// One chunk is enough: nobody waits any longer, and whoever sees it decides the others.
bool Agreement::decided(std::uint32_t generation) const {
  for (int chunk = 0; chunk < chunks(); ++chunk) {
    if (generation_of(get(Kind::mask, chunk)) >= generation) return true;
  }
  return false;
}

/// The mask as it stands; its generation is that of its oldest chunk.
Members Agreement::masked() const {
  Members now;
  for (int chunk = 0; chunk < chunks(); ++chunk) {
    const std::uint64_t word = get(Kind::mask, chunk);
    now.generation = chunk == 0 ? generation_of(word) : std::min(now.generation, generation_of(word));
    for (int bit = 0; bit < 32 && 32 * chunk + bit < ranks_; ++bit)
      now.live.push_back(generation_of(word) == 0 || (word_value(word) >> bit & 1) != 0);
  }
  return now;
}

LostRankError Agreement::lost() const { return LostRankError(rank_, members_.generation, masked()); }

Agreement::Finish Agreement::finish(std::chrono::nanoseconds deadline) {
  finished_ = (finished_ + 1) & step_mask;
  publish(Kind::finished, finished_word_, members_.generation);
  bool all = false;
  const auto ended = [&] {
    const std::vector<bool> missing = unfinished();
    all = std::find(missing.begin(), missing.end(), true) == missing.end();
    return all || called();
  };
  if (!store_.wait(ended, Store::Clock::now() + deadline)) return Finish::late;
  return all ? Finish::all : Finish::called;
}

std::vector<bool> Agreement::unfinished() const {
  std::vector<bool> missing = members_.live;
  for (int rank = 0; rank < ranks_; ++rank) {
    const std::uint64_t word = get(Kind::finished, rank);
    if (generation_of(word) == members_.generation && !is_before(steps_of(word), finished_))
      missing[static_cast<std::size_t>(rank)] = false;
  }
  return missing;
}

void Agreement::settle(const std::vector<bool>& suspects, const Patience& patience) {
  bool is_done = false;
  while (!is_done) {
    const std::uint32_t next = members_.generation + 1;
    if (decided(next)) throw lost();  // before anything is written: this rank was not there
    publish(Kind::here, here_word_, next);
    raise(Kind::called, next);
    hold(next, suspects, patience);
    propose(next);
    is_done = adopt(next);
  }
}

/// Waits until nobody is missing or others have decided, for ranks that are suspected not as long.
void Agreement::hold(std::uint32_t generation, const std::vector<bool>& suspects, const Patience& patience) {
  const auto begin = Store::Clock::now();
  std::vector<bool> expected = members_.live;
  const auto all_here = [&] {
    if (decided(generation)) return true;
    for (int rank = 0; rank < ranks_; ++rank) {
      if (expected[static_cast<std::size_t>(rank)] && !came(rank, generation)) return false;
    }
    return true;
  };
  const auto excuse = [&](const std::vector<bool>& missing) {
    for (std::size_t rank = 0; rank < expected.size(); ++rank) expected[rank] = expected[rank] && !missing[rank];
  };
  if (store_.wait(all_here, begin + patience.suspects)) return;
  excuse(suspects);
  if (ranks_a_node_ < ranks_) {
    if (store_.wait(all_here, begin + patience.mates)) return;
    excuse(mates_missing(suspects, generation));
  }
  store_.wait(all_here, begin + patience.others);
}

/// Ranks of suspects' nodes of which nobody has come: the node is lost, not a rank of it.
std::vector<bool> Agreement::mates_missing(const std::vector<bool>& suspects, std::uint32_t generation) const {
  std::vector<bool> missing(suspects.size(), false);
  for (int first = 0; first < ranks_; first += ranks_a_node_) {
    bool suspected = false, here = false;
    for (int rank = first; rank < first + ranks_a_node_; ++rank) {
      suspected = suspected || suspects[static_cast<std::size_t>(rank)];
      here = here || came(rank, generation);
    }
    std::fill_n(missing.begin() + first, ranks_a_node_, suspected && !here);
  }
  return missing;
}

/// All members live and reach the store, but when they met for the mask before this one, nodes did not hear each other. As few as
/// possible are left out, one after the other: whom most do not hear, of several the last. By node. Nobody where a member is
/// missing: who waited for that one has not spoken either.
std::vector<bool> Agreement::cut_off(std::uint32_t generation) const {
  const int nodes = ranks_ / ranks_a_node_;
  std::vector<bool> out(static_cast<std::size_t>(nodes), false);
  if (nodes == 1) return out;
  std::vector<std::uint32_t> unheard(out.size(), 0);
  for (int rank = 0; rank < ranks_; ++rank) {
    if (!members_.live[static_cast<std::size_t>(rank)]) continue;
    if (!came(rank, generation)) return out;
    const std::uint64_t word = get(Kind::unheard, rank);
    if (generation_of(word) + 1 == generation) unheard[static_cast<std::size_t>(rank / ranks_a_node_)] |= word_value(word);
  }
  const auto apart = [&](int a, int b) {
    const auto lacks = [&](int of, int other) { return other < 32 && (unheard[static_cast<std::size_t>(of)] >> other & 1) != 0; };
    return !out[static_cast<std::size_t>(a)] && !out[static_cast<std::size_t>(b)] && lacks(a, b) && lacks(b, a);
  };
  for (;;) {
    int most = 0, worst = 0;
    for (int node = 0; node < nodes; ++node) {
      int lacking = 0;
      for (int other = 0; other < nodes; ++other) lacking += apart(node, other) ? 1 : 0;
      if (lacking >= most) most = lacking, worst = node;
    }
    if (most == 0) return out;
    out[static_cast<std::size_t>(worst)] = true;
  }
}

/// Those who came, as this rank sees it now, but for who is cut off. A chunk is decided once, whoever's proposal it takes.
void Agreement::propose(std::uint32_t generation) {
  const std::vector<bool> out = cut_off(generation);
  for (int chunk = 0; chunk < chunks(); ++chunk) {
    std::uint64_t word = get(Kind::mask, chunk);
    std::uint32_t bits = 0;
    for (int bit = 0; bit < 32 && 32 * chunk + bit < ranks_; ++bit) {
      const int rank = 32 * chunk + bit;
      const bool is_in = generation_of(get(Kind::here, rank)) == generation && !out[static_cast<std::size_t>(rank / ranks_a_node_)];
      bits |= is_in ? 1u << bit : 0u;
    }
    while (generation_of(word) < generation && !store_.compare_set({Kind::mask, chunk}, word, pack_word(generation, bits)))
      continue;
  }
}

/// Takes the mask over, and the step at which all go on: the earliest that any who stayed has finished. Nobody has left a step
/// behind that another one had not finished, so this is the last that anybody left, or one that all have finished.
/// False where somebody has gone to the next roll call already: nothing comes of this generation.
bool Agreement::adopt(std::uint32_t generation) {
  const Members now = masked();
  bool in = now.live[static_cast<std::size_t>(rank_)];
  for (int chunk = 0; chunk < chunks(); ++chunk) in = in && generation_of(get(Kind::mask, chunk)) == generation;
  if (!in) throw lost();
  members_ = now;
  std::optional<std::uint32_t> earliest;
  for (int rank = 0; rank < ranks_; ++rank) {
    if (!now.live[static_cast<std::size_t>(rank)]) continue;
    const std::uint64_t word = get(Kind::here, rank);
    if (generation_of(word) != generation) return false;
    if (!is_late(word) && (!earliest || is_before(steps_of(word), *earliest))) earliest = steps_of(word);
  }
  adopted_at_ = finished_ = earliest.value_or(finished_);
  late_ = false;
  return true;
}

void Agreement::join(std::chrono::nanoseconds patience) {
  const auto end = Store::Clock::now() + patience;
  late_ = true;
  for (;;) {
    members_ = masked();
    const std::uint32_t next = members_.generation + 1;
    // Who has come to a roll call stays there: where the process before this one has, its word must not change any more. Where it
    // was this process, in a wait that it gave up, it still is there; for the next one it would give up again before that begins.
    const bool comes = awaited_ == next || generation_of(here_word_) < next;
    if (comes) {
      publish(Kind::here, here_word_, next);
      awaited_ = next;
    }
    // For the process before this one, which the others take for a member still, they wait in their step.
    raise(members_.live[static_cast<std::size_t>(rank_)] ? Kind::called : Kind::asked, next);
    if (!store_.wait([&] { return masked().generation >= next; }, end))
      throw FaultError({rank_, -1, "coming back", "roll call of generation", next, members_.generation});
    const Members now = masked();
    if (comes && now.generation == next && now.live[static_cast<std::size_t>(rank_)] && adopt(next)) return;
  }
}

}  // namespace heddle
