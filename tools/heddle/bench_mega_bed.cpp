#include "bench_mega_bed.hpp"

#include <algorithm>
#include <future>

#include "group/cuda_driver.hpp"
#include "heddle/error.hpp"
#include "heddle/plan.hpp"

namespace heddle::tool {

namespace {

constexpr int drawn_experts = 4;
/// What stays free on a GPU beside the copies of a layer.
constexpr std::size_t spare_bytes = std::size_t{1} << 30;

SyntheticOptions options_of(const MegaShape& layer, std::uint64_t seed) {
  SyntheticOptions options;
  options.shape = layer.shape;
  options.shape.experts = drawn_experts;
  options.kind = layer.kind;
  options.shared_kind = layer.shared_kind;
  options.shared_intermediate = layer.shared_intermediate;
  options.seed = seed;
  return options;
}

LayerOptions options_of(const LayerWay& way, int tokens) {
  LayerOptions options;
  options.way = way.way;
  options.shared = way.shared;
  options.combine_wire = way.combine_wire;
  options.combine = way.combine;
  options.cap = tokens;
  options.automatic.table = way.table;
  options.ring = way.ring;
  return options;
}

/// Of the GPU with least.
std::size_t free_memory(const Lanes& lanes) {
  std::size_t least = 0;
  for (std::size_t gpu = 0; gpu < lanes.gpus(); ++gpu) {
    const cuda::DeviceScope scope(lanes.device(gpu));
    std::size_t free = 0;
    std::size_t all = 0;
    cuda::check(cudaMemGetInfo(&free, &all), "free memory");
    least = gpu == 0 ? free : std::min(least, free);
  }
  return least;
}

}  // namespace

DrawnLayer::DrawnLayer(const MegaShape& layer, std::uint64_t seed) : drawn_(options_of(layer, seed)) {
  std::vector<std::future<ExpertWeights>> drawn;
  for (int id = 0; id < drawn_experts; ++id)
    drawn.push_back(std::async(std::launch::async, [this, id] { return drawn_.expert(id); }));
  for (auto& one : drawn) {
    const ExpertWeights weights = one.get();
    wide_.push_back(weights.gate);
    wide_.push_back(weights.up);
    down_.push_back(weights.down);
  }
  source_ = drawn_.source();
  source_.shape = layer.shape;
  source_.expert = [this](int id) { return expert(id); };
}

ExpertWeights DrawnLayer::expert(int id) const {
  const auto number = static_cast<std::size_t>(id);
  const std::size_t wide = wide_.size();
  const std::size_t up = number / wide;
  // Downs change with every expert, not only with every 64th.
  return {wide_[number % wide], wide_[up % wide], down_[(number + up + number / (wide * wide)) % down_.size()]};
}

MegaLoad load_of(const MegaShape& layer, const Batch& batch) {
  const Placement placement = Placement::contiguous(layer.shape.experts, batch.ranks());
  std::vector<long long> rows(static_cast<std::size_t>(layer.shape.experts), 0);
  for (int rank = 0; rank < batch.ranks(); ++rank) {
    for (const std::int32_t id : batch.routing(rank).ids) {
      if (id >= 0) ++rows[static_cast<std::size_t>(id)];
    }
  }
  const auto expert_bytes = static_cast<double>(expert_weight_bytes(layer.shape, layer.kind).total());
  const double a_pair = 6.0 * layer.shape.hidden;  // for each of the intermediate values
  MegaLoad busiest;
  for (int first = 0, last = 0; first < batch.ranks(); first = last) {
    MegaLoad load;
    for (last = first; last < batch.ranks() && batch.device_of(last) == batch.device_of(first); ++last) {
      for (const int expert : placement.experts_of(last)) {
        const long long here = rows[static_cast<std::size_t>(expert)];
        load.touched += here > 0 ? 1 : 0;
        load.operations += a_pair * layer.shape.intermediate * static_cast<double>(here);
      }
      if (layer.shared_kind) load.operations += a_pair * layer.shared_intermediate * batch.routing(last).tokens;
    }
    load.weight_bytes = load.touched * expert_bytes;
    busiest.touched = std::max(busiest.touched, load.touched);
    busiest.weight_bytes = std::max(busiest.weight_bytes, load.weight_bytes);
    busiest.operations = std::max(busiest.operations, load.operations);
  }
  if (layer.shared_kind) {
    LayerShape shared = layer.shape;
    shared.intermediate = layer.shared_intermediate;
    busiest.weight_bytes += static_cast<double>(expert_weight_bytes(shared, *layer.shared_kind).total());
  }
  return busiest;
}

ExchangeMemory memory_of(const LayerSource& source, int ranks, const std::vector<LayerWay>& ways, int tokens) {
  const LayerWeights weights = LayerWeights::load(source, Placement::contiguous(source.shape.experts, ranks), 0);
  ExchangeMemory memory;
  for (const LayerWay& way : ways) {
    try {
      memory.include(layer_memory(weights, options_of(way, tokens)));
    } catch (const InputError&) {  // told in its own line
    }
  }
  return memory;
}

MegaBed::MegaBed(Lanes& lanes, Batch& batch, const LayerSource& source, const LayerWay& way, int tokens,
                 const ExchangeMemory& memory, int copies, const BedPlace& place)
    : lanes_(lanes),
      workspace_(batch.workspace(memory.heap_bytes(batch.ranks()))),
      step_{tokens, Phase::decode},
      is_eager_(way.way == Way::normal),
      place_(place),
      seats_(seats_of(batch)) {
  const std::size_t before = free_memory(lanes);
  add_copy(source, way, tokens, memory);
  std::size_t left = free_memory(lanes);
  const std::size_t each = before - std::min(before, left);
  for (; this->copies() < copies && left > each + spare_bytes; left = free_memory(lanes)) add_copy(source, way, tokens, memory);
}

MegaBed::Seats MegaBed::seats_of(const Batch& batch) const {
  Seats seats{std::vector<std::vector<DeviceInput>>(lanes_.gpus()), std::vector<std::vector<bf16*>>(lanes_.gpus())};
  for (std::size_t gpu = 0; gpu < lanes_.gpus(); ++gpu) {
    for (int local = 0; local < workspace_.ranks_on(gpu); ++local) {
      seats.inputs[gpu].push_back(batch.input(workspace_.first_rank(gpu) + local));
      seats.outputs[gpu].push_back(batch.output(workspace_.first_rank(gpu) + local).out);
    }
  }
  return seats;
}

std::size_t MegaBed::weight_bytes() const {
  std::size_t bytes = 0;
  for (const std::vector<DeviceLayer>& copy : layers_) bytes += copy.front().weight_bytes();
  return bytes;
}

void MegaBed::add_copy(const LayerSource& source, const LayerWay& way, int tokens, const ExchangeMemory& memory) {
  const Placement placement = Placement::contiguous(source.shape.experts, workspace_.ranks());
  DeviceLayerOptions device;
  device.timed = true;
  device.shared_inside = way.inside;
  device.exchange.sms = place_.sms.exchange;
  device.expert_ctas = device.shared_ctas = place_.sms.products;
  std::vector<DeviceLayer> copy;
  for (std::size_t gpu = 0; gpu < lanes_.gpus(); ++gpu) {
    std::vector<LayerWeights> weights;
    for (int local = 0; local < workspace_.ranks_on(gpu); ++local)
      weights.push_back(LayerWeights::load(source, placement, workspace_.first_rank(gpu) + local));
    copy.emplace_back(workspace_, gpu, memory, weights, options_of(way, tokens), device);
  }
  layers_.push_back(std::move(copy));
}

void MegaBed::begin(int call, const Seats& seats) {
  for (std::size_t gpu = 0; gpu < lanes_.gpus(); ++gpu) layer(call, gpu).begin(seats.inputs[gpu], step_, stream(gpu));
}

void MegaBed::end(int call, const Seats& seats) {
  for (std::size_t gpu = 0; gpu < lanes_.gpus(); ++gpu) layer(call, gpu).end(seats.outputs[gpu], stream(gpu));
}

void MegaBed::queue(int call, const Seats& seats) {
  begin(call, seats);
  end(call, seats);
}

void MegaBed::call(int call, bool gated, const std::function<void()>& give_up) {
  gated = gated && !is_eager_;
  if (gated) lanes_.close_gate();
  try {
    queue(call);
  } catch (...) {
    lanes_.open_gate();
    throw;
  }
  lanes_.open_gate();
  lanes_.settle(give_up);
  check();
}

MegaParts MegaBed::parts(int call) const {
  MegaParts slowest;
  const auto total = [](const MegaParts& parts) { return parts.dispatch + parts.experts + parts.combine; };
  for (const DeviceLayer& one : layers_[static_cast<std::size_t>(call) % layers_.size()]) {
    const MegaParts parts = one.seconds();
    if (total(parts) > total(slowest)) slowest = parts;
  }
  return slowest;
}

void MegaBed::check() {
  std::exception_ptr first;  // all are asked: what experts met in a call that was given up would be told later
  for (std::vector<DeviceLayer>& copy : layers_) {
    for (DeviceLayer& one : copy) {
      try {
        one.throw_if_failed();
      } catch (const Error&) {
        if (first == nullptr) first = std::current_exception();
      }
    }
  }
  if (first != nullptr) std::rethrow_exception(first);
}

}  // namespace heddle::tool
