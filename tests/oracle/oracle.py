"""The MoE layer of docs/numerics.md in NumPy: float64 products, rounded only where that page rounds.

This is the second oracle: it shares no code with the library and was written from docs/numerics.md and docs/files.md alone.
"""

from dataclasses import dataclass, field

import numpy as np

import formats
from router import Router
from weights import Weight


@dataclass
class Expert:
    gate: Weight  # [D, H]
    up: Weight  # [D, H]
    down: Weight  # [H, D]


@dataclass
class Layer:
    hidden: int
    intermediate: int
    experts: list[Expert]
    shared: Expert = None
    shared_gate: np.ndarray = None  # bf16 [1, H]
    router: Router = None
    clamp: float = None  # what config.json says


@dataclass
class Batch:
    """hidden bf16 [T, H]; ids int [T, k] and weights f32 [T, k], None where the router chooses; tokens_per_rank int [R] or None."""

    hidden: np.ndarray
    ids: np.ndarray = None
    weights: np.ndarray = None
    tokens_per_rank: np.ndarray = None


@dataclass(frozen=True)
class Options:
    activation: str = "fp8"
    group: int = 128
    scale: str = "ue8m0"
    wire: str = "bf16"
    combine_wire: str = "bf16"
    weight_at: str = "activation"
    clamp: float = None
    sums: str = "slots"  # or "ranks": the two stages
    ranks: int = 1


@dataclass
class Pairs:
    """results [T, k, H], bf16 values as float64, zeros where the choice is -1."""

    results: np.ndarray
    ids: np.ndarray
    weights: np.ndarray = field(repr=False)


def matmul(left, right):
    return np.matmul(left, right.T)


def into_gemm(rows, options):
    """What a GEMM reads of rows [rows, K]: group-quantised and widened, or rounded to bf16."""
    if options.activation == "bf16":
        return formats.round_to_bf16(rows)
    codes, scales = formats.quantise_e4m3(rows, options.group, options.scale)
    return formats.widen_e4m3(codes, scales, options.group)


def silu_and_multiply(gate, up, clamp):
    """bf16 values in, f32 values out; every operation but the exponential is one of f32."""
    gate, up = np.asarray(gate, np.float64), np.asarray(up, np.float64)
    if clamp is not None:
        gate = np.minimum(gate, clamp)
        up = np.clip(up, -clamp, clamp)
    with np.errstate(over="ignore", invalid="ignore"):
        divisor = formats.round_to_f32(1 + formats.round_to_f32(np.exp(-gate)))
        return formats.round_to_f32(formats.round_to_f32(gate / divisor) * up)


def expert_rows(expert, rows, options, weights=None):
    """Rows [rows, H] through one expert, to bf16 [rows, H]. weights f32 [rows] multiply the activation, if given."""
    with np.errstate(invalid="ignore"):
        quantised = into_gemm(rows, options)
        gate = formats.round_to_bf16(matmul(quantised, expert.gate.widen()))
        up = formats.round_to_bf16(matmul(quantised, expert.up.widen()))
        activated = silu_and_multiply(gate, up, options.clamp)
        if weights is not None:
            activated = formats.round_to_f32(activated * weights.astype(np.float64)[:, None])
        return formats.round_to_bf16(matmul(into_gemm(activated, options), expert.down.widen()))


def arrived_rows(batch, options):
    """The hidden states as an expert's rank reads them. An fp8 wire's codes and scales are already what fp8 activations ask for."""
    wire = "bf16" if options.wire == "fp8" and options.activation == "fp8" else options.wire
    return formats.over_wire(batch.hidden.astype(np.float64), wire, options.group, options.scale)


