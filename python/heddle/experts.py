"""Experts alone, on the host engine: for exchanges of one's own, and grouped products for chains of one's own."""

from __future__ import annotations

from typing import Any

from heddle import _core
from heddle.arrays import Array, as_bytes, empty_like
from heddle.errors import InputError
from heddle.options import ExpertOptions, Quantisation, WeightKindName
from heddle.source import RankWeights

Rows = Any
"""bfloat16, or a pair of float8_e4m3fn (or their bytes) and a scale a group: float8_e8m0fnu (or bytes) or float32, as the
quantisation says."""


def parts_of(rows: Rows, out: Any) -> tuple[Any, Any]:
    """Values and scales, None of bfloat16, as they are lent. out: None will do of bfloat16 alone, which new memory is like."""
    if not isinstance(rows, tuple):
        return rows, None
    if len(rows) != 2:
        raise InputError(f"rows: expected an array, or a pair of values and scales, got {len(rows)} arrays")
    if out is None:
        raise InputError("out: expected memory for the results of fp8 rows, got None")
    return as_bytes(rows[0]), as_bytes(rows[1])


class Experts:
    """The experts of one rank: gate and up, SwiGLU, down, without an exchange. Calls may be made from several threads at once;
    whichever runner computes a row, its bits are the same. bf16 rows are quantised here if the activation is fp8. Rows are C order
    in host memory. Raises InputError for what does not fit."""

    def __init__(self, weights: RankWeights, options: ExpertOptions | None = None) -> None:
        self.weights = weights
        self.options = options if options is not None else ExpertOptions()
        self._core = _core.RankExperts(weights._core, self.options)

    def contiguous(self, rows: Rows, begins: Array, counts: Array, row_weights: Array | None = None, out: Any = None) -> Any:
        """Expert e has rows begins[e] to begins[e] + counts[e] of rows [M, H]. begins, counts: int32 [local experts]; row_weights:
        float32 [M], None: 1. Writes out, bfloat16 [M, H], there and nowhere else; None: new memory like bf16 rows. Returns out."""
        values, scales = parts_of(rows, out)
        out = empty_like(values, "out") if out is None else out
        self._core.contiguous(values, scales, begins, counts, row_weights, out)
        return out

    def masked(self, rows: Rows, counts: Array, row_weights: Array | None = None, out: Any = None) -> Any:
        """Expert e has the first counts[e] rows of its block of rows [local experts, B, H]. counts: int32 [local experts];
        row_weights: float32 [local experts, B], None: 1. Writes out, bfloat16 like rows, there and nowhere else. Returns out."""
        values, scales = parts_of(rows, out)
        out = empty_like(values, "out") if out is None else out
        self._core.masked(values, scales, counts, row_weights, out)
        return out

    def routed(self, rows: Rows, local_ids: Array, weights: Array, out: Any = None) -> Any:
        """Tokens in any order: rows [T, H], local_ids int32 [T, k] (-1: another rank's or none), weights float32 [T, k], to out,
        bfloat16 [T, H]: the weighted sum over this rank's experts, in the order of choices. Returns out."""
        values, scales = parts_of(rows, out)
        out = empty_like(values, "out") if out is None else out
        self._core.routed(values, scales, local_ids, weights, out)
        return out


def grouped_product(
    rows: Rows,
    weights: Any,
    groups: Array,
    out: Any,
    *,
    kind: WeightKindName = "bf16",
    weight_scales: Any = None,
    quantisation: Quantisation | None = None,
) -> Any:
    """out[i] = rows[i] times weights[groups[i]], transposed: one product of the runners, without what stands between them.

    rows: bfloat16 [M, K] or fp8 with scales (see Rows); weights: [G, N, K] as kind says: bf16; fp8_block: float8_e4m3fn with
    weight_scales float32 [G, ceil(N / 128), ceil(K / 128)]; mxfp8: float8_e4m3fn, and mxfp4: two e2m1 a byte [G, N, K / 2], both
    with float8_e8m0fnu [G, N, K / 32]. groups: int32 [M], -1: a row that is neither read nor written; out: bfloat16 [M, N]. C
    order in host memory. Returns out. Raises InputError before anything is written."""
    values, scales = parts_of(rows, out)
    how = quantisation if quantisation is not None else Quantisation()
    _core.grouped_product_into(values, scales, how, kind, as_bytes(weights), as_bytes(weight_scales), groups, out)
    return out
