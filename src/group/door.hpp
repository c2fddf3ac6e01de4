// How a process takes the place of a lost one. Each rank has a door, an abstract Unix socket; who runs steps looks there between
// two of them, without waiting, and hands the group's memory to who has called.
#pragma once

#include <memory>
#include <string>

#include "group/descriptors.hpp"
#include "group/memory.hpp"

namespace heddle {

/// Tells members of a host group's meetings from strangers.
constexpr std::uint64_t group_key = 0x48656464;
constexpr std::byte welcome{'w'};
constexpr std::byte refusal{'r'};

class Door {
 public:
  /// Opened when it is first answered.
  Door(std::string group_name, int rank);
  /// Lets in who waits; returns at once where nobody does.
  void answer(const HostMemory& memory, int ranks);

 private:
  std::string name_;
  Descriptor listener_;
};

/// Knocks at the doors of all other ranks until one opens. Errors as of rejoin_process_group.
std::shared_ptr<HostMemory> knock(const std::string& group_name, int rank, int ranks, WaitEnd end);

}  // namespace heddle
