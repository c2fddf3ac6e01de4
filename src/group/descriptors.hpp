// File descriptors between processes: abstract Unix sockets, whose names lie in no file system and vanish with
// their processes, and messages that carry descriptors. Every wait has an end.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace heddle {

/// A file descriptor that closes itself; below 0: none.
class Descriptor {
 public:
  explicit Descriptor(int number = -1) : number_(number) {}
  ~Descriptor();
  Descriptor(Descriptor&& other) noexcept : number_(other.release()) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  int number() const { return number_; }
  explicit operator bool() const { return number_ >= 0; }
  /// Hands it to the caller, who closes it.
  int release() { return std::exchange(number_, -1); }

 private:
  int number_;
};

/// The moment by which a wait must have ended.
using WaitEnd = std::chrono::steady_clock::time_point;

/// Listens on the abstract socket "heddle.`name`". None where it cannot, with errno set: EADDRINUSE if somebody
/// else does. Throws InputError for a name that does not fit an address.
Descriptor listen_on(const std::string& name, int backlog);
/// The next caller, or none where nobody came in time.
Descriptor accept_caller(const Descriptor& listener, WaitEnd end);
/// A connection to who listens on `name`, or none where nobody does.
Descriptor call(const std::string& name);

/// Sends one message of a few bytes and the descriptors with it (at most 253). False where the other side has gone.
bool send_message(const Descriptor& connection, std::span<const std::byte> bytes, std::span<const int> descriptors = {});

struct Message {
  std::vector<std::byte> bytes;
  std::vector<Descriptor> descriptors;
};
/// One message of exactly `bytes` bytes with at most `descriptors` descriptors; none where it did not come in time, the
/// other side has gone, or it is of another size.
std::optional<Message> receive_message(const Descriptor& connection, std::size_t bytes, std::size_t descriptors, WaitEnd end);

/// Has the other side gone, with nothing of it left to receive? Does not wait.
bool has_ended(const Descriptor& connection);

/// Who calls: the first message of a connection. `key` tells members from strangers.
struct Greeting {
  std::uint64_t key = 0;
  std::int32_t member = 0;
  std::int32_t members = 0;
};
bool send_greeting(const Descriptor& connection, const Greeting& greeting, std::span<const int> descriptors = {});

}  // namespace heddle
