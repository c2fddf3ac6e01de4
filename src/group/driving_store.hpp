// The store of a group over nodes as one of its ranks waits on it: meanwhile its messages make progress.
#pragma once

#include <memory>
#include <utility>

#include "heddle/nodes.hpp"
#include "heddle/store.hpp"

namespace heddle {

class DrivingStore final : public Store {
 public:
  DrivingStore(std::shared_ptr<Store> inner, NodeLink& link) : inner_(std::move(inner)), link_(link) {}
  std::uint64_t get(const StoreKey& key) const override { return inner_->get(key); }
  bool compare_set(const StoreKey& key, std::uint64_t& expected, std::uint64_t desired) override {
    return inner_->compare_set(key, expected, desired);
  }
  bool wait(const std::function<bool()>& there, Clock::time_point end) override {
    const auto look = [&] {
      link_.progress();
      return there();
    };
    return inner_->wait(look, end);
  }

 private:
  std::shared_ptr<Store> inner_;
  NodeLink& link_;
};

}  // namespace heddle