def pair_results(layer, batch, options):
    """Every (token, choice) of the batch through its expert."""
    tokens, choices = batch.ids.shape
    arrived = arrived_rows(batch, options)
    results = np.zeros((tokens, choices, layer.hidden))
    for number, expert in enumerate(layer.experts):
        token, choice = np.nonzero(batch.ids == number)
        if len(token):
            weights = batch.weights[token, choice] if options.weight_at == "activation" else None
            results[token, choice] = expert_rows(expert, arrived[token], options, weights)
    return Pairs(results, batch.ids, batch.weights)


def home_of_experts(experts, ranks):
    """The rank of each expert under the contiguous placement."""
    return np.arange(experts) * ranks // experts


def _travel_back(rows, options):
    """bf16 rows [T, H] as the home rank reads them."""
    return formats.over_wire(rows, options.combine_wire, 128, options.scale)


def _add_in_f32(total, addend):
    return formats.round_to_f32(total + addend)


def _weighted(pairs, choice, rows, options):
    """fmaf's addend: exact in float64, so that the sum rounds once."""
    if options.weight_at == "activation":
        return rows
    return np.where(pairs.ids[:, choice, None] >= 0, pairs.weights[:, choice, None].astype(np.float64) * rows, 0)


def sum_slots(pairs, options):
    """f32 [T, H]: one result a choice, in choice order."""
    total = np.zeros((pairs.results.shape[0], pairs.results.shape[2]))
    for choice in range(pairs.ids.shape[1]):
        rows = _travel_back(pairs.results[:, choice], options)
        total = _add_in_f32(total, _weighted(pairs, choice, rows, options))
    return total


def sum_ranks(pairs, options, experts):
    """f32 [T, H]: each rank sums its own experts' pairs and rounds to bf16, then the partial rows are summed in rank order."""
    home = home_of_experts(experts, options.ranks)
    rank_of_pair = np.where(pairs.ids >= 0, home[pairs.ids], -1)
    total = np.zeros((pairs.results.shape[0], pairs.results.shape[2]))
    for rank in range(options.ranks):
        partial = np.zeros_like(total)
        for choice in range(pairs.ids.shape[1]):
            mine = rank_of_pair[:, choice, None] == rank
            partial = np.where(mine, _add_in_f32(partial, _weighted(pairs, choice, pairs.results[:, choice], options)), partial)
        total = _add_in_f32(total, _travel_back(formats.round_to_bf16(partial), options))
    return total


def shared_result(layer, batch, options):
    """f32 [T, H] that the home rank adds last."""
    rows = batch.hidden.astype(np.float64)
    result = expert_rows(layer.shared, rows, options)
    if layer.shared_gate is None:
        return result
    with np.errstate(over="ignore", invalid="ignore"):
        gate = formats.round_to_f32(1 / (1 + np.exp(-matmul(rows, layer.shared_gate.astype(np.float64)))))
    return formats.round_to_f32(gate * result)


def finish(layer, pairs, shared, options):
    """Sums, adds the shared expert's result if there is one, and rounds, the only time at home. Returns bf16 values [T, H]."""
    with np.errstate(invalid="ignore"):
        total = sum_slots(pairs, options) if options.sums == "slots" else sum_ranks(pairs, options, len(layer.experts))
        if shared is not None:
            total = _add_in_f32(total, shared)
        return formats.round_to_bf16(total)


def layer_output(layer, batch, options):
    shared = shared_result(layer, batch, options) if layer.shared else None
    return finish(layer, pair_results(layer, batch, options), shared, options)


def relative_error(actual, expected):
    """||actual - expected|| / ||expected|| over what is finite in expected; infinite if NaN or infinity stand elsewhere."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    finite = np.isfinite(expected)
    if actual.shape != expected.shape or not np.array_equal(finite, np.isfinite(actual)):
        return np.inf
    if not np.array_equal(np.isnan(actual), np.isnan(expected)):
        return np.inf
    difference = np.linalg.norm(actual[finite] - expected[finite])
    size = np.linalg.norm(expected[finite])
    if size == 0:
        return 0.0 if difference == 0 else np.inf
    return float(difference / size)
