// What the members of a group settle before they share anything: that their texts agree, and whether a step that each
// took alone went well on all. Collective; an error is thrown on every member alike.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "heddle/group.hpp"

namespace heddle {

/// Every member's text, however long; dead members give "".
std::vector<std::string> exchange_texts(Group& group, const std::string& mine, const std::string& what);

/// Compares every member's configuration, "name=value" lines, with the first live one's. Throws InputError naming the
/// first value that differs; `member` says what a member is called there.
void compare_configurations(Group& group, const std::string& configuration, const std::string& member = "rank");

/// Takes a step on every member and tells all how it went: if it threw on one, that one's error is thrown on all (as an
/// InputError, or as an Error of kind fault).
void step_together(Group& group, const std::string& what, const std::function<void()>& step);

}  // namespace heddle
