"""Weights of grouped products in a GPU's memory, and the products: what DeepGEMM's calls do with tensors there
(docs/adapters.md)."""

from __future__ import annotations

import sys
from typing import Any

import numpy

from heddle import _core
from heddle.adapters.deepgemm_scales import pair_of
from heddle.adapters.tensors import is_on_gpu
from heddle.arrays import as_bytes
from heddle.errors import InputError
from heddle.options import Quantisation, WeightKindName
from heddle.streams import current_stream, lend, need_cuda_part


class GroupedWeights:
    """[G, N, K] in the order that Heddle's kernels read, made by deepgemm.load_grouped_weights and given to products as b. Calls
    queue kernels on torch's current stream and return; one object's calls follow each other on one stream. They may be captured:
    nothing is allocated but, by torch, a copy of scales that do not lie row by row and, with mxfp8, of rows as bfloat16. Layouts are read when the kernels run."""

    def __init__(self, values: Any, kind: WeightKindName, scales: Any, device: int, most_rows: int) -> None:
        need_cuda_part()
        self.kind, self.device, self.most_rows = kind, device, most_rows
        lent = as_bytes(numpy.ascontiguousarray(values)), as_bytes(scales)
        self._core = _core.RankGroupedProduct(kind, *lent, device, most_rows)

    def _call(self, a: Any, d: Any, columns: int) -> tuple[tuple[Any, Any, Quantisation], int]:
        """Values, scales and how these are; and the stream. Raises what an earlier call met."""
        self._core.throw_if_failed()
        values, scales = (a, None) if self.kind == "bf16" else pair_of(a, "a")
        for array, name in ((values, "a"), (d, "d")):
            if not is_on_gpu(array):
                got = type(array).__name__
                raise InputError(f"{name}: expected a tensor of GPU {self.device}, where the weights are, got {got}")
        stream = current_stream(values)
        if scales is None:
            return (values, None, Quantisation()), stream
        if str(values.dtype) != "torch.float8_e4m3fn":
            raise InputError(f"a[0]: expected float8_e4m3fn rows, got {values.dtype}")
        # mxfp8 is multiplied as bfloat16, which holds the codes of rows; their scales stay apart.
        codes = values.to(sys.modules["torch"].bfloat16) if self.kind == "mxfp8" else as_bytes(values)
        laid = scales.contiguous()
        if str(scales.dtype) != "torch.int32":
            return (codes, laid, Quantisation(columns, "f32")), stream
        # Flat first: of a single column torch looks at the stride that it has not.
        flat = laid.reshape(-1).view(sys.modules["torch"].uint8)
        return (codes, flat.view(*laid.shape[:-1], 4 * laid.shape[-1]), Quantisation(columns, "ue8m0")), stream

    def _contiguous(self, a: Any, d: Any, groups: Any, columns: int, zeroes: bool) -> None:
        (values, scales, how), stream = self._call(a, d, columns)
        self._core.contiguous(lend(values), lend(scales), how, lend(groups), zeroes, lend(d), 0, stream)

    def _ended(self, a: Any, d: Any, ends: Any, columns: int, zeroes: bool, alignment: int) -> None:
        (values, scales, how), stream = self._call(a, d, columns)
        self._core.ended(lend(values), lend(scales), how, lend(ends), alignment, zeroes, lend(d), 0, stream)

    def _masked(self, a: Any, d: Any, counts: Any, columns: int, expected_rows: int) -> None:
        (values, scales, how), stream = self._call(a, d, columns)
        self._core.masked(lend(values), lend(scales), how, lend(counts), lend(d), expected_rows, stream)

    def throw_if_failed(self) -> None:
        """Once the stream has been waited for: raises Error where a masked call met a count below 0 or above its block. Without
        it a later call does."""
        self._core.throw_if_failed()

    @property
    def weight_bytes(self) -> int:
        """Of device memory."""
        return self._core.weight_bytes
