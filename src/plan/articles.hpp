// The numbers of the three articles, one list an article.
#pragma once

#include <vector>

#include "heddle/plan.hpp"

namespace heddle::plan {

std::vector<ArticleNumber> exchange_numbers();
std::vector<ArticleNumber> fused_numbers();
std::vector<ArticleNumber> grid_numbers();

inline constexpr double mebi = 1024.0 * 1024.0;
inline constexpr double gibi = 1024.0 * mebi;

/// An article's example: bf16 rows both ways.
PlanRequest example(std::string_view preset, std::string_view machine, int ranks, int tokens, int cap);

}  // namespace heddle::plan
