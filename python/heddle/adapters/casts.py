"""Rows to fp8 before they travel, where they are."""

from __future__ import annotations

from typing import Any

import numpy

from heddle import formats
from heddle.adapters.places import place_of
from heddle.errors import InputError
from heddle.options import Quantisation

GROUP = Quantisation(128, "f32")
"""Of rows that travel as fp8."""

LARGEST, SMALLEST = 448, 1e-10
"""The largest value of e4m3, and the least that a group's largest is taken for (docs/numerics.md)."""


def quantised(rows: Any, name: str) -> tuple[Any, Any]:
    """bfloat16 [.., H] to codes and float32 scales [.., H / 128], of the same kind. The rules are docs/numerics.md's in either
    place, of finite values."""
    place = place_of(rows)
    values = place.lend(rows, name, "bfloat16", tuple(rows.shape))
    hidden = int(values.shape[-1])
    if place.gpu is None:
        codes, scales = formats.quantise_fp8(values.reshape(-1, hidden).astype(numpy.float32), GROUP)
    elif hidden % GROUP.group != 0:
        raise InputError(f"{name}: expected a multiple of {GROUP.group} columns on a GPU, got {hidden}")
    else:
        groups = place.cast(values, "float32").view(-1, hidden // GROUP.group, GROUP.group)
        scales = groups.abs().amax(-1).clamp(min=SMALLEST) / place.full((1,), LARGEST, "float32")
        codes = place.cast((groups / scales.unsqueeze(-1)).clamp(-LARGEST, LARGEST), "float8_e4m3fn").view(-1, hidden)
    codes, scales = codes.reshape(values.shape), scales.reshape(*values.shape[:-1], -(-hidden // GROUP.group))
    return place.like(codes, rows), place.like(scales, rows)
