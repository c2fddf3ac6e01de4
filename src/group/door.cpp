#include "group/door.hpp"

#include <fmt/format.h>

#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "heddle/error.hpp"

namespace heddle {

namespace {

using Clock = std::chrono::steady_clock;

std::string door_of(const std::string& group_name, int rank) { return fmt::format("{}.door.{}", group_name, rank); }

}  // namespace

Door::Door(std::string group_name, int rank) : name_(door_of(group_name, rank)) {}

// A stopped process of the same rank may still hold the name: then others have doors.
void Door::answer(const HostMemory& memory, int ranks) {
  if (!listener_) listener_ = listen_on(name_, ranks);
  if (!listener_) return;
  while (const Descriptor connection = accept_caller(listener_, Clock::now())) {
    // Who calls greets at once.
    const auto message = receive_message(connection, sizeof(Greeting), 0, Clock::now() + std::chrono::milliseconds(20));
    if (!message) continue;
    Greeting greeting;
    std::memcpy(&greeting, message->bytes.data(), sizeof greeting);
    const bool fits = greeting.key == group_key && greeting.members == ranks && greeting.member >= 0 && greeting.member < ranks;
    const int descriptor = memory.descriptor();
    send_message(connection, std::span(fits ? &welcome : &refusal, 1), std::span(&descriptor, fits ? 1 : 0));
  }
}

std::shared_ptr<HostMemory> knock(const std::string& group_name, int rank, int ranks, WaitEnd end) {
  std::vector<Descriptor> connections(static_cast<std::size_t>(ranks));
  do {
    for (int peer = 0; peer < ranks; ++peer) {
      if (peer == rank) continue;
      Descriptor& connection = connections[static_cast<std::size_t>(peer)];
      if (!connection) {
        connection = call(door_of(group_name, peer));
        if (connection && !send_greeting(connection, {group_key, rank, ranks})) connection = Descriptor();
      }
      if (!connection) continue;
      auto answer = receive_message(connection, 1, 1, Clock::now() + std::chrono::milliseconds(1));
      if (!answer) {
        if (has_ended(connection)) connection = Descriptor();  // who takes that rank's place has a door, too
        continue;
      }
      if (answer->bytes[0] == welcome && answer->descriptors.size() == 1)
        return HostMemory::adopt(answer->descriptors[0].release());
      throw InputError(fmt::format("group \"{}\": rank {} refused rank {} of {}; does the group have another number of ranks?",
                                   group_name, peer, rank, ranks));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  } while (Clock::now() < end);
  throw FaultError({rank, -1, fmt::format("coming back to group \"{}\"", group_name), "answer", 1, 0});
}

}  // namespace heddle
