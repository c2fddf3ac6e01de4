#include "trace/strips.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "trace/words.hpp"

namespace heddle::trace {

namespace {

/// What a piece of a strip shows. Idle is the background.
enum class Paint : std::uint8_t { wait, gemm1, gemm2, shared, epilogue, load, move, sum, prepare, idle };
constexpr int paints = static_cast<int>(Paint::idle);
struct Pen {
  const char* colour;
  const char* text;
};
constexpr std::array<Pen, paints> pens{{{"#d5d5d5", "waits"},
                                        {"#2c6fbb", "GEMM 1"},
                                        {"#123f73", "GEMM 2"},
                                        {"#1b9e9e", "shared expert"},
                                        {"#e8862d", "activation, epilogue"},
                                        {"#9b7fc7", "loads of weights and rows"},
                                        {"#3f9b46", "rows move"},
                                        {"#b8b800", "combine, sum"},
                                        {"#8c6d4f", "announce, count, regroup"}}};

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

constexpr int cells = 1200;  ///< of a row, a unit wide each
constexpr int left = 190;    ///< of names
constexpr int right = 20;
constexpr int row_height = 11;
constexpr int strip_height = 22;

/// Calls work(cell, share of the cell) for the cells that [begin, end) covers.
template <class Work>
void for_cells(std::int64_t begin, std::int64_t end, std::int64_t all, const Work& work) {
  const double scale = static_cast<double>(cells) / static_cast<double>(std::max<std::int64_t>(all, 1));
  const double from = static_cast<double>(begin) * scale;
  const double to = static_cast<double>(end) * scale;
  for (int cell = static_cast<int>(from); cell < cells && cell < to; ++cell)
    work(cell, std::min<double>(to, cell + 1) - std::max<double>(from, cell));
}

/// A row of cells: of each paint its share of the cell's time, and of that the part that was waited.
struct Row {
  std::vector<std::array<double, paints>> shares{cells};
  std::vector<double> waited = std::vector<double>(cells, 0.0);

  void add(const Lane& lane, std::int64_t all) {
    for (const Segment& segment : segments_of(lane)) {
      const auto paint = static_cast<std::size_t>(segment.of_shared ? Paint::shared : paint_of(*segment.span));
      const double waiting = waited_share(*segment.span);
      for_cells(segment.begin, segment.end, all, [&](int cell, double share) {
        const auto at = static_cast<std::size_t>(cell);
        shares[at][paint] += share;
        waited[at] += share * waiting;
      });
    }
  }
  /// What most of a cell is.
  Paint paint(int cell) const {
    const auto& of = shares[static_cast<std::size_t>(cell)];
    const auto most = std::max_element(of.begin(), of.end());
    const double idle = 1.0 - std::accumulate(of.begin(), of.end(), 0.0);
    return *most >= idle && *most > 0 ? static_cast<Paint>(most - of.begin()) : Paint::idle;
  }
  /// In tenths: cells that are alike become one piece.
  int waited_tenths(int cell) const { return static_cast<int>(std::min(1.0, waited[static_cast<std::size_t>(cell)]) * 10 + 0.5); }
};

class Drawing {
 public:
  explicit Drawing(std::int64_t all) : all_(all) {}

  void text(int x, int y, const std::string& what, const char* style) {
    body_ += fmt::format("<text x=\"{}\" y=\"{}\" {}>{}</text>\n", x, y, style, what);
  }
  void rectangle(double x, double y, double width, double height, const char* colour) {
    body_ += fmt::format("<rect x=\"{:g}\" y=\"{:g}\" width=\"{:g}\" height=\"{:g}\" fill=\"{}\"/>\n", x, y, width, height, colour);
  }

