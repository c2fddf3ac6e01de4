// Tensor-parallel experts: which part of every expert's intermediate size a rank holds, and weights cut to it on the host.
#pragma once

#include <vector>

#include "heddle/experts.hpp"

namespace heddle {

/// [first, first + count) of an expert's intermediate size.
struct SliceRange {
  int first = 0;
  int count = 0;
};

/// Slices begin at multiples of 128, so that groups of activations and blocks of scales are those of the whole expert, and are
/// as even as that allows. Throws InputError where there are fewer such parts than ranks.
SliceRange slice_of_rank(int intermediate, int rank, int ranks);

/// Experts cut to a slice, with their memory: rows of gate and up, columns of down.
class ExpertSlices {
 public:
  ExpertSlices(const std::vector<ExpertWeights>& experts, const SliceRange& slice);
  const std::vector<ExpertWeights>& views() const { return views_; }  ///< valid while this object lives

 private:
  std::vector<std::vector<std::byte>> memory_;
  std::vector<ExpertWeights> views_;
};

}  // namespace heddle
