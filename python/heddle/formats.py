"""Group quantisation as wires and products use it (docs/numerics.md), on NumPy arrays in host memory."""

from __future__ import annotations

from typing import Any

from heddle import _core
from heddle.options import Quantisation


def quantise_fp8(rows: Any, quantisation: Quantisation | None = None) -> tuple[Any, Any]:
    """rows float32 [R, C] to codes float8_e4m3fn [R, C] and a scale a group, [R, ceil(C / group)]: float8_e8m0fnu, or float32.
    Raises InputError for other dtypes, and groups other than 128 and 32."""
    import ml_dtypes
    import numpy

    how = quantisation if quantisation is not None else Quantisation()
    count, columns = rows.shape
    codes = numpy.empty((count, columns), numpy.uint8)
    scales = numpy.empty((count, -(-columns // max(how.group, 1))), numpy.float32 if how.scale == "f32" else numpy.uint8)
    _core.quantise_fp8_into(rows, codes, scales, how)
    return codes.view(ml_dtypes.float8_e4m3fn), scales if how.scale == "f32" else scales.view(ml_dtypes.float8_e8m0fnu)


def widen_fp8(codes: Any, scales: Any, quantisation: Quantisation | None = None) -> Any:
    """Back to float32 [R, C]: the value of each code times the scale of its group."""
    import numpy

    how = quantisation if quantisation is not None else Quantisation()
    rows = numpy.empty(codes.shape, numpy.float32)
    _core.widen_fp8_into(codes.view(numpy.uint8), scales if how.scale == "f32" else scales.view(numpy.uint8), rows, how)
    return rows
