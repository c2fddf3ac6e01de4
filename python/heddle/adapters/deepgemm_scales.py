"""DeepGEMM's scale tensors: its layouts, and reading any of them as the library has scales."""

from __future__ import annotations

from typing import Any

import numpy

from heddle.adapters.places import column_major
from heddle.adapters.tensors import like, numpy_of
from heddle.errors import InputError

TMA_BYTES = 16
"""What a column of scales is aligned to."""

_alignment = 128


def get_tma_aligned_size(x: int, element_size: int) -> int:
    """x rows, up to a multiple of 16 bytes of element_size each."""
    unit = TMA_BYTES // element_size
    return -(-x // unit) * unit


def set_mk_alignment_for_contiguous_layout(value: int) -> None:
    """Rows that a group begins at a multiple of in a psum layout. Heddle's products need none: 1 will do."""
    if value < 1:
        raise InputError(f"value: expected at least 1, got {value}")
    global _alignment
    _alignment = value


def get_mk_alignment_for_contiguous_layout() -> int:
    """What was set, at first 128."""
    return _alignment


def get_theoretical_mk_alignment_for_contiguous_layout(expected_m: int | None = None, num_groups: int | None = None) -> int:
    """The same, whatever is expected."""
    return _alignment


get_m_alignment_for_contiguous_layout = get_mk_alignment_for_contiguous_layout
get_k_alignment_for_contiguous_layout = get_mk_alignment_for_contiguous_layout


def pair_of(given: Any, name: str) -> tuple[Any, Any]:
    """Values and their scales, as they come."""
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise InputError(f"{name}: expected a pair of values and scales, got {type(given).__name__}")
    return given[0], given[1]


def matrices_of(values: Any, name: str) -> tuple[int, int, int, bool]:
    """How many there are of fp8, or of fp4 with two columns a byte; rows, columns, and whether they are fp4."""
    is_fp4 = values.dtype in (numpy.int8, numpy.uint8)
    if values.ndim != 3 or not (is_fp4 or values.dtype.name == "float8_e4m3fn"):
        got = f"{values.dtype} {list(values.shape)}"
        raise InputError(f"{name}: expected float8_e4m3fn or int8 (two of fp4) [groups, rows, columns], got {got}")
    count, rows, width = values.shape
    return count, rows, width * (2 if is_fp4 else 1), is_fp4


def _lend_float(sf: Any, name: str) -> Any:
    scales = numpy_of(sf, name)
    if scales.dtype != numpy.float32 or scales.ndim not in (2, 3):
        got = f"{scales.dtype} {list(scales.shape)}"
        raise InputError(f"{name}: expected float32 [rows, scales], or of several matrices, got {got}")
    return scales


def exponents(scales: Any, name: str) -> Any:
    """Powers of 2, float32, as ue8m0 bytes. Raises InputError for other values, which would be rounded."""
    bits = numpy.ascontiguousarray(scales).view(numpy.uint32)
    if ((bits & 0x807FFFFF) != 0).any():
        raise InputError(f"{name}: expected powers of 2, which ue8m0 can hold, got others")
    return (bits >> 23).astype(numpy.uint8)


def get_mn_major_tma_aligned_tensor(sf: Any) -> Any:
    """float32 [.., rows, groups] with neighbouring rows beside each other in memory, columns a multiple of 16 bytes."""
    return like(column_major(_lend_float(sf, "sf"), TMA_BYTES // 4), sf)


def get_mn_major_tma_aligned_packed_ue8m0_tensor(sf: Any, psum_layout: Any = None) -> Any:
    """float32 powers of 2 [.., rows, groups] to int32 [.., rows, groups / 4], four ue8m0 each, the first in the lowest byte, with
    neighbouring rows beside each other in memory. psum_layout: kept, all rows are packed."""
    codes = exponents(_lend_float(sf, "sf"), "sf")
    padded = numpy.zeros((*codes.shape[:-1], -(-codes.shape[-1] // 4) * 4), numpy.uint8)
    padded[..., : codes.shape[-1]] = codes
    return like(column_major(padded.view(numpy.int32), TMA_BYTES // 4), sf)


def check_scales(scales: Any, name: str, rows: int, columns: int, granularity: tuple[int, int], groups: int | None) -> None:
    """Raises InputError unless there is a scale (int32: four) for each part of that size of [rows, columns]."""
    by_rows, by_columns = granularity
    count = -(-columns // by_columns)
    expected = [] if groups is None else [groups]
    expected += [-(-rows // by_rows), -(-count // 4) if scales.dtype == numpy.int32 else count]
    if scales.dtype not in (numpy.float32, numpy.int32) or list(scales.shape) != expected:
        raise InputError(f"{name}: expected float32 or int32 (four of them) {expected}, got {scales.dtype} {list(scales.shape)}")


def transform_sf_into_required_layout(
    sf: Any,
    mn: int,
    k: int,
    recipe: tuple[int, int, int] | tuple[int, int],
    num_groups: int | None = None,
    is_sfa: bool | None = None,
    disable_ue8m0_cast: bool = False,
    psum_layout: Any = None,
) -> Any:
    """Scales of [mn, k], of num_groups matrices, as products take them. recipe: rows and columns of a scale, or both operands' rows
    and the columns, of which is_sfa picks.

    128 columns: float32 as on Hopper, of single rows in columns, of 128 rows as they are. 32 columns: float32 powers of 2 to packed
    ue8m0, as on Blackwell, of blocks of rows repeated. int32 (packed) stays."""
    granularity = (recipe[0] if is_sfa else recipe[1], recipe[2]) if len(recipe) == 3 else (recipe[0], recipe[1])
    if (len(recipe) == 3) != (is_sfa is not None):
        raise InputError(f"is_sfa: expected with a recipe of three numbers and only there, got {is_sfa} with {tuple(recipe)}")
    scales = numpy_of(sf, "sf")
    check_scales(scales, "sf", mn, k, granularity, num_groups)
    if scales.dtype == numpy.int32:
        return sf
    if granularity[1] == 128:
        return get_mn_major_tma_aligned_tensor(sf) if granularity[0] == 1 else sf
    if granularity[1] != 32 or disable_ue8m0_cast:
        raise InputError(f"recipe: expected scales of 128 columns, or of 32 that are cast to ue8m0, got {tuple(recipe)}")
    each_row = scales if granularity[0] == 1 else scales.repeat(granularity[0], axis=-2)[..., :mn, :]
    return get_mn_major_tma_aligned_packed_ue8m0_tensor(like(each_row, sf))


def unpacked(scales: Any, count: int) -> Any:
    """int32 [.., rows, groups / 4] of any order in memory as bytes [.., rows, count]."""
    return numpy.ascontiguousarray(numpy.ascontiguousarray(scales).view(numpy.uint8)[..., :count])
