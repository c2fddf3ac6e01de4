// Meeting of processes: rank 0 listens on an abstract Unix socket and hands the memfd to each rank
// that calls. After that the sockets are closed; everything else happens in the control segment.
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>

#include "group/descriptors.hpp"
#include "group/door.hpp"
#include "group/host_group.hpp"

namespace heddle {

namespace {

using Clock = std::chrono::steady_clock;

/// The greeting of the next caller who is one of us, or none.
std::optional<Greeting> greeting_of(const Descriptor& connection, WaitEnd end) {
  if (!connection) return std::nullopt;
  const auto message = receive_message(connection, sizeof(Greeting), 0, std::min(end, Clock::now() + std::chrono::seconds(1)));
  if (!message) return std::nullopt;
  Greeting greeting;
  std::memcpy(&greeting, message->bytes.data(), sizeof greeting);
  return greeting.key == group_key ? std::optional(greeting) : std::nullopt;
}

std::shared_ptr<HostMemory> welcome_all(const std::string& name, int ranks, WaitEnd end) {
  const Descriptor listener = listen_on(name, ranks);
  if (!listener) {
    throw InputError(
        fmt::format("group \"{}\": rank 0 cannot listen ({}); is another group of this name running?", name, std::strerror(errno)));
  }
  auto memory = create_group_memory(ranks);
  std::vector<bool> here(static_cast<std::size_t>(ranks), false);
  here[0] = true;
  for (int missing = ranks - 1; missing > 0;) {
    // The clock too: a greeting that cannot be taken (no descriptors are left, say) stays readable.
    const Descriptor connection = Clock::now() < end ? accept_caller(listener, end) : Descriptor();
    if (!connection && Clock::now() >= end) {
      const auto absent = static_cast<int>(std::find(here.begin(), here.end(), false) - here.begin());
      throw FaultError({0, absent, fmt::format("joining group \"{}\"", name), "greeting", static_cast<std::uint64_t>(ranks - 1),
                        static_cast<std::uint64_t>(ranks - 1 - missing)});
    }
    const auto hello = greeting_of(connection, end);
    if (!hello) continue;  // not one of us
    const bool fits =
        hello->members == ranks && hello->member > 0 && hello->member < ranks && !here[static_cast<std::size_t>(hello->member)];
    const int descriptor = memory->descriptor();
    send_message(connection, std::span(fits ? &welcome : &refusal, 1), std::span(&descriptor, fits ? 1 : 0));
    if (!fits) {
      throw InputError(fmt::format("group \"{}\" of {} ranks: refused a process that came as rank {} of {}", name, ranks,
                                   hello->member, hello->members));
    }
    here[static_cast<std::size_t>(hello->member)] = true;
    --missing;
  }
  return memory;
}

std::shared_ptr<HostMemory> call_rank_0(const std::string& name, int rank, int ranks, WaitEnd end) {
  const std::string phase = fmt::format("joining group \"{}\"", name);
  for (;;) {
    const Descriptor connection = call(name);
    if (connection) {
      send_greeting(connection, {group_key, rank, ranks});
      auto answer = receive_message(connection, 1, 1, end);
      if (!answer) throw FaultError({rank, 0, phase, "answer", 1, 0});
      if (answer->bytes[0] == welcome && answer->descriptors.size() == 1)
        return HostMemory::adopt(answer->descriptors[0].release());
      throw InputError(
          fmt::format("group \"{}\": rank 0 refused rank {} of {}; do all processes name the same number of ranks and "
                      "different ranks?",
                      name, rank, ranks));
    }
    if (Clock::now() >= end) throw FaultError({rank, 0, phase, "open socket", 1, 0});
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

}  // namespace

std::unique_ptr<Group> join_process_group(const std::string& name, int rank, int ranks, const GroupOptions& options) {
  return join_host_group(name, rank, ranks, options);
}

std::unique_ptr<HostGroup> join_host_group(const std::string& name, int rank, int ranks, const GroupOptions& options) {
  check_group_size(rank, ranks);
  const auto end = Clock::now() + options.deadline;
  auto memory = rank == 0 ? welcome_all(name, ranks, end) : call_rank_0(name, rank, ranks, end);
  auto group = std::make_unique<HostGroup>(std::move(memory), rank, ranks, options, std::make_unique<Door>(name, rank));
  group->barrier("joining the group");
  return group;
}

std::unique_ptr<Group> rejoin_process_group(const std::string& name, int rank, int ranks, const GroupOptions& options) {
  return rejoin_host_group(name, rank, ranks, options);
}

std::unique_ptr<HostGroup> rejoin_host_group(const std::string& name, int rank, int ranks, const GroupOptions& options) {
  check_group_size(rank, ranks);
  auto memory = knock(name, rank, ranks, Clock::now() + options.deadline);
  return std::make_unique<HostGroup>(std::move(memory), rank, ranks, options, std::make_unique<Door>(name, rank));
}

}  // namespace heddle
