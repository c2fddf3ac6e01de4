// Experts' weights as bytes of one layout, so that a rank can copy an expert that another one has without asking what it is.
#pragma once

#include <array>
#include <cstddef>

#include "heddle/experts.hpp"

namespace heddle {

/// A cell: values and scales of gate, up and down, each aligned to 64 bytes, and their tensor scales.
class CellLayout {
 public:
  /// Of experts like this one.
  explicit CellLayout(const ExpertWeights& like);

  std::size_t bytes() const { return bytes_; }
  /// Throws InputError, with `name`, for an expert of another kind or size.
  void store(const ExpertWeights& expert, std::byte* cell, const char* name) const;
  /// Views into the cell, with the tensor scales that stand in it now.
  ExpertWeights view(const std::byte* cell) const;

 private:
  struct Part {
    WeightMatrix shape;  ///< without its memory
    std::size_t values = 0, value_bytes = 0;
    std::size_t scales = 0, scale_bytes = 0;
    std::size_t tensor_scale = 0;
  };
  std::array<Part, 3> parts_;
  std::size_t bytes_ = 0;
};

}  // namespace heddle
