// heddle bench exchange: dispatch + combine of every way on the GPUs of this machine, one rank a GPU or
// virtual ranks, as replays of a CUDA graph (exchange-ways article, section 8.1).
#include <cuda_runtime.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench.hpp"
#include "exchange/host_exchange.hpp"
#include "group/cuda_driver.hpp"
#include "heddle/device.hpp"
#include "heddle/plan.hpp"
#include "heddle/version.hpp"
#include "json_file.hpp"
#include "layer/synthetic.hpp"
#include "words.hpp"

namespace heddle::tool {

namespace {

using cuda::check;
using Json = nlohmann::ordered_json;

struct BenchArguments {
  int ranks = 0, gpus = 0, hidden = 4096, experts = 64, topk = 6, sms = 0, round_trips = 10, replays = 40;
  std::vector<int> tokens{1, 8, 64, 128, 512, 4096};
  std::vector<std::string> ways{"gather", "low_latency", "elastic", "one_sided"};
  std::vector<std::string> wire_names{"bf16", "fp8"};
  std::string json, commit;
  std::uint64_t seed = 1;
};

/// Device memory of one GPU.
class Block {
 public:
  Block(int device, std::size_t bytes) {
    const cuda::DeviceScope scope(device);
    check(cudaMalloc(&address_, std::max<std::size_t>(bytes, 16)), "memory of the benchmark");
    check(cudaMemset(address_, 0, std::max<std::size_t>(bytes, 16)), "memory of the benchmark");
  }
  ~Block() { cudaFree(address_); }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  template <class T>
  T* as() const {
    return static_cast<T*>(address_);
  }
  template <class T>
  void write(const std::vector<T>& values) {
    check(cudaMemcpy(address_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice), "inputs of the benchmark");
  }

 private:
  void* address_ = nullptr;
};

struct Seat {
  std::unique_ptr<Block> tokens, hidden, ids, weights, results, out;
};

/// One configuration, captured once a GPU.
class Setup {
 public:
  Setup(const BenchArguments& a, Way way, Wire wire, int tokens)
      : options_(options_of(a, way, wire, tokens)),
        memory_(exchange_memory(options_)),
        workspace_({a.ranks, devices(a.gpus), std::chrono::seconds(10)}, memory_.heap_bytes(a.ranks)) {
    const Step step{tokens, Phase::decode};
    for (std::size_t gpu = 0; gpu < workspace_.gpus(); ++gpu) {
      const cuda::DeviceScope scope(workspace_.device(gpu));
      exchanges_.push_back(create_device_exchange(workspace_, gpu, options_, memory_, {a.sms}));
      cudaStream_t stream = nullptr;
      check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
      streams_.push_back(stream);
      for (int local = 0; local < workspace_.ranks_on(gpu); ++local)
        add_seat(a, workspace_.device(gpu), workspace_.first_rank(gpu) + local, tokens);
    }
    for (std::size_t gpu = 0; gpu < workspace_.gpus(); ++gpu) {
      const cuda::DeviceScope scope(workspace_.device(gpu));
      check(cudaDeviceSynchronize(), "inputs");
      capture(gpu, step, a.round_trips);
    }
  }
  ~Setup() {
    for (cudaGraphExec_t graph : graphs_) cudaGraphExecDestroy(graph);
    for (cudaStream_t stream : streams_) cudaStreamDestroy(stream);
  }

