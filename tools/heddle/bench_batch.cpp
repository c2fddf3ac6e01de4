#include "bench_batch.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "bench_kernels.hpp"
#include "group/cuda_driver.hpp"
#include "heddle/error.hpp"

namespace heddle::tool {

using cuda::check;

namespace {

/// kind:value, as `heddle run --routing` has it.
Popularity popularity_of(const BenchArguments& a, int ranks) {
  const auto colon = a.routing.find(':');
  const std::string kind = a.routing.substr(0, colon);
  const std::string value = colon == std::string::npos ? "" : a.routing.substr(colon + 1);
  try {
    if (kind == "uniform" && value.empty()) return uniform_popularity(a.experts);
    if (kind == "zipf" && !value.empty()) return zipf_popularity(a.experts, std::stod(value), a.seed);
    if (kind == "hot" && !value.empty()) return hot_rank_popularity(Placement::contiguous(a.experts, ranks), std::stoi(value));
  } catch (const std::logic_error&) {  // of std::stod and std::stoi
  }
  throw InputError(fmt::format("--routing takes uniform, zipf:EXPONENT or hot:RANK, not '{}'", a.routing));
}

BatchRouting recorded(const BenchArguments& a, int ranks, int tokens) {
  const Recording recording = Recording::open(a.trace);
  if (a.trace_expand < 1) throw InputError(fmt::format("--trace-expand {}: at least 1 is needed", a.trace_expand));
  const long long needed = static_cast<long long>(recording.least_experts()) * a.trace_expand;
  if (needed > a.experts)
    throw InputError(fmt::format("{} names expert {}; --experts {} are too few", a.trace, needed - 1, a.experts));
  const int wanted = ranks * tokens;
  const int per_step = std::max(1, recording.prompts());
  const int there = (recording.steps() - a.trace_step) * per_step;
  const int taken = std::max(1, std::min(wanted, there));
  Routing source = recording.take(a.trace_layer, a.trace_step, taken);
  if (a.trace_expand > 1) source = expand(source, a.trace_expand);

  BatchRouting batch;
  batch.topk = source.topk;
  batch.note = fmt::format("recorded in {}, layer {}, step {}", a.trace, a.trace_layer, a.trace_step);
  if (a.trace_expand > 1) batch.note += fmt::format(", expanded {} times", a.trace_expand);
  if (taken < wanted) batch.note += fmt::format(", {} tokens again and again", taken);
  batch.ranks.assign(static_cast<std::size_t>(ranks), Routing{tokens, source.topk, {}, {}});
  const auto k = static_cast<std::size_t>(source.topk);
  for (int i = 0; i < wanted; ++i) {
    Routing& to = batch.ranks[static_cast<std::size_t>(i % ranks)];
    const auto from = static_cast<std::ptrdiff_t>(static_cast<std::size_t>(i % taken) * k);
    const auto end = from + static_cast<std::ptrdiff_t>(k);
    to.ids.insert(to.ids.end(), source.ids.begin() + from, source.ids.begin() + end);
    to.weights.insert(to.weights.end(), source.weights.begin() + from, source.weights.begin() + end);
  }
  return batch;
}

}  // namespace

BatchRouting make_routing(const BenchArguments& a, int ranks, int tokens) {
  if (!a.trace.empty()) return recorded(a, ranks, tokens);
  BatchRouting batch;
  batch.topk = a.topk;
  batch.note = fmt::format("{}, drawn from seed {}", a.routing, a.seed);
  const Popularity popularity = popularity_of(a, ranks);
  for (int rank = 0; rank < ranks; ++rank) {
    DrawOptions draw;
    draw.tokens = tokens;
    draw.topk = a.topk;
    draw.seed = a.seed * 1000 + static_cast<std::uint64_t>(rank);
    batch.ranks.push_back(draw_routing(popularity, draw));
  }
  return batch;
}

Batch::Batch(Lanes& lanes, const BatchRouting& routing, int hidden, std::uint64_t seed)
    : lanes_(lanes), routing_(routing), hidden_(hidden), seed_(seed) {
  const DeviceWorkspace& spread = workspace(1);  // it knows which ranks live where
  for (std::size_t gpu = 0; gpu < lanes.gpus(); ++gpu) {
    const cuda::DeviceScope scope(lanes.device(gpu));
    for (int local = 0; local < spread.ranks_on(gpu); ++local) {
      const int rank = spread.first_rank(gpu) + local;
      const Routing& own = this->routing(rank);
      const std::size_t values = static_cast<std::size_t>(own.tokens) * static_cast<std::size_t>(hidden);
      Seat seat;
      seat.device = lanes.device(gpu);
      seat.gpu = gpu;
      seat.tokens = std::make_unique<Block>(seat.device, sizeof(int));
      seat.hidden = std::make_unique<Block>(seat.device, values * sizeof(bf16));
      seat.out = std::make_unique<Block>(seat.device, values * sizeof(bf16));
      seat.ids = std::make_unique<Block>(seat.device, own.ids.size() * sizeof(std::int32_t));
      seat.weights = std::make_unique<Block>(seat.device, own.weights.size() * sizeof(float));
      seat.bad = std::make_unique<Block>(seat.device, sizeof(unsigned long long));
      seat.ids->write(own.ids.data(), own.ids.size() * sizeof(std::int32_t));
      seat.weights->write(own.weights.data(), own.weights.size() * sizeof(float));
      fill_normal(seat.hidden->as<bf16>(), values, seed * 1000 + static_cast<std::uint64_t>(rank), lanes.stream(gpu));
      seats_.push_back(std::move(seat));
    }
  }
  lanes.settle();
}

DeviceWorkspace& Batch::workspace(std::size_t bytes) {
  if (workspace_ == nullptr || workspace_->bytes() < bytes) {
    workspace_.reset();  // first, so that both need not fit
    workspace_ = std::make_unique<DeviceWorkspace>(DeviceGroupOptions{ranks(), lanes_.devices(), lanes_.deadline()}, bytes);
  }
  return *workspace_;
}

void Batch::set_routing(const BatchRouting& routing) {
  routing_ = routing;
  for (std::size_t rank = 0; rank < seats_.size(); ++rank) {
    const Routing& own = routing_.ranks[rank];
    seats_[rank].ids->write(own.ids.data(), own.ids.size() * sizeof(std::int32_t));
    seats_[rank].weights->write(own.weights.data(), own.weights.size() * sizeof(float));
  }
}

void Batch::set_tokens(int tokens) {
  for (const Seat& seat : seats_) seat.tokens->write(&tokens, sizeof tokens);
}

DeviceInput Batch::input(int rank) const {
  const Seat& seat = seats_[static_cast<std::size_t>(rank)];
  DeviceInput input;
  input.tokens = seat.tokens->as<int>();
  input.hidden = seat.hidden->as<bf16>();
  input.ids = seat.ids->as<std::int32_t>();
  input.weights = seat.weights->as<float>();
  return input;
}

DeviceOutput Batch::output(int rank) const {
  DeviceOutput output;
  output.out = seats_[static_cast<std::size_t>(rank)].out->as<bf16>();
  return output;
}

const bf16* Batch::results(int rank, std::size_t rows) {
  Seat& seat = seats_[static_cast<std::size_t>(rank)];
  const std::size_t values = std::max<std::size_t>(rows, 1) * static_cast<std::size_t>(hidden_);
  if (seat.results == nullptr || seat.results->bytes() < values * sizeof(bf16)) {
    seat.results.reset();  // first, so that both need not fit
    seat.results = std::make_unique<Block>(seat.device, values * sizeof(bf16));
    fill_results(rank, seat.results->as<bf16>(), std::max<std::size_t>(rows, 1));
  }
  return seat.results->as<bf16>();
}

void Batch::fill_results(int rank, bf16* to, std::size_t rows) {
  const Seat& seat = seats_[static_cast<std::size_t>(rank)];
  const cuda::DeviceScope scope(seat.device);
  fill_normal(to, rows * static_cast<std::size_t>(hidden_), seed_ * 1000 + 500 + static_cast<std::uint64_t>(rank),
              lanes_.stream(seat.gpu));
  lanes_.settle();
}

void Batch::poison_outputs() {
  for (const Seat& seat : seats_) {
    const cuda::DeviceScope scope(seat.device);
    check(cudaMemsetAsync(seat.out->as<bf16>(), 0xFF, seat.out->bytes(), lanes_.stream(seat.gpu)), "poisoning of outputs");
  }
  lanes_.settle();
}

unsigned long long Batch::bad_outputs(int tokens) {
  const auto values = static_cast<std::size_t>(tokens) * static_cast<std::size_t>(hidden_);
  const unsigned long long none = 0;
  for (const Seat& seat : seats_) {
    const cuda::DeviceScope scope(seat.device);
    seat.bad->write(&none, sizeof none);
    count_not_finite(seat.out->as<bf16>(), values, seat.bad->as<unsigned long long>(), lanes_.stream(seat.gpu));
  }
  lanes_.settle();
  unsigned long long all = 0;
  for (const Seat& seat : seats_) {
    unsigned long long bad = 0;
    check(cudaMemcpy(&bad, seat.bad->as<unsigned long long>(), sizeof bad, cudaMemcpyDeviceToHost), "check of the outputs");
    all += bad;
  }
  return all;
}

}  // namespace heddle::tool
