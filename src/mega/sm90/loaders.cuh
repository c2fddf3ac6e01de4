// The roles that fetch what tasks read beside weights: token rows and their scales. Both wait by themselves until it is there.
#pragma once

#include "experts/sm90/loaders.cuh"
#include "experts/sm90/row_loaders.cuh"
#include "mega/sm90/tasks.cuh"

namespace heddle::sm90 {

/// Who reads rows: threads, by loads, or the unit that copies tensors.
enum class RowReader : std::uint8_t { threads, copies };

/// When the stages of a task's rows may be read (see Settled). For a warp. Where a wait gives up the roles go on without waiting:
/// old bytes are multiplied, and nobody is told of the result.
template <class Shape, RowReader reader>
class AwaitedRows {
 public:
  __device__ AwaitedRows(MegaShared<Shape>& shared, MegaWorker& w, const KernelTask& task) : shared_(shared), w_(w), task_(task) {}

  /// How many are there, at least so many.
  __device__ int await(int stages) {
    while (ready_ < stages) {
      const int ready = shared_.has_stopped() ? all : look();
      if (ready == 0) shared_.stop();
      ready_ = ready == 0 ? all : ready;
      if constexpr (reader == RowReader::copies) ptx::fence_global_proxies();  // stored by threads
    }
    return ready_;
  }
  __device__ static std::uint32_t load(const std::uint32_t* word) { return *word; }

 private:
  static constexpr int all = 1 << 30;

  /// How many stages are there, at least one more; 0: gave up.
  __device__ int look() {
    const MegaLayout& layout = shared_.known.call.layout;
    const MegaBlock block = task_.block();
    switch (task_.source) {
      case MegaSource::gemm1:
        return mega_await_rows(w_, layout, block) ? all : 0;
      case MegaSource::gemm2:
        return mega_await_steps(w_, layout, block, ready_);
      case MegaSource::shared_gemm1:
        return mega_await_input(w_, layout) ? all : 0;
      case MegaSource::shared_gemm2:
        break;
    }
    return mega_await_shared_steps(w_, layout, block.place.block, ready_);
  }

  MegaShared<Shape>& shared_;
  MegaWorker& w_;
  const KernelTask& task_;
  int ready_ = 0;
};

/// What the math warps need a row of a task: its weight, or where its results go. Seen by whoever has seen the task's last rows.
template <class Shape>
__device__ void lay_down_rows(MegaShared<Shape>& shared, const KernelTask& task, int slot) {
  const HeapView& heap = shared.begun.heap;
  const MegaLayout& layout = shared.known.call.layout;
  for (int i = static_cast<int>(threadIdx.x) % warp_threads; i < task.task.rows; i += warp_threads) {
    const auto row = static_cast<std::size_t>(task.task.flat + i);
    if (task.source == MegaSource::gemm1) shared.factors[slot][i] = *heap.mine<const float>(layout.row_weight(row));
    if (task.source == MegaSource::gemm2)
      shared.results[slot][i] = reinterpret_cast<bf16*>(home_of(heap, layout, *heap.mine<const MegaOrigin>(layout.origin(row))));
    if (task.source == MegaSource::shared_gemm2)
      shared.results[slot][i] = heap.mine<bf16>(layout.shared_slot(static_cast<int>(row)));
  }
  __syncwarp();
}

/// Token rows, as boxes. By a warp.
template <class Shape>
__device__ void load_rows(MegaShared<Shape>& shared, MegaWorker w, const MegaRank& part) {
  TaskReader<Shape> tasks(shared);
  RowBoxes<Shape> boxes(shared.engine);
  KernelTask task;
  while (tasks.next(task)) {
    const trace::WarpSpan span(trace::Kind::rows, task);
    AwaitedRows<Shape, RowReader::copies> rows(shared, w, task);
    const RowTensor& tensor = part.rows[static_cast<int>(task.source)];
    const int stages = plan_of(shared, task).steps() / Shape::parts;
    const auto copy = [&](int begin, int end) {
      for (int i = begin; i < end; ++i) {
        if (w.lane() == 0) {
          boxes.copy(tensor, task.task.flat, task.task.rows, i);
        } else {
          boxes.join();
        }
        if constexpr (arrivals_a_warp > 1) __syncwarp();  // none arrives for the stage behind it
      }
      __syncwarp();
    };
    // The first stages, which products wait for, where the ring is long; then what the task's end needs, which the last stage tells
    // of; then all that are there in one go, as math warps have few stages to wait with.
    int stage = min(rows.await(1), Shape::tokens_first ? 0 : min(Shape::row_stages, stages - 1));
    copy(0, stage);
    lay_down_rows(shared, task, tasks.slot());
    while (stage < stages) {
      const int first = stage;
      stage = min(rows.await(stage + 1), stages);
      copy(first, stage);
    }
    tasks.leave();
  }
}

/// Token scales. By a warp.
template <class Shape>
__device__ void load_scales(MegaShared<Shape>& shared, MegaWorker w) {
  TaskReader<Shape> tasks(shared);
  ScaleLoader<Shape> loader(shared.engine);
  KernelTask task;
  while (tasks.next(task)) {
    const int source = static_cast<int>(task.source);
    if (shared.known.rows[source].scaling != TokenScales::none) {
      const trace::WarpSpan span(trace::Kind::scales, task);
      const WeightPlan plan = plan_of(shared, task);
      AwaitedRows<Shape, RowReader::threads> rows(shared, w, task);
      loader.load(shared.known.rows[source], plan.cols, task.task, plan.steps() / Shape::parts, rows);
    }
    tasks.leave();
  }
}

}  // namespace heddle::sm90
