// Numbers for people.
#pragma once

#include <algorithm>
#include <string>

namespace heddle::plan {

/// Commas between the thousands of a decimal number: 1234567.5 becomes 1,234,567.5.
inline std::string with_commas(std::string number) {
  for (std::size_t end = std::min(number.find('.'), number.size()); end > 3; end -= 3) {
    number.insert(number.begin() + static_cast<std::ptrdiff_t>(end - 3), ',');
  }
  return number;
}

}  // namespace heddle::plan
