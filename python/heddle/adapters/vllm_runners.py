"""What computes for vLLM's experts: Heddle's runners in host memory, and on a GPU."""

from __future__ import annotations

import sys
from typing import Any

import numpy

from heddle.adapters.tensors import gpu_of, in_host_memory, is_on_gpu, lend, lend_writable, numpy_of
from heddle.device import DeviceExperts
from heddle.errors import InputError
from heddle.experts import Experts
from heddle.options import ExpertOptions, Quantisation, WeightKindName
from heddle.source import RankWeights, Source

MOST_TOKENS = 8192
"""Of a routed call on a GPU; more go in several."""


class Weights:
    """One layer's on this rank, as vLLM hands them to every call: w1 [E, 2 D, H], gate before up, w2 [E, H, D], and with fp8 blocks
    of 128 the scales of both."""

    def __init__(self, w1: Any, w2: Any, scales: tuple[Any, Any] | None, clamp: float | None) -> None:
        self.w1, self.w2, self.scales, self.clamp = w1, w2, scales, clamp

    @property
    def is_on_gpu(self) -> bool:
        return is_on_gpu(self.w1)

    def load(self) -> RankWeights:
        """Views of host memory; weights of a GPU are copied there."""
        given = (self.w1, self.w2, *(self.scales or (None, None)))
        arrays = [None if one is None else numpy_of(in_host_memory(one), "weights") for one in given]
        kind: WeightKindName = "bf16" if self.scales is None else "fp8_block"
        source = Source.of_fused_arrays(
            *arrays[:2], topk=1, kind=kind, gate_up_scales=arrays[2], down_scales=arrays[3], clamp=self.clamp
        )
        return source.load(0, 1)


OPTIONS = ExpertOptions(quantisation=Quantisation(128, "f32"), weight_at="combine")


class HostRunner:
    """Over weights where they are."""

    def __init__(self, weights: Weights) -> None:
        self._experts = Experts(weights.load(), OPTIONS)

    def routed(self, rows: Any, scales: Any, ids: Any, weights: Any, places: Any, out: Any) -> None:
        """ids: over all experts, or local without places, the local number of each. weights: None: 1."""
        here = lend(ids, "topk_ids", ("int64", "int32"), (int(rows.shape[0]), "topk"))
        if places is not None:
            local = lend(places, "expert_map", ("int32", "int64"), ("experts",))
            if here.size and here.max() >= len(local):
                raise InputError(f"topk_ids: expected -1 to {len(local) - 1}, got {here.max()}")
            here = numpy.where(here < 0, -1, local[here])
        given = numpy.ones(here.shape, numpy.float32) if weights is None else lend(weights, "topk_weights", "float32", here.shape)
        results = lend_writable(out, "output", "bfloat16", tuple(rows.shape))
        lent = numpy.ascontiguousarray(here, numpy.int32), numpy.ascontiguousarray(given)
        self._experts.routed(self._rows(rows, scales), *lent, results)

    def masked(self, rows: Any, scales: Any, counts: Any, topk: int, out: Any) -> None:
        there = lend(counts, "expert_num_tokens", "int32", (int(rows.shape[0]),))
        self._experts.masked(self._rows(rows, scales), there, out=lend_writable(out, "output", "bfloat16", tuple(rows.shape)))

    @staticmethod
    def _rows(rows: Any, scales: Any) -> Any:
        values = numpy.ascontiguousarray(numpy_of(rows, "hidden_states"))
        return values if scales is None else (values, numpy.ascontiguousarray(numpy_of(scales, "a1q_scale")))


class DeviceRunner:
    """Over weights that are laid out once more in the GPU's memory, by the first call: it makes what later ones use, and is not
    captured in a graph. Calls are queued on torch's current stream."""

    def __init__(self, weights: Weights) -> None:
        self._weights: RankWeights | None = weights.load()
        self._device = gpu_of(weights.w1)
        self._experts: DeviceExperts | None = None

    def _made(self, tokens: int, topk: int) -> DeviceExperts:
        """For calls of so many tokens; what calls before found on the device is looked at here."""
        if self._weights is not None:
            sizes = {"most_rows": tokens * min(topk, self._weights.experts), "most_tokens": tokens, "topk": topk}
            self._experts = DeviceExperts(self._weights, OPTIONS, device=self._device, **sizes)
            self._weights = None
        assert self._experts is not None
        self._experts.throw_if_failed()
        return self._experts

    def routed(self, rows: Any, scales: Any, ids: Any, weights: Any, places: Any, out: Any) -> None:
        torch = sys.modules["torch"]
        experts = self._made(MOST_TOKENS, int(ids.shape[1]))
        local = ids if places is None else torch.where(ids < 0, -1, places[ids.clamp(min=0).long()])
        local = local.to(torch.int32).contiguous()
        given = torch.ones(local.shape, dtype=torch.float32, device=local.device) if weights is None else weights.contiguous()
        for begin in range(0, int(rows.shape[0]), MOST_TOKENS):
            part = slice(begin, begin + MOST_TOKENS)
            some = self._rows(rows[part], None if scales is None else scales[part])
            experts.routed(some, local[part], given[part], out[part])

    def masked(self, rows: Any, scales: Any, counts: Any, topk: int, out: Any) -> None:
        self._made(int(rows.shape[1]), topk).masked(self._rows(rows, scales), counts, out=out)

    @staticmethod
    def _rows(rows: Any, scales: Any) -> Any:
        return rows.contiguous() if scales is None else (rows.contiguous(), scales.contiguous())
