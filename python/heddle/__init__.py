"""Heddle: the expert-parallel Mixture-of-Experts layer (docs/python.md).

One rank, from a checkpoint to outputs, on the host engine:

    group = heddle.join()                                   # one process a rank: torchrun, mpirun, or names and numbers
    source = heddle.Source.open("checkpoint/", layer_index=3)
    layer = heddle.MoeLayer.create(group, source, heddle.LayerOptions(way="low_latency", cap=64))
    out = layer.forward(hidden, ids, weights, step=heddle.Step(64))
"""

from heddle import formats
from heddle._core import Group, join_group, thread_group
from heddle._core import version as __version__
from heddle.checking import reference
from heddle.errors import Error, FaultError, InputError
from heddle.exchange import Arrived, Exchange, ExchangeOptions
from heddle.experts import Experts, grouped_product
from heddle.group import join, run_threads
from heddle.layer import MoeLayer, Workspace, workspace_bytes
from heddle.options import (
    ExpertOptions,
    LayerOptions,
    LayerReport,
    LayerShape,
    PhaseReport,
    Quantisation,
    RouterOptions,
    Step,
    TokenBound,
    TokenBudget,
)
from heddle.planning import (
    PlanRequest,
    Preset,
    Quantity,
    Section,
    budget_plan,
    check_cap,
    plan,
    preset,
    presets,
    token_bound,
)
from heddle.source import RankWeights, Source

__all__ = [
    "Arrived",
    "Error",
    "Exchange",
    "ExchangeOptions",
    "ExpertOptions",
    "Experts",
    "FaultError",
    "Group",
    "InputError",
    "LayerOptions",
    "LayerReport",
    "LayerShape",
    "MoeLayer",
    "PhaseReport",
    "PlanRequest",
    "Preset",
    "Quantisation",
    "Quantity",
    "RankWeights",
    "RouterOptions",
    "Section",
    "Source",
    "Step",
    "TokenBound",
    "TokenBudget",
    "Workspace",
    "__version__",
    "budget_plan",
    "check_cap",
    "formats",
    "grouped_product",
    "join",
    "join_group",
    "plan",
    "preset",
    "presets",
    "reference",
    "run_threads",
    "thread_group",
    "token_bound",
    "workspace_bytes",
]
