"""What a layer and a call are described by. Everything here is plain data, the same on all ranks of a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

WayName = Literal["gather", "normal", "low_latency", "elastic", "one_sided", "mega", "auto"]
RunnerName = Literal["auto", "contiguous", "masked", "routed"]
ActivationName = Literal["fp8", "bf16"]
WireName = Literal["bf16", "fp8", "nvfp4"]
ScaleName = Literal["ue8m0", "f32"]
WeightKindName = Literal["bf16", "fp8_block", "mxfp4", "nvfp4", "mxfp8"]
PhaseName = Literal["decode", "prefill"]
LayoutName = Literal["contiguous", "masked", "routed"]


@dataclass(frozen=True)
class LayerShape:
    """Sizes of one layer. hidden and intermediate are multiples of 64; experts are counted over all ranks."""

    hidden: int
    intermediate: int
    experts: int
    topk: int
    clamp: float | None = None
    """L of the SwiGLU clamp, None if the model has none."""


@dataclass(frozen=True)
class Step:
    """The largest batch of any rank in a call (under tensor-parallel attention the whole batch), and whether any rank has prompt
    tokens. The same on all ranks."""

    max_tokens: int
    phase: PhaseName = "decode"


@dataclass(frozen=True)
class Quantisation:
    """How activations are quantised before a product, and rows on an fp8 wire: values a group (128 or 32) and the scale's
    format."""

    group: int = 128
    scale: ScaleName = "ue8m0"


@dataclass(frozen=True, kw_only=True)
class ExpertOptions:
    """The arithmetic of experts without an exchange."""

    activation: ActivationName | None = None
    """None: bf16 where the weights are bf16, else fp8."""
    quantisation: Quantisation = field(default_factory=Quantisation)
    clamp: float | None = None
    """L of the SwiGLU clamp. None: the shape's."""
    weight_at: Literal["activation", "combine"] = "activation"
    """Where row weights are applied; combine: in routed sums, and else not at all."""


@dataclass(frozen=True, kw_only=True)
class LayerOptions:
    """Everything a layer is created with (docs/python.md says which fields belong to which way)."""

    cap: int
    """Most tokens a rank may bring."""
    way: WayName = "low_latency"
    """auto: each call goes the way that a table of measured times names for its step (docs/choosing.md)."""
    runner: RunnerName = "auto"
    """auto: what the way's layout wants."""
    activation: ActivationName | None = None
    """None: bf16 where the weights are bf16, else fp8."""
    quantisation: Quantisation = field(default_factory=Quantisation)
    wire: WireName | None = None
    """Format of rows on their way to the experts. None: what the runner takes."""
    combine_wire: WireName = "bf16"
    """Format of results on their way home."""
    weight_at: Literal["activation", "combine"] = "activation"
    """Where the routing weight is applied."""
    reduce: Literal["rank", "home"] = "rank"
    """elastic: where a token's results are first summed."""
    cpu_sync: bool = False
    """elastic: the host waits for the count."""
    gather: Literal["padded", "uneven", "zero_filled", "tensor_parallel"] = "padded"
    """gather: how every token comes to every rank."""
    clamp: float | None = None
    """L of the SwiGLU clamp. None: the shape's."""
    shared: Literal["alone", "fused", "extra"] = "alone"
    """What happens to the shared expert, where the layer has one."""
    tensor_parallel: bool = False
    """Every rank brings the whole batch, keeps its slice for the round trip, and gets all outputs."""
    expert_slices: bool = False
    """gather: every rank holds a slice of every expert."""
    workers: int = 1
    """Protocol threads a rank on the host engine."""
    block_rows: int = 128
    """mega: rows of a row block, a multiple of 8 up to 256."""
    ring: Literal["live", "full"] = "live"
    """mega: row blocks that the rings hold."""
    overflow: Literal["error", "split"] = "error"
    """More tokens than cap: an error, or as many passes as the largest batch of the step needs."""
    tuning: str | None = None
    """auto: a file that `heddle tune` has written. None: the shipped times of H200."""
    sums: Literal["any", "slots", "two_stages"] = "any"
    """auto: any way; or only ways that have equal bits."""
    candidates: Sequence[WayName] = ()
    """auto: ways to choose from. Empty: all that do what the other options ask for."""


@dataclass(frozen=True)
class PhaseReport:
    """Of one phase of a call on one rank; remote bytes crossed to another rank."""

    seconds: float
    remote_bytes: int
    local_bytes: int


@dataclass(frozen=True)
class LayerReport:
    """What the last call did on this rank."""

    dispatch: PhaseReport
    regroup: PhaseReport
    gemm1: PhaseReport
    activation: PhaseReport
    gemm2: PhaseReport
    combine: PhaseReport
    shared_seconds: float
    layout: LayoutName
    """How arrived rows lay."""
    host_waited: bool
    rows_sent: int
    """Copies of its tokens that this rank delivered, its own included."""
    rows_received: int
    """Copies that arrived."""
    rows_real: int
    """Pairs of an arrived row and an expert of this rank."""
    rows_room: int
    """Rows handed to the runner, padding included."""
    way: WayName
    """That the call went."""
    passes: int
    """With overflow="split"; all other numbers are sums over them."""


@dataclass(frozen=True)
class RouterOptions:
    """How a model's logits become choices and weights."""

    score: Literal["softmax", "sigmoid", "sqrtsoftplus", "softmax_topk"]
    topk: int
    groups: int = 1
    topk_groups: int = 1
    renormalise: bool = True
    scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class TokenBudget:
    """What an engine may run in one call (docs/planning.md, "The token budget")."""

    decode_graphs: Sequence[int] = ()
    """Requests of a data-parallel group in each captured decode step; empty: these ranks never decode."""
    request_tokens: int = 1
    speculative_rows: int = 1
    prefill_chunk: int | None = None
    """Prompt tokens of one step, of all groups together; None: these ranks never prefill."""
    data_parallel_groups: int = 1


@dataclass(frozen=True)
class TokenBound:
    """The most tokens that a rank can bring to a call of each kind; 0 where it makes no such calls."""

    decode: int
    prefill: int

    @property
    def cap(self) -> int:
        """The smallest cap that covers both."""
        return max(self.decode, self.prefill)
