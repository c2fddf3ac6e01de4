"""DeepGEMM's grouped products and its mega MoE over the host engine (docs/adapters.md).

    from heddle.adapters import deepgemm as deep_gemm       # instead of: import deep_gemm

A product sums K in steps of 128 (docs/numerics.md, GEMM 1). Operands are fp8 rows with a scale of 128 or 32 columns, and weights of
fp8 with a scale of 128 x 128 or of 32 columns, or fp4 with a scale of 32 columns; or bfloat16. Arrays are NumPy's or torch's CPU
tensors, or a GPU's tensors: of products with load_grouped_weights, of mega MoE with SymmBuffer. Names and arguments are those of
DeepGEMM 2.8.1 as vLLM 0.33.0 carries it. Errors are heddle.InputError and FaultError."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy

from heddle.adapters.deepgemm_grouped import GroupedWeights
from heddle.adapters.deepgemm_mega import (
    MegaWeights,
    SymmBuffer,
    bf16_mega_moe,
    fp8_fp4_mega_moe,
    get_symm_buffer_for_mega_moe,
    transform_weights_for_mega_moe,
)
from heddle.adapters.deepgemm_scales import (
    check_scales,
    exponents,
    get_k_alignment_for_contiguous_layout,
    get_m_alignment_for_contiguous_layout,
    get_mk_alignment_for_contiguous_layout,
    get_mn_major_tma_aligned_packed_ue8m0_tensor,
    get_mn_major_tma_aligned_tensor,
    get_theoretical_mk_alignment_for_contiguous_layout,
    get_tma_aligned_size,
    matrices_of,
    pair_of,
    set_mk_alignment_for_contiguous_layout,
    transform_sf_into_required_layout,
    unpacked,
)
from heddle.adapters.tensors import gpu_of, in_host_memory, is_on_gpu, lend, lend_writable, numpy_of
from heddle.errors import InputError
from heddle.experts import grouped_product
from heddle.options import Quantisation, WeightKindName

__all__ = [
    "GroupedWeights",
    "MegaWeights",
    "SymmBuffer",
    "bf16_mega_moe",
    "fp8_fp4_mega_moe",
    "get_k_alignment_for_contiguous_layout",
    "get_m_alignment_for_contiguous_layout",
    "get_mk_alignment_for_contiguous_layout",
    "get_mn_major_tma_aligned_packed_ue8m0_tensor",
    "get_mn_major_tma_aligned_tensor",
    "get_symm_buffer_for_mega_moe",
    "get_theoretical_mk_alignment_for_contiguous_layout",
    "get_tma_aligned_size",
    "load_grouped_weights",
    "m_grouped_bf16_gemm_nt_contiguous",
    "m_grouped_bf16_gemm_nt_masked",
    "m_grouped_fp8_fp4_gemm_nt_contiguous",
    "m_grouped_fp8_fp4_gemm_nt_masked",
    "m_grouped_fp8_gemm_nt_contiguous",
    "m_grouped_fp8_gemm_nt_masked",
    "set_mk_alignment_for_contiguous_layout",
    "transform_sf_into_required_layout",
    "transform_weights_for_mega_moe",
]


@dataclass(frozen=True)
class _Operands:
    """Rows [M, K] and weights [G, N, K] as heddle.grouped_product takes them."""

    rows: Any
    weights: Any
    kind: WeightKindName
    weight_scales: Any = None
    quantisation: Quantisation | None = None

    @property
    def count(self) -> int:
        """M."""
        return len(self.rows[0] if isinstance(self.rows, tuple) else self.rows)

    @property
    def groups(self) -> int:
        return int(self.weights.shape[0])

    @property
    def columns(self) -> int:
        """N."""
        return int(self.weights.shape[1])

    def multiply(self, groups: Any, out: Any) -> None:
        given = {"kind": self.kind, "weight_scales": self.weight_scales, "quantisation": self.quantisation}
        grouped_product(self.rows, self.weights, groups, out, **given)


def _granularity(recipe: Any, recipe_a: Any, recipe_b: Any, is_packed: bool) -> tuple[tuple[int, int], tuple[int, int]]:
    """Rows and columns of a scale of a, and of b."""
    if (recipe_a is None) != (recipe_b is None) or (recipe is not None and recipe_a is not None):
        raise InputError(f"expected recipe, or recipe_a and recipe_b, got {recipe}, {recipe_a} and {recipe_b}")
    if recipe_a is not None:
        return (recipe_a[0], recipe_a[1]), (recipe_b[0], recipe_b[1])
    of_a, of_b, columns = recipe if recipe is not None else (1, 1, 128) if is_packed else (1, 128, 128)
    return (of_a, columns), (of_b, columns)


def _check_granularity_of_rows(of_a: tuple[int, int]) -> None:
    if of_a[0] != 1 or of_a[1] not in (32, 128):
        raise InputError(f"a: expected a scale of a row and 32 or 128 columns, got {list(of_a)}")


def _columns_of_a_scale(recipe: Any, recipe_a: Any, recipe_b: Any) -> int:
    """Of a; what those of b are was said when it was loaded."""
    of_a, _ = _granularity(recipe, recipe_a, recipe_b, False)
    _check_granularity_of_rows(of_a)
    return of_a[1]


def _pair(given: Any, name: str) -> tuple[Any, Any]:
    values, scales = pair_of(given, name)
    return numpy_of(values, f"{name}[0]"), numpy_of(scales, f"{name}[1]")


def _weights(values: Any, scales: Any, granularity: tuple[int, int]) -> tuple[Any, WeightKindName, Any]:
    groups, rows, columns, is_fp4 = matrices_of(values, "b[0]")
    check_scales(scales, "b[1]", rows, columns, granularity, groups)
    if granularity == (128, 128) and not is_fp4 and scales.dtype == numpy.float32:
        return values, "fp8_block", numpy.ascontiguousarray(scales)
    if granularity[0] != 1 or granularity[1] not in (32, 128):
        raise InputError(f"b: expected a scale of [128, 128] of fp8, or of a row and 32 or 128 columns, got {list(granularity)}")
    count = -(-columns // granularity[1])
    bytes_ = unpacked(scales, count) if scales.dtype == numpy.int32 else exponents(scales, "b[1]")
    by_32 = bytes_.repeat(granularity[1] // 32, axis=2)[:, :, : -(-columns // 32)]
    return values, "mxfp4" if is_fp4 else "mxfp8", numpy.ascontiguousarray(by_32)


def _fp8_operands(a: Any, b: Any, recipes: tuple[Any, Any, Any], in_blocks: bool) -> _Operands:
    """in_blocks: a is [G, M, K] and not [M, K]."""
    (values, scales), (b_values, b_scales) = _pair(a, "a"), _pair(b, "b")
    if values.dtype.name != "float8_e4m3fn" or values.ndim != (3 if in_blocks else 2):
        expected = "[G, M, K]" if in_blocks else "[M, K]"
        raise InputError(f"a[0]: expected float8_e4m3fn {expected}, got {values.dtype} {list(values.shape)}")
    of_a, of_b = _granularity(*recipes, b_scales.dtype == numpy.int32)
    _check_granularity_of_rows(of_a)
    *_, rows, columns = values.shape
    check_scales(scales, "a[1]", rows, columns, of_a, len(values) if in_blocks else None)
    count = -(-columns // of_a[1])
    is_packed = scales.dtype == numpy.int32
    laid = unpacked(scales, count) if is_packed else numpy.ascontiguousarray(scales)
    weights, kind, weight_scales = _weights(b_values, b_scales, of_b)
    if in_blocks and len(values) != len(weights):
        raise InputError(f"a[0]: expected the {len(weights)} groups of b, got {len(values)}")
    flat = numpy.ascontiguousarray(values).reshape(-1, columns), laid.reshape(-1, count)
    return _Operands(flat, weights, kind, weight_scales, Quantisation(of_a[1], "ue8m0" if is_packed else "f32"))


def _bf16_operands(a: Any, b: Any, in_blocks: bool) -> _Operands:
    weights = lend(b, "b", "bfloat16", ("G", "N", "K"))
    groups, _, columns = weights.shape
    rows = lend(a, "a", "bfloat16", (groups, "M", columns) if in_blocks else ("M", columns))
    return _Operands(numpy.ascontiguousarray(rows).reshape(-1, columns), weights, "bf16")


def _refuse(epilogue: Any, a: Any, b: Any) -> None:
    if epilogue is not None:
        raise InputError("epilogue: expected None: results are rounded to bfloat16 and nothing else is done to them")
    parts = [part for given in (a, b) for part in (given if isinstance(given, tuple | list) else (given,))]
    if not isinstance(b, GroupedWeights) and any(map(is_on_gpu, parts)):
        raise InputError("b: expected what load_grouped_weights returned: on a GPU weights are loaded once, not by every call")


def _check_expected(expected_m: int) -> None:
    if expected_m < 1:
        raise InputError(f"expected_m: expected at least 1, got {expected_m}")


def load_grouped_weights(
    b: Any, recipe: Any = None, recipe_b: Any = None, *, device: int | None = None, most_rows: int = 1 << 17
) -> GroupedWeights:
    """Weights in a GPU's memory, in the order of Heddle's kernels: what products of tensors there take as b. DeepGEMM has no such
    call: it is made once, where weights are loaded.

    b: as the products take it; N and K multiples of 64. In host memory or on a GPU, from
    which it is copied to the host first; not needed later. recipe, recipe_b: as the products', of b's scales. device: None: b's GPU,
    or 0; most_rows: of a contiguous call, at 12 bytes of the GPU's memory each. Waits, and is not captured."""
    parts = tuple(b) if isinstance(b, tuple | list) else (b,)
    if device is None:
        device = gpu_of(parts[0]) if is_on_gpu(parts[0]) else 0
    host = tuple(map(in_host_memory, parts))
    if not isinstance(b, tuple | list):
        return GroupedWeights(lend(host[0], "b", "bfloat16", ("G", "N", "K")), "bf16", None, device, most_rows)
    values, scales = _pair(host, "b")
    is_packed = scales.dtype == numpy.int32
    granularity = tuple(recipe_b) if recipe_b is not None else _granularity(recipe, None, None, is_packed)[1]
    return GroupedWeights(*_weights(values, scales, granularity), device, most_rows)


