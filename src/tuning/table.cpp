// Measured times: what an entry must be, what lies between its sizes, and which entry stands in for a shape.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <fstream>

#include "group/fingerprint.hpp"
#include "heddle/error.hpp"
#include "heddle/tuning.hpp"
#include "tuning/around.hpp"

namespace heddle {

namespace {

/// Products of size ratios beyond this are other layers.
constexpr double farthest = 4.0;

[[noreturn]] void refuse(const TuningEntry& entry, const std::string& text) {
  throw InputError(fmt::format("tuning entry of {} ({} x {}, {} experts, {} ranks): {}", entry.key.machine, entry.key.hidden,
                               entry.key.intermediate, entry.key.experts, entry.key.ranks, text));
}

void check(const TuningEntry& entry) {
  const TuningKey& key = entry.key;
  if (key.machine.empty()) refuse(entry, "it names no machine");
  for (const int size : {key.hidden, key.intermediate, key.experts, key.topk, key.ranks}) {
    if (size < 1) refuse(entry, fmt::format("sizes are 1 or more, not {}", size));
  }
  if (entry.rows.empty()) refuse(entry, "it has no rows");
  int before = 0;
  for (const TuningRow& row : entry.rows) {
    if (row.max_tokens <= before)
      refuse(entry, fmt::format("a row of {} tokens behind one of {}; sizes are 1 or more, and ascend", row.max_tokens, before));
    before = row.max_tokens;
    if (row.us.empty()) refuse(entry, fmt::format("the row of {} tokens has no times", row.max_tokens));
    for (const auto& [way, us] : row.us) {
      if (way == Way::automatic) refuse(entry, "auto is no way that has times of its own");
      if (!(us > 0) || !std::isfinite(us))
        refuse(entry, fmt::format("{} us of {} at {} tokens is no time", us, name(way), row.max_tokens));
    }
  }
}

double distance(const TuningKey& a, const TuningKey& b) {
  const auto ratio = [](int x, int y) { return std::abs(std::log2(static_cast<double>(x) / y)); };
  return ratio(a.hidden, b.hidden) + ratio(a.intermediate, b.intermediate) + ratio(a.experts, b.experts) + ratio(a.topk, b.topk);
}

}  // namespace

std::optional<double> TuningEntry::us(Way way, int max_tokens) const {
  const auto [below, above] = measured_around(*this, way, max_tokens);
  if (below == nullptr && above == nullptr) return std::nullopt;
  if (above == nullptr) return below->us.at(way) * max_tokens / below->max_tokens;
  if (below == nullptr || above->max_tokens == max_tokens) return above->us.at(way);
  const double from = std::log(below->max_tokens);
  const double share = (std::log(max_tokens) - from) / (std::log(above->max_tokens) - from);
  return std::exp((1 - share) * std::log(below->us.at(way)) + share * std::log(above->us.at(way)));
}

void TuningTable::add(TuningEntry entry) {
  check(entry);
  const auto same = std::find_if(entries_.begin(), entries_.end(), [&](const TuningEntry& one) { return one.key == entry.key; });
  if (same != entries_.end()) {
    *same = std::move(entry);
  } else {
    entries_.push_back(std::move(entry));
  }
}

const TuningEntry* TuningTable::find(const TuningKey& key) const {
  const TuningEntry* nearest = nullptr;
  double least = std::log2(farthest);
  for (const TuningEntry& entry : entries_) {
    const TuningKey& one = entry.key;
    if (one.machine != key.machine || one.ranks != key.ranks || one.weights != key.weights || one.activation != key.activation)
      continue;
    const double far = distance(one, key);
    if (far > least || (nearest != nullptr && far == least)) continue;
    nearest = &entry;
    least = far;
  }
  return nearest;
}

std::string TuningTable::fingerprint() const {
  return fmt::format("{}-entries-{:016x}", entries_.size(), heddle::fingerprint<char>(json()));
}

std::string host_machine() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const auto colon = line.find(": ");
    if (line.rfind("model name", 0) == 0 && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "host";
}

}  // namespace heddle
