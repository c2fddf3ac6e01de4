"""DeepGEMM's mega MoE: a buffer that tokens are written to, weights, and one call for the whole layer, over way mega."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import ml_dtypes
import numpy

from heddle import _core, formats
from heddle.adapters.deepgemm_layers import DeviceLayers, HostLayers, Layers
from heddle.adapters.deepgemm_scales import matrices_of, pair_of, unpacked
from heddle.adapters.places import HOST
from heddle.adapters.tensors import gpu_of, in_host_memory, is_on_gpu, lend, lend_writable, like, numpy_of
from heddle.adapters.trips import experts_a_rank, joined, lend_stats
from heddle.errors import InputError
from heddle.options import LayerOptions, Quantisation, WeightKindName
from heddle.source import RankWeights, Source

GROUP = Quantisation(32, "ue8m0")
"""Of rows and activations, as DeepGEMM's mega MoE has them."""

_KINDS: dict[str, tuple[WeightKindName, str]] = {
    "fp8xfp4": ("mxfp4", "float8_e4m3fn"),
    "fp8xfp8": ("mxfp8", "float8_e4m3fn"),
    "bf16xbf16": ("bf16", "bfloat16"),
}
"""Kinds of weights and rows by mma_type."""

_PACKED = 128
"""Columns whose four scales one int32 holds."""

MOST_COUNTED = 1000
"""Experts whose counts fit into one exchange, 4 digits each."""

MOST_TOKENS_COUNTED = 0xFFFF
"""What 4 digits hold: a token chooses an expert at most once."""


class MegaWeights(NamedTuple):
    """What transform_weights_for_mega_moe returns of a matrix an expert: values as they were, and their scales as bytes
    [E, rows, columns / 32]."""

    values: Any
    scales: Any
    kind: WeightKindName


def _check_activation(activation: str) -> None:
    if activation != "swiglu":
        raise InputError(f"activation: expected swiglu, got {activation}")


