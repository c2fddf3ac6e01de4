// The role of tasks and combine for a worker that does one thing after the other: a thread, or the explorer's coroutine. In a
// kernel the same calls of the protocol stand in several warps.
#pragma once

#include "heddle/experts.hpp"
#include "mega/protocol.hpp"
#include "trace/recorder.hpp"

namespace heddle {

/// Room for activations in a worker's ordinary memory: row i at values + i * value_stride, its scales at scales + i * scale_stride.
struct StepRows {
  std::byte* values = nullptr;
  std::size_t value_stride = 0;
  std::byte* scales = nullptr;
  std::size_t scale_stride = 0;
};

/// Arrived rows likewise, in wire format, with their weights.
struct ArrivedRows {
  std::byte* rows = nullptr;
  float* weights = nullptr;
};

/// Runs tasks on worker W with what `Products` computes, all in ordinary memory of the worker:
///   ArrivedRows arrived(rows)                        room for a block's rows; then
///   RowView gemm1(expert, part, rows)                128 activations of each, or fewer; scales padded to StepFormat::scale_stride
///   RowView shared_gemm1(first token, part, rows)    the same of the rank's own tokens by the shared expert
///   StepRows activations(format, rows)               room for a block's activations, all steps; then
///   const bf16* gemm2(expert, part, rows)            [rows, columns of the part]
///   const bf16* shared_gemm2(part, rows)             the same by the shared expert
template <CountingWorker W, class Products>
class MegaTasks {
 public:
  MegaTasks(W& w, const MegaCall& call, Products& products) : w_(w), call_(call), layout_(call.layout), products_(products) {}

  /// GEMM 1 of the shared expert, which needs no counts; its GEMM 2, whose slots may be written only then; and the rank's tasks,
  /// one after the other, until all are taken.
  bool run() {
    if (!w_.begin()) return false;
    run_all_shared_gemm1();
    if (!mega_await_counts(w_, layout_) || !run_all_shared_gemm2()) return false;
    const MegaSchedule schedule = layout_.schedule(call_.blocks().count());
    for (int place = mega_claim(w_, layout_); place < schedule.tasks(); place = mega_claim(w_, layout_)) {
      const MegaTask task = schedule.task(place);
      const MegaBlock block = block_of(call_, task.block);
      const bool is_gemm1 = task.kind == MegaTask::Kind::gemm1;
      const trace::TaskNote note{is_gemm1 ? trace::Product::gemm1 : trace::Product::gemm2, block.expert, task.block, task.part,
                                 block.rows};
      if (!(is_gemm1 ? run_gemm1(block, note) : run_gemm2(block, note))) return false;
    }
    mega_finish(w_, layout_);
    return true;
  }

 private:
  bool run_gemm1(const MegaBlock& block, const trace::TaskNote& note) {
    if (!load_rows(block, note)) return false;
    const RowView made = multiplied(note, [&] { return products_.gemm1(block.expert, note.part, block.rows); });
    const trace::Recorded epilogue(trace::Kind::epilogue, note);
    store(layout_.intermediate(), block.ring_row, note.part, block.rows, made);
    mega_note_step(w_, layout_, block, note.part);
    return true;
  }

  bool load_rows(const MegaBlock& block, const trace::TaskNote& note) {
    const trace::Recorded loading(trace::Kind::rows, note);
    if (!mega_await_rows(w_, layout_, block)) return false;
    const HeapView heap = w_.heap();
    const ArrivedRows room = products_.arrived(block.rows);
    for (int i = 0; i < block.rows; ++i) {
      const std::size_t row = block.ring_row + static_cast<std::size_t>(i);
      w_.copy_row(room.rows + static_cast<std::size_t>(i) * layout_.wire.row_bytes(),
                  heap.template mine<std::byte>(layout_.arrived(row)), layout_.wire);
      room.weights[i] = w_.read(heap.template mine<const float>(layout_.row_weight(row)));
    }
    w_.complete_all();
    return true;
  }

  bool run_gemm2(const MegaBlock& block, const trace::TaskNote& note) {
    const auto await = [&](int step) { return mega_await_steps(w_, layout_, block, step); };
    if (!load_steps(layout_.intermediate(), block.ring_row, note, await)) return false;
    const bf16* results = multiplied(note, [&] { return products_.gemm2(block.expert, note.part, block.rows); });
    const trace::Recorded epilogue(trace::Kind::epilogue, note);
    const int columns = columns_of(note.part);
    for (int i = 0; i < block.rows; ++i) mega_push(w_, layout_, block, i, results + i * columns, note.part * task_columns, columns);
    mega_note_pushed(w_, layout_, block);
    return true;
  }

