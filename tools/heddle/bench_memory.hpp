// Memory of a GPU for as long as a benchmark needs it.
#pragma once

#include <cstddef>

#include "heddle/error.hpp"

namespace heddle::tool {

/// Was it an allocation on a GPU that failed?
bool for_lack_of_memory(const Error& error);

/// Device memory of one GPU. Throws Error.
class Block {
 public:
  /// Zeroed. Throws Error if there is not so much.
  Block(int device, std::size_t bytes);
  ~Block();
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  template <class T>
  T* as() const {
    return static_cast<T*>(address_);
  }
  std::size_t bytes() const { return bytes_; }
  void write(const void* values, std::size_t bytes);

 private:
  int device_;
  std::size_t bytes_;
  void* address_ = nullptr;
};

}  // namespace heddle::tool
