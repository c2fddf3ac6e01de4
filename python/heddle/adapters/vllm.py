"""vLLM's modular kernel over Heddle (docs/adapters.md): what takes rows to their experts and home, and the experts.

    from heddle.adapters.vllm import HeddlePrepareAndFinalize, HeddleExperts
    kernel = FusedMoEKernel(HeddlePrepareAndFinalize(...), HeddleExperts(moe_config=..., quant_config=...))

HeddlePrepareAndFinalize goes way normal, rows once a rank (vLLM's Standard format); HeddleBatchedPrepareAndFinalize way
low_latency, blocks of rows by expert (BatchedExperts). All of them take tensors of a GPU, too, and queue on its current stream; either
half may be used with vLLM's own other half, or others'. Where vLLM's modules are loaded when this one is imported, its base classes are
taken; else stand-ins of the same names. Names are those of vLLM 0.33.0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from heddle.adapters.casts import quantised
from heddle.adapters.deepep import Buffer
from heddle.adapters.places import element_of, place_of
from heddle.adapters.trips import experts_a_rank
from heddle.adapters.vllm_base import (
    ExpertTokensMetadata,
    FusedMoEActivationFormat,
    FusedMoEPrepareAndFinalizeModular,
    TopKWeightAndReduceDelegate,
)
from heddle.adapters.vllm_experts import HeddleBatchedExperts, HeddleExperts, quantises
from heddle.errors import InputError

__all__ = ["HeddleBatchedExperts", "HeddleBatchedPrepareAndFinalize", "HeddleExperts", "HeddlePrepareAndFinalize"]

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
        place, tokens = place_of(a1), int(a1.shape[0])
        rows = place.lend(a1, "a1", "bfloat16", ("tokens", "hidden"))
        place.lend(topk_ids, "topk_ids", ("int64", "int32"), (tokens, "topk"))
        weights = place.lend(topk_weights, "topk_weights", "float32", tuple(topk_ids.shape))
        if not apply_router_weight_on_input:
            return a1
        if topk_ids.shape[1] != 1:
            raise InputError(f"apply_router_weight_on_input: expected 1 choice a token, got {topk_ids.shape[1]}")
        products = place.cast(rows, "float32") * place.cast(place.cast(weights, "bfloat16"), "float32")
        return place.like(place.cast(products, "bfloat16"), a1)

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
        sent = quantised(rows, "a1") if quantises(quant_config) and not defer_input_quant else rows
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
        place = place_of(a1)
        counted = place.like(place.count(place.lend(ids, "topk_ids", "int64", ("rows", "topk")), local), a1)
        meta = ExpertTokensMetadata(counted, place.numbers(counts, a1))
        return here, scales, meta, self._global_ids(ids, num_experts, local), weights

    def _global_ids(self, ids: Any, num_experts: int, local: int) -> Any:
        foreign = -1 if local == num_experts else num_experts - 1 if self.rank_expert_offset == 0 else 0
        place = place_of(ids)
        values = place.lend(ids, "topk_ids", "int64", ("rows", "topk"))
        return place.like(place.where(values < 0, foreign, values + self.rank_expert_offset), ids)

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
        place = handle.place
        out = place.lend_writable(output, "output", "bfloat16", (handle.trip.tokens, handle.trip.options.hidden))
        sums = fused_expert_output
        if sums.shape[0] > 0:
            sums = weight_and_reduce_impl.apply(None, sums, topk_weights, topk_ids, apply_router_weight_on_input)
        combined, _, _ = self.buffer.combine(sums, handle)
        out[...] = place.lend(combined, "output", "bfloat16", tuple(out.shape))


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
        place = place_of(topk_ids)
        ids = place.lend(topk_ids, "topk_ids", ("int64", "int32"), ("tokens", "topk"))
        places = place.lend(self.global_to_physical, "global_to_physical", ("int64", "int32"), ("experts",))
        moved = place.where(ids < 0, -1, places[place.where(ids < 0, 0, ids)])
        return place.like(place.cast(moved, element_of(ids)), topk_ids)

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
            taken = quantised(taken, "a1")
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
        place, weights = handle.place, topk_weights
        if apply_router_weight_on_input:
            weights = place.like(place.full(tuple(topk_weights.shape), 1, "float32"), topk_weights)
        place.lend_writable(output, "output", "bfloat16", (handle.trip.tokens, handle.trip.options.hidden))
        self.buffer.low_latency_combine(fused_expert_output, self._physical(topk_ids), weights, handle, out=output)
