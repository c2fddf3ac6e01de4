#include "exchange/host_exchange.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <system_error>
#include <thread>
#include <utility>

#include "trace/recorder.hpp"

namespace heddle {

namespace {
std::function<void()>& verb_hook() {
  thread_local std::function<void()> hook;
  return hook;
}
}  // namespace

void set_verb_hook(std::function<void()> hook) { verb_hook() = std::move(hook); }

HostRank::HostRank(Workspace& workspace, const ExchangeOptions& options, const ExchangeMemory& memory)
    : workspace_(workspace), options_(options), shape_(shape_of(options)), hook_(verb_hook()) {
  if (ranks() != workspace.group().ranks()) {
    throw InputError(fmt::format("the placement is for {} ranks, the group has {}", ranks(), workspace.group().ranks()));
  }
  if (workspace.group().nodes() > 1 && options.way != Way::elastic) {
    throw InputError(fmt::format("way {} knows one node, the group has {}; take elastic, whose rows also go by messages",
                                 name(options.way), workspace.group().nodes()));
  }
  const Areas areas = areas_of(memory, ranks());
  const ExchangeMemory own = exchange_memory(options);
  if (areas.end > workspace.bytes() || own.dispatch > memory.dispatch || own.combine > memory.combine ||
      own.outputs > memory.outputs || own.mega_words > memory.mega_words || own.mega_sums > memory.mega_sums ||
      own.tagged_dispatch > memory.tagged_dispatch || own.tagged_combine > memory.tagged_combine) {
    throw InputError(fmt::format("way {} needs a workspace of {} bytes a rank, this one has {}", name(options.way),
                                 std::max(areas.end, own.heap_bytes(ranks())), workspace.bytes()));
  }
  for (int r = 0; r < ranks(); ++r) experts_on_.push_back(static_cast<int>(options_.placement.experts_of(r).size()));
  placement_ = {options_.placement.rank_map().data(), options_.placement.local_index_map().data(), experts_on_.data(),
                shape_.experts};
  local_experts_ = static_cast<int>(options_.placement.experts_of(rank()).size());
  all_gather_.shape = shape_;
  all_gather_.hidden = options_.hidden;
  all_gather_.areas = areas;
  most_tokens_ = tensor_parallel() ? ranks() * options_.cap : options_.cap;
  team_ = {workspace.view(), options_.workers, workspace.group().deadline(), &workspace.live(), 0, hook_ ? &hook_ : nullptr};
  // Spinning pays only while every worker has a core of its own.
  if (ranks() * options_.workers <= static_cast<int>(std::thread::hardware_concurrency())) team_.spins = 200;
  for (int i = 0; i < options_.workers; ++i) workers_.emplace_back(team_, i);
}

void HostRank::run(CallPart part, const Half& half) {
  const trace::Context traced = trace::context();
  run_side_by_side(workers_.size(), [&](std::size_t i) {
    const trace::Attached lane(traced, trace::Role::worker, static_cast<int>(i));
    const trace::Recorded half_recorded(trace::Kind::move);
    workers_[i].start(part);
    return half(workers_[i]);
  });
}

void HostRank::run_side_by_side(std::size_t n, const std::function<bool(std::size_t)>& task) {
  team_.deadline = workspace_.group().deadline();
  start_team(workspace_.view());
  std::vector<char> done(n, 0);
  std::vector<std::exception_ptr> errors(n);
  const auto attempt = [&](std::size_t i, const auto& work) noexcept {
    try {
      work();
    } catch (...) {
      errors[i] = std::current_exception();
      raise_abort(workspace_.view(), {{WordKind::failed, -1, -1}, rank(), 0, 0});  // nobody shall wait for this rank
    }
  };
  const auto work = [&](std::size_t i) { done[i] = task(i) ? 1 : 0; };
  {
    std::vector<std::jthread> threads;
    attempt(0, [&] {
      try {
        for (std::size_t i = 1; i < n; ++i) threads.emplace_back([&, i] { attempt(i, [&] { work(i); }); });
      } catch (const std::system_error& error) {
        throw InputError(fmt::format("rank {} cannot start worker {} of {}: {}; take fewer workers, or allow more threads", rank(),
                                     threads.size() + 1, n, error.code().message()));
      }
      work(0);
    });
  }
  const bool failed = std::find(done.begin(), done.end(), 0) != done.end();
  if (failed) order_.fail();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
  if (failed) workspace_.throw_if_aborted();
}

void HostRank::refuse(const InputError& error, int expected, int seen) {
  workspace_.refuse(static_cast<std::uint64_t>(expected), static_cast<std::uint64_t>(seen));
  throw InputError(error);
}

void HostRank::accept(const ExchangeInput& input, const Step& step) {
  workspace_.throw_if_aborted();
  if (step.max_tokens > most_tokens_) {
    throw InputError(
        fmt::format("way {}: the step's largest batch is {} rows, the cap is {}; create the layer with a cap of at least {}",
                    name(options_.way), step.max_tokens, most_tokens_, step.max_tokens));
  }
  if (input.tokens < 0 || input.tokens > step.max_tokens) {
    refuse(InputError(fmt::format("rank {} brings {} tokens, the step says at most {}", rank(), input.tokens, step.max_tokens)),
           step.max_tokens, input.tokens);
  }
  try {
    const bool missing = input.hidden == nullptr || input.ids == nullptr || input.weights == nullptr;
    if (input.tokens > 0 && missing)
      throw InputError(fmt::format("rank {} brings {} tokens without hidden states, ids or weights", rank(), input.tokens));
    check_choices({input.ids, static_cast<std::size_t>(input.tokens) * static_cast<std::size_t>(options_.topk)}, input.tokens,
                  options_.topk, shape_.experts);
    if (input.extra.size() != options_.extra_payloads.size()) {
      throw InputError(
          fmt::format("{} extra payloads were given, {} announced", input.extra.size(), options_.extra_payloads.size()));
    }
  } catch (const InputError& error) {
    refuse(error, 0, 0);
  }
  offered_ = input;
  step_ = step;
  input_ = {input.tokens, options_.topk, input.hidden, input.ids, input.weights};
  order_.dispatch(false);
}

void HostRank::accept(const CombineOutput& output) {
  order_.need_dispatch(false, name(options_.way));
  order_.combine(false);
  if (input_.tokens > 0 && (tensor_parallel() ? output.all_out : output.out) == nullptr) {
    refuse(InputError(fmt::format("rank {} has no memory for the outputs of its {} tokens", rank(), input_.tokens)), 0, 0);
  }
  if (output.all_out == nullptr || tensor_parallel()) return;
  const int room = ranks() * options_.cap;
  if (output.first < 0 || output.all_tokens > room || output.first + input_.tokens > output.all_tokens) {
    refuse(
        InputError(fmt::format("rank {}: its {} tokens from row {} on do not fit a batch of {} rows (at most {}: {} ranks of {})",
                               rank(), input_.tokens, output.first, output.all_tokens, room, ranks(), options_.cap)),
        output.all_tokens, output.first + input_.tokens);
  }
}

void HostRank::share_outputs(const CombineOutput& output) {
  if (output.all_out == nullptr || tensor_parallel()) return;
  run(CallPart::combine, [&](HostWorker& w) {
    return all_gather_rows(w, all_gather_, output.first, input_.tokens, output.all_tokens, output.out, output.all_out);
  });
  for (int d = 0; d < ranks(); ++d) count_rows(d, input_.tokens, all_gather_.row_bytes());
}

void HostRank::count_rows(int peer, std::int64_t rows, std::size_t bytes_a_row) {
  if (!workspace_.live()[static_cast<std::size_t>(peer)]) return;
  const auto n = static_cast<std::uint64_t>(rows);
  (peer == rank() ? traffic_.local_rows : traffic_.remote_rows) += n;
  (peer == rank() ? traffic_.local_bytes : traffic_.remote_bytes) += n * bytes_a_row;
}

void HostRank::count_between(std::int64_t rows, std::size_t bytes_a_row) {
  const auto n = static_cast<std::uint64_t>(rows);
  traffic_.remote_rows += n;
  traffic_.remote_bytes += n * bytes_a_row;
  traffic_.between_rows += n;
  traffic_.between_bytes += n * bytes_a_row;
}

int count_pairs(const Arrived& arrived, int topk) {
  const std::int32_t* begin = arrived.local_ids;
  return static_cast<int>(
      std::count_if(begin, begin + static_cast<std::ptrdiff_t>(arrived.room) * topk, [](std::int32_t id) { return id >= 0; }));
}

std::size_t expanded_room(const ExchangeOptions& options, int experts, std::size_t rows_arrived) {
  const auto local = static_cast<std::size_t>(experts);
  if (options.arrived == ArrivedLayout::masked) {
    // A row comes at most once to an expert.
    return local * static_cast<std::size_t>(options.placement.ranks()) * static_cast<std::size_t>(options.cap);
  }
  const auto pairs_a_row = std::min<std::size_t>(static_cast<std::size_t>(options.topk), local);
  return align_up(rows_arrived * pairs_a_row + local * 127, 128);
}

void ExpandedRows::reserve(const ExchangeOptions& options, int experts, std::size_t rows_arrived, std::size_t row_bytes) {
  const auto local = static_cast<std::size_t>(experts);
  room = expanded_room(options, experts, rows_arrived);
  begins.grow(local + 1);
  counts.grow(local + 1);
  places.grow(rows_arrived * static_cast<std::size_t>(options.topk) + 1);
  numbers.grow(rows_arrived * static_cast<std::size_t>(options.topk) + 1);
  before.grow(local + 1);
  row_weights.grow(room + 1);
  rows.grow(room * row_bytes + 1);
}

ExpertLayout ExpandedRows::layout(const ExchangeOptions& options, int experts, int group_ranks) const {
  ExpertLayout to;
  to.local_experts = experts;
  to.block_rows = options.arrived == ArrivedLayout::masked ? group_ranks * options.cap : 0;
  to.begins = begins.data();
  to.counts = counts.data();
  to.places = places.data();
  to.numbers = numbers.data();
  to.before = before.data();
  to.row_weights = row_weights.data();
  to.rows = rows.data();
  return to;
}

void ExpandedRows::describe(const ExchangeOptions& options, int experts, int group_ranks, const RowFormat& format,
                            Arrived& arrived) const {
  arrived.layout = options.arrived;
  arrived.wire = options.wire;
  arrived.rows = rows.data();
  arrived.row_stride = format.row_bytes();
  arrived.room = static_cast<int>(room);
  arrived.begins = begins.data();
  arrived.counts = counts.data();
  arrived.row_weights = row_weights.data();
  arrived.block_rows = options.arrived == ArrivedLayout::masked ? group_ranks * options.cap : 0;
  for (int e = 0; e < experts; ++e) arrived.real += counts[static_cast<std::size_t>(e)];
}

}  // namespace heddle
