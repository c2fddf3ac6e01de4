// What benchmarks say of flags that make no sense.
#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string>
#include <vector>

#include "heddle/error.hpp"

namespace heddle::tool {

/// Throws InputError unless there are values and all are 1 or more.
inline void at_least_one(const char* option, const std::vector<int>& values) {
  if (values.empty()) throw InputError(fmt::format("{}: give at least one number", option));
  for (const int value : values) {
    if (value < 1) throw InputError(fmt::format("{} {}: at least 1 is needed", option, value));
  }
}

/// Throws InputError that lists the known words unless all given ones are among them.
inline void one_of(const char* option, const std::vector<std::string>& given, const std::vector<std::string>& known) {
  for (const std::string& word : given) {
    if (std::find(known.begin(), known.end(), word) == known.end())
      throw InputError(fmt::format("{} does not know '{}'; it takes {}", option, word, fmt::join(known, ", ")));
  }
}

}  // namespace heddle::tool
