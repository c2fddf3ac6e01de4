// Tensor-parallel experts for the reference: rank r's slice of expert e is an expert of its own, e * ranks + r, which every token
// that chooses e chooses on every rank. It is e but for a down matrix that is zero outside of the slice.
#pragma once

#include <functional>
#include <map>
#include <span>
#include <vector>

#include "heddle/experts.hpp"

namespace heddle {

class SlicesAsExperts {
 public:
  /// Rank r has columns [ends[r - 1], ends[r]) of every down matrix. `expert`: the whole ones.
  SlicesAsExperts(std::function<ExpertWeights(int)> expert, std::vector<int> ends, std::span<const std::int32_t> ids,
                  std::span<const float> weights, int experts);

  const std::vector<std::int32_t>& ids() const { return ids_; }   ///< [tokens, topk * ranks]
  const std::vector<float>& weights() const { return weights_; }  ///< likewise
  const std::vector<int>& rank_of() const { return rank_of_; }    ///< [experts * ranks]
  ExpertWeights expert(int id);                                   ///< valid while this object lives

 private:
  std::function<ExpertWeights(int)> whole_;
  std::vector<int> ends_;
  std::vector<std::int32_t> ids_;
  std::vector<float> weights_;
  std::vector<int> rank_of_;
  std::map<int, std::vector<std::byte>> down_;  ///< values of the down matrices
};

}  // namespace heddle
