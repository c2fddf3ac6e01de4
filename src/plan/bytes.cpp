// Bytes of rows, of pairs, of weights, and what a round trip moves.
#include <fmt/format.h>

#include "formats/row_format.hpp"
#include "heddle/error.hpp"
#include "heddle/plan.hpp"
#include "plan/ways.hpp"

namespace heddle {

std::uint64_t wire_row_bytes(Wire wire, int hidden, const Quantisation& quantisation) {
  return RowFormat{.wire = wire, .hidden = hidden, .quantisation = quantisation}.reported_bytes();
}

namespace {

Traffic traffic(Way way, const PlanRequest& request, Wire wire) {
  Traffic result;
  result.rows = request.tokens * copies_of_a_token(way, request.shape, request.ranks);
  result.row_bytes = wire_row_bytes(wire, request.shape.hidden, request.quantisation);
  result.bytes = result.rows * static_cast<double>(result.row_bytes);
  result.remote_bytes = result.bytes * (1 - 1.0 / request.ranks);
  return result;
}

}  // namespace

Traffic dispatch_traffic(Way way, const PlanRequest& request) { return traffic(way, request, request.wire); }

Traffic combine_traffic(Way way, const PlanRequest& request) { return traffic(way, request, request.combine_wire); }

PairBytes fused_pair_bytes(int hidden) {
  constexpr std::uint64_t weight = sizeof(float);
  return {wire_row_bytes(Wire::fp8, hidden, {32, ScaleFormat::ue8m0}) + weight, wire_row_bytes(Wire::bf16, hidden)};
}

double round_trip_reduction(GroupFormat dispatch, GroupFormat combine) {
  const auto bits = [](GroupFormat format) { return format.bits + (format.group > 0 ? 8.0 / format.group : 0.0); };
  return 2 * 16 / (bits(dispatch) + bits(combine));
}

namespace {

WeightBytes matrix_bytes(std::uint64_t rows, std::uint64_t columns, WeightKind kind) {
  const std::uint64_t values = rows * columns;
  switch (kind) {
    case WeightKind::bf16:
      return {2 * values, 0};
    case WeightKind::fp8_block:
      return {values, sizeof(float) * plan::divide_up(rows, std::uint64_t{128}) * plan::divide_up(columns, std::uint64_t{128})};
    case WeightKind::mxfp4:
      return {values / 2, rows * plan::divide_up(columns, std::uint64_t{32})};
    case WeightKind::nvfp4:
      return {values / 2, rows * plan::divide_up(columns, std::uint64_t{16})};
    case WeightKind::mxfp8:
      return {values, rows * plan::divide_up(columns, std::uint64_t{32})};
  }
  throw InputError("unknown weight kind");
}

}  // namespace

WeightBytes expert_weight_bytes(const LayerShape& shape, WeightKind kind) {
  const auto hidden = static_cast<std::uint64_t>(shape.hidden);
  const auto intermediate = static_cast<std::uint64_t>(shape.intermediate);
  const WeightBytes gate_or_up = matrix_bytes(intermediate, hidden, kind);
  const WeightBytes down = matrix_bytes(hidden, intermediate, kind);
  return {2 * gate_or_up.values + down.values, 2 * gate_or_up.scales + down.scales};
}

}  // namespace heddle
