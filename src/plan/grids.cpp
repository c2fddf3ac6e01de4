// Grids of the activation step, tasks of the GEMMs, SMs of a transfer.
#include <algorithm>
#include <cmath>

#include "heddle/plan.hpp"
#include "plan/ways.hpp"

namespace heddle {

GridPlan activation_grid(const LayerShape& shape, int ranks, int cap, int sms) {
  constexpr int outputs_a_thread = 8, warp = 32, most_threads = 1024, threads_an_sm = 2048, most_ctas = 32;
  GridPlan grid;
  grid.threads = std::min(most_threads, plan::round_up(plan::divide_up(shape.intermediate, outputs_a_thread), warp));
  grid.ctas_an_sm = std::min(most_ctas, threads_an_sm / grid.threads);
  grid.slots = static_cast<std::uint64_t>(sms) * static_cast<std::uint64_t>(grid.ctas_an_sm);
  grid.padded = static_cast<std::uint64_t>(ranks) * static_cast<std::uint64_t>(cap) * static_cast<std::uint64_t>(shape.topk);
  grid.persistent = std::min(grid.slots, grid.padded);
  return grid;
}

GemmTasks gemm_tasks(const LayerShape& shape) {
  constexpr int task_columns = 256, step = 128;
  return {.gemm1_tasks = plan::divide_up(2 * shape.intermediate, task_columns),
          .gemm1_steps = plan::divide_up(shape.hidden, step),
          .gemm2_tasks = plan::divide_up(shape.hidden, task_columns),
          .gemm2_steps = plan::divide_up(shape.intermediate, step)};
}

int transfer_sms(double copies, int ranks, double link, double sm_read, double sm_write, int sms) {
  constexpr double margin = 1.25;
  constexpr int fewest = 4;
  if (ranks == 1) {
    return sms;  // nothing crosses a link: local copies may use every SM
  }
  const double arriving = link / (1 - 1.0 / ranks);  // bytes a second that the link can sustain, own rows included
  const double busy = std::max(arriving / sm_write, arriving / copies / sm_read);
  const int wanted = std::max(fewest, static_cast<int>(std::ceil(busy * margin)));
  return std::min(plan::round_up(wanted, 2), sms);
}

}  // namespace heddle
