#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <fstream>
#include <numeric>
#include <string_view>

#include "heddle/error.hpp"
#include "heddle/routing.hpp"
#include "routing/random.hpp"

namespace heddle {

namespace {

void check_experts(int experts) {
  if (experts < 1) throw InputError(fmt::format("generator: {} experts; at least 1 is needed", experts));
}

/// Popularity as whole numbers, the largest 2^32, anything positive at least 1: sums are then exact
/// and draws the same on every machine.
std::vector<std::uint64_t> whole_weights(const Popularity& popularity) {
  double largest = 0.0;
  for (std::size_t e = 0; e < popularity.size(); ++e) {
    if (!(popularity[e] >= 0.0 && std::isfinite(popularity[e]))) {
      throw InputError(
          fmt::format("generator: the popularity of expert {} is {}; finite and not negative is needed", e, popularity[e]));
    }
    largest = std::max(largest, popularity[e]);
  }
  std::vector<std::uint64_t> weights(popularity.size(), 0);
  for (std::size_t e = 0; e < weights.size(); ++e) {
    if (popularity[e] > 0.0) weights[e] = std::max<std::uint64_t>(1, static_cast<std::uint64_t>(popularity[e] / largest * 0x1p32));
  }
  return weights;
}

/// Draws distinct experts for one token at a time.
class Drawer {
 public:
  Drawer(const Popularity& popularity, std::uint64_t seed)
      : weights_(whole_weights(popularity)),
        total_(std::accumulate(weights_.begin(), weights_.end(), std::uint64_t{0})),
        random_(seed) {}

  void draw(std::span<std::int32_t> ids) {
    std::uint64_t left = total_;
    for (std::size_t choice = 0; choice < ids.size(); ++choice) {
      const auto taken = ids.first(choice);
      const bool popular_left = left != 0;
      const auto weight = [&](std::size_t e) { return popular_left ? weights_[e] : 1; };
      std::uint64_t target = random_.below(popular_left ? left : weights_.size() - choice);
      std::size_t expert = 0;
      while (is_taken(taken, expert) || target >= weight(expert)) {
        if (!is_taken(taken, expert)) target -= weight(expert);
        ++expert;
      }
      ids[choice] = static_cast<std::int32_t>(expert);
      left -= popular_left ? weights_[expert] : 0;
    }
  }

  /// Weights of a token's choices, after some of them became -1.
  void weigh(std::span<std::int32_t> ids, std::uint64_t missing_below, float scale, std::span<float> weights) {
    float sum = 0.0f;
    for (std::size_t choice = 0; choice < ids.size(); ++choice) {
      const float weight = random_.positive_unit();
      if ((random_.next() >> 11) < missing_below) ids[choice] = -1;
      weights[choice] = ids[choice] < 0 ? 0.0f : weight;
      sum += weights[choice];
    }
    if (sum == 0.0f) return;
    for (float& weight : weights) weight = weight / sum * scale;
  }

 private:
  static bool is_taken(std::span<const std::int32_t> taken, std::size_t expert) {
    return std::find(taken.begin(), taken.end(), static_cast<std::int32_t>(expert)) != taken.end();
  }

