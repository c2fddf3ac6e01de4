#include <fmt/format.h>

#include <algorithm>
#include <atomic>

#include "group/agreement.hpp"
#include "heddle/group.hpp"
#include "signal/fault.hpp"
#include "signal/words.hpp"

namespace heddle {

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
  std::atomic_ref<Word>(header->call).store(epoch + 2);
  group_->barrier("workspace reset");
}

void Workspace::reset() { reset(group_->live()); }

// The addresses stay until the end of the workspace: who still has a view of a heap that is gone sees zeros.
void Workspace::close() { group_->release_heap(heap_); }
void Workspace::abandon() { group_->abandon_heap(heap_); }

Store& Group::store() { throw InputError("this group has no store that outlives its ranks"); }

}  // namespace heddle
