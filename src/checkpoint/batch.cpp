#include <fmt/format.h>

#include <cstring>
#include <limits>
#include <numeric>

#include "checkpoint/batch.hpp"
#include "checkpoint/describe.hpp"
#include "heddle/error.hpp"

namespace heddle {

namespace checkpoint {

namespace {

template <typename Value>
std::vector<Value> copy_values(const Tensor& tensor) {
  std::vector<Value> values(tensor.bytes.size() / sizeof(Value));
  if (!values.empty()) std::memcpy(values.data(), tensor.bytes.data(), tensor.bytes.size());
  return values;
}

bool is_size(std::int64_t value) { return value >= 0 && value <= std::numeric_limits<std::int32_t>::max(); }

void read_hidden_states(const SafetensorsFile& file, const std::string& place, Batch& batch) {
  const Tensor* const hidden = file.find("hidden_states");
  if (hidden == nullptr) throw InputError(fmt::format("{}: tensor 'hidden_states' is missing; BF16 [T, H] is expected", place));
  const bool fits = hidden->dtype == Dtype::bf16 && hidden->shape.size() == 2 && is_size(hidden->shape[0]) &&
                    is_size(hidden->shape[1]) && hidden->shape[1] > 0;
  if (!fits) refuse(*hidden, fmt::format("is {}; BF16 [T, H] is expected", type_and_shape(*hidden)));
  batch.tokens = static_cast<int>(hidden->shape[0]);
  batch.hidden = static_cast<int>(hidden->shape[1]);
  batch.hidden_states = copy_values<bf16>(*hidden);
}

std::vector<std::int32_t> read_ids(const Tensor& ids) {
  if (ids.dtype == Dtype::i32) return copy_values<std::int32_t>(ids);
  const auto wide = copy_values<std::int64_t>(ids);
  std::vector<std::int32_t> narrow;
  narrow.reserve(wide.size());
  for (std::size_t i = 0; i < wide.size(); ++i) {
    if (wide[i] < std::numeric_limits<std::int32_t>::min() || wide[i] > std::numeric_limits<std::int32_t>::max()) {
      const auto choices = static_cast<std::size_t>(ids.shape[1]);
      refuse(ids, fmt::format("token {}, choice {} is {}; no expert has such an id", i / choices, i % choices, wide[i]));
    }
    narrow.push_back(static_cast<std::int32_t>(wide[i]));
  }
  return narrow;
}

void read_routing(const SafetensorsFile& file, Batch& batch) {
  const Tensor* const ids = file.find("topk_ids");
  const Tensor* const weights = file.find("topk_weights");
  if (ids == nullptr && weights == nullptr) return;
  if (ids == nullptr || weights == nullptr) {
    refuse(ids == nullptr ? *weights : *ids,
           fmt::format("stands alone; {} is missing (both or neither)", in_quotes(ids == nullptr ? "topk_ids" : "topk_weights")));
  }
  const bool ids_fit = (ids->dtype == Dtype::i32 || ids->dtype == Dtype::i64) && ids->shape.size() == 2 &&
                       ids->shape[0] == batch.tokens && is_size(ids->shape[1]) && ids->shape[1] > 0;
  if (!ids_fit) {
    refuse(*ids, fmt::format("is {}; I32 or I64 [{}, k] is expected, a row for each of the {} hidden states", type_and_shape(*ids),
                             batch.tokens, batch.tokens));
  }
  if (weights->dtype != Dtype::f32 || weights->shape != ids->shape) {
    refuse(*weights, fmt::format("is {}; F32 {} is expected, like topk_ids", type_and_shape(*weights), shape_text(ids->shape)));
  }
  batch.routing = Routing{batch.tokens, static_cast<int>(ids->shape[1]), read_ids(*ids), copy_values<float>(*weights)};
}

void read_tokens_per_rank(const SafetensorsFile& file, Batch& batch) {
  const Tensor* const counts = file.find("tokens_per_rank");
  if (counts == nullptr) return;
  if (counts->dtype != Dtype::i32 || counts->shape.size() != 1 || counts->shape[0] < 1) {
    refuse(*counts, fmt::format("is {}; I32 [R] is expected, a count for each rank", type_and_shape(*counts)));
  }
  batch.tokens_per_rank = copy_values<int>(*counts);
  std::int64_t sum = 0;
  for (std::size_t rank = 0; rank < batch.tokens_per_rank.size(); ++rank) {
    const int count = batch.tokens_per_rank[rank];
    if (count < 0) refuse(*counts, fmt::format("rank {} has {} tokens; counts are 0 or more", rank, count));
    sum += count;
  }
  if (sum != batch.tokens) refuse(*counts, fmt::format("sums to {}, but hidden_states has {} tokens", sum, batch.tokens));
}

}  // namespace

Batch read_batch(const SafetensorsFile& file, const std::string& place) {
  Batch batch;
  read_hidden_states(file, one_line(place), batch);
  read_routing(file, batch);
  read_tokens_per_rank(file, batch);
  return batch;
}

}  // namespace checkpoint

Batch read_batch(const std::string& path) { return checkpoint::read_batch(*checkpoint::SafetensorsFile::open(path), path); }

}  // namespace heddle
