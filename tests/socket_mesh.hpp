// Links between the processes of a test that stand for ranks on several nodes: sockets between every two, made before they are
// forked, and switches that cut nodes off, from the network or from the store.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <deque>
#include <map>
#include <utility>

#include "heddle/error.hpp"
#include "heddle/nodes.hpp"
#include "heddle/store.hpp"

namespace heddle {

/// A packet is a message: a process that is killed leaves none in pieces.
class SocketMesh {
 public:
  struct Switches {
    std::atomic<std::uint32_t> no_network, no_store;  ///< bits: ranks that are cut off
  };

  explicit SocketMesh(int ranks)
      : ranks_(ranks),
        switches_(
            static_cast<Switches*>(mmap(nullptr, sizeof(Switches), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {
    for (int a = 0; a < ranks; ++a) {
      for (int b = a + 1; b < ranks; ++b) {
        int pair[2];
        if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair) != 0) throw InputError("no sockets");
        ends_[{a, b}] = pair[0];
        ends_[{b, a}] = pair[1];
      }
    }
  }
  ~SocketMesh() {
    for (const auto& [name, end] : ends_) close(end);
    munmap(switches_, sizeof(Switches));
  }
  SocketMesh(const SocketMesh&) = delete;
  SocketMesh& operator=(const SocketMesh&) = delete;

  int ranks() const { return ranks_; }
  int end(int of, int to) const { return ends_.at({of, to}); }
  Switches& switches() const { return *switches_; }

 private:
  int ranks_;
  std::map<std::pair<int, int>, int> ends_;
  Switches* switches_;
};

class SocketLink final : public NodeLink {
 public:
  SocketLink(const SocketMesh& mesh, int rank) : mesh_(mesh), rank_(rank) {}

  std::size_t most_bytes() const override { return std::size_t{100} << 10; }
  void post(int peer, int tag, NodeMessage message) override {
    const std::uint32_t cut = mesh_.switches().no_network;
    if (((cut >> rank_ ^ cut >> peer) & 1) != 0) return;
    NodeMessage packet(sizeof tag + message.size());
    std::memcpy(packet.data(), &tag, sizeof tag);
    if (!message.empty()) std::memcpy(packet.data() + sizeof tag, message.data(), message.size());
    leaving_[peer].push_back(std::move(packet));
    idle();
  }
  std::optional<NodeMessage> take(int peer, int tag) override {
    idle();
    receive(peer);
    auto& queue = arrived_[{tag, peer}];
    if (queue.empty()) return std::nullopt;
    NodeMessage message = std::move(queue.front());
    queue.pop_front();
    return message;
  }
  std::optional<NodeMessage> take_any(int tag) override {
    for (int peer = 0; peer < mesh_.ranks(); ++peer) {
      if (peer == rank_) continue;
      if (auto message = take(peer, tag)) return message;
    }
    return std::nullopt;
  }
  bool idle() override {
    bool all = true;
    for (auto& [peer, queue] : leaving_) {
      while (!queue.empty() && send(mesh_.end(rank_, peer), queue.front().data(), queue.front().size(), MSG_NOSIGNAL) >= 0)
        queue.pop_front();
      all = all && queue.empty();
    }
    return all;
  }
  void abandon() override { leaving_.clear(); }

 private:
  void receive(int peer) {
    NodeMessage packet(most_bytes() + sizeof(int));
    for (;;) {
      const ssize_t got = recv(mesh_.end(rank_, peer), packet.data(), packet.size(), 0);
      if (got < static_cast<ssize_t>(sizeof(int))) return;
      int tag = 0;
      std::memcpy(&tag, packet.data(), sizeof tag);
      arrived_[{tag, peer}].emplace_back(packet.begin() + sizeof tag, packet.begin() + got);
    }
  }

  const SocketMesh& mesh_;
  int rank_;
  std::map<int, std::deque<NodeMessage>> leaving_;
  std::map<std::pair<int, int>, std::deque<NodeMessage>> arrived_;  ///< by tag and peer
};

/// A store that a rank does not reach while its switch is off.
class CutStore final : public Store {
 public:
  CutStore(std::shared_ptr<Store> inner, const SocketMesh& mesh, int rank) : inner_(std::move(inner)), mesh_(mesh), rank_(rank) {}
  std::uint64_t get(const StoreKey& key) const override {
    reach();
    return inner_->get(key);
  }
  bool compare_set(const StoreKey& key, std::uint64_t& expected, std::uint64_t desired) override {
    reach();
    return inner_->compare_set(key, expected, desired);
  }
  bool wait(const std::function<bool()>& there, Clock::time_point end) override { return inner_->wait(there, end); }

 private:
  void reach() const {
    if ((mesh_.switches().no_store >> rank_ & 1) != 0)
      throw Error(ErrorKind::fault, "the store cannot be reached: a switch is off");
  }
  std::shared_ptr<Store> inner_;
  const SocketMesh& mesh_;
  int rank_;
};

}  // namespace heddle
