#include "explorer/batches.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <random>

#include "formats/rows.hpp"

namespace heddle::explorer {

namespace {
std::size_t at(int i) { return static_cast<std::size_t>(i); }
const char* wire_name(Wire wire) { return wire == Wire::bf16 ? "bf16" : (wire == Wire::fp8 ? "fp8" : "nvfp4"); }
}  // namespace

std::string Problem::name() const {
  std::vector<std::string> calls;
  for (const auto& call : tokens) calls.push_back(fmt::format("{}", fmt::join(call, "+")));
  return fmt::format("{} ranks x {} workers, {} experts, top-{}, {}, tokens {}{}, routing {}", ranks, workers, experts, topk,
                     wire_name(wire), fmt::join(calls, " then "), live.empty() ? "" : ", not all live", routing);
}

std::vector<bf16> to_bf16s(const std::vector<float>& values) {
  std::vector<bf16> result;
  for (const float value : values) result.push_back(to_bf16(value));
  return result;
}

Batches::Batches(const Problem& problem) : problem_(problem) {
  experts_on_.assign(at(problem.ranks), 0);
  for (int e = 0; e < problem.experts; ++e) {
    const int rank = e * problem.ranks / problem.experts;
    local_index_.push_back(experts_on_[at(rank)]++);
    rank_of_.push_back(rank);
  }
  for (int call = 0; call < calls(); ++call) {
    for (int rank = 0; rank < problem.ranks; ++rank) batches_.push_back(draw(call, rank));
  }
}

Batches::Batch Batches::draw(int call, int rank) const {
  std::mt19937 random(static_cast<unsigned>(1 + problem_.routing + 1000 * call + 100 * rank));
  Batch batch;
  const int tokens = live(rank) ? problem_.tokens[at(call)][at(rank)] : 0;
  std::vector<std::int32_t> experts;
  for (int e = 0; e < problem_.experts; ++e) experts.push_back(e);
  for (int token = 0; token < tokens; ++token) {
    // The first three values tell whose row of which call it is.
    for (int j = 0; j < problem_.hidden; ++j) {
      const int tag[] = {1 + rank, 1 + token, 1 + call};
      batch.hidden.push_back(to_bf16(static_cast<float>(j < 3 ? tag[j] : (7 * rank + 5 * token + 3 * call + j) % 16)));
    }
    std::shuffle(experts.begin(), experts.end(), random);
    for (int choice = 0; choice < problem_.topk; ++choice) {
      batch.ids.push_back(random() % 8 == 0 ? -1 : experts[at(choice)]);
      batch.weights.push_back(static_cast<float>(1 + random() % 2));
    }
  }
  // Never null, so that a rank without tokens still has addresses.
  batch.hidden.resize(batch.hidden.size() + 1);
  batch.ids.push_back(-1);
  batch.weights.push_back(0);
  return batch;
}

int Batches::first_expert(int rank) const {
  return static_cast<int>(std::find(rank_of_.begin(), rank_of_.end(), rank) - rank_of_.begin());
}

int Batches::largest(int call) const {
  return *std::max_element(problem_.tokens[at(call)].begin(), problem_.tokens[at(call)].end());
}

int Batches::tokens_before(int call, int rank) const {
  int tokens = 0;
  for (int source = 0; source < rank; ++source) tokens += input(call, source).tokens;
  return tokens;
}

ExchangeShape Batches::shape() const {
  ExchangeShape shape;
  shape.ranks = problem_.ranks;
  shape.experts = problem_.experts;
  for (int rank = 0; rank < problem_.ranks; ++rank)
    shape.max_local_experts = std::max(shape.max_local_experts, local_experts(rank));
  shape.topk = problem_.topk;
  for (int call = 0; call < calls(); ++call) shape.cap = std::max(shape.cap, largest(call));
  return shape;
}

SendInput Batches::input(int call, int rank) const {
  const Batch& own = batch(call, rank);
  return {static_cast<int>(own.ids.size() - 1) / problem_.topk, problem_.topk, own.hidden.data(), own.ids.data(),
          own.weights.data()};
}

std::vector<int> Batches::tokens_to(int call, int source, int rank) const {
  std::vector<int> tokens;
  const SendInput sent = input(call, source);
  for (int token = 0; token < sent.tokens; ++token) {
    bool goes = false;
    for (int choice = 0; choice < sent.topk; ++choice)
      goes = goes || placement().rank_of_choice(sent.ids[token * sent.topk + choice]) == rank;
    if (goes) tokens.push_back(token);
  }
  return tokens;
}

std::vector<int> Batches::pairs_of(int call, int source, int expert) const {
  std::vector<int> pairs;
  const SendInput sent = input(call, source);
  for (int pair = 0; pair < sent.tokens * sent.topk; ++pair) {
    if (sent.ids[pair] == expert) pairs.push_back(pair);
  }
  return pairs;
}

std::vector<std::byte> Batches::row(int call, int source, int token) const {
  std::vector<std::byte> bytes(wire().row_bytes());
  quantise_row(input(call, source).hidden + token * problem_.hidden, wire(), bytes.data());
  return bytes;
}

std::vector<float> Batches::expert_result(int call, int source, int token, int expert) const {
  std::vector<float> values(at(problem_.hidden));
  widen_row(row(call, source, token).data(), wire(), values.data());
  for (float& value : values) value += static_cast<float>(expert + 1);
  return values;
}

std::vector<bf16> Batches::partial_sum(int call, int source, int token, int rank) const {
  std::vector<float> sum(at(problem_.hidden), 0.0f);
  const SendInput sent = input(call, source);
  for (int pair = token * sent.topk; pair < (token + 1) * sent.topk; ++pair) {
    if (sent.ids[pair] < 0 || rank_of_[at(sent.ids[pair])] != rank) continue;
    const std::vector<float> result = expert_result(call, source, token, sent.ids[pair]);
    for (std::size_t j = 0; j < sum.size(); ++j) sum[j] += sent.weights[pair] * result[j];
  }
  return to_bf16s(sum);
}

std::vector<bf16> Batches::outputs(int call, int rank) const {
  std::vector<bf16> all;
  for (int token = 0; token < input(call, rank).tokens; ++token) {
    std::vector<float> sum(at(problem_.hidden), 0.0f);
    for (int d = 0; d < problem_.ranks; ++d) {
      if (!live(d)) continue;
      const std::vector<bf16> partial = partial_sum(call, rank, token, d);
      for (std::size_t j = 0; j < sum.size(); ++j) sum[j] += to_float(partial[j]);
    }
    const std::vector<bf16> row = to_bf16s(sum);
    all.insert(all.end(), row.begin(), row.end());
  }
  return all;
}

}  // namespace heddle::explorer
