// Comparing our numbers with an article's: rounded to the digits that it gives.
#include "plan/articles.hpp"

#include <fmt/format.h>

#include "plan/text.hpp"

namespace heddle {

std::string ArticleNumber::rounded() const {
  const std::size_t point = stated.find('.');
  const std::size_t decimals = point == std::string::npos ? 0 : stated.size() - point - 1;
  return plan::with_commas(fmt::format("{:.{}f}", value, decimals));
}

std::vector<ArticleNumber> article_numbers() {
  std::vector<ArticleNumber> all = plan::exchange_numbers();
  for (const std::vector<ArticleNumber>& more : {plan::fused_numbers(), plan::grid_numbers()}) {
    all.insert(all.end(), more.begin(), more.end());
  }
  return all;
}

namespace plan {

PlanRequest example(std::string_view preset, std::string_view machine, int ranks, int tokens, int cap) {
  const ModelPreset& model = find_preset(preset);
  PlanRequest request;
  request.shape = model.shape;
  request.weights = model.weights.at(0);
  request.ranks = ranks;
  request.tokens = tokens;
  request.cap = cap;
  request.machine = find_machine(machine);
  return request;
}

}  // namespace plan

}  // namespace heddle
