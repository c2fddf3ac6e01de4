"""vLLM's modular kernel over Heddle (docs/adapters.md): what takes rows to their experts and home, and the experts.

    from heddle.adapters.vllm import HeddlePrepareAndFinalize, HeddleExperts
    kernel = FusedMoEKernel(HeddlePrepareAndFinalize(...), HeddleExperts(moe_config=..., quant_config=...))

HeddlePrepareAndFinalize goes way normal, rows once a rank (vLLM's Standard format); HeddleBatchedPrepareAndFinalize way
low_latency, blocks of rows by expert (BatchedExperts); both on the host engine. Either may be used with experts of vLLM's own, and
HeddleExperts and HeddleBatchedExperts, which compute on a GPU as well, with others' prepare and finalize. Where vLLM's modules are
loaded when this one is imported, its base classes are taken; else stand-ins of the same names. Names are those of vLLM 0.33.0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy

from heddle import formats
from heddle.adapters.deepep import Buffer
from heddle.adapters.tensors import lend, lend_writable, like, numpy_of
from heddle.adapters.trips import experts_a_rank
from heddle.adapters.vllm_base import (
    ExpertTokensMetadata,
    FusedMoEActivationFormat,
    FusedMoEPrepareAndFinalizeModular,
    TopKWeightAndReduceDelegate,
)
from heddle.adapters.vllm_experts import HeddleBatchedExperts, HeddleExperts, quantises
from heddle.errors import InputError
from heddle.options import Quantisation

__all__ = ["HeddleBatchedExperts", "HeddleBatchedPrepareAndFinalize", "HeddleExperts", "HeddlePrepareAndFinalize"]

GROUP = Quantisation(128, "f32")
"""Of rows that travel as fp8."""


def _quantised(rows: Any) -> tuple[Any, Any]:
    """bfloat16 [.., H] to codes and float32 scales [.., H / 128], of the same kind."""
    values = numpy_of(rows, "a1")
    codes, scales = formats.quantise_fp8(values.reshape(-1, values.shape[-1]).astype(numpy.float32), GROUP)
    return like(codes.reshape(values.shape), rows), like(scales.reshape(*values.shape[:-1], -1), rows)


class _PrepareAndFinalize(FusedMoEPrepareAndFinalizeModular):
    """One layer's, on one rank. All is done by the call that begins it: the asynchronous forms return what has arrived."""

    def __init__(self, buffer: Buffer, num_dispatchers: int) -> None:
        super().__init__()
        if num_dispatchers != buffer.group_size:
            raise InputError(f"num_dispatchers: expected the {buffer.group_size} ranks of the buffer, got {num_dispatchers}")
        self.buffer = buffer
        self.num_dispatchers_ = num_dispatchers
        self._handle: Any = None

    def topk_indices_dtype(self) -> Any:
        """None: int32 and int64 will do."""
        return None

    def num_dispatchers(self) -> int:
        return self.num_dispatchers_

    def output_is_reduced(self) -> bool:
        return True

    def supports_async(self) -> bool:
        return True

    def supports_dbo(self) -> bool:
        """No: two halves of a batch in turn are two threads of one rank."""
        return False

    def prepare_async(
        self,
        a1: Any,
        topk_weights: Any,
        topk_ids: Any,
        num_experts: int,
        expert_map: Any,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool,
    ) -> Callable[[], Any]:
        """prepare; what is returned gives its result."""
        given = (a1, topk_weights, topk_ids, num_experts, expert_map, apply_router_weight_on_input, quant_config)
        prepared = self.prepare(*given, defer_input_quant)
        return lambda: prepared

    def finalize_async(
        self,
        output: Any,
        fused_expert_output: Any,
        topk_weights: Any,
        topk_ids: Any,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> Callable[[], None]:
        """finalize; output is written when it returns."""
        given = (output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input, weight_and_reduce_impl)
        self.finalize(*given)
        return lambda: None

    @staticmethod
    def _weighted(a1: Any, topk_weights: Any, topk_ids: Any, apply_router_weight_on_input: bool) -> Any:
        """The rows to send, times their weights where those belong to the input."""
        tokens = int(a1.shape[0])
        lend(a1, "a1", "bfloat16", ("tokens", "hidden"))
        lend(topk_ids, "topk_ids", ("int64", "int32"), (tokens, "topk"))
        weights = lend(topk_weights, "topk_weights", "float32", tuple(topk_ids.shape))
        if not apply_router_weight_on_input:
            return a1
        if topk_ids.shape[1] != 1:
            raise InputError(f"apply_router_weight_on_input: expected 1 choice a token, got {topk_ids.shape[1]}")
        rows = numpy_of(a1, "a1")
        return like((rows.astype(numpy.float32) * weights.astype(rows.dtype).astype(numpy.float32)).astype(rows.dtype), a1)

    def _taken(self) -> Any:
        if self._handle is None or self._handle.trip.over:
            raise InputError("finalize: expected after prepare, got it after finalize or reset")
        return self._handle


class HeddlePrepareAndFinalize(_PrepareAndFinalize):
    """Way normal: rows once a rank, in (rank, token) order. Arguments are those of vLLM's DeepEPHTPrepareAndFinalize; buffer:
    heddle.adapters.deepep's, which layers may share; rank_expert_offset: this rank's first expert. Experts lie contiguous."""

    def __init__(self, buffer: Buffer, num_dispatchers: int, dp_size: int, rank_expert_offset: int) -> None:
        super().__init__(buffer, num_dispatchers)
        self.dp_size, self.rank_expert_offset = dp_size, rank_expert_offset

    @property
    def activation_format(self) -> Any:
        return FusedMoEActivationFormat.Standard

    def max_num_tokens_per_rank(self) -> int | None:
        """None: the ranks tell each other."""
        return None

    def prepare(
        self,
        a1: Any,
        topk_weights: Any,
        topk_ids: Any,
        num_experts: int,
        expert_map: Any,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool,
    ) -> tuple[Any, Any, Any, Any, Any]:
        """All of dispatch. Collective. a1 bfloat16 [T, H], topk_ids int32 or int64 [T, k] over all ranks' experts (-1: none),
        topk_weights float32 [T, k].

        Returns rows [M, H], bfloat16 or with fp8 blocks float8_e4m3fn and their scales float32 [M, H / 128] (else None); the counts
        of the local experts; ids [M, k] over all ranks' experts, other ranks' choices naming an expert that is not local (-1 of a
        single rank), and weights [M, k], 0 there. Raises InputError before anything is sent."""
        rows = self._weighted(a1, topk_weights, topk_ids, apply_router_weight_on_input)
        local = experts_a_rank(num_experts, self.buffer.group_size)
        if self.rank_expert_offset != local * self.buffer.rank:
            raise InputError(f"rank_expert_offset: expected {local * self.buffer.rank}, got {self.rank_expert_offset}")
        sent = _quantised(rows) if quantises(quant_config) and not defer_input_quant else rows
        to_ranks, _, to_experts, is_there, _ = self.buffer.get_dispatch_layout(topk_ids, num_experts)
        taken, ids, weights, counts, self._handle, _ = self.buffer.dispatch(
            sent,
            num_tokens_per_rank=to_ranks,
            is_token_in_rank=is_there,
            num_tokens_per_expert=to_experts,
            topk_idx=topk_ids,
            topk_weights=topk_weights,
        )
        here, scales = taken if isinstance(taken, tuple) else (taken, None)
        counted = like(numpy.array(counts, numpy.int32), a1)
        return here, scales, ExpertTokensMetadata(counted, counted), self._global_ids(ids, num_experts, local), weights

    def _global_ids(self, ids: Any, num_experts: int, local: int) -> Any:
        foreign = -1 if local == num_experts else num_experts - 1 if self.rank_expert_offset == 0 else 0
        values = numpy_of(ids, "topk_ids")
        return like(numpy.where(values < 0, foreign, values + self.rank_expert_offset), ids)

    def finalize(
        self,
        output: Any,
        fused_expert_output: Any,
        topk_weights: Any,
        topk_ids: Any,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> None:
        """All of combine, into output, bfloat16 [T, H]. Collective. fused_expert_output: what weight_and_reduce_impl makes sums of,
        [M, H]; topk_weights and topk_ids: as prepare returned them."""
        handle = self._taken()
        if isinstance(weight_and_reduce_impl, TopKWeightAndReduceDelegate):
            raise InputError("weight_and_reduce_impl: expected experts that say how rows are summed, got a delegate")
        out = lend_writable(output, "output", "bfloat16", (handle.trip.tokens, handle.trip.options.hidden))
        sums = fused_expert_output
        if sums.shape[0] > 0:
            sums = weight_and_reduce_impl.apply(None, sums, topk_weights, topk_ids, apply_router_weight_on_input)
        combined, _, _ = self.buffer.combine(sums, handle)
        out[...] = numpy_of(combined, "output")


class HeddleBatchedPrepareAndFinalize(_PrepareAndFinalize):
    """Way low_latency: a block of rows for each local expert. Arguments are those of vLLM's DeepEPLLPrepareAndFinalize; buffer:
    heddle.adapters.deepep's, which layers may share; max_tokens_per_rank: C, the same on all ranks; use_fp8_dispatch: rows travel
    as fp8; global_to_physical: where experts lie that have been moved, the other two maps are kept."""

    def __init__(
        self,
        buffer: Buffer,
        max_tokens_per_rank: int,
        num_dispatchers: int,
        use_fp8_dispatch: bool = False,
        global_to_physical: Any = None,
        physical_to_global: Any = None,
        local_expert_global_ids: Any = None,
    ) -> None:
        super().__init__(buffer, num_dispatchers)
        self.max_tokens_per_rank, self.use_fp8_dispatch = max_tokens_per_rank, use_fp8_dispatch
        self.global_to_physical, self.physical_to_global = global_to_physical, physical_to_global
        self.local_expert_global_ids = local_expert_global_ids

    @property
    def activation_format(self) -> Any:
        return FusedMoEActivationFormat.BatchedExperts

    def max_num_tokens_per_rank(self) -> int | None:
        return self.max_tokens_per_rank

    def _physical(self, topk_ids: Any) -> Any:
        if self.global_to_physical is None:
            return topk_ids
        ids, places = numpy_of(topk_ids, "topk_ids"), numpy_of(self.global_to_physical, "global_to_physical")
        return like(numpy.where(ids < 0, -1, places[ids]).astype(ids.dtype), topk_ids)

    def prepare(
        self,
        a1: Any,
        topk_weights: Any,
        topk_ids: Any,
        num_experts: int,
        expert_map: Any,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool,
    ) -> tuple[Any, Any, Any, None, None]:
        """All of dispatch. Collective. Arguments as HeddlePrepareAndFinalize's, T at most C.

        Returns rows [local experts, C * ranks, H], bfloat16 or with fp8 blocks float8_e4m3fn and their scales float32 (else None);
        the counts of the local experts, whose rows come first; None twice. Raises InputError before anything is sent."""
        rows = self._weighted(a1, topk_weights, topk_ids, apply_router_weight_on_input)
        is_quantised = quantises(quant_config) and not defer_input_quant
        if self.use_fp8_dispatch and not is_quantised:
            raise InputError("use_fp8_dispatch: expected experts that take fp8 rows in groups of 128, got others")
        taken, counts, self._handle, _, _ = self.buffer.low_latency_dispatch(
            rows, self._physical(topk_ids), self.max_tokens_per_rank, num_experts, use_fp8=self.use_fp8_dispatch
        )
        if is_quantised and not self.use_fp8_dispatch:
            taken = _quantised(taken)
        here, scales = taken if isinstance(taken, tuple) else (taken, None)
        return here, scales, ExpertTokensMetadata(counts, None), None, None

    def finalize(
        self,
        output: Any,
        fused_expert_output: Any,
        topk_weights: Any,
        topk_ids: Any,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> None:
        """All of combine, with weights and sums, into output, bfloat16 [T, H]. Collective. fused_expert_output: [local experts,
        C * ranks, H]; topk_weights and topk_ids: this rank's own, as prepare had them."""
        handle = self._taken()
        if not isinstance(weight_and_reduce_impl, TopKWeightAndReduceDelegate):
            raise InputError("weight_and_reduce_impl: expected experts that leave weights and sums to combine")
        weights = numpy_of(topk_weights, "topk_weights")
        if apply_router_weight_on_input:
            weights = numpy.ones_like(weights)
        lend_writable(output, "output", "bfloat16", (handle.trip.tokens, handle.trip.options.hidden))
        self.buffer.low_latency_combine(
            fused_expert_output, self._physical(topk_ids), like(weights, topk_weights), handle, out=output
        )
