#include "trace/strips.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "trace/cells.hpp"

namespace heddle::trace {

namespace {

constexpr int cells = 1200;  ///< of a row, a unit wide each
constexpr int left = 190;    ///< of names
constexpr int right = 20;
constexpr int row_height = 11;
constexpr int strip_height = 22;

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
  void row(const std::string& label, const CellRow& row) {
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
  for (const NamedRow& one : rows_of(call, cells, all, ctas)) drawing.row(one.label, one.row);
  drawing.strip("tensor cores", busy_products(call, cells, all), pens[static_cast<std::size_t>(Paint::gemm1)].colour);
  drawing.strip("rows between ranks", busy_movers(call, cells, all), pens[static_cast<std::size_t>(Paint::move)].colour);
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
