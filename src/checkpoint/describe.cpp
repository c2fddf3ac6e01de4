#include "checkpoint/describe.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace heddle::checkpoint {

std::string one_line(std::string_view text) {
  constexpr std::size_t longest = 200;
  std::string line(text.substr(0, longest));
  for (char& character : line) {
    const auto code = static_cast<unsigned char>(character);
    if (code < 0x20 || code == 0x7F) character = '?';
  }
  if (text.size() > longest) line += "...";
  return line;
}

std::string in_quotes(std::string_view name) { return fmt::format("'{}'", one_line(name)); }

std::string shape_text(std::span<const std::int64_t> shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

}  // namespace heddle::checkpoint
