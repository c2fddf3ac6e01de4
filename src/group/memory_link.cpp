#include "group/memory_link.hpp"

namespace heddle {

void MemoryPost::put(int from, int to, int tag, NodeMessage message) {
  const std::lock_guard lock(mutex_);
  if (is_cut(from) != is_cut(to)) return;
  queues_[{to, tag, from}].push_back(std::move(message));
}

std::optional<NodeMessage> MemoryPost::get(int from, int to, int tag) {
  const std::lock_guard lock(mutex_);
  const auto queue = queues_.find({to, tag, from});
  if (queue == queues_.end() || queue->second.empty()) return std::nullopt;
  NodeMessage message = std::move(queue->second.front());
  queue->second.pop_front();
  return message;
}

std::optional<NodeMessage> MemoryPost::get_any(int to, int tag) {
  const std::lock_guard lock(mutex_);
  for (auto queue = queues_.lower_bound({to, tag, 0}); queue != queues_.end(); ++queue) {
    if (queue->first.to != to || queue->first.tag != tag) break;
    if (queue->second.empty()) continue;
    NodeMessage message = std::move(queue->second.front());
    queue->second.pop_front();
    return message;
  }
  return std::nullopt;
}

void MemoryPost::cut(int first, int ranks) {
  const std::lock_guard lock(mutex_);
  cut_first_ = first;
  cut_ranks_ = ranks;
}

std::vector<std::shared_ptr<MemoryLink>> create_memory_links(int ranks) {
  const auto post = std::make_shared<MemoryPost>();
  std::vector<std::shared_ptr<MemoryLink>> links;
  for (int rank = 0; rank < ranks; ++rank) links.push_back(std::make_shared<MemoryLink>(post, rank));
  return links;
}

}  // namespace heddle