  /// All steps of a GEMM 2 task's rows, from row `first` of the region on; await(step) as mega_await_steps.
  template <class Await>
  bool load_steps(const StepRegion& region, std::size_t first, const trace::TaskNote& note, const Await& await) {
    const trace::Recorded loading(trace::Kind::rows, note);
    const StepRows room = products_.activations(region.format, note.rows);
    for (int step = 0, ready = 0; step < region.format.steps(); ++step) {
      if (step >= ready) ready = await(step);
      if (ready == 0) return false;
      load(region, first, step, note.rows, room);
    }
    w_.complete_all();
    return true;
  }

  template <class Multiply>
  auto multiplied(const trace::TaskNote& note, const Multiply& multiply) {
    const trace::Recorded products(trace::Kind::products, note);
    return multiply();
  }

  // The shared expert's tasks are dealt beforehand: all are of one size. GEMM 1 waits for nobody, so GEMM 2 waits for what is under
  // way.
  int shared_blocks() const { return layout_.has_shared ? parts_of(call_.input.tokens, layout_.block_rows) : 0; }
  void run_all_shared_gemm1() {
    const int steps = layout_.shared.steps();
    for (int task = w_.index(); task < shared_blocks() * steps; task += w_.count()) {
      const int block = task / steps;
      const int part = task % steps;
      const int first = block * layout_.block_rows;
      const trace::TaskNote note{trace::Product::shared_gemm1, 0, block, part, shared_rows(block)};
      const RowView made = multiplied(note, [&] { return products_.shared_gemm1(first, part, note.rows); });
      const trace::Recorded epilogue(trace::Kind::epilogue, note);
      store(layout_.shared_intermediate(), static_cast<std::size_t>(first), part, note.rows, made);
      mega_note_shared_step(w_, layout_, block, part);
    }
  }
  bool run_all_shared_gemm2() {
    for (int task = w_.index(); task < shared_blocks() * layout_.gemm2_tasks(); task += w_.count()) {
      if (!run_shared_gemm2(task / layout_.gemm2_tasks(), task % layout_.gemm2_tasks())) return false;
    }
    return true;
  }

  bool run_shared_gemm2(int block, int part) {
    const trace::TaskNote note{trace::Product::shared_gemm2, 0, block, part, shared_rows(block)};
    const int first = block * layout_.block_rows;
    const auto await = [&](int step) { return mega_await_shared_steps(w_, layout_, block, step); };
    if (!load_steps(layout_.shared_intermediate(), static_cast<std::size_t>(first), note, await)) return false;
    const bf16* results = multiplied(note, [&] { return products_.shared_gemm2(part, note.rows); });
    const trace::Recorded epilogue(trace::Kind::epilogue, note);
    const int columns = columns_of(part);
    for (int i = 0; i < note.rows; ++i) {
      const std::size_t to = layout_.shared_slot(first + i) + static_cast<std::size_t>(part * task_columns) * sizeof(bf16);
      w_.copy_bytes(w_.heap().template mine<std::byte>(to), results + i * columns,
                    static_cast<std::size_t>(columns) * sizeof(bf16));
    }
    return true;
  }

  void store(const StepRegion& region, std::size_t first, int step, int rows, const RowView& from) {
    const HeapView heap = w_.heap();
    for (std::size_t i = 0; i < static_cast<std::size_t>(rows); ++i) {
      w_.copy_bytes(heap.template mine<std::byte>(region.values(first + i, step)), from.values + i * from.value_stride,
                    region.format.value_bytes(region.format.columns(step)));
      if (region.format.scale_stride() == 0) continue;
      w_.copy_bytes(heap.template mine<std::byte>(region.scales(first + i, step)), from.scales + i * from.scale_stride,
                    region.format.scale_stride());
    }
  }

  void load(const StepRegion& region, std::size_t first, int step, int rows, const StepRows& to) {
    const HeapView heap = w_.heap();
    for (std::size_t i = 0; i < static_cast<std::size_t>(rows); ++i) {
      w_.copy_bytes(to.values + i * to.value_stride + region.format.value_bytes(step * step_columns),
                    heap.template mine<std::byte>(region.values(first + i, step)),
                    region.format.value_bytes(region.format.columns(step)));
      if (region.format.scale_stride() == 0) continue;
      w_.copy_bytes(to.scales + i * to.scale_stride + static_cast<std::size_t>(step) * region.format.scale_stride(),
                    heap.template mine<std::byte>(region.scales(first + i, step)), region.format.scale_stride());
    }
  }

  int shared_rows(int block) const {
    const int left = call_.input.tokens - block * layout_.block_rows;
    return left < layout_.block_rows ? left : layout_.block_rows;
  }
  int columns_of(int part) const {
    const int left = layout_.wire.hidden - part * task_columns;
    return left < task_columns ? left : task_columns;
  }

  W& w_;
  const MegaCall& call_;
  const MegaLayout& layout_;
  Products& products_;
};

}  // namespace heddle
