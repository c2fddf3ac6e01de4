#include "layer/cuda_seat.hpp"

#include <cuda_runtime.h>
#include <fmt/format.h>

#include <algorithm>
#include <numeric>

namespace heddle {

using cuda::check;

namespace {

int device_of(const DeviceWorkspace& workspace, int rank) { return workspace.device(workspace.impl().gpu_of(rank)); }

}  // namespace

DeviceSeat::DeviceSeat(DeviceRanks& all, int rank)
    : all_(all),
      options_(all.options_),
      rank_(rank),
      gpu_(all.workspace_.impl().gpu_of(rank)),
      local_(rank - all.workspace_.first_rank(gpu_)),
      device_(device_of(all.workspace_, rank)),
      stream_(all.streams_[gpu_]),
      local_experts_(options_.placement.experts_of(rank).size()),
      tokens_there_(device_),
      hidden_(device_),
      results_(device_),
      shared_(device_),
      out_(device_),
      all_out_(device_),
      ids_(device_),
      weights_(device_),
      factors_(device_) {
  if (!options_.extra_payloads.empty()) throw InputError("extra payloads go with the exchange's own interface, not with a layer");
  // Now, not while kernels of other ranks wait.
  const auto cap = static_cast<std::size_t>(most_tokens());
  const std::size_t pairs = cap * static_cast<std::size_t>(options_.topk);
  tokens_there_.grow(1);
  ids_.grow(pairs);
  weights_.grow(pairs);
  factors_.grow(cap);
  for (DeviceRoom<bf16>* rows : {&hidden_, &shared_, &out_}) rows->grow(cap * hidden());
}

auto DeviceSeat::offer() const -> Offer& { return all_.offers_[static_cast<std::size_t>(rank_ - all_.first_rank())]; }

void DeviceSeat::refuse(const InputError& error, int expected, int seen) {
  all_.give_up(rank_, WordKind::refused, static_cast<std::uint64_t>(expected), static_cast<std::uint64_t>(seen));
  throw InputError(error);
}

/// What all ranks see alike is thrown alike, the rest also ends the others' waits. As on the host engine.
void DeviceSeat::accept(const ExchangeInput& input, const Step& step) {
  if (step.max_tokens > most_tokens()) {
    throw InputError(
        fmt::format("way {}: the step's largest batch is {} rows, the cap is {}; create the layer with a cap of at least {}",
                    name(options_.way), step.max_tokens, most_tokens(), step.max_tokens));
  }
  if (input.tokens < 0 || input.tokens > step.max_tokens) {
    refuse(InputError(fmt::format("rank {} brings {} tokens, the step says at most {}", rank_, input.tokens, step.max_tokens)),
           step.max_tokens, input.tokens);
  }
  if (input.tokens > 0 && (input.hidden == nullptr || input.ids == nullptr || input.weights == nullptr)) {
    refuse(InputError(fmt::format("rank {} brings {} tokens without hidden states, ids or weights", rank_, input.tokens)), 0, 0);
  }
  try {
    const std::size_t pairs = static_cast<std::size_t>(input.tokens) * static_cast<std::size_t>(options_.topk);
    check_choices({input.ids, pairs}, input.tokens, options_.topk, options_.placement.experts());
  } catch (const InputError& error) {
    refuse(error, 0, 0);
  }
}

void DeviceSeat::accept(const CombineOutput& output) {
  if (tokens_ > 0 && (tensor_parallel() ? output.all_out : output.out) == nullptr)
    refuse(InputError(fmt::format("rank {} has no memory for the outputs of its {} tokens", rank_, tokens_)), 0, 0);
  if (output.all_out == nullptr || tensor_parallel()) return;
  if (output.first < 0 || output.all_tokens > all_rows() || output.first + tokens_ > output.all_tokens) {
    refuse(InputError(
               fmt::format("rank {}: its {} tokens from row {} on do not fit a batch of {} rows (at most {}: {} ranks of {})",
                           rank_, tokens_, output.first, output.all_tokens, all_rows(), options_.placement.ranks(), options_.cap)),
           output.all_tokens, output.first + tokens_);
  }
}

template <class T>
const T* DeviceSeat::upload(DeviceRoom<T>& to, const T* from, std::size_t size) {
  T* there = to.grow(size);
  if (size > 0) check(cudaMemcpyAsync(there, from, size * sizeof(T), cudaMemcpyHostToDevice, stream_), "copying to the GPU");
  return there;
}

template <class T>
void DeviceSeat::download(T* to, const T* from, std::size_t size) const {
  if (size > 0) check(cudaMemcpyAsync(to, from, size * sizeof(T), cudaMemcpyDeviceToHost, stream_), "copying from the GPU");
}

void DeviceSeat::settle() const { check(cudaStreamSynchronize(stream_), "copies of a rank"); }

void DeviceSeat::dispatch_send(const ExchangeInput& input, const Step& step) {
  accept(input, step);
  const cuda::DeviceScope scope(device_);
  tokens_ = input.tokens;
  const auto tokens = static_cast<std::size_t>(tokens_);
  const std::size_t pairs = tokens * static_cast<std::size_t>(options_.topk);
  DeviceInput& there = offer().input;
  there.tokens = upload(tokens_there_, &tokens_, 1);
  there.hidden = upload(hidden_, input.hidden, tokens * hidden());
  there.ids = upload(ids_, input.ids, pairs);
  there.weights = upload(weights_, input.weights, pairs);
  all_.counts_.count(rank_, input);
  all_.meeting_.meet(rank_, "dispatch on GPUs", [&] { all_.send_dispatch(step); });
}

Arrived DeviceSeat::dispatch_receive() {
  all_.meeting_.meet(rank_, "dispatch on GPUs", [this] { all_.receive_dispatch(); });
  const cuda::DeviceScope scope(device_);
  const Arrived there = all_.exchanges_[gpu_]->arrived(local_);
  arrived_ = there;
  if (there.layout == ArrivedLayout::routed) {
    fetch_routed(there);
  } else {
    fetch_by_expert(there);
  }
  const auto& live = all_.workspace_.live();
  arrived_.received = all_.counts_.received(rank_, live);
  traffic_ = all_.counts_.dispatched(rank_, live);
  return arrived_;
}

void DeviceSeat::fetch_routed(const Arrived& there) {
  const auto room = static_cast<std::size_t>(there.room);
  const std::size_t pairs = room * static_cast<std::size_t>(options_.topk);
  local_ids_.resize(pairs);
  pair_weights_.resize(pairs);
  rows_.grow(room * there.row_stride + 1);
  download(local_ids_.data(), there.local_ids, pairs);
  download(pair_weights_.data(), there.weights, pairs);
  download(rows_.data(), there.rows, room * there.row_stride);
  settle();
  arrived_.rows = rows_.data();
  arrived_.local_ids = local_ids_.data();
  arrived_.weights = pair_weights_.data();
  arrived_.real = count_pairs(arrived_, options_.topk);
}

void DeviceSeat::fetch_by_expert(const Arrived& there) {
  begins_.resize(local_experts_);
  counts_.resize(local_experts_);
  download(begins_.data(), there.begins, local_experts_);
  download(counts_.data(), there.counts, local_experts_);
  settle();
  const auto room = static_cast<std::size_t>(there.room);
  rows_.grow(room * there.row_stride + 1);
  row_weights_.grow(room + 1);
  for (std::size_t e = 0; e < local_experts_; ++e) {
    const auto begin = static_cast<std::size_t>(begins_[e]);
    const auto count = static_cast<std::size_t>(counts_[e]);
    download(rows_.data() + begin * there.row_stride, there.rows + begin * there.row_stride, count * there.row_stride);
    download(row_weights_.data() + begin, there.row_weights + begin, count);
  }
  settle();
  arrived_.rows = rows_.data();
  arrived_.begins = begins_.data();
  arrived_.counts = counts_.data();
  arrived_.row_weights = row_weights_.data();
  arrived_.real = std::accumulate(counts_.begin(), counts_.end(), 0);
}

void DeviceSeat::combine_send(const bf16* results) {
  const cuda::DeviceScope scope(device_);
  const std::size_t rows_a_row = arrived_.slots_wanted ? static_cast<std::size_t>(options_.topk) : 1;
  const std::size_t values = static_cast<std::size_t>(arrived_.room) * rows_a_row * hidden();
  if (arrived_.layout == ArrivedLayout::routed) {
    upload(results_, results, values);
  } else {
    bf16* there = results_.grow(values);
    for (std::size_t e = 0; e < local_experts_; ++e) {
      const std::size_t begin = static_cast<std::size_t>(begins_[e]) * hidden();
      const std::size_t bytes = static_cast<std::size_t>(counts_[e]) * hidden() * sizeof(bf16);
      if (bytes > 0)
        check(cudaMemcpyAsync(there + begin, results + begin, bytes, cudaMemcpyHostToDevice, stream_), "copying to the GPU");
    }
  }
  offer().results = results_.grow(values);
  all_.meeting_.meet(rank_, "combine on GPUs", [this] { all_.send_combine(); });
}

void DeviceSeat::combine_receive(const CombineOutput& output) {
  accept(output);
  const cuda::DeviceScope scope(device_);
  const auto tokens = static_cast<std::size_t>(tokens_);
  const bool all = output.all_out != nullptr || tensor_parallel();
  const std::size_t all_tokens = tensor_parallel() ? tokens : static_cast<std::size_t>(output.all_tokens);
  DeviceOutput& there = offer().output;
  there = {};
  there.out = out_.grow(tokens * hidden());
  // Room for all there can be: growing would free, and that waits for kernels.
  if (all) there.all_out = all_out_.grow(static_cast<std::size_t>(all_rows()) * hidden());
  there.first = output.first;
  there.all_tokens = output.all_tokens;
  if (output.shared != nullptr) there.shared = upload(shared_, output.shared, tokens * hidden());
  if (output.shared_factors != nullptr) there.shared_factors = upload(factors_, output.shared_factors, tokens);
  all_.meeting_.meet(rank_, "combine on GPUs", [this] { all_.receive_combine(); });
  if (!tensor_parallel()) download(output.out, there.out, tokens * hidden());
  if (output.all_out != nullptr) download(output.all_out, there.all_out, all_tokens * hidden());
  settle();
  traffic_ = all_.counts_.combined(rank_, all_.workspace_.live(), all);
}

}  // namespace heddle
