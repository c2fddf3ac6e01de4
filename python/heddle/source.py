"""Where a layer's weights come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from heddle import _core
from heddle.arrays import Array, as_bytes
from heddle.options import LayerOptions, LayerShape, RouterOptions, WeightKindName


class RankWeights:
    """One rank's share of a layer: its own experts and the shared expert, as views that keep their source alive."""

    def __init__(self, core: _core.RankWeights, rank: int) -> None:
        self._core = core
        self.rank = rank

    @property
    def shape(self) -> LayerShape:
        return self._core.shape

    @property
    def ranks(self) -> int:
        return self._core.ranks

    @property
    def experts(self) -> int:
        """Of this rank."""
        return self._core.experts


class Source:
    """A layer's weights: of a checkpoint (Source.open), drawn from a seed (Source.synthetic) or of arrays (Source.of_arrays)."""

    def __init__(self, core: _core.Source) -> None:
        self._core = core

    @classmethod
    def open(cls, path: str, layer_index: int | None = None) -> Source:
        """One layer of a checkpoint, memory-mapped: a .safetensors file, an index, or a folder (docs/files.md). layer_index picks
        one where there are several. Raises InputError: file, tensor, what, what would be right."""
        return cls(_core.Source.open(str(path), layer_index))

    @classmethod
    def synthetic(
        cls,
        shape: LayerShape,
        kind: WeightKindName = "bf16",
        *,
        shared_kind: WeightKindName | None = None,
        shared_intermediate: int = 0,
        seed: int = 0,
    ) -> Source:
        """Weights drawn from a seed, alike on all ranks. shared_kind: the shared expert's (None: there is none),
        shared_intermediate its size (0: that of the others)."""
        return cls(_core.Source.draw(shape, kind, shared_kind, shared_intermediate, seed))

    @classmethod
    def of_arrays(
        cls,
        gate: Array,
        up: Array,
        down: Array,
        *,
        topk: int,
        clamp: float | None = None,
        shared: tuple[Array, Array, Array] | None = None,
    ) -> Source:
        """bf16 weights in host memory, which are not copied and kept alive: gate and up [experts, D, H], down [experts, H, D];
        shared: the shared expert's gate and up [D', H] and down [H, D']."""
        return cls(_core.Source.of_arrays(gate, up, down, topk, clamp, shared))

    @classmethod
    def of_fused_arrays(
        cls,
        gate_up: Any,
        down: Any,
        *,
        topk: int,
        kind: WeightKindName = "bf16",
        gate_up_scales: Any = None,
        down_scales: Any = None,
        clamp: float | None = None,
        first: int = 0,
        experts: int | None = None,
    ) -> Source:
        """Weights as engines keep them, in host memory, not copied and kept alive: gate_up [E, 2 D, H], gate before up, and down
        [E, H, D], of experts first to first + E of `experts` in all (None: there are no others).

        kind: bf16; fp8_block: float8_e4m3fn with scales float32 [E, rows / 128, columns / 128], D a multiple of 128; mxfp8:
        float8_e4m3fn, and mxfp4: two e2m1 a byte, the even one low, both with scales float8_e8m0fnu [E, rows, columns / 32]. One-byte
        types may be given as bytes. Raises InputError for what does not fit; load does for experts that are not here."""
        arrays = (as_bytes(gate_up), as_bytes(down), kind, as_bytes(gate_up_scales), as_bytes(down_scales))
        return cls(_core.Source.of_fused(*arrays, topk, clamp, first, experts))

    @property
    def shape(self) -> LayerShape:
        """topk is 0 where a checkpoint does not tell; with_topk gives it."""
        return self._core.shape

    @property
    def kind(self) -> WeightKindName:
        """Of the routed experts."""
        return self._core.kind

    @property
    def prefix(self) -> str:
        """Where a checkpoint's layer was found, e.g. "model.layers.3.mlp."."""
        return self._core.prefix

    @property
    def has_shared(self) -> bool:
        return self._core.has_shared

    @property
    def has_router(self) -> bool:
        return self._core.has_router

    @property
    def router(self) -> RouterOptions | None:
        """As config.json says; None where it does not."""
        return self._core.router

    def with_topk(self, topk: int) -> Source:
        """The same weights with another number of choices a token."""
        return Source(self._core.with_topk(topk))

    def route(self, hidden: Array, router: RouterOptions | None = None) -> tuple[Any, Any]:
        """The router's choices: hidden bf16 [T, H] in host memory to ids int32 [T, k] and weights float32 [T, k], NumPy arrays.
        router: None takes what config.json says. Raises InputError without a router."""
        import numpy

        options = router if router is not None else self.router
        tokens, topk = int(getattr(hidden, "shape", (0,))[0]), options.topk if options is not None else 1
        ids, weights = numpy.empty((tokens, topk), numpy.int32), numpy.empty((tokens, topk), numpy.float32)
        self._core.route_into(hidden, router, ids, weights)
        return ids, weights

    def load(
        self, rank: int, ranks: int, *, placement: Sequence[int] | None = None, options: LayerOptions | None = None
    ) -> RankWeights:
        """Reads the share of one rank. placement: the rank of each expert; None: contiguous, expert e on rank e * ranks // experts.
        options: needed with expert_slices, where every rank holds a part of every expert."""
        slices = options is not None and options.expert_slices
        return RankWeights(self._core.load(rank, ranks, list(placement) if placement is not None else None, slices), rank)
