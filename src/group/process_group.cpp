// Meeting of processes: rank 0 listens on an abstract Unix socket and hands the memfd to each rank
// that calls. After that the sockets are closed; everything else happens in the control segment.
#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <thread>

#include "group/host_group.hpp"

namespace heddle {

namespace {

using Clock = std::chrono::steady_clock;

/// A file descriptor that closes itself.
struct Descriptor {
  int number = -1;
  explicit Descriptor(int value) : number(value) {}
  ~Descriptor() {
    if (number >= 0) close(number);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
};

struct Hello {
  std::uint32_t magic = 0x48656464;
  std::int32_t rank = 0;
  std::int32_t ranks = 0;
};

struct Address {
  sockaddr_un value{};
  socklen_t length = 0;
};

Address address_of(const std::string& name) {
  Address address;
  address.value.sun_family = AF_UNIX;
  const std::string text = "heddle." + name;
  if (name.empty() || text.size() + 1 > sizeof(address.value.sun_path)) {
    throw InputError(fmt::format("a group's name has 1 to {} characters, not {}", sizeof(address.value.sun_path) - 9, name.size()));
  }
  std::memcpy(address.value.sun_path + 1, text.data(), text.size());
  address.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + text.size());
  return address;
}

int milliseconds_left(Clock::time_point end) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now()).count();
  return static_cast<int>(std::max<long long>(left, 0));
}

bool wait_readable(int descriptor, Clock::time_point end) {
  pollfd entry{descriptor, POLLIN, 0};
  int ready = 0;
  do {
    ready = poll(&entry, 1, milliseconds_left(end));
  } while (ready < 0 && errno == EINTR);
  return ready > 0;
}

/// Sends the status byte of a greeting; with the memfd where the caller is welcome.
void answer(int connection, char status, int descriptor) {
  iovec data{&status, 1};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  if (status == 'w') {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &descriptor, sizeof(int));
  }
  sendmsg(connection, &message, MSG_NOSIGNAL);
}

std::shared_ptr<HostMemory> welcome_all(const std::string& name, int ranks, Clock::time_point end) {
  const Address address = address_of(name);
  const Descriptor listener(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (bind(listener.number, reinterpret_cast<const sockaddr*>(&address.value), address.length) != 0 ||
      listen(listener.number, ranks) != 0) {
    throw InputError(
        fmt::format("group \"{}\": rank 0 cannot listen ({}); is another group of this name running?", name, std::strerror(errno)));
  }
  auto memory = HostMemory::create();
  const int status = memory->reserve(0, control_stride * static_cast<std::size_t>(ranks));
  if (status != 0) throw InputError(fmt::format("no memory for the control segment of {} ranks: {}", ranks, std::strerror(status)));
  std::vector<bool> here(static_cast<std::size_t>(ranks), false);
  here[0] = true;
  for (int missing = ranks - 1; missing > 0;) {
    // The clock too: a greeting that cannot be taken (no descriptors are left, say) stays readable.
    if (Clock::now() >= end || !wait_readable(listener.number, end)) {
      const auto absent = static_cast<int>(std::find(here.begin(), here.end(), false) - here.begin());
      throw FaultError({0, absent, fmt::format("joining group \"{}\"", name), "greeting", static_cast<std::uint64_t>(ranks - 1),
                        static_cast<std::uint64_t>(ranks - 1 - missing)});
    }
    const Descriptor connection(accept4(listener.number, nullptr, nullptr, SOCK_CLOEXEC));
    Hello hello;
    if (connection.number < 0 || !wait_readable(connection.number, std::min(end, Clock::now() + std::chrono::seconds(1))) ||
        recv(connection.number, &hello, sizeof hello, 0) != static_cast<ssize_t>(sizeof hello) || hello.magic != Hello{}.magic) {
      continue;  // not one of us
    }
    const bool fits = hello.ranks == ranks && hello.rank > 0 && hello.rank < ranks && !here[static_cast<std::size_t>(hello.rank)];
    answer(connection.number, fits ? 'w' : 'r', memory->descriptor());
    if (!fits) {
      throw InputError(fmt::format("group \"{}\" of {} ranks: refused a process that came as rank {} of {}", name, ranks,
                                   hello.rank, hello.ranks));
    }
    here[static_cast<std::size_t>(hello.rank)] = true;
    --missing;
  }
  return memory;
}

/// What rank 0 answered: the memfd with a welcome, or none. Nothing at all if rank 0 has gone.
struct Answer {
  bool came = false;
  std::shared_ptr<HostMemory> memory;
};

Answer receive_answer(int connection) {
  char status = 0;
  iovec data{&status, 1};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  if (recvmsg(connection, &message, MSG_CMSG_CLOEXEC) != 1) return {};
  const cmsghdr* header = CMSG_FIRSTHDR(&message);
  if (status != 'w' || header == nullptr || header->cmsg_type != SCM_RIGHTS) return {true, nullptr};
  int descriptor = -1;
  std::memcpy(&descriptor, CMSG_DATA(header), sizeof(int));
  return {true, HostMemory::adopt(descriptor)};
}

std::shared_ptr<HostMemory> call_rank_0(const std::string& name, int rank, int ranks, Clock::time_point end) {
  const Address address = address_of(name);
  const std::string phase = fmt::format("joining group \"{}\"", name);
  for (;;) {
    const Descriptor connection(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (connect(connection.number, reinterpret_cast<const sockaddr*>(&address.value), address.length) == 0) {
      const Hello hello{Hello{}.magic, rank, ranks};
      send(connection.number, &hello, sizeof hello, MSG_NOSIGNAL);
      const Answer answer = wait_readable(connection.number, end) ? receive_answer(connection.number) : Answer{};
      if (!answer.came) throw FaultError({rank, 0, phase, "answer", 1, 0});
      if (answer.memory) return answer.memory;
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
  check_group_size(rank, ranks);
  const auto end = Clock::now() + options.deadline;
  auto memory = rank == 0 ? welcome_all(name, ranks, end) : call_rank_0(name, rank, ranks, end);
  auto group = std::make_unique<HostGroup>(std::move(memory), rank, ranks, options);
  group->barrier("joining the group");
  return group;
}

}  // namespace heddle