  /// Microseconds a round trip of the slower GPU, one sample a replay.
  std::vector<double> measure(int replays, int round_trips) {
    std::vector<double> samples;
    const std::size_t gpus = workspace_.gpus();
    std::vector<cudaEvent_t> begins(gpus), ends(gpus);
    for (std::size_t gpu = 0; gpu < gpus; ++gpu) {
      const cuda::DeviceScope scope(workspace_.device(gpu));
      check(cudaEventCreate(&begins[gpu]), "event");
      check(cudaEventCreate(&ends[gpu]), "event");
    }
    for (int replay = -3; replay < replays; ++replay) {
      for (std::size_t gpu = 0; gpu < gpus; ++gpu) {
        const cuda::DeviceScope scope(workspace_.device(gpu));
        check(cudaEventRecord(begins[gpu], streams_[gpu]), "event");
        check(cudaGraphLaunch(graphs_[gpu], streams_[gpu]), "replay");
        check(cudaEventRecord(ends[gpu], streams_[gpu]), "event");
      }
      double slowest = 0;
      for (std::size_t gpu = 0; gpu < gpus; ++gpu) {
        check(cudaEventSynchronize(ends[gpu]), "replay");
        float milliseconds = 0;
        check(cudaEventElapsedTime(&milliseconds, begins[gpu], ends[gpu]), "event");
        slowest = std::max(slowest, 1e3 * static_cast<double>(milliseconds) / round_trips);
      }
      workspace_.throw_if_aborted();
      if (replay >= 0) samples.push_back(slowest);
    }
    for (std::size_t gpu = 0; gpu < gpus; ++gpu) {
      cudaEventDestroy(begins[gpu]);
      cudaEventDestroy(ends[gpu]);
    }
    return samples;
  }

  const ExchangeOptions& options() const { return options_; }
  std::size_t heap_bytes() const { return workspace_.bytes(); }
  const Routing& routing(int rank) const { return routings_[static_cast<std::size_t>(rank)]; }

 private:
  static std::vector<int> devices(int gpus) {
    std::vector<int> all;
    for (int i = 0; i < gpus; ++i) all.push_back(i);
    return all;
  }
  static ExchangeOptions options_of(const BenchArguments& a, Way way, Wire wire, int tokens) {
    ExchangeOptions options;
    options.way = way;
    options.hidden = a.hidden;
    options.topk = a.topk;
    options.cap = tokens;
    options.placement = Placement::contiguous(a.experts, a.ranks);
    options.wire = wire;
    options.arrived = default_layout(way);
    return options;
  }

  void add_seat(const BenchArguments& a, int device, int rank, int tokens) {
    const auto t = static_cast<std::size_t>(tokens);
    const auto h = static_cast<std::size_t>(a.hidden);
    const auto k = static_cast<std::size_t>(a.topk);
    DrawOptions draw;
    draw.tokens = tokens;
    draw.topk = a.topk;
    draw.seed = a.seed * 1000 + static_cast<std::uint64_t>(rank);
    routings_.push_back(draw_routing(uniform_popularity(a.experts), draw));
    Seat seat;
    seat.tokens = std::make_unique<Block>(device, sizeof(int));
    seat.hidden = std::make_unique<Block>(device, t * h * sizeof(bf16));
    seat.ids = std::make_unique<Block>(device, t * k * sizeof(std::int32_t));
    seat.weights = std::make_unique<Block>(device, t * k * sizeof(float));
    seat.out = std::make_unique<Block>(device, t * h * sizeof(bf16));
    seat.tokens->write(std::vector<int>{tokens});
    seat.hidden->write(draw_hidden_states(tokens, a.hidden, HiddenStates::gaussian, draw.seed));
    seat.ids->write(routings_.back().ids);
    seat.weights->write(routings_.back().weights);
    seats_.push_back(std::move(seat));
  }