  std::vector<std::uint64_t> weights_;
  std::uint64_t total_;
  Random random_;
};

std::vector<std::string_view> cells_of(std::string_view line) {
  std::vector<std::string_view> cells;
  while (true) {
    const std::size_t comma = line.find(',');
    cells.push_back(line.substr(0, comma));
    if (comma == std::string_view::npos) return cells;
    line.remove_prefix(comma + 1);
  }
}

template <class Number>
Number number_of(std::string_view cell, const std::string& where) {
  Number value{};
  const auto [end, error] = std::from_chars(cell.data(), cell.data() + cell.size(), value);
  if (error != std::errc{} || end != cell.data() + cell.size())
    throw InputError(fmt::format("{}: '{}' is not a number", where, cell));
  return value;
}

ExpertCounts parse_counts(std::string_view line, std::size_t columns, const std::string& where) {
  std::vector<std::string_view> cells = cells_of(line);
  if (cells.size() != columns) throw InputError(fmt::format("{}: {} cells, the heading has {}", where, cells.size(), columns));
  while (cells.size() > 4 && cells.back().empty()) cells.pop_back();
  if (cells.size() == 4) throw InputError(fmt::format("{}: no counts", where));
  ExpertCounts row;
  row.model = cells[0];
  row.domain = cells[1];
  row.layer = number_of<int>(cells[2], where);
  row.tokens = number_of<std::int64_t>(cells[3], where);
  for (std::size_t i = 4; i < cells.size(); ++i) {
    row.counts.push_back(number_of<double>(cells[i], where));
    if (!(row.counts.back() >= 0.0 && std::isfinite(row.counts.back()))) {
      throw InputError(fmt::format("{}: expert {} has a count of {}", where, i - 4, row.counts.back()));
    }
  }
  return row;
}

}  // namespace

Popularity uniform_popularity(int experts) {
  check_experts(experts);
  return Popularity(static_cast<std::size_t>(experts), 1.0);
}

Popularity zipf_popularity(int experts, double exponent, std::uint64_t seed) {
  check_experts(experts);
  if (!std::isfinite(exponent)) throw InputError(fmt::format("generator: the Zipf exponent is {}; a number is needed", exponent));
  Popularity popularity(static_cast<std::size_t>(experts));
  for (std::size_t n = 0; n < popularity.size(); ++n) popularity[n] = std::pow(static_cast<double>(n + 1), -exponent);
  Random random(seed);
  for (std::size_t n = popularity.size() - 1; n > 0; --n) std::swap(popularity[n], popularity[random.below(n + 1)]);
  return popularity;
}

Popularity hot_rank_popularity(const Placement& placement, int rank) {
  if (rank < 0 || rank >= placement.ranks()) {
    throw InputError(fmt::format("generator: hot rank {}, ranks are 0 to {}", rank, placement.ranks() - 1));
  }
  Popularity popularity(static_cast<std::size_t>(placement.experts()), 0.0);
  for (const int expert : placement.experts_of(rank)) popularity[static_cast<std::size_t>(expert)] = 1.0;
  return popularity;
}

std::vector<ExpertCounts> read_expert_counts(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  if (!std::getline(file, line)) throw InputError(fmt::format("{}: cannot be read, or is empty", path));
  const auto without_return = [](std::string_view text) { return text.ends_with('\r') ? text.substr(0, text.size() - 1) : text; };
  const std::string_view heading = without_return(line);
  if (!heading.starts_with("model,domain,layer,tokens,e0")) {
    throw InputError(fmt::format("{}, line 1: the heading is not model,domain,layer,tokens,e0,e1,...", path));
  }
  const std::size_t columns = cells_of(heading).size();
  std::vector<ExpertCounts> rows;
  for (int number = 2; std::getline(file, line); ++number) {
    const std::string_view text = without_return(line);
    if (!text.empty()) rows.push_back(parse_counts(text, columns, fmt::format("{}, line {}", path, number)));
  }
  return rows;
}

Routing draw_routing(const Popularity& popularity, const DrawOptions& options) {
  const auto experts = popularity.size();
  if (options.tokens < 0 || options.topk < 1 || static_cast<std::size_t>(options.topk) > experts) {
    throw InputError(
        fmt::format("generator: {} tokens of {} distinct choices among {} experts", options.tokens, options.topk, experts));
  }
  if (!(options.missing >= 0.0 && options.missing <= 1.0) || !(options.scale > 0.0f && std::isfinite(options.scale))) {
    throw InputError(fmt::format("generator: a share of missing choices of {} (0 to 1) and weights that sum to {} (positive)",
                                 options.missing, options.scale));
  }
  const auto k = static_cast<std::size_t>(options.topk), size = static_cast<std::size_t>(options.tokens) * k;
  const auto missing_below = static_cast<std::uint64_t>(options.missing * 0x1p53);
  Routing routing{options.tokens, options.topk, std::vector<std::int32_t>(size), std::vector<float>(size)};
  Drawer drawer(popularity, options.seed);
  for (std::size_t at = 0; at < size; at += k) {
    const std::span<std::int32_t> ids = std::span(routing.ids).subspan(at, k);
    drawer.draw(ids);
    drawer.weigh(ids, missing_below, options.scale, std::span(routing.weights).subspan(at, k));
  }
  return routing;
}

}  // namespace heddle
