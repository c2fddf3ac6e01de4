"""The planner and the token budget: what a layer costs, and which cap an engine needs, before anything runs (docs/planning.md)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from heddle import _core
from heddle.options import LayerShape, Quantisation, TokenBound, TokenBudget, WeightKindName, WireName


@dataclass(frozen=True)
class Preset:
    """The shape of a published model. What could not be confirmed is None or empty."""

    name: str
    shape: LayerShape
    shared_experts: int | None
    weights: tuple[WeightKindName, ...]
    """Of the routed experts; the first is the usual one."""
    shared_weights: WeightKindName | None
    """Where they differ from the routed ones."""
    plan_only: bool
    """It can be planned, not run."""
    note: str


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """One layer on a group of ranks."""

    shape: LayerShape
    ranks: int
    tokens: int
    """Each rank brings."""
    cap: int | None = None
    """Most tokens a rank may bring; None: as many as it brings."""
    weights: WeightKindName = "bf16"
    shared_experts: int = 0
    wire: WireName | None = None
    """None: fp8, or bf16 where the weights are bf16."""
    combine_wire: WireName = "bf16"
    quantisation: Quantisation = field(default_factory=Quantisation)
    machine: str = "h200"

    @classmethod
    def of_preset(cls, name: str, *, ranks: int, tokens: int, cap: int | None = None, machine: str = "h200") -> PlanRequest:
        """A published model's layer. Raises InputError that lists the names."""
        model = preset(name)
        return cls(
            shape=model.shape,
            ranks=ranks,
            tokens=tokens,
            cap=cap,
            weights=model.weights[0] if model.weights else "bf16",
            shared_experts=model.shared_experts or 0,
            machine=machine,
        )


@dataclass(frozen=True)
class Quantity:
    """One number, its formula with the inputs filled in, and who says so. Bytes, seconds, or plain numbers by `unit`."""

    name: str
    title: str
    value: float
    unit: Literal["count", "copies", "rows", "bytes", "seconds", "ratio"]
    formula: str
    source: str


@dataclass(frozen=True)
class Section:
    """One part of a plan, as `heddle plan` prints it: quantities that belong together, under a title."""

    name: str
    title: str
    quantities: tuple[Quantity, ...]


def presets() -> list[Preset]:
    """All published models that are known."""
    return _core.presets()


def preset(name: str) -> Preset:
    """A published model. Raises InputError that lists the names."""
    return _core.preset(name)


def plan(request: PlanRequest) -> list[Section]:
    """Copies, bytes, buffers, grids and floors of the layer. Raises InputError if the request makes none."""
    return _core.plan(request)


def token_bound(budget: TokenBudget) -> TokenBound:
    """The most tokens that a rank can bring to a call. Raises InputError where the budget bounds nothing."""
    return _core.token_bound(budget)


def check_cap(budget: TokenBudget, cap: int) -> None:
    """Raises InputError where a rank could bring more than `cap` tokens: which step, and what would fit."""
    _core.check_cap(budget, cap)


def budget_plan(budget: TokenBudget, request: PlanRequest, cap: int | None = None) -> list[Section]:
    """What the budget asks of a rank: its bounds, the cap to take (or `cap`, held against it), and every way's memory there. The
    request's tokens and cap are not read."""
    return _core.budget_plan(budget, request, cap)
