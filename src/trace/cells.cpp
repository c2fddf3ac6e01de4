#include "trace/cells.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <tuple>

#include "trace/segments.hpp"

namespace heddle::trace {

namespace {

Paint paint_of(const Span& span) {
  switch (span.kind) {
    case Kind::products:
      if (span.task.product == Product::gemm1) return Paint::gemm1;
      return span.task.product == Product::gemm2 ? Paint::gemm2 : Paint::shared;
    case Kind::shared:
      return Paint::shared;
    case Kind::activation:
    case Kind::epilogue:
      return Paint::epilogue;
    case Kind::weights:
    case Kind::rows:
    case Kind::scales:
    case Kind::widen:
    case Kind::claim:
      return Paint::load;
    case Kind::dispatch:
    case Kind::move:
    case Kind::fetch:
      return Paint::move;
    case Kind::combine:
    case Kind::sum:
      return Paint::sum;
    case Kind::announce:
    case Kind::count:
    case Kind::regroup:
      return Paint::prepare;
    case Kind::next_task:
    case Kind::wait:
      return Paint::wait;
  }
  return Paint::wait;
}

bool multiplies(const Span& span) { return span.kind == Kind::products; }
/// Rows on their way between ranks: by workers, or as the end of a task.
bool moves(const Span& span) {
  return span.kind == Kind::move || span.kind == Kind::fetch || span.kind == Kind::announce || span.kind == Kind::sum ||
         (span.kind == Kind::epilogue && span.task.product == Product::gemm2);
}

double waited_share(const Span& span) {
  const auto waited = static_cast<double>(std::accumulate(span.waited, span.waited + summed_waits, std::int64_t{0}));
  return span.length() > 0 ? std::min(1.0, waited / static_cast<double>(span.length())) : 0.0;
}

/// Calls work(cell, share of the cell) for the cells that [begin, end) covers.
template <class Work>
void for_cells(int cells, std::int64_t begin, std::int64_t end, std::int64_t all, const Work& work) {
  const double scale = static_cast<double>(cells) / static_cast<double>(std::max<std::int64_t>(all, 1));
  const double from = static_cast<double>(begin) * scale;
  const double to = static_cast<double>(end) * scale;
  for (int cell = static_cast<int>(from); cell < cells && cell < to; ++cell)
    work(cell, std::min<double>(to, cell + 1) - std::max<double>(from, cell));
}

/// Which share of the lanes that ever do something does it, by cell.
template <class Does>
std::vector<double> busy_lanes(const Trace& lanes, int cells, std::int64_t all, const Does& does) {
  std::vector<double> busy(static_cast<std::size_t>(cells), 0.0);
  std::set<LaneName> able;
  for (const Lane& lane : lanes) {
    if (std::none_of(lane.spans.begin(), lane.spans.end(), does)) continue;
    able.insert(lane.name);
    for (const Segment& segment : segments_of(lane)) {
      if (!does(*segment.span)) continue;
      const double working = 1.0 - waited_share(*segment.span);
      for_cells(cells, segment.begin, segment.end, all,
                [&](int cell, double share) { busy[static_cast<std::size_t>(cell)] += share * working; });
    }
  }
  for (double& value : busy) value /= std::max<double>(1.0, static_cast<double>(able.size()));
  return busy;
}

}  // namespace

void CellRow::add(const Lane& lane, std::int64_t all) {
  for (const Segment& segment : segments_of(lane)) {
    const auto paint = static_cast<std::size_t>(segment.of_shared ? Paint::shared : paint_of(*segment.span));
    const double waiting = waited_share(*segment.span);
    for_cells(static_cast<int>(shares_.size()), segment.begin, segment.end, all, [&](int cell, double share) {
      const auto at = static_cast<std::size_t>(cell);
      shares_[at][paint] += share;
      waited_[at] += share * waiting;
    });
  }
}

Paint CellRow::paint(int cell) const {
  const auto& of = shares_[static_cast<std::size_t>(cell)];
  const auto most = std::max_element(of.begin(), of.end());
  const double idle = 1.0 - std::accumulate(of.begin(), of.end(), 0.0);
  return *most >= idle && *most > 0 ? static_cast<Paint>(most - of.begin()) : Paint::idle;
}

int CellRow::waited_tenths(int cell) const {
  return static_cast<int>(std::min(1.0, waited_[static_cast<std::size_t>(cell)]) * 10 + 0.5);
}

std::vector<NamedRow> rows_of(const TracedCall& call, int cells, std::int64_t all, int ctas) {
  // Halves and kernels that follow each other share the row of their worker.
  std::map<std::tuple<int, int, Role, int>, CellRow> rows;
  for (const Lane& lane : call.lanes) {
    if (!is_shown(lane, ctas) || lane.spans.empty()) continue;
    const auto key = std::tuple(lane.name.rank, lane.name.cta, lane.name.role, lane.name.number);
    rows.try_emplace(key, cells).first->second.add(lane, all);
  }
  std::vector<NamedRow> named;
  for (auto& [key, row] : rows) {
    const auto& [rank, cta, role, number] = key;
    named.push_back({fmt::format("rank {} {}", rank, text_of(LaneName{rank, role, number, cta, 0})), std::move(row)});
  }
  return named;
}

std::vector<double> busy_products(const TracedCall& call, int cells, std::int64_t all) {
  return busy_lanes(call.lanes, cells, all, multiplies);
}

std::vector<double> busy_movers(const TracedCall& call, int cells, std::int64_t all) {
  return busy_lanes(call.lanes, cells, all, moves);
}

}  // namespace heddle::trace
