// The planner: copies, bytes, buffers, grids and floors of one MoE layer, from its shape alone.
// Every number says where it comes from (docs/planning.md). Sizes are bytes, rates bytes or
// operations a second, times seconds; a rank brings `tokens` tokens and the router is uniform.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "heddle/budget.hpp"
#include "heddle/exchange.hpp"
#include "heddle/formats.hpp"
#include "heddle/routing.hpp"
#include "heddle/shape.hpp"

namespace heddle {

// ---------------------------------------------------------------- models and machines

/// Router of a published model; what its configuration does not confirm is empty.
struct RouterPreset {
  Score score = Score::softmax;
  bool selection_bias = false;
  int groups = 1;
  int topk_groups = 1;
  std::optional<bool> renormalise;
  std::optional<float> scale;
};

/// Shape of a published model. Fields that could not be confirmed are empty.
struct ModelPreset {
  std::string_view name = {};
  LayerShape shape = {};
  std::optional<int> shared_experts = {};
  std::vector<WeightKind> weights = {};           ///< of the routed experts; the first is the usual one
  std::optional<WeightKind> shared_weights = {};  ///< where they differ from the routed ones
  std::optional<RouterPreset> router = {};
  std::optional<int> layers = {};  ///< that hold experts
  bool plan_only = false;          ///< its activation is its own: it can be planned, not run
  std::string_view note = {};      ///< what a reader should know, or empty
};

std::span<const ModelPreset> model_presets();

/// Throws InputError that lists the names.
const ModelPreset& find_preset(std::string_view name);

/// A number of a machine and who says so.
struct MachineValue {
  double value = 0;
  std::string_view source;
};

/// What one way takes on a machine inside one node, fitted to two calls, the smallest and a large one.
struct WayFit {
  Way way;
  double dispatch = 0, combine = 0;                    ///< s of a call that moves next to nothing
  double dispatch_slowdown = 1, combine_slowdown = 1;  ///< times the floor of its bytes
};

/// What lies between a machine's rates and the times measured on it.
struct MachineFit {
  std::string_view source;
  std::vector<WayFit> ways = {};
  double quantise = 0;       ///< s that dispatch takes longer with a quantised wire
  double quantise_rate = 0;  ///< values/s that a rank quantises; 0: no matter
  double experts = 0;        ///< s of the experts beyond their floor
  double experts_slowdown = 1;
};

/// One GPU and its links; what neither was measured nor stated is empty.
struct Machine {
  std::string_view name;
  std::string_view title;
  int sms = 0;
  std::optional<MachineValue> link = {};             ///< bytes/s to the other GPUs, one direction
  std::optional<MachineValue> sm_read = {};          ///< bytes/s one SM reads
  std::optional<MachineValue> sm_write = {};         ///< bytes/s one SM writes
  std::optional<MachineValue> memory_read = {};      ///< bytes/s of device memory, all SMs
  std::optional<MachineValue> memory_copy = {};      ///< bytes/s, read and written bytes added up
  std::optional<MachineValue> fp8 = {};              ///< operations/s of the tensor cores
  std::optional<MachineValue> bf16 = {};             ///< operations/s of the tensor cores
  std::optional<MachineValue> word_latency = {};     ///< s until a word written here is seen there
  std::optional<MachineValue> launch = {};           ///< s a kernel in a graph
  std::optional<MachineValue> network = {};          ///< bytes/s of one GPU to other nodes, one direction
  std::optional<MachineValue> network_latency = {};  ///< s until a word written here is seen at another node
  std::optional<MachineFit> fit = {};
};

std::span<const Machine> machines();

/// Throws InputError that lists the names.
const Machine& find_machine(std::string_view name);

// ---------------------------------------------------------------- what is planned

/// A router that takes a token's experts from `chosen` of `groups` equal groups of experts, any as likely.
struct GroupLimit {
  int groups = 1;
  int chosen = 1;
};

/// One layer on a group of ranks.
struct PlanRequest {
  LayerShape shape;
  WeightKind weights = WeightKind::bf16;
  int shared_experts = 0;
  int ranks = 1;
  int nodes = 1;           ///< that share the ranks equally, see node_plan.hpp
  GroupLimit group_limit;  ///< of the router, for what crosses nodes
  int tokens = 1;          ///< each rank brings
  int cap = 1;             ///< most tokens a rank may bring
  Wire wire = Wire::bf16;
  Wire combine_wire = Wire::bf16;
  Combine combine = Combine::slots;  ///< mega only
  Quantisation quantisation;
  Machine machine;

