#include "balancing/cells.hpp"

#include <fmt/format.h>

#include <cstring>

#include "heddle/error.hpp"

namespace heddle {

namespace {

constexpr std::size_t alignment = 64;

std::size_t take(std::size_t& end, std::size_t bytes) {
  const std::size_t begin = end;
  end = (end + bytes + alignment - 1) / alignment * alignment;
  return begin;
}

std::array<const WeightMatrix*, 3> matrices(const ExpertWeights& expert) { return {&expert.gate, &expert.up, &expert.down}; }

void copy(std::span<const std::byte> from, std::byte* to) {
  if (!from.empty()) std::memcpy(to, from.data(), from.size());
}

}  // namespace

CellLayout::CellLayout(const ExpertWeights& like) {
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    const WeightMatrix& matrix = *matrices(like)[i];
    Part& part = parts_[i];
    part.shape = matrix;
    part.shape.values = part.shape.scales = {};
    part.value_bytes = matrix.values.size();
    part.scale_bytes = matrix.scales.size();
    part.values = take(bytes_, part.value_bytes);
    part.scales = take(bytes_, part.scale_bytes);
    part.tensor_scale = take(bytes_, sizeof(float));
  }
}

void CellLayout::store(const ExpertWeights& expert, std::byte* cell, const char* name) const {
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    const WeightMatrix& matrix = *matrices(expert)[i];
    const Part& part = parts_[i];
    if (matrix.kind != part.shape.kind || matrix.block_scale != part.shape.block_scale || matrix.rows != part.shape.rows ||
        matrix.cols != part.shape.cols || matrix.values.size() != part.value_bytes || matrix.scales.size() != part.scale_bytes) {
      throw InputError(fmt::format(
          "{}: a matrix of [{}, {}] and {} + {} bytes among others of [{}, {}] and {} + {}; experts that change places are "
          "of one kind and size",
          name, matrix.rows, matrix.cols, matrix.values.size(), matrix.scales.size(), part.shape.rows, part.shape.cols,
          part.value_bytes, part.scale_bytes));
    }
    copy(matrix.values, cell + part.values);
    copy(matrix.scales, cell + part.scales);
    std::memcpy(cell + part.tensor_scale, &matrix.tensor_scale, sizeof(float));
  }
}

ExpertWeights CellLayout::view(const std::byte* cell) const {
  std::array<WeightMatrix, 3> views;
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    const Part& part = parts_[i];
    views[i] = part.shape;
    views[i].values = {cell + part.values, part.value_bytes};
    views[i].scales = {cell + part.scales, part.scale_bytes};
    std::memcpy(&views[i].tensor_scale, cell + part.tensor_scale, sizeof(float));
  }
  return {views[0], views[1], views[2]};
}

}  // namespace heddle
