#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <sstream>

#include "group/control.hpp"
#include "heddle/group.hpp"
#include "signal/fault.hpp"
#include "signal/words.hpp"

namespace heddle {

namespace {

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

/// Every rank's text, however long: in pieces, until no rank has a full one left.
std::vector<std::string> exchange_texts(Group& group, const std::string& mine, const std::string& what) {
  std::vector<std::string> all(static_cast<std::size_t>(group.ranks()));
  bool more = true;
  for (std::size_t begin = 0; more; begin += control_text_bytes) {
    more = false;
    const auto pieces = group.exchange(begin < mine.size() ? mine.substr(begin, control_text_bytes) : "", what);
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
      all[rank] += pieces[rank];
      more = more || pieces[rank].size() == control_text_bytes;
    }
  }
  return all;
}

/// Compares every rank's configuration with the first live rank's; all ranks see the same texts and throw alike.
void compare_configurations(Group& group, const std::string& configuration) {
  const auto all = exchange_texts(group, configuration, "comparison of configurations");
  int first = 0;
  while (!group.live()[static_cast<std::size_t>(first)]) ++first;
  const auto expected = lines_of(all[static_cast<std::size_t>(first)]);
  for (int rank = first + 1; rank < group.ranks(); ++rank) {
    if (!group.live()[static_cast<std::size_t>(rank)]) continue;
    const auto found = lines_of(all[static_cast<std::size_t>(rank)]);
    for (std::size_t i = 0; i < std::max(expected.size(), found.size()); ++i) {
      const std::string want = i < expected.size() ? expected[i] : "nothing";
      const std::string have = i < found.size() ? found[i] : "nothing";
      if (want == have) continue;
      throw InputError(fmt::format("ranks disagree: rank {} was created with {}, rank {} with {}; all ranks need the same", rank,
                                   have, first, want));
    }
  }
}

}  // namespace

Workspace::Workspace(Group& group, std::size_t bytes, const std::string& configuration) : group_(&group) {
  compare_configurations(group, configuration + fmt::format("heap_bytes={}\n", bytes));
  heap_ = group.create_heap(std::max(bytes, heap_header_bytes));
}

void Workspace::throw_if_aborted() const { heddle::throw_if_aborted(heap_.view); }

void Workspace::refuse(std::uint64_t expected, std::uint64_t seen) const {
  raise_abort(heap_.view, {{WordKind::refused, -1, -1}, heap_.view.rank, expected, seen});
}

void Workspace::reset(const std::vector<bool>& live) {
  group_->reset(live);
  // Nobody of the live ranks is inside a protocol now. Words carry epochs, so raising the epoch past
  // every rank's makes all of them stale at once; only the header itself is zeroed.
  Word epoch = 0;
  for (int rank = 0; rank < group_->ranks(); ++rank) {
    epoch = std::max(epoch, std::atomic_ref<Word>(heap_.view.at<HeapHeader>(rank, 0)->epoch).load());
  }
  group_->barrier("workspace reset");
  auto* header = heap_.view.mine<HeapHeader>(0);
  std::atomic_ref<Word>(header->abort).store(0);
  header->fault = {};
  std::atomic_ref<Word>(header->epoch).store(epoch + 2);  // one more than any call that was under way
  group_->barrier("workspace reset");
}

void Workspace::reset() { reset(group_->live()); }

void Workspace::close() {
  group_->release_heap(heap_);
  heap_ = {};
}

}  // namespace heddle
