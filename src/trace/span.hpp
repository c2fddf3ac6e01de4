// What a trace is made of: who did what from when to when, and what it waited for. Plain types, one source for host and device.
//
// A lane is one worker in one role: a thread of the host engine, a warp of a kernel. Its spans nest; none overlaps another one in
// part. Spans of Kind::wait are waits for a word of a protocol. Waits that are too many and too short to be spans of their own (a
// stage of a ring in shared memory) are summed up in the innermost span around them.
#pragma once

#include <cstdint>
#include <vector>

#include "signal/words.hpp"

namespace heddle::trace {

/// Whose lane.
enum class Role : std::uint8_t {
  rank,      ///< the thread that calls a rank's layer: the steps of a chain
  worker,    ///< of an exchange: a thread, or a warp of a kernel
  dispatch,  ///< of the fused layer: announces (on the host), counts, fetches rows
  tasks,     ///< on the host: runs tasks, then sums
  claim,     ///< on GPUs: claims tasks and streams their weights
  rows,      ///< on GPUs: loads token rows
  scales,    ///< on GPUs: loads token scales
  widen,     ///< on GPUs: widens stored weights
  math,      ///< on GPUs: products and what becomes of them, the first warp of a warpgroup
};

/// What a span is spent on.
enum class Kind : std::uint8_t {
  dispatch,    ///< of a chain: rows go out and arrive
  move,        ///< rows and words of an exchange, by its worker
  regroup,     ///< arrived rows become the products' input
  products,    ///< of one task, or of a chain's step; on the host a GEMM 1 task's activation included
  activation,  ///< of a chain: a step of its own
  epilogue,    ///< of a task: activations, or results pushed home
  shared,      ///< the shared expert of a chain
  combine,     ///< of a chain: results go back and are summed
  announce,    ///< own tokens laid down, and told of
  count,       ///< what comes from whom
  fetch,       ///< rows pulled from their ranks
  claim,       ///< the next task
  weights,     ///< of a task, streamed into shared memory
  rows,        ///< of a task, brought to its products
  scales,      ///< likewise
  widen,       ///< weights of a task made operands
  sum,         ///< slots at home become outputs
  next_task,   ///< waits until its CTA has claimed one
  wait,        ///< for a word, see Span::word
};
inline constexpr int kinds = static_cast<int>(Kind::wait) + 1;

enum class Product : std::uint8_t { none, gemm1, gemm2, shared_gemm1, shared_gemm2 };

/// Of which task; Product::none: of none.
struct TaskNote {
  Product product = Product::none;
  std::int32_t expert = 0;  ///< local
  std::int32_t block = 0;   ///< row block of the rank, or of the shared expert
  std::int32_t part = 0;    ///< which 128 activations, or which 256 columns
  std::int32_t rows = 0;
};

/// Summed waits of a span: for what it takes, and for what it needs beside that or for room to put it. waits_of() names them.
inline constexpr int summed_waits = 2;

struct Span {
  std::int64_t begin = 0;  ///< nanoseconds of the recorder's clock
  std::int64_t end = 0;
  Kind kind = Kind::wait;
  TaskNote task;
  WordName word;                           ///< of a wait
  std::int64_t waited[summed_waits] = {};  ///< nanoseconds

  std::int64_t length() const { return end - begin; }
};

struct LaneName {
  int rank = 0;
  Role role = Role::rank;
  int number = 0;  ///< among those of this role of the rank or, on GPUs, of the CTA
  int cta = -1;    ///< -1: of a thread
  int launch = 0;  ///< on GPUs: which kernel of the call

  friend bool operator==(const LaneName&, const LaneName&) = default;
  friend auto operator<=>(const LaneName&, const LaneName&) = default;
};

struct Lane {
  LaneName name;
  const char* kernel = nullptr;  ///< on GPUs: its name
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::vector<Span> spans;  ///< in the order in which they ended
  std::int64_t lost = 0;    ///< spans for which there was no room
};

/// Lanes of one call, as recorded.
using Trace = std::vector<Lane>;

}  // namespace heddle::trace
