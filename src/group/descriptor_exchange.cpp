#include "group/descriptor_exchange.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <random>

#include "group/agreement.hpp"
#include "group/text_reader.hpp"

namespace heddle {

namespace {

using Clock = std::chrono::steady_clock;

/// Where a member listens, the key that its callers must bring, and how many descriptors it gives.
struct Meeting {
  std::string name;
  std::uint64_t key = 0;
  std::size_t descriptors = 0;
};

std::uint64_t random_number() {
  std::random_device device;
  return static_cast<std::uint64_t>(device()) << 32 | device();
}

std::vector<Meeting> tell_meetings(Group& group, const Meeting& mine, const std::string& what) {
  std::vector<Meeting> all;
  for (const std::string& text : group.exchange(fmt::format("{} {} {}", mine.name, mine.key, mine.descriptors), what)) {
    TextReader told(text);
    Meeting& meeting = all.emplace_back();
    meeting.name = told.word();
    told.number(meeting.key);
    told.number(meeting.descriptors);
  }
  return all;
}

/// Greets a member with the own descriptors. They lie in its queue, so nobody has to take turns.
void give(const Group& group, int peer, const Meeting& meeting, std::span<const int> mine, const std::string& what) {
  const Descriptor connection = call(meeting.name);
  if (!connection || !send_greeting(connection, {meeting.key, group.rank(), group.ranks()}, mine))
    throw FaultError({group.rank(), peer, what, "open socket", 1, 0});
}

}  // namespace

std::vector<std::vector<Descriptor>> exchange_descriptors(Group& group, std::span<const int> mine, const std::string& what) {
  const auto members = static_cast<std::size_t>(group.ranks());
  const auto self = static_cast<std::size_t>(group.rank());
  const Meeting own{fmt::format("pass.{}.{}.{:016x}", getpid(), self, random_number()), random_number(), mine.size()};
  Descriptor listener;
  step_together(group, what, [&] {
    listener = listen_on(own.name, group.ranks());
    if (!listener) throw InputError(fmt::format("{}: cannot listen for the others: {}", what, std::strerror(errno)));
  });
  const std::vector<Meeting> meetings = tell_meetings(group, own, what);
  std::vector<std::vector<Descriptor>> taken(members);
  std::vector<bool> missing = group.live();
  missing[self] = false;
  const auto wanted = static_cast<std::uint64_t>(std::count(missing.begin(), missing.end(), true));
  for (std::size_t peer = 0; peer < members; ++peer) {
    if (missing[peer]) give(group, static_cast<int>(peer), meetings[peer], mine, what);
  }
  const WaitEnd end = Clock::now() + group.deadline();
  for (std::uint64_t came = 0; came < wanted;) {
    const Descriptor connection = accept_caller(listener, end);
    if (Clock::now() >= end) {
      const auto absent = static_cast<int>(std::find(missing.begin(), missing.end(), true) - missing.begin());
      throw FaultError({group.rank(), absent, what, "descriptors", wanted, came});
    }
    if (!connection) continue;
    auto message = receive_message(connection, sizeof(Greeting), 253, std::min(end, Clock::now() + std::chrono::seconds(1)));
    if (!message) continue;
    Greeting greeting;
    std::memcpy(&greeting, message->bytes.data(), sizeof greeting);
    const auto peer = static_cast<std::size_t>(greeting.member);
    const bool known = greeting.key == own.key && greeting.member >= 0 && peer < members && missing[peer];
    if (!known || message->descriptors.size() != meetings[peer].descriptors) continue;  // not one of us
    taken[peer] = std::move(message->descriptors);
    missing[peer] = false;
    ++came;
  }
  return taken;
}

}  // namespace heddle
