// Errors are for people: what happened, where, with which numbers, and what would be right.
// The library throws these and nothing else; it never exits, traps or aborts.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace heddle {

/// What kind of failure an Error reports. The values are the command's exit statuses.
enum class ErrorKind : int {
  check = 1,  ///< a comparison or verification missed its bound
  input = 2,  ///< bad arguments, shapes or files; nothing was started
  fault = 3,  ///< a run-time fault: a deadline passed, a rank died or aborted
};

/// One line of text for a person, and its kind.
class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  ErrorKind kind() const noexcept { return kind_; }

 private:
  ErrorKind kind_;
};

/// Bad arguments or files: say what, where, and what would be right.
class InputError : public Error {
 public:
  explicit InputError(const std::string& message) : Error(ErrorKind::input, message) {}
};

/// Which wait ended without its word (docs/protocols/README.md). `peer` is the rank that should have written
/// the word, -1 where no single rank is meant.
struct Fault {
  int rank = -1;      ///< the rank that gave up
  int peer = -1;      ///< the rank it was waiting for
  std::string phase;  ///< e.g. "low_latency dispatch"
  std::string word;   ///< e.g. "count of expert 3 from rank 1"
  std::uint64_t expected = 0;
  std::uint64_t seen = 0;
};

/// A run-time fault with its record.
class FaultError : public Error {
 public:
  explicit FaultError(Fault fault);
  const Fault& fault() const noexcept { return fault_; }

 private:
  Fault fault_;
};

}  // namespace heddle
