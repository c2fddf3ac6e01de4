#include "group/descriptors.hpp"

#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "heddle/error.hpp"

namespace heddle {

namespace {

constexpr std::size_t most_descriptors = 253;  // of one message; the kernel's SCM_MAX_FD

struct Address {
  sockaddr_un value{};
  socklen_t length = 0;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&value); }
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

bool wait_readable(const Descriptor& descriptor, WaitEnd end) {
  pollfd entry{descriptor.number(), POLLIN, 0};
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - std::chrono::steady_clock::now()).count();
    const int ready = poll(&entry, 1, static_cast<int>(std::clamp<long long>(left, 0, 1 << 30)));
    if (ready >= 0 || errno != EINTR) return ready > 0;
  }
}

/// Descriptors of a received message: all of them are taken, so that none stays open unnoticed.
std::vector<Descriptor> take_descriptors(msghdr& message) {
  std::vector<Descriptor> taken;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    std::vector<int> numbers((header->cmsg_len - CMSG_LEN(0)) / sizeof(int));
    std::memcpy(numbers.data(), CMSG_DATA(header), numbers.size() * sizeof(int));
    for (const int number : numbers) taken.emplace_back(number);
  }
  return taken;
}

}  // namespace

Descriptor::~Descriptor() {
  if (number_ >= 0) close(number_);
}

Descriptor listen_on(const std::string& name, int backlog) {
  const Address address = address_of(name);
  Descriptor listener(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!listener || bind(listener.number(), address.get(), address.length) != 0 || listen(listener.number(), backlog) != 0)
    return Descriptor();
  return listener;
}

Descriptor accept_caller(const Descriptor& listener, WaitEnd end) {
  if (!wait_readable(listener, end)) return Descriptor();
  return Descriptor(accept4(listener.number(), nullptr, nullptr, SOCK_CLOEXEC));
}

Descriptor call(const std::string& name) {
  const Address address = address_of(name);
  Descriptor connection(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!connection || connect(connection.number(), address.get(), address.length) != 0) return Descriptor();
  return connection;
}

bool send_message(const Descriptor& connection, std::span<const std::byte> bytes, std::span<const int> descriptors) {
  if (descriptors.size() > most_descriptors) {
    throw InputError(fmt::format("a message carries at most {} descriptors, not {}", most_descriptors, descriptors.size()));
  }
  iovec data{const_cast<std::byte*>(bytes.data()), bytes.size()};
  std::vector<cmsghdr> control(CMSG_SPACE(descriptors.size_bytes()) / sizeof(cmsghdr) + 1);  // aligned for a header
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  if (!descriptors.empty()) {
    message.msg_control = control.data();
    message.msg_controllen = CMSG_SPACE(descriptors.size_bytes());
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(descriptors.size_bytes());
    std::memcpy(CMSG_DATA(header), descriptors.data(), descriptors.size_bytes());
  }
  ssize_t sent = 0;
  do {
    sent = sendmsg(connection.number(), &message, MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  return sent == static_cast<ssize_t>(bytes.size());
}

std::optional<Message> receive_message(const Descriptor& connection, std::size_t bytes, std::size_t descriptors, WaitEnd end) {
  if (!wait_readable(connection, end)) return std::nullopt;
  Message received;
  received.bytes.resize(bytes);
  iovec data{received.bytes.data(), bytes};
  const std::size_t room = std::min(descriptors, most_descriptors) * sizeof(int);
  std::vector<cmsghdr> control(CMSG_SPACE(room) / sizeof(cmsghdr) + 1);
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = CMSG_SPACE(room);
  ssize_t came = 0;
  do {
    came = recvmsg(connection.number(), &message, MSG_CMSG_CLOEXEC);
  } while (came < 0 && errno == EINTR);
  if (came < 0) return std::nullopt;
  received.descriptors = take_descriptors(message);
  if (came != static_cast<ssize_t>(bytes) || received.descriptors.size() > descriptors) return std::nullopt;
  return received;
}

bool has_ended(const Descriptor& connection) {
  std::byte next{};
  const ssize_t came = recv(connection.number(), &next, 1, MSG_PEEK | MSG_DONTWAIT);
  return came == 0 || (came < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
}

bool send_greeting(const Descriptor& connection, const Greeting& greeting, std::span<const int> descriptors) {
  return send_message(connection, std::as_bytes(std::span(&greeting, 1)), descriptors);
}

}  // namespace heddle
