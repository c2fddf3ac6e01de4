// Which way is fastest: measured times by size of a call, and the choice that way `auto` makes from them (docs/choosing.md).
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "heddle/exchange.hpp"
#include "heddle/formats.hpp"
#include "heddle/shape.hpp"

namespace heddle {

struct PlanRequest;

/// What measured times hold for.
struct TuningKey {
  std::string machine;  ///< a GPU's name as its driver gives it, or host_machine()
  int hidden = 0;
  int intermediate = 0;  ///< of the routed experts
  int experts = 0;       ///< over all ranks
  int topk = 0;
  int ranks = 0;
  WeightKind weights = WeightKind::bf16;
  Activation activation = Activation::fp8;

  friend bool operator==(const TuningKey&, const TuningKey&) = default;
};

/// Microseconds of a call of the layer by way, in steps of so many tokens.
struct TuningRow {
  int max_tokens = 0;
  std::map<Way, double> us;
};

struct TuningEntry {
  TuningKey key;
  std::string source;           ///< who measured it, for a reader
  std::vector<TuningRow> rows;  ///< by ascending max_tokens

  /// A way's microseconds in a step of `max_tokens`: between two measured sizes along a straight line of the logarithms, below the
  /// smallest as there, above the largest in proportion to the tokens. nullopt: this way was not measured.
  std::optional<double> us(Way way, int max_tokens) const;
};

/// Measured times of machines and shapes. A value; the same on all ranks that choose by it.
class TuningTable {
 public:
  TuningTable() = default;
  /// What is shipped: times of H200 (src/tuning/h200.json, where each entry says what it was measured with).
  static std::shared_ptr<const TuningTable> shipped();
  /// Reads JSON (docs/json.md, "A tuning table"); `whose` is what errors call it. Throws InputError: what, where in the text.
  static TuningTable parse(const std::string& json, const std::string& whose);
  /// Likewise a file. Throws InputError also where it cannot be read.
  static TuningTable read(const std::string& path);

  /// Takes the place of an entry of the same key. Throws InputError for sizes and times that are none.
  void add(TuningEntry entry);
  const std::vector<TuningEntry>& entries() const { return entries_; }
  std::string json() const;
  /// Writes beside the final name and renames. Throws InputError with the system's reason.
  void write(const std::string& path) const;

  /// The entry of this key; else of the nearest shape on the same machine and ranks, of the same weights and activations: up to a
  /// factor of 4 over hidden and intermediate size, experts and choices together. Null: nothing fits.
  const TuningEntry* find(const TuningKey& key) const;
  /// A word that differs where tables differ: what ranks compare.
  std::string fingerprint() const;

 private:
  std::vector<TuningEntry> entries_;
};

/// What the host engine's times hold for: the processor's name, as /proc/cpuinfo gives it.
std::string host_machine();

/// A way that was weighed.
struct WayTime {
  Way way = Way::gather;
  std::optional<double> us;  ///< nullopt: not measured, while others were
  std::string terms;         ///< where the time comes from
};

/// A way that does not do what the options ask for.
struct RefusedWay {
  Way way = Way::gather;
  std::string reason;
};

/// One choice, with its reasons.
struct WayChoice {
  Way way = Way::gather;
  int max_tokens = 0;          ///< of the step
  std::string source;          ///< of the times
  std::vector<WayTime> times;  ///< of all candidates
  std::vector<RefusedWay> refused;

  /// Some lines for a reader.
  std::string text() const;
};

/// The fastest of `candidates` in a step of `max_tokens` tokens a rank: by the table where it has an entry for `key` with times of
/// any of them, those without times left out; else by the planner's model of `request` (docs/planning.md), whose tokens and cap are
/// not read, at the rates of the machine of the key or, where those are not known, of H200. The first of equals.
/// The same numbers give the same choice on every rank. Throws InputError without candidates.
WayChoice choose_way(const TuningTable& table, const TuningKey& key, const PlanRequest& request, std::span<const Way> candidates,
                     int max_tokens);

}  // namespace heddle