  void capture(std::size_t gpu, const Step& step, int round_trips) {
    const auto first = static_cast<std::size_t>(workspace_.first_rank(gpu));
    const auto count = static_cast<std::size_t>(workspace_.ranks_on(gpu));
    std::vector<DeviceInput> inputs;
    std::vector<DeviceOutput> outputs;
    std::vector<const bf16*> results;
    DeviceExchange& exchange = *exchanges_[gpu];
    for (std::size_t i = first; i < first + count; ++i) {
      inputs.push_back({seats_[i].tokens->as<int>(),
                        seats_[i].hidden->as<bf16>(),
                        seats_[i].ids->as<std::int32_t>(),
                        seats_[i].weights->as<float>(),
                        {}});
      outputs.push_back({seats_[i].out->as<bf16>(), nullptr, nullptr});
    }
    cudaGraph_t graph = nullptr;
    check(cudaStreamBeginCapture(streams_[gpu], cudaStreamCaptureModeRelaxed), "capture");
    for (int trip = 0; trip < round_trips; ++trip) {
      exchange.dispatch(inputs, step, streams_[gpu]);
      if (results.empty()) {
        // Results of the right size, whatever they hold: zeros are not read by any decision.
        for (std::size_t i = 0; i < count; ++i) {
          if (bf16* own = exchange.result_rows(static_cast<int>(i)); own != nullptr) {
            results.push_back(own);
            continue;
          }
          const auto room = static_cast<std::size_t>(exchange.arrived(static_cast<int>(i)).room);
          seats_[first + i].results = std::make_unique<Block>(
              workspace_.device(gpu), std::max<std::size_t>(room, 1) * static_cast<std::size_t>(options_.hidden) * sizeof(bf16));
          results.push_back(seats_[first + i].results->as<bf16>());
        }
      }
      exchange.combine(results, outputs, streams_[gpu]);
    }
    check(cudaStreamEndCapture(streams_[gpu], &graph), "capture");
    cudaGraphExec_t executable = nullptr;
    check(cudaGraphInstantiate(&executable, graph, 0), "graph");
    check(cudaGraphDestroy(graph), "graph");
    graphs_.push_back(executable);
  }

  ExchangeOptions options_;
  ExchangeMemory memory_;
  DeviceWorkspace workspace_;
  std::vector<std::unique_ptr<DeviceExchange>> exchanges_;
  std::vector<cudaStream_t> streams_;
  std::vector<cudaGraphExec_t> graphs_;
  std::vector<Seat> seats_;
  std::vector<Routing> routings_;
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// Remote row bytes a round trip that the busiest rank puts on its link in one direction, by the routing.
double remote_bytes(const Setup& setup, const BenchArguments& a) {
  const ExchangeOptions& options = setup.options();
  const auto out = static_cast<double>(wire_format(options).reported_bytes());
  const auto back = static_cast<double>(returned_format(options).reported_bytes());
  std::vector<double> sent(static_cast<std::size_t>(a.ranks), 0.0);
  for (int rank = 0; rank < a.ranks; ++rank) {
    const Routing& routing = setup.routing(rank);
    const auto add = [&](int peer) {
      if (peer == rank) return;
      sent[static_cast<std::size_t>(rank)] += out;
      sent[static_cast<std::size_t>(peer)] += back;
    };
    for (int token = 0; token < routing.tokens; ++token) {
      std::vector<bool> seen(static_cast<std::size_t>(a.ranks), options.way == Way::gather);
      for (int choice = 0; choice < routing.topk; ++choice) {
        const std::int32_t id = routing.ids[static_cast<std::size_t>(token * routing.topk + choice)];
        if (id < 0) continue;
        const int peer = options.placement.rank_of(id);
        if (options.way == Way::low_latency) add(peer);
        seen[static_cast<std::size_t>(peer)] = true;
      }
      for (int peer = 0; options.way != Way::low_latency && peer < a.ranks; ++peer) {
        if (seen[static_cast<std::size_t>(peer)]) add(peer);
      }
    }
  }
  return *std::max_element(sent.begin(), sent.end());
}

Json machine_of(int gpus) {
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, 0), "properties of GPU 0");
  int driver = 0;
  check(cudaDriverGetVersion(&driver), "driver version");
  return {{"gpu", properties.name}, {"gpus", gpus}, {"sms", properties.multiProcessorCount}, {"driver_cuda", driver}};
}

std::string today() {
  const std::time_t now = std::time(nullptr);
  char text[32] = {};
  std::strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S UTC", std::gmtime(&now));
  return text;
}

/// This process's command line, as typed.
std::string command_line() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  std::replace(text.begin(), text.end(), '\0', ' ');
  return text;
}

