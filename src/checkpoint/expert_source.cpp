#include "checkpoint/expert_source.hpp"

#include <fmt/format.h>

#include <utility>
#include <vector>

#include "checkpoint/describe.hpp"
#include "experts/words.hpp"
#include "heddle/error.hpp"

namespace heddle::checkpoint {

namespace {

void require_size(const MatrixSource& matrix, int rows, int cols, std::string_view why) {
  if (matrix.rows == rows && matrix.cols == cols) return;
  throw InputError(fmt::format("{}: is {} x {} values; {} x {} are needed ({})", matrix.values->label(), matrix.rows, matrix.cols,
                               rows, cols, why));
}

void require_kind(const MatrixSource& matrix, const MatrixSource& first) {
  if (matrix.kind == first.kind) return;
  throw InputError(fmt::format("{}: is {}, but {} is {}; the experts of a layer must be of one kind", matrix.values->label(),
                               kind_text(matrix.kind), in_quotes(first.values->name), kind_text(first.kind)));
}

class SeparateExperts final : public ExpertSource {
 public:
  explicit SeparateExperts(std::vector<ExpertTensors> experts) : experts_(std::move(experts)) {}

  int experts() const override { return static_cast<int>(experts_.size()); }
  ExpertSize size() const override { return experts_.front().size(); }
  WeightKind kind() const override { return experts_.front().gate.kind; }
  ExpertWeights load(int id, OwnedMemory& memory) const override { return experts_[static_cast<std::size_t>(id)].view(memory); }

 private:
  std::vector<ExpertTensors> experts_;
};

/// The ids must be 0, 1, 2, ... up to what config.json says, or up to the last one there.
void require_all_ids(const TensorTable& table, const LayerNames& layer, const ModelConfig& config) {
  const int last = *layer.ids.rbegin();
  const int expected = config.experts.value_or(last + 1);
  if (last >= expected) {
    throw InputError(fmt::format("{}: holds expert {} in {}, but {} says there are {} (0 to {})", table.place(), last,
                                 in_quotes(layer.prefix), config.file, expected, expected - 1));
  }
  for (int id = 0; id < expected; ++id) {
    if (layer.ids.contains(id)) continue;
    const std::string source = config.experts ? config.file : fmt::format("the last one is {}", last);
    throw InputError(fmt::format("{}: expert {} of {} is missing; {} of {} are there ({})", table.place(), id,
                                 in_quotes(layer.prefix + "experts."), layer.ids.size(), expected, source));
  }
}

}  // namespace

ExpertWeights ExpertTensors::view(OwnedMemory& memory) const {
  return {view_matrix(gate, memory), view_matrix(up, memory), view_matrix(down, memory)};
}

ExpertTensors find_expert(TensorTable& table, const std::string& stem) {
  const auto names = find_matrix_names(table, stem);
  if (!names) {
    throw InputError(fmt::format("{}: {} has no matrices; gate_proj, up_proj, down_proj or w1, w3, w2 are needed", table.place(),
                                 in_quotes(stem)));
  }
  ExpertTensors expert{find_matrix(table, fmt::format("{}{}", stem, names->gate)),
                       find_matrix(table, fmt::format("{}{}", stem, names->up)),
                       find_matrix(table, fmt::format("{}{}", stem, names->down))};
  const auto [hidden, intermediate] = expert.size();
  if (hidden % 64 != 0 || intermediate % 64 != 0) {
    throw InputError(fmt::format("{}: is {} x {} values; intermediate and hidden size must be multiples of 64",
                                 expert.gate.values->label(), intermediate, hidden));
  }
  require_size(expert.up, intermediate, hidden, "like the gate matrix");
  require_size(expert.down, hidden, intermediate, "the gate matrix transposed");
  require_kind(expert.up, expert.gate);
  require_kind(expert.down, expert.gate);
  return expert;
}

std::unique_ptr<ExpertSource> find_experts(TensorTable& table, const LayerNames& layer, const ModelConfig& config) {
  if (layer.fused && !layer.ids.empty()) {
    throw InputError(fmt::format("{}: {} has both single experts and fused tensors (gate_up_proj, down_proj); one form is needed",
                                 table.place(), in_quotes(layer.prefix + "experts.")));
  }
  if (layer.fused) return find_fused_experts(table, layer, config);
  require_all_ids(table, layer, config);
  std::vector<ExpertTensors> experts;
  for (const int id : layer.ids) {
    experts.push_back(find_expert(table, fmt::format("{}experts.{}.", layer.prefix, id)));
    const auto [hidden, intermediate] = experts.front().size();
    require_size(experts.back().gate, intermediate, hidden, "like expert 0");
    require_kind(experts.back().gate, experts.front().gate);
  }
  return std::make_unique<SeparateExperts>(std::move(experts));
}

}  // namespace heddle::checkpoint
