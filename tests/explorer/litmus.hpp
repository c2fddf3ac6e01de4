// Small programs over a few words and cells of rank 0's part, and the set of what they can see.
#pragma once

#include <fmt/format.h>

#include <functional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "explorer/worker.hpp"

namespace heddle::explorer {

/// One rank of a program: its verbs, with what they see noted down.
class LitmusRank {
 public:
  LitmusRank(Machine& machine, int rank, int index) : w(machine, rank, index) { w.start(); }
  void publish(int word, std::uint32_t value) { w.publish(word_at(word), value); }
  void wait(int word, std::uint32_t least = 0) {
    std::uint32_t value = 0;
    w.acquire_at_least(word_at(word), {}, least, value);
    note(value);
  }
  /// The value, or 0 if the word is not there yet.
  std::uint32_t peek(int word) {
    std::uint32_t value = 0;
    if (!w.peek(word_at(word), value)) value = 0;
    note(value);
    return value;
  }
  void write(int cell, std::uint32_t value) { w.write(cell_at(cell), value); }
  std::uint32_t read(int cell) {
    const std::uint32_t value = w.read(cell_at(cell));
    note(value);
    return value;
  }
  Word* word_at(int word) const { return w.heap().at<Word>(0, heap_header_bytes + sizeof(Word) * static_cast<std::size_t>(word)); }
  std::uint32_t* cell_at(int cell) const {
    return w.heap().at<std::uint32_t>(0, heap_header_bytes + 128 + sizeof(std::uint32_t) * static_cast<std::size_t>(cell));
  }
  void note(std::uint32_t value) { seen += fmt::format("{} ", value); }

  ExplorerWorker w;
  std::string seen;
};

class Litmus : public Scenario {
 public:
  using Program = std::function<void(LitmusRank&)>;
  explicit Litmus(std::vector<Program> programs, int workers = 1) : programs_(std::move(programs)), workers_(workers) {}
  std::string name() const override { return "litmus"; }
  int ranks() const override { return static_cast<int>(programs_.size()) / workers_; }
  int workers_a_rank() const override { return workers_; }
  std::size_t part_bytes() const override { return heap_header_bytes + 256; }
  void begin() override { seen_.assign(programs_.size(), ""); }
  void work(Machine& machine, int rank, int index) override {
    LitmusRank own(machine, rank, index);
    const auto program = static_cast<std::size_t>(rank * workers_ + index);
    programs_[program](own);
    seen_[program] = own.seen;
  }
  void end() override {
    std::string all;
    for (const std::string& seen : seen_) all += "[" + seen + "]";
    outcomes.insert(all);
  }
  std::set<std::string> outcomes;

 private:
  std::vector<Program> programs_;
  int workers_;
  std::vector<std::string> seen_;
};

}  // namespace heddle::explorer
