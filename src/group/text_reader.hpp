// Words and numbers of a text that members of a group tell each other. Not a stream: what those make of digits hangs on the locale
// of the process, which belongs to whoever has loaded this library.
#pragma once

#include <charconv>
#include <string_view>
#include <type_traits>

namespace heddle {

class TextReader {
 public:
  /// The text must outlive the reader.
  explicit TextReader(std::string_view text) : rest_(text) {}

  /// The next word; empty at the end.
  std::string_view word() {
    skip_spaces();
    const std::string_view found = rest_.substr(0, rest_.find_first_of(spaces));
    rest_.remove_prefix(found.size());
    return found;
  }
  /// The next word as a whole number; false where there is none, and then `value` is as it was.
  template <class Number>
  bool number(Number& value) {
    static_assert(std::is_integral_v<Number>);
    const std::string_view found = word();
    Number parsed{};
    const auto [end, error] = std::from_chars(found.data(), found.data() + found.size(), parsed);
    if (error != std::errc() || end != found.data() + found.size()) return false;
    value = parsed;
    return true;
  }
  /// What is left of the line, without the spaces before it.
  std::string_view line() {
    skip_spaces();
    const std::string_view found = rest_.substr(0, rest_.find('\n'));
    rest_.remove_prefix(found.size());
    return found;
  }

 private:
  static constexpr std::string_view spaces = " \n";

  void skip_spaces() {
    const auto begin = rest_.find_first_not_of(spaces);
    rest_.remove_prefix(begin == rest_.npos ? rest_.size() : begin);
  }

  std::string_view rest_;
};

}  // namespace heddle
