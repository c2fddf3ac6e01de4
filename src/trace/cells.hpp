// A traced call cut into cells of time: what each worker mostly did in each, as pictures show it.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "trace/segments.hpp"

namespace heddle::trace {

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

/// A worker's row: of each paint its share of a cell's time, and of that the part that was waited.
class CellRow {
 public:
  explicit CellRow(int cells) : shares_(static_cast<std::size_t>(cells)), waited_(static_cast<std::size_t>(cells), 0.0) {}

  /// `all`: nanoseconds that the cells are of.
  void add(const Lane& lane, std::int64_t all);
  /// What most of a cell is.
  Paint paint(int cell) const;
  /// In tenths: cells that are alike become one piece.
  int waited_tenths(int cell) const;

 private:
  std::vector<std::array<double, paints>> shares_;
  std::vector<double> waited_;
};

struct NamedRow {
  std::string label;
  CellRow row;
};
/// A row a worker, of threads and of the first `ctas` CTAs.
std::vector<NamedRow> rows_of(const TracedCall& call, int cells, std::int64_t all, int ctas);

/// Of all lanes that ever multiply, or move rows between ranks, the share that does so, by cell.
std::vector<double> busy_products(const TracedCall& call, int cells, std::int64_t all);
std::vector<double> busy_movers(const TracedCall& call, int cells, std::int64_t all);

}  // namespace heddle::trace
