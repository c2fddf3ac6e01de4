// Looking something up by its name, for people who mistype.
#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <span>
#include <string_view>
#include <vector>

#include "heddle/error.hpp"

namespace heddle::plan {

/// Throws InputError that lists the names.
template <typename Named>
const Named& find_named(std::span<const Named> all, std::string_view name, std::string_view what) {
  const auto found = std::find_if(all.begin(), all.end(), [&](const Named& one) { return one.name == name; });
  if (found == all.end()) {
    std::vector<std::string_view> names;
    std::transform(all.begin(), all.end(), std::back_inserter(names), [](const Named& one) { return one.name; });
    throw InputError(fmt::format("unknown {} '{}'; known are {}", what, name, fmt::join(names, ", ")));
  }
  return *found;
}

}  // namespace heddle::plan