  void legend() {
    int x = left;
    for (const Pen& pen : pens) {
      rectangle(x, y_, 10, 10, pen.colour);
      text(x + 14, y_ + 9, pen.text, "");
      x += 130;
    }
    y_ += 24;
  }
  void heading(const std::string& what) {
    y_ += 16;
    text(10, y_, what, "font-weight=\"bold\" font-size=\"13\"");
    y_ += 10;
  }
  void row(const std::string& label, const Row& row) {
    text(left - 6, y_ + 9, label, "text-anchor=\"end\"");
    rectangle(left, y_, cells, row_height - 1, "#f7f7f7");
    for (int cell = 0, end = 0; cell < cells; cell = end) {
      const Paint paint = row.paint(cell);
      const int tenths = row.waited_tenths(cell);
      for (end = cell + 1; end < cells && row.paint(end) == paint && row.waited_tenths(end) == tenths; ++end) {
      }
      if (paint == Paint::idle) continue;
      rectangle(left + cell, y_, end - cell, row_height - 1, pens[static_cast<std::size_t>(paint)].colour);
      const double grey = tenths / 10.0 * (row_height - 1);
      if (tenths > 0 && paint != Paint::wait) rectangle(left + cell, y_ + row_height - 1 - grey, end - cell, grey, pens[0].colour);
    }
    y_ += row_height;
  }
  /// busy [cells], 0 to 1.
  void strip(const std::string& label, const std::vector<double>& busy, const char* colour) {
    text(left - 6, y_ + strip_height / 2 + 4, label, "text-anchor=\"end\" font-weight=\"bold\"");
    rectangle(left, y_, cells, strip_height, "#f0f0f0");
    for (int cell = 0, end = 0; cell < cells; cell = end) {
      const auto tenths = [&](int at) { return static_cast<int>(std::min(1.0, busy[static_cast<std::size_t>(at)]) * 20 + 0.5); };
      for (end = cell + 1; end < cells && tenths(end) == tenths(cell); ++end) {
      }
      const double height = tenths(cell) / 20.0 * strip_height;
      if (height > 0) rectangle(left + cell, y_ + strip_height - height, end - cell, height, colour);
    }
    y_ += strip_height + 3;
  }
  void axis() {
    y_ += 12;
    constexpr int marks = 6;
    for (int i = 0; i <= marks; ++i) {
      const double us = static_cast<double>(all_) * i / marks / 1e3;
      text(left + cells * i / marks, y_, fmt::format("{:.1f} us", us), "text-anchor=\"middle\"");
    }
    y_ += 8;
  }
  std::string finish() const {
    return fmt::format(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0}\" height=\"{1}\" viewBox=\"0 0 {0} {1}\" "
        "font-family=\"sans-serif\" font-size=\"9\">\n<rect width=\"{0}\" height=\"{1}\" fill=\"white\"/>\n{2}</svg>\n",
        left + cells + right, y_ + 10, body_);
  }

 private:
  std::int64_t all_;
  int y_ = 12;
  std::string body_;
};

/// Which share of the lanes that ever do something does it, by cell.
template <class Does>
std::vector<double> busy_lanes(const Trace& lanes, std::int64_t all, const Does& does) {
  std::vector<double> busy(cells, 0.0);
  std::set<LaneName> able;
  for (const Lane& lane : lanes) {
    if (std::none_of(lane.spans.begin(), lane.spans.end(), does)) continue;
    able.insert(lane.name);
    for (const Segment& segment : segments_of(lane)) {
      if (!does(*segment.span)) continue;
      const double working = 1.0 - waited_share(*segment.span);
      for_cells(segment.begin, segment.end, all,
                [&](int cell, double share) { busy[static_cast<std::size_t>(cell)] += share * working; });
    }
  }
  for (double& value : busy) value /= std::max<double>(1.0, static_cast<double>(able.size()));
  return busy;
}

std::string escaped(std::string text) {
  for (const auto& [from, to] : {std::pair("&", "&amp;"), std::pair("<", "&lt;")}) {
    for (std::size_t at = text.find(from); at != std::string::npos; at = text.find(from, at + 1)) text.replace(at, 1, to);
  }
  return text;
}

void draw(Drawing& drawing, const TracedCall& call, std::int64_t all, int ctas) {
  std::int64_t end = 0;
  for (const Lane& lane : call.lanes) end = std::max(end, lane.end);
  drawing.heading(escaped(fmt::format("{}: {:.1f} us", call.title, static_cast<double>(end) / 1e3)));
  // Halves and kernels that follow each other share the row of their worker.
  std::map<std::tuple<int, int, Role, int>, Row> rows;
  for (const Lane& lane : call.lanes) {
    if (is_shown(lane, ctas) && !lane.spans.empty())
      rows[{lane.name.rank, lane.name.cta, lane.name.role, lane.name.number}].add(lane, all);
  }
  for (const auto& [key, row] : rows) {
    const auto& [rank, cta, role, number] = key;
    drawing.row(fmt::format("rank {} {}", rank, text_of(LaneName{rank, role, number, cta, 0})), row);
  }
  drawing.strip("tensor cores", busy_lanes(call.lanes, all, multiplies), pens[static_cast<std::size_t>(Paint::gemm1)].colour);
  drawing.strip("rows between ranks", busy_lanes(call.lanes, all, moves), pens[static_cast<std::size_t>(Paint::move)].colour);
}

}  // namespace

std::string strips(std::span<const TracedCall> calls, int ctas) {
  std::int64_t all = 0;
  for (const TracedCall& call : calls) {
    for (const Lane& lane : call.lanes) all = std::max(all, lane.end);
  }
  Drawing drawing(all);
  drawing.legend();
  for (const TracedCall& call : calls) draw(drawing, call, all, ctas);
  drawing.axis();
  return drawing.finish();
}

}  // namespace heddle::trace