  /// What enters the GEMMs: bf16 if the weights are bf16, otherwise fp8.
  Activation activation() const { return weights == WeightKind::bf16 ? Activation::bf16 : Activation::fp8; }
};

/// Throws InputError (numbers in the message) if the request makes no layer.
void check_request(const PlanRequest& request);

// ---------------------------------------------------------------- copies and rows

/// Experts of one rank under the contiguous placement, expert e on rank floor(e * ranks / experts).
int experts_on_rank(int experts, int ranks, int rank);

/// Most experts that any rank holds.
int most_local_experts(int experts, int ranks);

/// Ranks that hold at least one of a token's k distinct experts, on average (hypergeometric).
double expected_copies(int experts, int topk, int ranks);

/// The same as if the k experts were drawn with replacement: slightly fewer.
double expected_copies_with_replacement(int experts, int topk, int ranks);

/// Copies of a token that a way sends, the one that stays at home counted.
double copies_of_a_token(Way way, const LayerShape& shape, int ranks);

/// Experts among `local` of `experts` that at least one of `tokens` tokens chooses, on average.
double expected_touched_experts(int local, int experts, int topk, std::uint64_t tokens);

/// (token, expert) pairs of one layer over all ranks, and their averages.
struct PairCounts {
  std::uint64_t pairs = 0;
  double per_expert = 0;
  double per_rank = 0;
};
PairCounts pair_counts(const LayerShape& shape, int ranks, int tokens);

// ---------------------------------------------------------------- bytes

/// Bytes of one row on the wire, scales included, padding left out.
std::uint64_t wire_row_bytes(Wire wire, int hidden, const Quantisation& quantisation = {});

/// Bytes of one direction of the round trip at one rank; on average what it sends equals what it receives.
struct Traffic {
  double rows = 0;  ///< that arrive, the rank's own included
  std::uint64_t row_bytes = 0;
  double bytes = 0;         ///< rows * row_bytes
  double remote_bytes = 0;  ///< without the rank's own rows
};
Traffic dispatch_traffic(Way way, const PlanRequest& request);
Traffic combine_traffic(Way way, const PlanRequest& request);

/// What one pair of the fused kernel moves (fused-kernel article, section 1.2): fp8 values, one
/// scale byte for 32 of them and a 4-byte weight out, a bf16 row back.
struct PairBytes {
  std::uint64_t out = 0;
  std::uint64_t back = 0;
};
PairBytes fused_pair_bytes(int hidden);

/// bf16 bytes of a round trip over its bytes in other formats: both directions, values and scales,
/// `bits` a value and one scale byte for `group` values (0: no scales).
struct GroupFormat {
  int bits = 16;
  int group = 0;
};
double round_trip_reduction(GroupFormat dispatch, GroupFormat combine);

/// The three matrices of one expert as stored.
struct WeightBytes {
  std::uint64_t values = 0;
  std::uint64_t scales = 0;
  std::uint64_t total() const { return values + scales; }
};
WeightBytes expert_weight_bytes(const LayerShape& shape, WeightKind kind);

// ---------------------------------------------------------------- buffers

/// One region of a rank's buffers.
struct Region {
  std::string name;
  std::uint64_t rows = 0;
  std::uint64_t bytes = 0;
  std::string formula;
};

/// The regions that a way needs on one rank, as the articles describe it (not this library's own layout).
struct Buffer {
  std::vector<Region> regions;
  std::uint64_t bytes() const;
  const Region& region(std::string_view name) const;  ///< throws InputError if there is none
};

/// By the exchange-ways article (sections 2 to 6); for mega fused_buffer() with the choices of the
/// kernel described there.
Buffer article_buffer(Way way, const PlanRequest& request);

/// How the fused kernel's arrived and intermediate regions are sized.
enum class ArrivedRegion : std::uint8_t { worst_case, ring };

/// The fused kernel's symmetric buffer (fused-kernel article, section 5.1). The cap is rounded up
/// by fused_cap(); `shared_experts` run inside the kernel and need a result slot more; `sms` sizes the ring.
Buffer fused_buffer(const LayerShape& shape, int ranks, int cap, ArrivedRegion arrived, int shared_experts, int sms);

/// The cap rounded up to the next multiple of 1,920, which every row-block size divides.
int fused_cap(int cap);

/// Worst case or ring? The kernel takes the ring up to a rounded cap of 5,760.
ArrivedRegion fused_arrived(int cap);

/// Rows that can arrive at one rank at most: every token's k copies, but not more than it has experts.
std::uint64_t fused_worst_rows(const LayerShape& shape, int ranks, int cap);

/// Rows of the ring: the row blocks that can be live at once, for the worst block size.
std::uint64_t fused_ring_rows(const LayerShape& shape, int ranks, int cap, int sms);

/// The fused layer's buffer on one rank as this library lays it out, for as many workers with tasks as the machine has SMs. Its
/// regions and their sum are the layout's own numbers (src/mega/layout.hpp); results travel as bf16 whatever the request says.
Buffer mega_buffer(const PlanRequest& request, RingSize ring);

/// Bytes of a rank's workspace as a way's own layout reports them.
using LayoutBytes = std::function<std::uint64_t(const PlanRequest&)>;

/// Layouts of this library that report their bytes; a way that is not here is left out of the plan. Way::automatic: all ways in
/// one workspace.
const std::map<Way, LayoutBytes>& own_layouts();

/// Padded per-expert tensors of a rank (persistent-grid article): T rows for each local expert.
struct PaddedTensors {
  std::uint64_t rows_an_expert = 0;  ///< T = cap * ranks
  std::uint64_t rows = 0;            ///< local experts * T
  std::uint64_t received = 0;        ///< bytes of the received rows, fp8 values or bf16
  std::uint64_t gate_up = 0;         ///< bytes of GEMM 1's bf16 output
};
PaddedTensors padded_tensors(const LayerShape& shape, int ranks, int cap, Activation activation = Activation::fp8);

// ---------------------------------------------------------------- grids and tasks

/// The two grids of the activation step (persistent-grid article).
struct GridPlan {
  int threads = 0;     ///< a CTA; eight outputs a thread
  int ctas_an_sm = 0;  ///< assumed resident: 2,048 threads an SM
  std::uint64_t slots = 0;
  std::uint64_t padded = 0;      ///< one CTA a possible row, T * k
  std::uint64_t persistent = 0;  ///< min(slots, T * k)
  std::uint64_t not_launched() const { return padded - persistent; }
};
GridPlan activation_grid(const LayerShape& shape, int ranks, int cap, int sms);

/// Tasks of one row block and K steps of one task: 256 columns a task, 128 of K a step
/// (fused-kernel article, sections 3.3 and 3.6).
struct GemmTasks {
  int gemm1_tasks = 0, gemm1_steps = 0;
  int gemm2_tasks = 0, gemm2_steps = 0;
};
GemmTasks gemm_tasks(const LayerShape& shape);

// ---------------------------------------------------------------- time

/// SMs that a transfer needs so that the link, not the SMs, is its limit: for every byte that
/// arrives, 1 - 1/ranks crosses the link, one is written and 1/copies is read by an SM; a quarter
/// is added, and the result is even, at least 4 and at most `sms`.
int transfer_sms(double copies, int ranks, double link, double sm_read, double sm_write, int sms);

/// Lower bounds of one layer on one rank, in seconds; 0 where the machine has no such rate.
struct Floors {
  double weights = 0;     ///< touched experts' bytes over memory_read
  double operations = 0;  ///< 6 * rows * H * D over the tensor cores' rate
  double activation = 0;  ///< bytes of the activation step over memory_copy
};
Floors expert_floors(const PlanRequest& request);
/// The same of so many rows and of so many experts that have some, where they are known.
Floors expert_floors(const PlanRequest& request, double rows, double touched);

/// A model of one layer's time, for choosing a way; not a measurement. nullopt if the machine lacks a rate.
struct TimeEstimate {
  double exchange = 0;  ///< launches, rendezvous, bytes over the link, local passes over the rows
  double experts = 0;   ///< the greater of weights and operations, and the activation
  double total = 0;     ///< their sum; for mega the greater of both
};
std::optional<TimeEstimate> estimate_time(Way way, const PlanRequest& request);

/// What one rank does in a call, where the choices of the tokens are known.
struct RankWork {
  double rows = 0;       ///< that arrive, the rank's own included
  double link_rows = 0;  ///< the greater of those that come from other ranks and those that go to them; results go the other way
  double pairs = 0;      ///< (token, expert) pairs of its experts
  double touched = 0;    ///< its experts that have some
};
/// The same model of that rank's time; the slowest rank's is the layer's. Of the request tokens and router do not matter.
std::optional<TimeEstimate> estimate_time(Way way, const PlanRequest& request, const RankWork& work);

// ---------------------------------------------------------------- the whole plan

enum class Unit : std::uint8_t { count, copies, rows, bytes, seconds, ratio };

/// One number, its formula with the inputs filled in, and who says so.
struct Quantity {
  std::string name;  ///< stable, for programs
  std::string title;
  double value = 0;
  Unit unit = Unit::count;
  std::string formula;
  std::string source;
};

struct Section {
  std::string name;  ///< stable, for programs
  std::string title;
  std::vector<Quantity> quantities;
};

struct Plan {
  PlanRequest request;
  std::vector<Section> sections;
};

/// Throws InputError if the request makes no layer.
Plan make_plan(const PlanRequest& request, const std::map<Way, LayoutBytes>& layouts = own_layouts());

/// What a token budget asks of a rank: its bounds, the cap to take, and every way's memory at that cap and, where prompts bring
/// more, at one for decode steps alone. A given `cap` replaces the suggested one and is held against the budget. The request's
/// tokens and cap are not read. Throws InputError also where the groups of the budget do not divide the ranks.
Plan make_budget_plan(const TokenBudget& budget, PlanRequest request, std::optional<int> cap = {},
                      const std::map<Way, LayoutBytes>& layouts = own_layouts());

/// A number that an article states, and the same from the functions above.
struct ArticleNumber {
  std::string title;
  std::string article;
  std::string section;
  std::string stated;  ///< digits as in the article, thousands separated by commas
  double value = 0;    ///< ours, in the article's unit
  std::string unit;    ///< what the digits count
  std::string formula;

  /// Ours, rounded to the digits that the article gives.
  std::string rounded() const;
  bool agrees() const { return rounded() == stated; }
};

/// Every number that the three articles compute.
std::vector<ArticleNumber> article_numbers();

}  // namespace heddle
