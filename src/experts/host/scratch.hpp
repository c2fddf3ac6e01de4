// Memory that a thread keeps from call to call, so that nothing is allocated per tile.
#pragma once

#include <cstddef>
#include <memory>
#include <new>

namespace heddle {

/// An array that only grows, aligned to 64 bytes. What it holds after a resize is unspecified.
template <class T>
class Scratch {
 public:
  T* resize(std::size_t count) {
    if (count > capacity_) {
      data_.reset();
      capacity_ = 0;
      data_.reset(static_cast<T*>(::operator new(count * sizeof(T), alignment)));
      capacity_ = count;
    }
    return data_.get();
  }
  T* data() const { return data_.get(); }

 private:
  static constexpr std::align_val_t alignment{64};
  struct Free {
    void operator()(T* memory) const { ::operator delete(memory, alignment); }
  };
  std::unique_ptr<T, Free> data_;
  std::size_t capacity_ = 0;
};

}  // namespace heddle
