// A link whose messages belong to an era: what was sent in an earlier one is not found any more. Each era has tags of its own, so
// that a message that comes late, or never whole, is in nobody's way.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "heddle/nodes.hpp"

namespace heddle {

class EraLink final : public NodeLink {
 public:
  explicit EraLink(std::shared_ptr<NodeLink> inner) : inner_(std::move(inner)) {}

  /// Nothing that was posted before needs to leave any more; what has come is thrown away.
  void begin(std::uint32_t era) {
    inner_->abandon();
    for (int tag = 0; tag < tags_an_era; ++tag) {
      while (take_any(tag)) continue;
    }
    first_tag_ = tags_an_era * static_cast<int>(era % eras);
  }

  std::size_t most_bytes() const override { return inner_->most_bytes(); }
  void post(int peer, int tag, NodeMessage message) override { inner_->post(peer, first_tag_ + tag, std::move(message)); }
  std::optional<NodeMessage> take(int peer, int tag) override { return inner_->take(peer, first_tag_ + tag); }
  std::optional<NodeMessage> take_any(int tag) override { return inner_->take_any(first_tag_ + tag); }
  bool idle() override { return inner_->idle(); }
  bool progress() override { return inner_->progress(); }
  void abandon() override { inner_->abandon(); }

  NodeLink& inner() const { return *inner_; }

 private:
  static constexpr int tags_an_era = 8;        // at least those of NodeTag
  static constexpr std::uint32_t eras = 4096;  // MPI promises tags up to 32,767

  std::shared_ptr<NodeLink> inner_;
  int first_tag_ = 0;
};

}  // namespace heddle
