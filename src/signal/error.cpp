#include "heddle/error.hpp"

#include <fmt/format.h>

#include "signal/words.hpp"

namespace heddle {

namespace {
std::string describe(const Fault& fault) {
  if (fault.phase == word_text(WordKind::team).phase && fault.peer == fault.rank) {
    return fmt::format("rank {} gave up in {}: {} of {} of its own workers (on a GPU: its CTAs) had come", fault.rank, fault.phase,
                       fault.seen, fault.expected);
  }
  const std::string peer = fault.peer < 0 ? "" : fmt::format(" from rank {}", fault.peer);
  return fmt::format("rank {} gave up in {}: waited for {}{}, expected {}, saw {}", fault.rank, fault.phase, fault.word, peer,
                     fault.expected, fault.seen);
}
}  // namespace

FaultError::FaultError(Fault fault) : Error(ErrorKind::fault, describe(fault)), fault_(std::move(fault)) {}

}  // namespace heddle
