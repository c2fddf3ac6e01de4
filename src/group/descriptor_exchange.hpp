// Descriptors from every member of a group to every other one. Processes that share nothing but a host group hand each
// other memory this way.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "group/descriptors.hpp"
#include "heddle/group.hpp"

namespace heddle {

/// Collective: gives `mine` to every other live member and returns what each of them gave (nothing of the own member and
/// of dead ones). Members meet at abstract sockets whose random names go through Group::exchange. `mine` stays the
/// caller's. Throws FaultError naming the member that did not come within the group's deadline.
std::vector<std::vector<Descriptor>> exchange_descriptors(Group& group, std::span<const int> mine, const std::string& what);

}  // namespace heddle