def _transformed(weights: Any, name: str) -> MegaWeights:
    """In host memory: layers of a GPU, too, read their weights there."""
    if not isinstance(weights, tuple | list):
        return MegaWeights(lend(in_host_memory(weights), name, "bfloat16", ("experts", "rows", "columns")), None, "bf16")
    values, scales = map(in_host_memory, pair_of(weights, name))
    values = numpy_of(values, f"{name}[0]")
    experts, rows, columns, is_fp4 = matrices_of(values, f"{name}[0]")
    packed = lend(scales, f"{name}[1]", "int32", (experts, rows, -(-columns // _PACKED)))
    return MegaWeights(values, unpacked(packed, -(-columns // 32)), "mxfp4" if is_fp4 else "mxfp8")


def transform_weights_for_mega_moe(
    l1_weights: Any, l2_weights: Any, activation: str = "swiglu"
) -> tuple[MegaWeights, MegaWeights]:
    """This rank's weights as mega MoE calls take them. l1_weights: gate before up, [E, 2 D, H], l2_weights: [E, H, D]; bfloat16, or
    pairs of float8_e4m3fn, or int8 (two of fp4, the even one low), and int32 [E, rows, columns / 128] of four ue8m0 each, of 32
    columns, in any order in memory. Values in host memory are not copied: they stay as they are until the last call. Those of a GPU
    are copied to host memory, and again to the GPU by the first call of a layer."""
    _check_activation(activation)
    return _transformed(l1_weights, "l1_weights"), _transformed(l2_weights, "l2_weights")


class SymmBuffer:
    """Where one rank's tokens are written to, and what all layers of these sizes share. Collective.

    Arguments are DeepGEMM's; group: a torch process group or a heddle.Group; num_max_tokens_per_rank: C, as given; mma_type:
    fp8xfp4, fp8xfp8 or bf16xbf16; base: another buffer, whose ranks this one has. Heddle's own: like, an array whose kind the
    buffer's are of (None: torch's in host memory where torch is loaded, else NumPy's). A tensor of a GPU makes this a buffer of
    that GPU, whose calls are queued on the current stream: one process a GPU, fp8xfp4 or bf16xbf16, and no counts.

    x: float8_e4m3fn [C, H] and x_sf: int32 [C, H / 128] of four ue8m0, of 32 columns each; or x bfloat16 and x_sf None; topk_idx:
    int64 [C, k], -1: none; topk_weights: float32 [C, k]. A call takes the first rows of each."""

    def __init__(
        self,
        group: Any,
        num_experts: int,
        num_max_tokens_per_rank: int,
        num_topk: int,
        hidden: int,
        intermediate_hidden: int,
        num_shared_experts: int = 0,
        mma_type: str = "fp8xfp4",
        activation: str = "swiglu",
        base: SymmBuffer | None = None,
        *,
        like: Any = None,
    ) -> None:
        _check_activation(activation)
        if num_shared_experts != 0:
            raise InputError(f"num_shared_experts: expected 0, got {num_shared_experts}: the call has no such part here")
        if mma_type not in _KINDS:
            raise InputError(f"mma_type: expected {' or '.join(_KINDS)}, got {mma_type}")
        if hidden % _PACKED != 0 or intermediate_hidden % _PACKED != 0:
            got = f"{hidden} and {intermediate_hidden}"
            raise InputError(f"hidden, intermediate_hidden: expected multiples of {_PACKED}, got {got}")
        self.group = group
        self._group: _core.Group = base._group if base is not None else joined(group)
        self._local_experts = experts_a_rank(num_experts, self._group.ranks)
        self.num_experts, self.num_max_tokens_per_rank, self.num_topk = num_experts, num_max_tokens_per_rank, num_topk
        self.hidden, self.intermediate_hidden, self.num_shared_experts = hidden, intermediate_hidden, num_shared_experts
        self.mma_type, self.activation = mma_type, activation
        self._layers: Layers = DeviceLayers(self._group, gpu_of(like)) if is_on_gpu(like) else HostLayers(self._group)
        self._make_arrays(like)

    def _make_arrays(self, kind: Any) -> None:
        torch = sys.modules.get("torch")
        if kind is None:
            kind = numpy.empty(0) if torch is None else torch.empty(0)
        most, is_bf16 = self.num_max_tokens_per_rank, self.mma_type == "bf16xbf16"

        def zeros(columns: int, element: Any) -> Any:
            made = like(numpy.zeros((most, columns), element), kind)
            return made.to(kind.device) if is_on_gpu(kind) else made

        self.x = zeros(self.hidden, ml_dtypes.bfloat16 if is_bf16 else ml_dtypes.float8_e4m3fn)
        self.x_sf = None if is_bf16 else zeros(self.hidden // _PACKED, numpy.int32)
        self.topk_idx, self.topk_weights = zeros(self.num_topk, numpy.int64), zeros(self.num_topk, numpy.float32)

    def destroy(self) -> None:
        """Lets go of the layers and arrays; what layers held goes when the group ends."""
        self._layers.clear()
        self.group = self.x = self.x_sf = None

    def reset(self, live: Sequence[bool] | None = None) -> None:
        """Not DeepGEMM's: after a FaultError, by all ranks that go on; live: as Workspace.reset's. On the host engine layers are
        made anew by the next calls; the memory of the old ones goes when the group ends."""
        self._layers.reset(live)

    def _load(self, l1: MegaWeights, l2: MegaWeights) -> RankWeights:
        source = Source.of_fused_arrays(
            l1.values,
            l2.values,
            topk=self.num_topk,
            kind=l1.kind,
            gate_up_scales=l1.scales,
            down_scales=l2.scales,
            first=self._group.rank * self._local_experts,
            experts=self.num_experts,
        )
        return source.load(self._group.rank, self._group.ranks)

    def _run(self, l1: MegaWeights, l2: MegaWeights, clamp: float | None, given: tuple[Any, Any, Any], out: Any) -> None:
        options = LayerOptions(cap=self.num_max_tokens_per_rank, way="mega", quantisation=GROUP, clamp=clamp)
        key = *(id(array) for array in (l1.values, l1.scales, l2.values, l2.scales)), clamp
        self._layers.call(key, (l1, l2), lambda: self._load(l1, l2), options, given, out)

    def _check_weights(self, l1: Any, l2: Any) -> None:
        if not isinstance(l1, MegaWeights) or not isinstance(l2, MegaWeights):
            raise InputError("l1_weights and l2_weights: expected what transform_weights_for_mega_moe returned")
        kind = _KINDS[self.mma_type][0]
        halves = 2 if kind == "mxfp4" else 1
        for name, weights, rows, columns in (
            ("l1_weights", l1, 2 * self.intermediate_hidden, self.hidden),
            ("l2_weights", l2, self.hidden, self.intermediate_hidden),
        ):
            expected = [self._local_experts, rows, columns // halves]
            if weights.kind != kind or list(weights.values.shape) != expected:
                raise InputError(f"{name}: expected {kind} {expected}, got {weights.kind} {list(weights.values.shape)}")

    def _check_tokens(self, tokens: int) -> None:
        if tokens > self.num_max_tokens_per_rank:
            raise InputError(f"y: expected at most num_max_tokens_per_rank = {self.num_max_tokens_per_rank} tokens, got {tokens}")

    def _tokens_on_gpu(self, tokens: int) -> tuple[Any, Any, Any]:
        """As _tokens; ids are looked at by the call's kernels."""
        torch = sys.modules["torch"]
        rows = self.x[:tokens]
        if self.x_sf is not None:
            powers = (self.x_sf[:tokens].contiguous().view(torch.uint8).to(torch.int32) << 23).view(torch.float32)
            groups = self.hidden // 32
            wide = rows.to(torch.float32).view(tokens, groups, 32) * powers.view(tokens, groups, 1)
            rows = wide.view(tokens, self.hidden).to(torch.bfloat16)
        return rows.contiguous(), self.topk_idx[:tokens].to(torch.int32), self.topk_weights[:tokens].contiguous()

    def _tokens(self, tokens: int) -> tuple[Any, Any, Any]:
        """hidden bfloat16, ids int32 and weights float32 of the first rows."""
        sizes = (self.num_max_tokens_per_rank, self.num_topk)
        ids = lend(self.topk_idx, "topk_idx", ("int64", "int32"), sizes)[:tokens]
        if ids.size and not (-1 <= ids.min() and ids.max() < self.num_experts):
            raise InputError(f"topk_idx: expected -1 to {self.num_experts - 1}, got {ids.min()} to {ids.max()}")
        weights = numpy.ascontiguousarray(lend(self.topk_weights, "topk_weights", "float32", sizes)[:tokens])
        rows = lend(self.x, "x", _KINDS[self.mma_type][1], (self.num_max_tokens_per_rank, self.hidden))[:tokens]
        if self.x_sf is not None:
            scales = lend(self.x_sf, "x_sf", "int32", (self.num_max_tokens_per_rank, self.hidden // _PACKED))[:tokens]
            codes = unpacked(scales, self.hidden // 32).view(ml_dtypes.float8_e8m0fnu)
            # bfloat16 holds these values, and is rounded to the same codes again, or to equal ones.
            rows = formats.widen_fp8(numpy.ascontiguousarray(rows), codes, GROUP).astype(ml_dtypes.bfloat16)
        return numpy.ascontiguousarray(rows), numpy.ascontiguousarray(ids, numpy.int32), weights

    def _add_counts(self, stats: Any, ids: Any) -> None:
        """Every rank tells the others how often its tokens chose each expert."""
        counts = numpy.bincount(ids[ids >= 0], minlength=self.num_experts).astype(">u2")
        told = self._group.exchange(counts.tobytes().hex(), "rows of each expert")
        here = slice(self._group.rank * len(stats), (self._group.rank + 1) * len(stats))
        for text in told:
            if text:
                stats += numpy.frombuffer(bytes.fromhex(text), ">u2")[here].astype(numpy.int32)


def get_symm_buffer_for_mega_moe(
    group: Any,
    num_experts: int,
    num_max_tokens_per_rank: int,
    num_topk: int,
    hidden: int,
    intermediate_hidden: int,
    num_shared_experts: int = 0,
    use_fp8_dispatch: bool | None = None,
    mma_type: str = "fp8xfp4",
    activation: str = "swiglu",
) -> SymmBuffer:
    """A SymmBuffer. use_fp8_dispatch: the old word for an mma_type that begins with fp8. Collective."""
    if use_fp8_dispatch is not None:
        if use_fp8_dispatch != mma_type.startswith("fp8"):
            raise InputError(f"use_fp8_dispatch: expected {not use_fp8_dispatch} with mma_type {mma_type}, got {use_fp8_dispatch}")
        warnings.warn("use_fp8_dispatch: mma_type says it", DeprecationWarning, stacklevel=2)
    sizes = (num_experts, num_max_tokens_per_rank, num_topk, hidden, intermediate_hidden)
    return SymmBuffer(group, *sizes, num_shared_experts, mma_type, activation)


def _call(y: Any, l1: Any, l2: Any, buffer: SymmBuffer, stats: Any, clamp: float | None) -> None:
    """All that can be refused is refused before anything is sent."""
    buffer._check_weights(l1, l2)
    if is_on_gpu(buffer.x):
        if stats is not None:
            raise InputError("cumulative_local_expert_recv_stats: expected None: rows of experts are not counted on a GPU")
        buffer._check_tokens(int(y.shape[0]))
        buffer._run(l1, l2, clamp, buffer._tokens_on_gpu(int(y.shape[0])), y)
        return
    out = lend_writable(y, "y", "bfloat16", ("tokens", buffer.hidden))
    if not out.flags.c_contiguous:
        raise InputError(f"y: expected C order, got strides {out.strides}")
    buffer._check_tokens(len(out))
    counters = lend_stats(HOST, stats, buffer.num_experts, buffer._group.ranks)
    sizes = buffer.num_experts, buffer.num_max_tokens_per_rank
    if counters is not None and (sizes[0] > MOST_COUNTED or sizes[1] > MOST_TOKENS_COUNTED):
        most = f"{MOST_COUNTED} experts and {MOST_TOKENS_COUNTED} tokens a rank"
        raise InputError(f"cumulative_local_expert_recv_stats: expected at most {most}, got {sizes[0]} and {sizes[1]}")
    given = buffer._tokens(len(out))
    buffer._run(l1, l2, clamp, given, out)
    if counters is not None:
        buffer._add_counts(counters, given[1])


def _refuse(activation: str, alpha: float, beta: float, **absent: Any) -> None:
    """All but SwiGLU, and arguments that have to be None."""
    _check_activation(activation)
    if (alpha, beta) != (1.0, 0.0):
        raise InputError(f"activation_alpha, activation_beta: expected 1 and 0, got {alpha} and {beta}")
    for name, value in absent.items():
        if value is not None:
            raise InputError(f"{name}: expected None, got {type(value).__name__}: the call has no such part here")


def fp8_fp4_mega_moe(
    y: Any,
    l1_weights: Any,
    l2_weights: Any,
    sym_buffer: SymmBuffer,
    shared_l1_weights: Any = None,
    shared_l2_weights: Any = None,
    cumulative_local_expert_recv_stats: Any = None,
    recipe: tuple[int, int, int] = (1, 1, 32),
    activation: Literal["swiglu"] = "swiglu",
    activation_clamp: float | None = None,
    fast_math: bool = True,
    activation_alpha: float = 1.0,
    activation_beta: float = 0.0,
) -> None:
    """The layer of the tokens in sym_buffer (mma_type fp8xfp4 or fp8xfp8) into y, bfloat16 [T, H], of which T is taken; all ranks
    call, also without tokens. Weights: as transform_weights_for_mega_moe returned them. The stats, int32 [local experts], are added
    to; all ranks give them or none does. activation_clamp: of SwiGLU. fast_math is kept. Collective."""
    absent = {"shared_l1_weights": shared_l1_weights, "shared_l2_weights": shared_l2_weights}
    _refuse(activation, activation_alpha, activation_beta, **absent)
    if tuple(recipe) != (1, 1, 32) or sym_buffer.mma_type == "bf16xbf16":
        raise InputError(f"expected recipe (1, 1, 32) and a buffer of fp8 rows, got {tuple(recipe)} and {sym_buffer.mma_type}")
    _call(y, l1_weights, l2_weights, sym_buffer, cumulative_local_expert_recv_stats, activation_clamp)


def bf16_mega_moe(
    y: Any,
    l1_weights: Any,
    l2_weights: Any,
    sym_buffer: SymmBuffer,
    shared_l1_weights: Any = None,
    shared_l2_weights: Any = None,
    cumulative_local_expert_recv_stats: Any = None,
    activation: Literal["swiglu"] = "swiglu",
    activation_clamp: float | None = None,
    fast_math: bool = True,
    activation_alpha: float = 1.0,
    activation_beta: float = 0.0,
    post_expert_norm_gamma: Any = None,
    post_expert_norm_eps: float = 0.0,
) -> None:
    """As fp8_fp4_mega_moe, with a buffer of mma_type bf16xbf16 and bfloat16 weights. post_expert_norm_eps is kept. Collective."""
    absent = {"shared_l1_weights": shared_l1_weights, "shared_l2_weights": shared_l2_weights}
    _refuse(activation, activation_alpha, activation_beta, post_expert_norm_gamma=post_expert_norm_gamma, **absent)
    if sym_buffer.mma_type != "bf16xbf16":
        raise InputError(f"sym_buffer: expected mma_type bf16xbf16, got {sym_buffer.mma_type}")
    _call(y, l1_weights, l2_weights, sym_buffer, cumulative_local_expert_recv_stats, activation_clamp)
