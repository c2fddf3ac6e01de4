#include "reference/reference.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include "reference/check.hpp"
#include "reference/pairs.hpp"
#include "reference/sums.hpp"
#include "reference/weights.hpp"

namespace heddle {

namespace {
using reference::TokenResults;

/// A piece of work: some rows of one expert.
struct Task {
  const ExpertWeights* expert = nullptr;
  bool is_shared = false;
  std::vector<std::size_t> rows;  ///< pairs (token · k + choice) of a routed expert, tokens of the shared one
};

/// Bounds the memory of a task, while a weight row is still widened for many rows at once.
constexpr std::size_t rows_a_task = 64;

void check_expert(const ExpertWeights& expert, int hidden, int intermediate, const std::string& who) {
  reference::check_matrix(expert.gate, intermediate, hidden, "reference: gate of " + who);
  reference::check_matrix(expert.up, intermediate, hidden, "reference: up of " + who);
  reference::check_matrix(expert.down, hidden, intermediate, "reference: down of " + who);
}

void add_tasks(const ExpertWeights& expert, bool is_shared, const std::vector<std::size_t>& rows, std::vector<Task>& tasks) {
  for (std::size_t first = 0; first < rows.size(); first += rows_a_task) {
    const auto begin = rows.begin() + static_cast<std::ptrdiff_t>(first);
    const auto size = static_cast<std::ptrdiff_t>(std::min(rows_a_task, rows.size() - first));
    tasks.push_back({&expert, is_shared, {begin, begin + size}});
  }
}

/// Runs act(0) .. act(count - 1) on some threads; rethrows what one of them threw.
template <class Action>
void in_parallel(std::size_t count, int threads, const Action& act) {
  std::atomic<std::size_t> next{0};
  const auto work = [&] {
    for (std::size_t i = next++; i < count; i = next++) {
      act(i);
    }
  };
  const std::size_t asked = threads > 0 ? static_cast<std::size_t>(threads) : std::thread::hardware_concurrency();
  std::vector<std::future<void>> helpers;  // their destructors wait
  for (std::size_t i = 1; i < std::min(asked, count); ++i) {
    helpers.push_back(std::async(std::launch::async, work));
  }
  work();
  for (std::future<void>& helper : helpers) {
    helper.get();
  }
}

class Layer {
 public:
  Layer(const ReferenceInput& input, const ReferenceOptions& options)
      : input_(input),
        options_(options),
        hidden_(static_cast<std::size_t>(input.hidden)),
        topk_(static_cast<std::size_t>(input.topk)),
        tokens_(static_cast<std::size_t>(input.tokens)) {}

  std::vector<bf16> run() {
    std::vector<Task> tasks;
    plan_routed(tasks);
    plan_shared(tasks);
    pair_results_.resize(tokens_ * topk_ * hidden_);
    shared_results_.resize(input_.shared != nullptr ? tokens_ * hidden_ : 0);
    in_parallel(tasks.size(), options_.threads, [&](std::size_t i) { compute(tasks[i]); });
    std::vector<bf16> output(tokens_ * hidden_);
    in_parallel(tokens_, options_.threads, [&](std::size_t token) { sum(token, output); });
    return output;
  }

 private:
  void plan_routed(std::vector<Task>& tasks) {
    std::vector<std::vector<std::size_t>> pairs_of(static_cast<std::size_t>(input_.experts));
    for (std::size_t pair = 0; pair < input_.ids.size(); ++pair) {
      if (input_.ids[pair] >= 0) {
        pairs_of[static_cast<std::size_t>(input_.ids[pair])].push_back(pair);
      }
    }
    experts_.resize(pairs_of.size());
    for (std::size_t expert = 0; expert < pairs_of.size(); ++expert) {
      if (!pairs_of[expert].empty()) {
        experts_[expert] = input_.expert(static_cast<int>(expert));
        check_expert(experts_[expert], input_.hidden, input_.intermediate, fmt::format("expert {}", expert));
        add_tasks(experts_[expert], false, pairs_of[expert], tasks);
      }
    }
  }

  void plan_shared(std::vector<Task>& tasks) {
    if (input_.shared != nullptr) {
      check_expert(input_.shared->weights, input_.hidden, input_.shared->intermediate, "the shared expert");
      std::vector<std::size_t> all(tokens_);
      for (std::size_t token = 0; token < tokens_; ++token) {
        all[token] = token;
      }
      add_tasks(input_.shared->weights, true, all, tasks);
    }
  }

  void compute(const Task& task) {
    // The shared expert runs at home: its rows do not travel and have the weight 1.
    const Wire wire = task.is_shared ? Wire::bf16 : options_.wire;
    const Activation activation = task.is_shared ? options_.shared_activation.value_or(options_.activation) : options_.activation;
    const bool is_weighted = !task.is_shared && options_.weight_at == WeightAt::activation;
    const std::size_t count = task.rows.size();
    std::vector<double> x(count * hidden_);
    std::vector<float> weights;
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t row = task.rows[i];
      reference::expert_input(hidden_of(task.is_shared ? row : row / topk_), wire, activation, options_,
                              std::span(x).subspan(i * hidden_, hidden_));
      if (is_weighted) {
        weights.push_back(input_.weights[row]);
      }
    }
    std::vector<bf16> results(count * hidden_);
    reference::expert_results(*task.expert, x, static_cast<int>(count), weights, activation, options_, results);
    std::vector<bf16>& all = task.is_shared ? shared_results_ : pair_results_;
    for (std::size_t i = 0; i < count; ++i) {
      std::copy_n(results.data() + i * hidden_, hidden_, all.data() + task.rows[i] * hidden_);
    }
  }

  void sum(std::size_t token, std::vector<bf16>& output) const {
    TokenResults results;
    results.ids = input_.ids.subspan(token * topk_, topk_);
    results.weights = input_.weights.subspan(token * topk_, topk_);
    results.pairs = std::span(pair_results_).subspan(token * topk_ * hidden_, topk_ * hidden_);
    results.hidden = hidden_of(token);
    if (input_.shared != nullptr) {
      results.shared = std::span(shared_results_).subspan(token * hidden_, hidden_);
    }
    reference::token_output(results, input_, options_, std::span(output).subspan(token * hidden_, hidden_));
  }

  std::span<const bf16> hidden_of(std::size_t token) const { return input_.hidden_states.subspan(token * hidden_, hidden_); }

  const ReferenceInput& input_;
  const ReferenceOptions& options_;
  std::size_t hidden_, topk_, tokens_;
  std::vector<ExpertWeights> experts_;
  std::vector<bf16> pair_results_;    ///< [T, k, H]
  std::vector<bf16> shared_results_;  ///< [T, H]
};
}  // namespace

std::vector<bf16> reference_layer(const ReferenceInput& input, const ReferenceOptions& options) {
  reference::check_input(input, options);
  return Layer(input, options).run();
}

}  // namespace heddle