def _contiguous_on_gpu(
    a: Any, b: GroupedWeights, d: Any, grouped_layout: Any, columns: int, use_psum_layout: bool, ensure_zero_padding: bool
) -> None:
    if use_psum_layout:
        b._ended(a, d, grouped_layout, columns, ensure_zero_padding, get_mk_alignment_for_contiguous_layout())
    else:
        b._contiguous(a, d, grouped_layout, columns, ensure_zero_padding)


def _groups_of_ends(ends: Any, rows: int) -> Any:
    """The group of each row, -1: none. Groups end where told and begin at the alignment's next multiple."""
    alignment, groups = get_mk_alignment_for_contiguous_layout(), numpy.full(rows, -1, numpy.int32)
    begin = before = 0
    for group, end in enumerate(ends.tolist()):
        if end > rows or (end < begin and end != before):  # an empty group may end where the one before it does
            raise InputError(f"grouped_layout[{group}]: expected an end of {begin} to {rows}, got {end}")
        groups[begin:end] = group
        before, begin = end, -(-end // alignment) * alignment
    return groups


def _contiguous(operands: _Operands, d: Any, grouped_layout: Any, use_psum_layout: bool, ensure_zero_padding: bool) -> None:
    out = lend_writable(d, "d", "bfloat16", (operands.count, operands.columns))
    if use_psum_layout:
        groups = _groups_of_ends(lend(grouped_layout, "grouped_layout", "int32", (operands.groups,)), operands.count)
    else:
        groups = numpy.ascontiguousarray(lend(grouped_layout, "grouped_layout", "int32", (operands.count,)))
    operands.multiply(groups, out)
    if ensure_zero_padding:
        out[groups < 0] = 0


def _masked(operands: _Operands, d: Any, masked_m: Any) -> None:
    most = operands.count // max(operands.groups, 1)
    out = lend_writable(d, "d", "bfloat16", (operands.groups, most, operands.columns))
    counts = lend(masked_m, "masked_m", "int32", (operands.groups,))
    if counts.size and not (0 <= counts.min() and counts.max() <= most):
        raise InputError(f"masked_m: expected 0 to {most}, got {counts.min()} to {counts.max()}")
    groups = numpy.where(numpy.arange(most) < counts[:, None], numpy.arange(operands.groups, dtype=numpy.int32)[:, None], -1)
    if not out.flags.c_contiguous:
        raise InputError(f"d: expected C order, got strides {out.strides}")
    operands.multiply(groups.astype(numpy.int32).reshape(-1), out.reshape(-1, operands.columns))


def m_grouped_fp8_fp4_gemm_nt_contiguous(
    a: Any,
    b: Any,
    d: Any,
    grouped_layout: Any,
    recipe: Any = None,
    recipe_a: Any = None,
    recipe_b: Any = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
    expected_m_for_psum_layout: int | None = None,
    epilogue: Any = None,
) -> None:
    """d[i] = a[i] times b[grouped_layout[i]], transposed.

    a: float8_e4m3fn [M, K] and scales [M, K / 128 or 32], float32 or int32 of four ue8m0; b: float8_e4m3fn [G, N, K] and scales
    float32 [G, N / 128, K / 128], or of a row and 32 columns; or int8 [G, N, K / 2], fp4, and scales of a row and 32 columns; d:
    bfloat16 [M, N]; grouped_layout: int32 [M], -1: padding, rows in any order. use_psum_layout: int32 [G], where the rows of each
    group end, which begin at the alignment's next multiple. ensure_zero_padding: zeros in the rows of nobody, else they are not
    written. Recipes say rows and columns of a scale; None: (1, 128, 128), or (1, 1, 128) where b's are packed. Others are kept."""
    _refuse(epilogue, a, b)
    if isinstance(b, GroupedWeights):
        columns = _columns_of_a_scale(recipe, recipe_a, recipe_b)
        _contiguous_on_gpu(a, b, d, grouped_layout, columns, use_psum_layout, ensure_zero_padding)
        return
    operands = _fp8_operands(a, b, (recipe, recipe_a, recipe_b), in_blocks=False)
    _contiguous(operands, d, grouped_layout, use_psum_layout, ensure_zero_padding)


def m_grouped_fp8_fp4_gemm_nt_masked(
    a: Any,
    b: Any,
    d: Any,
    masked_m: Any,
    expected_m: int,
    recipe: Any = None,
    recipe_a: Any = None,
    recipe_b: Any = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    epilogue: Any = None,
) -> None:
    """The first masked_m[g] rows of d[g] = a[g] times b[g], transposed; other rows are neither read nor written.

    a: float8_e4m3fn [G, M, K] and scales [G, M, K / 128 or 32]; b and recipes as above; d: bfloat16 [G, M, N]; masked_m: int32 [G];
    expected_m: kept."""
    _refuse(epilogue, a, b)
    _check_expected(expected_m)
    if isinstance(b, GroupedWeights):
        b._masked(a, d, masked_m, _columns_of_a_scale(recipe, recipe_a, recipe_b), expected_m)
        return
    _masked(_fp8_operands(a, b, (recipe, recipe_a, recipe_b), in_blocks=True), d, masked_m)


m_grouped_fp8_gemm_nt_contiguous = m_grouped_fp8_fp4_gemm_nt_contiguous
m_grouped_fp8_gemm_nt_masked = m_grouped_fp8_fp4_gemm_nt_masked


def m_grouped_bf16_gemm_nt_contiguous(
    a: Any,
    b: Any,
    d: Any,
    grouped_layout: Any,
    compiled_dims: str = "nk",
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
    expected_m_for_psum_layout: int | None = None,
    epilogue: Any = None,
) -> None:
    """As the fp8 form, of bfloat16 a [M, K] and b [G, N, K]."""
    _refuse(epilogue, a, b)
    if isinstance(b, GroupedWeights):
        _contiguous_on_gpu(a, b, d, grouped_layout, 128, use_psum_layout, ensure_zero_padding)
        return
    _contiguous(_bf16_operands(a, b, in_blocks=False), d, grouped_layout, use_psum_layout, ensure_zero_padding)


def m_grouped_bf16_gemm_nt_masked(
    a: Any, b: Any, d: Any, masked_m: Any, expected_m: int, compiled_dims: str = "nk", epilogue: Any = None
) -> None:
    """As the fp8 form, of bfloat16 a [G, M, K] and b [G, N, K]."""
    _refuse(epilogue, a, b)
    _check_expected(expected_m)
    if isinstance(b, GroupedWeights):
        b._masked(a, d, masked_m, 128, expected_m)
        return
    _masked(_bf16_operands(a, b, in_blocks=True), d, masked_m)
