// What a rank does with what arrived: grids, GEMMs, floors and the time model.
#include <fmt/format.h>

#include "plan/sections.hpp"
#include "plan/ways.hpp"

namespace heddle::plan {

namespace {

Section activation_section(const PlanRequest& request) {
  const LayerShape& shape = request.shape;
  const PaddedTensors tensors = padded_tensors(shape, request.ranks, request.cap, request.activation());
  const GridPlan grids = activation_grid(shape, request.ranks, request.cap, request.machine.sms);
  const char* format = request.activation() == Activation::fp8 ? "fp8" : "bf16";
  Section section{"activation", "Activation step: room and grids", {}};
  const Adder rows(section, Unit::rows), bytes(section, Unit::bytes), count(section, Unit::count);
  rows("rows_an_expert", "T, most rows of an expert", double(tensors.rows_an_expert),
       fmt::format("cap {} x {} ranks", request.cap, request.ranks), grid_article("How T is computed"));
  rows("room", "rows of room", double(tensors.rows),
       fmt::format("{} local experts x T", most_local_experts(shape.experts, request.ranks)), exchange_article("4.2"));
  bytes("received", "padded received rows", double(tensors.received), fmt::format("room x {} values, {}", shape.hidden, format),
        grid_article("Prefill uses option (a)"));
  bytes("gate_up", "padded output of GEMM 1", double(tensors.gate_up),
        fmt::format("room x 2 x {} values, bf16", shape.intermediate), grid_article("Prefill uses option (a)"));
  count("slots", "CTA slots", double(grids.slots),
        fmt::format("{} SMs x {} CTAs of {} threads (assumed)", request.machine.sms, grids.ctas_an_sm, grids.threads),
        grid_article("The padded grid"));
  count("padded", "CTAs of the padded grid", double(grids.padded), "T x k", grid_article("The padded grid"));
  count("persistent", "CTAs of the persistent grid", double(grids.persistent), "min(slots, T x k)",
        grid_article("The persistent grid"));
  count("not_launched", "CTAs that the persistent grid saves", double(grids.not_launched()), "padded - persistent",
        grid_article("The two grids side by side"));
  return section;
}

Section gemm_section(const PlanRequest& request) {
  const LayerShape& shape = request.shape;
  const GemmTasks tasks = gemm_tasks(shape);
  const WeightBytes weights = expert_weight_bytes(shape, request.weights);
  const int local = most_local_experts(shape.experts, request.ranks);
  Section section{"gemm", "GEMMs and weights", {}};
  const Adder count(section, Unit::count), bytes(section, Unit::bytes);
  count("gemm1_tasks", "GEMM 1, tasks of a row block", tasks.gemm1_tasks, fmt::format("2 x {} columns / 256", shape.intermediate),
        fused_article("3.3"));
  count("gemm1_steps", "GEMM 1, K steps of a task", tasks.gemm1_steps, fmt::format("{} / 128", shape.hidden), fused_article("3.3"));
  count("gemm2_tasks", "GEMM 2, tasks of a row block", tasks.gemm2_tasks, fmt::format("{} columns / 256", shape.hidden),
        fused_article("3.6"));
  count("gemm2_steps", "GEMM 2, K steps of a task", tasks.gemm2_steps, fmt::format("{} / 128", shape.intermediate),
        fused_article("3.6"));
  bytes("expert_values", "an expert's weights, without scales", double(weights.values),
        fmt::format("3 x {} x {} values", shape.hidden, shape.intermediate), fused_article("3.4"));
  bytes("expert_scales", "their scales", double(weights.scales), "as checkpoints store them", "docs/numerics.md");
  bytes("rank_weights", "a rank's weights and scales", local * double(weights.total()), fmt::format("{} local experts", local),
        fused_article("3.4"));
  return section;
}

Section floor_section(const PlanRequest& request) {
  const Machine& machine = request.machine;
  Section section{"floors", fmt::format("Floors of a layer on one {}", machine.title), {}};
  const Adder seconds(section, Unit::seconds);
  const auto add = [&](std::string name, std::string title, double time, std::string_view what,
                       const std::optional<MachineValue>& rate) {
    if (rate) {
      seconds(std::move(name), std::move(title), time, fmt::format("{} at {:.4g} x 10^12/s", what, rate->value / 1e12),
              std::string(rate->source));
    }
  };
  const Floors floors = expert_floors(request);
  add("weights", "weights of the touched experts", floors.weights, "bytes", machine.memory_read);
  add("operations", "both GEMMs", floors.operations, "6 x rows x H x D operations",
      request.activation() == Activation::fp8 ? machine.fp8 : machine.bf16);
  add("activation", "activation step", floors.activation, "bytes read and written", machine.memory_copy);
  for (const WayTraits& way : ways) {
    if (machine.link) {
      const double bytes = dispatch_traffic(way.way, request).remote_bytes + combine_traffic(way.way, request).remote_bytes;
      add(fmt::format("{}.wire", way.name), fmt::format("{}, dispatch and combine", way.name), bytes / machine.link->value,
          "remote bytes", machine.link);
    }
  }
  return section;
}

Section model_section(const PlanRequest& request) {
  const Machine& machine = request.machine;
  Section section{"model", "Transfer SMs, and the chooser's model of a layer (not measured)", {}};
  if (machine.link && machine.sm_read && machine.sm_write) {
    const double copies = expected_copies(request.shape.experts, request.shape.topk, request.ranks);
    const double link = machine.link->value, read = machine.sm_read->value, write = machine.sm_write->value;
    const std::string formula = fmt::format("1.25 x {:.1f} / (1 - 1/{}) x max(1/{:.0f}, 1/({:.2f} x {:.0f})) GB/s, up to even",
                                            link / 1e9, request.ranks, write / 1e9, copies, read / 1e9);
    Adder(section, Unit::count)("elastic.sms", "elastic, SMs of its transfer",
                                transfer_sms(copies, request.ranks, link, read, write, machine.sms),
                                request.ranks > 1 ? formula : "one rank: nothing crosses a link", exchange_article("5.1"));
  }
  for (const WayTraits& way : ways) {
    if (const auto time = estimate_time(way.way, request)) {
      Adder(section, Unit::seconds)(fmt::format("{}.layer", way.name), fmt::format("{}, a layer", way.name), time->total,
                                    fmt::format("exchange {:.1f} us, experts {:.1f} us, {}", time->exchange * 1e6,
                                                time->experts * 1e6, way.way == Way::mega ? "overlapped" : "in turn"),
                                    "docs/planning.md");
    }
  }
  return section;
}

}  // namespace

std::vector<Section> compute_sections(const PlanRequest& request) {
  return {activation_section(request), gemm_section(request), floor_section(request), model_section(request)};
}

}  // namespace heddle::plan
