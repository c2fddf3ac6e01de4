"""The layer in float64, rounded only where docs/numerics.md says, to compare outputs with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from heddle import _core
from heddle.arrays import Array, empty_like
from heddle.options import LayerOptions
from heddle.source import Source


def reference(
    source: Source,
    hidden: Array,
    ids: Array,
    weights: Array,
    options: LayerOptions,
    *,
    ranks: int = 1,
    placement: Sequence[int] | None = None,
) -> Any:
    """What the ranks together should give: hidden bf16 [T, H], ids int32 [T, k] and weights float32 [T, k] of all ranks' tokens, in
    host memory, to bf16 [T, H] of hidden's kind. ranks and placement matter where partial sums are rounded by rank. Slow.
    Raises InputError for what docs/numerics.md does not allow."""
    out = empty_like(hidden, "hidden as a NumPy array")
    _core.reference_into(
        source._core, hidden, ids, weights, out, ranks, list(placement) if placement is not None else None, options
    )
    return out
