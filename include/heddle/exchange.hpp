// The ways of the round trip behind one interface (exchange-ways article; docs/ways.md).
//
// A round trip is dispatch, the experts, combine. On each rank:
//   Arrived rows = exchange.dispatch(input, step);   // tokens to the ranks of their experts
//   ... the experts turn the arrived rows into results ...
//   exchange.combine(results, {out});                // results home, summed
// Every rank makes the same calls in the same order, also with no tokens. Host engine: calls return
// when their half is done; a wait that cannot end becomes a FaultError on every rank. A rank may be one call
// behind the others when it hears of it: after a fault ranks can differ by a call in what they finished.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "heddle/experts.hpp"
#include "heddle/formats.hpp"
#include "heddle/group.hpp"
#include "heddle/routing.hpp"
#include "heddle/shape.hpp"

namespace heddle {

enum class Way : std::uint8_t {
  gather,
  normal,
  low_latency,
  elastic,
  one_sided,
  mega,
  automatic,  ///< one of the others, chosen by a layer call by call (docs/choosing.md); no exchange is made of it
};
/// The ways that there are, `automatic` not among them.
inline constexpr std::array<Way, 6> real_ways{Way::gather, Way::normal, Way::low_latency, Way::elastic, Way::one_sided, Way::mega};

/// Where a token's results are first summed (elastic): on the expert's rank, or at home from one row a choice.
enum class Reduce : std::uint8_t { rank, home };

/// How a row reaches the ranks of another node (elastic; docs/nodes.md). Never changes a bit.
enum class NodeMode : std::uint8_t {
  direct,  ///< once to each rank that needs it
  hybrid,  ///< once to the node, where the rank with the sender's place forwards it; results come back the same way
};

/// What becomes of a result that comes home (mega).
enum class Combine : std::uint8_t {
  slots,  ///< it waits in a slot of its own; slots are summed in choice order, so the same call gives the same bits
  /// It is added to its token's bf16 sum when it comes: the least memory, but every addition rounds, and their order is not fixed.
  /// Bits may differ from call to call. Needs combine_wire bf16.
  add,
};

/// How gather brings every token to every rank.
enum class GatherMode : std::uint8_t {
  padded,           ///< blocks of the step's largest batch
  uneven,           ///< exact offsets, after the counts have been exchanged
  zero_filled,      ///< zero-filled buffers summed by an all-reduce
  tensor_parallel,  ///< every rank has every token already; nothing is sent, the sum is an all-reduce
};

/// How many row blocks the fused layer's rings hold.
enum class RingSize : std::uint8_t {
  live,  ///< those that can be live at once; rows wait for room
  full,  ///< all that can arrive; nothing ever waits for room
};

/// What only the fused layer (Way::mega) is sized by.
struct MegaOptions {
  int intermediate = 0;                     ///< D of the routed experts
  int shared_intermediate = 0;              ///< of the shared expert that runs inside; 0: none does
  Activation activation = Activation::fp8;  ///< of rows between the GEMMs
  int block_rows = 128;                     ///< rows of a row block: a multiple of 8, 8 to 256. Never changes a bit.
  RingSize ring = RingSize::live;
  /// Every rank has one more expert behind those of the placement, which all its own tokens choose last, with weight 1.
  bool extra_expert = false;
};

std::string_view name(Way way);  ///< `auto` for automatic
/// The way of that name, `auto` included.
std::optional<Way> find_way(std::string_view name);
std::string_view name(ArrivedLayout layout);

struct ExchangeOptions {
  Way way = Way::low_latency;
  int hidden = 0;
  int topk = 1;
  int cap = 0;          ///< most tokens a rank may bring, in rows
  Placement placement;  ///< where experts live; its ranks are the group's
  Wire wire = Wire::fp8;
  Wire combine_wire = Wire::bf16;
  Quantisation quantisation;                      ///< of fp8 wires, both directions
  ArrivedLayout arrived = ArrivedLayout::masked;  ///< what the runner wants; see default_layout and allows_layout
  WeightAt weight_at = WeightAt::activation;
  Reduce reduce = Reduce::rank;      ///< elastic only
  Combine combine = Combine::slots;  ///< mega only
  NodeMode mode = NodeMode::direct;  ///< elastic on a group of several nodes only
  bool cpu_sync = false;             ///< elastic only: the host waits for the count, outputs get their exact size
  GatherMode gather = GatherMode::padded;
  int workers = 1;       ///< threads a rank in the protocols; mega: in each role
  int queue_rows = 256;  ///< normal only: rows a queue between two ranks holds
  int chunk_rows = 32;   ///< normal only: rows a publish covers
  /// gather (padded, both wires bf16): in steps of up to so many tokens a rank, rows travel as words with the flag beside the data,
  /// which takes twice the bytes and a flight less: faster up to about 32 tokens. 0: never. At most the cap.
  int tagged_tokens = 0;
  std::vector<std::size_t> extra_payloads;  ///< one_sided only: bytes a row (multiples of 16) of up to three more payloads
  MegaOptions mega;                         ///< mega only
};

/// The layout a way hands over without further copies.
ArrivedLayout default_layout(Way way);
/// Can this way hand over that layout?
bool allows_layout(Way way, ArrivedLayout layout);

/// Heap a way needs in every rank's part, by what it is for. Ways that share a workspace take the
/// larger of each.
struct ExchangeMemory {
  std::size_t dispatch = 0;
  std::size_t combine = 0;
  std::size_t outputs = 0;          ///< the all-gather of outputs under tensor-parallel attention
  std::size_t mega_words = 0;       ///< words of the fused layer that its own rank alone reaches
  std::size_t mega_sums = 0;        ///< sums of the fused layer that results are added to
  std::size_t tagged_dispatch = 0;  ///< rows as words, on their way out
  std::size_t tagged_combine = 0;   ///< and home
  void include(const ExchangeMemory& other);
  /// Bytes of a rank's part that holds all of it, header and words included.
  std::size_t heap_bytes(int ranks) const;
};

/// Throws InputError with numbers where options do not fit together.
void check_options(const ExchangeOptions& options);
ExchangeMemory exchange_memory(const ExchangeOptions& options);
/// The options as "name=value" lines: what all ranks must agree on (see Workspace).
std::string describe(const ExchangeOptions& options);

/// One rank's tokens, in ordinary memory that stays as it is until combine has returned.
struct ExchangeInput {
  int tokens = 0;                       ///< at most the cap; may be 0
  const bf16* hidden = nullptr;         ///< [tokens, H]
  const std::int32_t* ids = nullptr;    ///< [tokens, topk], -1: no expert, no repeats within a token
  const float* weights = nullptr;       ///< [tokens, topk]
  std::vector<const std::byte*> extra;  ///< one_sided: [tokens, bytes] for each extra payload
};

/// What arrived on this rank. Rows are in wire format. Valid until the next dispatch; rows and payloads of gather
/// and one_sided, which lie in the heap, only until this rank's combine_send: others may then write there.
struct Arrived {
  ArrivedLayout layout = ArrivedLayout::routed;
  Wire wire = Wire::bf16;
  const std::byte* rows = nullptr;
  std::size_t row_stride = 0;  ///< bytes between rows
  int room = 0;                ///< rows the experts are handed, padding included
  int received = 0;            ///< rows that came over (this rank's own included)
  int real = 0;                ///< pairs of a row and an expert of this rank
  bool host_waited = false;    ///< did the host wait for a count?
  double regroup_seconds = 0;  ///< of dispatch_receive: laying arrived rows out for the runner
  // contiguous and masked: one row a pair
  const std::int32_t* begins = nullptr;  ///< [local experts]: first row of each expert
  const std::int32_t* counts = nullptr;  ///< [local experts]
  const float* row_weights = nullptr;    ///< [room]; only rows of an expert are set
  int block_rows = 0;                    ///< masked: rows between two experts' blocks
  // routed
  const std::int32_t* local_ids = nullptr;  ///< [room, topk], -1: foreign, none or padding
  const float* weights = nullptr;           ///< [room, topk]
  bool slots_wanted = false;                ///< routed: results are [room, topk, H], one a choice, instead of sums
  // one_sided's extra payloads, [room] rows each
  std::vector<const std::byte*> extra;
};

/// Where combine leaves the outputs. Checked when combine_receive begins (InputError).
struct CombineOutput {
  bf16* out = nullptr;                    ///< [tokens, H] of this rank
  const bf16* shared = nullptr;           ///< [tokens, H] added last, before the only rounding (shared expert), or null
  const float* shared_factors = nullptr;  ///< [tokens]: `shared` is multiplied by it in f32 (a gated shared expert); null: 1
  // Tensor-parallel attention: this rank's tokens are rows [first, first + tokens) of a batch of
  // `all_tokens` that every rank wants. With GatherMode::tensor_parallel `out` is ignored.
  bf16* all_out = nullptr;  ///< [all_tokens, H], or null on all ranks alike
  int first = 0;
  int all_tokens = 0;
};

/// Rows that this rank pushed to a rank, or pulled from one, and their bytes without padding; local: its
/// own part. Copies inside a rank (packing, laying out by expert) are not transfers and not counted.
struct ExchangeTraffic {
  std::uint64_t remote_bytes = 0;
  std::uint64_t local_bytes = 0;
  std::uint64_t remote_rows = 0;
  std::uint64_t local_rows = 0;
  // Of the remote ones, those that went to another node. What a node forwards is counted by the rank that does.
  std::uint64_t between_bytes = 0;
  std::uint64_t between_rows = 0;
};

/// One way on one rank. The send and receive halves may be called apart, with other work in between.
class Exchange {
 public:
  virtual ~Exchange() = default;
  virtual void dispatch_send(const ExchangeInput& input, const Step& step) = 0;
  virtual Arrived dispatch_receive() = 0;
  /// results: contiguous and masked [room, H], one a row; routed [room, H] sums of this rank's experts,
  /// or [room, topk, H] where slots_wanted.
  virtual void combine_send(const bf16* results) = 0;
  virtual void combine_receive(const CombineOutput& output) = 0;
  /// Traffic since the last call of this function.
  virtual ExchangeTraffic take_traffic() = 0;

  Arrived dispatch(const ExchangeInput& input, const Step& step) {
    dispatch_send(input, step);
    return dispatch_receive();
  }
  void combine(const bf16* results, const CombineOutput& output) {
    combine_send(results);
    combine_receive(output);
  }
};

/// A way (all but mega, which is a whole layer: MoeLayer) over a workspace of at least memory.heap_bytes(ranks), where `memory`
/// includes this way's own needs and is the same for all ways that share the workspace, on all ranks. Ways may follow each other
/// there in any order, a round trip at a time. Memory for rows is made here, except by ways whose host waits for exact sizes
/// (normal, elastic with cpu_sync). Throws InputError.
std::unique_ptr<Exchange> create_exchange(Workspace& workspace, const ExchangeOptions& options, const ExchangeMemory& memory);

}  // namespace heddle