void bench(BenchArguments a) {
  int present = 0;
  if (cudaGetDeviceCount(&present) != cudaSuccess || present == 0)
    throw InputError("heddle bench exchange needs a GPU; there is none here");
  if (a.gpus == 0) a.gpus = a.ranks == 0 ? present : std::min(present, a.ranks);
  if (a.ranks == 0) a.ranks = a.gpus;
  const double link = find_machine("h200").link->value;
  Json rows = Json::array();
  fmt::print(
      "{} ranks on {} GPUs, hidden {}, {} experts, top-{}; us a round trip (dispatch + combine), median of {} replays of {}\n",
      a.ranks, a.gpus, a.hidden, a.experts, a.topk, a.replays, a.round_trips);
  fmt::print("{:<12} {:<5} {:>7} {:>9} {:>9} {:>9} {:>11} {:>7}\n", "way", "wire", "tokens", "median", "least", "most", "remote MB",
             "of link");
  for (const std::string& way_name : a.ways) {
    const std::map<std::string, Way> known{
        {"gather", Way::gather}, {"low_latency", Way::low_latency}, {"elastic", Way::elastic}, {"one_sided", Way::one_sided}};
    const Way way = value_of(known, "--way", way_name);
    for (const std::string& wire_name : a.wire_names) {
      for (const int tokens : a.tokens) {
        if (way == Way::low_latency && tokens > 1024) continue;  // the region an expert and source makes larger caps a waste
        Setup setup(a, way, value_of(wires, "--wire", wire_name), tokens);
        const std::vector<double> samples = setup.measure(a.replays, a.round_trips);
        const double middle = median(samples);
        const double bytes = remote_bytes(setup, a);
        const double share = bytes / (middle * 1e-6) / link;
        fmt::print("{:<12} {:<5} {:>7} {:>9.2f} {:>9.2f} {:>9.2f} {:>11.3f} {:>6.0f}%\n", way_name, wire_name, tokens, middle,
                   *std::min_element(samples.begin(), samples.end()), *std::max_element(samples.begin(), samples.end()),
                   bytes / 1e6, 100 * share);
        std::fflush(stdout);
        rows.push_back({{"way", way_name},
                        {"wire", wire_name},
                        {"tokens", tokens},
                        {"median_us", middle},
                        {"samples_us", samples},
                        {"remote_bytes", bytes},
                        {"share_of_link", share},
                        {"heap_bytes", setup.heap_bytes()}});
      }
    }
  }
  if (a.json.empty()) return;
  write_json(a.json, {{"heddle", version},
                      {"benchmark", "exchange"},
                      {"date", today()},
                      {"commit", a.commit},
                      {"command", command_line()},
                      {"machine", machine_of(a.gpus)},
                      {"ranks", a.ranks},
                      {"hidden", a.hidden},
                      {"experts", a.experts},
                      {"topk", a.topk},
                      {"round_trips_a_replay", a.round_trips},
                      {"rows", rows}});
}

}  // namespace

void add_bench(CLI::App& app, int&) {
  auto* command = app.add_subcommand("bench", "measure on the GPUs of this machine");
  command->require_subcommand(1);
  auto a = std::make_shared<BenchArguments>();
  auto* exchange = command->add_subcommand("exchange", "dispatch + combine of the ways, as CUDA graph replays");
  exchange->add_option("--ranks", a->ranks, "ranks (default: one a GPU); more than GPUs: virtual ranks");
  exchange->add_option("--gpus", a->gpus, "GPUs (default: all)");
  exchange->add_option("--hidden", a->hidden, "hidden size")->capture_default_str();
  exchange->add_option("--experts", a->experts, "experts over all ranks")->capture_default_str();
  exchange->add_option("--topk", a->topk, "choices a token")->capture_default_str();
  exchange->add_option("--tokens", a->tokens, "tokens a rank")->delimiter(',');
  exchange->add_option("--way", a->ways, "ways")->delimiter(',');
  exchange->add_option("--wire", a->wire_names, "wires of the dispatch")->delimiter(',');
  exchange->add_option("--sms", a->sms, "CTAs a GPU (default: by the rule)");
  exchange->add_option("--replays", a->replays, "samples")->capture_default_str();
  exchange->add_option("--commit", a->commit, "what the JSON says was measured");
  exchange->add_option("--json", a->json, "raw samples with their provenance");
  exchange->callback([a] { bench(*a); });
}

}  // namespace heddle::tool
