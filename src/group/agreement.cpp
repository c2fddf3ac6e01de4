#include "group/agreement.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "group/control.hpp"

namespace heddle {

namespace {

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    lines.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return lines;
}

int first_live(const Group& group) {
  return static_cast<int>(std::find(group.live().begin(), group.live().end(), true) - group.live().begin());
}

}  // namespace

// In pieces, until no member has a full one left.
std::vector<std::string> exchange_texts(Group& group, const std::string& mine, const std::string& what) {
  std::vector<std::string> all(static_cast<std::size_t>(group.ranks()));
  bool more = true;
  for (std::size_t begin = 0; more; begin += control_text_bytes) {
    more = false;
    const auto pieces = group.exchange(begin < mine.size() ? mine.substr(begin, control_text_bytes) : "", what);
    for (std::size_t member = 0; member < all.size(); ++member) {
      all[member] += pieces[member];
      more = more || pieces[member].size() == control_text_bytes;
    }
  }
  return all;
}

void compare_configurations(Group& group, const std::string& configuration, const std::string& member) {
  const auto all = exchange_texts(group, configuration, "comparison of configurations");
  const int first = first_live(group);
  const auto expected = lines_of(all[static_cast<std::size_t>(first)]);
  for (int other = first + 1; other < group.ranks(); ++other) {
    if (!group.live()[static_cast<std::size_t>(other)]) continue;
    const auto found = lines_of(all[static_cast<std::size_t>(other)]);
    for (std::size_t i = 0; i < std::max(expected.size(), found.size()); ++i) {
      const std::string want = i < expected.size() ? expected[i] : "nothing";
      const std::string have = i < found.size() ? found[i] : "nothing";
      if (want == have) continue;
      const char* plural = member.back() == 's' ? "es" : "s";
      throw InputError(fmt::format("{0}{1} disagree: {0} {2} was created with {3}, {0} {4} with {5}; all {0}{1} need the same",
                                   member, plural, other, have, first, want));
    }
  }
}

void step_together(Group& group, const std::string& what, const std::function<void()>& step) {
  std::string trouble;
  try {
    step();
  } catch (const InputError& error) {
    trouble = std::string("i") + error.what();
  } catch (const std::exception& error) {
    trouble = std::string("f") + error.what();
  }
  for (const std::string& text : exchange_texts(group, trouble, what)) {
    if (text.empty()) continue;
    if (text.front() == 'i') throw InputError(text.substr(1));
    throw Error(ErrorKind::fault, text.substr(1));
  }
}

}  // namespace heddle
