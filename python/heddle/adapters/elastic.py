"""DeepEP's second form, ElasticBuffer, over way elastic: rows once a rank, or with do_expand a row for each expert."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy

from heddle.adapters.events import EventHandle, EventOverlap, passed
from heddle.adapters.places import Place, element_of
from heddle.adapters.trips import (
    Rows,
    Trip,
    Trips,
    add_bias,
    aligned,
    check_alignment,
    choices,
    experts_a_rank,
    joined,
    lend_bias,
    lend_stats,
    rank_membership,
)
from heddle.errors import InputError
from heddle.exchange import ExchangeOptions
from heddle.options import LayerShape, Step
from heddle.planning import PlanRequest, plan

TMA_ROWS = 4
"""Scales of 4 bytes in 16: what TMA needs a column to be a multiple of."""


class EPHandle:
    """What ElasticBuffer.dispatch returns: for combine, for a dispatch of other rows the same way, and with its counts, which are
    arrays of the kind of topk_idx, int32.

    psum_num_recv_tokens_per_scaleup_rank [ranks]: rows from the ranks up to each. psum_num_recv_tokens_per_expert [local experts]:
    where rows of each expert end; without do_expand sums of counts aligned up. num_unaligned_recv_tokens_per_expert: the counts.
    """

    def __init__(
        self, trip: Trip, place: Place, topk_idx: Any, ids: Any, do_expand: bool, expert_alignment: int, num_sms: int
    ) -> None:
        self.trip = trip
        self.place = place
        self.ids = ids
        self.topk_idx = topk_idx
        self.do_expand = do_expand
        self.num_experts = trip.options.experts
        self.expert_alignment = expert_alignment
        self.num_max_tokens_per_rank = trip.options.cap
        self.num_sms = num_sms
        self.num_recv_tokens = 0
        self.num_expanded_tokens = 0
        self.num_recv_tokens_per_expert_list: list[int] = []
        self.psum_num_recv_tokens_per_scaleup_rank: Any = None
        self.psum_num_recv_tokens_per_expert: Any = None
        self.num_unaligned_recv_tokens_per_expert: Any = None
        self.begins: Any = None
        """do_expand: the first row of each local expert in recv_x."""
        self.moves: list[tuple[slice, slice]] = []
        """do_expand: where each local expert's rows lie in recv_x, and where in what arrived."""
        self.rows = 0
        """Of recv_x, padding included."""

    def count(self, counts: Any, sources: Any, worst_rows: int | None) -> None:
        """Fills in what is derived from the rows of each local expert and of each source rank, NumPy's. worst_rows: rows of recv_x
        where nobody waits for a count, before alignment."""
        padded = aligned(counts, self.expert_alignment)
        ends = padded.cumsum().astype(numpy.int32)
        self.begins = (ends - padded).astype(numpy.int32)
        self.num_recv_tokens, self.num_expanded_tokens = int(sources.sum()), int(ends[-1])
        self.num_recv_tokens_per_expert_list = padded.tolist()
        told = sources.cumsum().astype(numpy.int32), self.begins + counts if self.do_expand else ends, counts
        of_ranks, of_experts, unaligned = (self.place.from_host(numbers, self.topk_idx) for numbers in told)
        self.psum_num_recv_tokens_per_scaleup_rank, self.psum_num_recv_tokens_per_expert = of_ranks, of_experts
        self.num_unaligned_recv_tokens_per_expert = unaligned
        if self.do_expand:
            pairs = zip(self.begins.tolist(), self.place.to_host(self.trip.arrived.begins).tolist(), counts.tolist())
            self.moves = [(slice(there, there + count), slice(here, here + count)) for there, here, count in pairs]
        if worst_rows is None:
            self.rows = self.num_expanded_tokens if self.do_expand else self.num_recv_tokens
        else:
            room = worst_rows + (len(counts) * (self.expert_alignment - 1) if self.do_expand else 0)
            self.rows = int(aligned(room, self.expert_alignment)) if self.do_expand else room


class ElasticBuffer:
    """Round trips of one rank, way elastic. group: as Buffer's. num_max_tokens_per_rank: the cap where a dispatch gives none.
    num_cpu_timeout_secs: the deadline of a group that is joined here. Other arguments are kept or not used."""

    def __init__(
        self,
        group: Any,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        self.group = group
        self._group = joined(group, deadline=float(num_cpu_timeout_secs))
        self._trips = Trips(self._group)
        self.rank_idx, self.num_ranks = self._group.rank, self._group.ranks
        self.num_bytes = num_bytes if num_bytes is not None else 0
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.deterministic, self.explicitly_destroy = deterministic, explicitly_destroy
        self.allow_hybrid_mode, self.allow_multiple_reduction = allow_hybrid_mode, allow_multiple_reduction
        self.prefer_overlap_with_compute, self.num_allocated_qps = prefer_overlap_with_compute, num_allocated_qps
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.get_logical_domain_size()
        self.num_rdma_ranks, self.num_nvlink_ranks = self.get_physical_domain_size()
        self.scaleout_rank_idx, self.scaleup_rank_idx = 0, self.rank_idx

    def destroy(self) -> None:
        """Collective: gives the exchanges' memory back. A later call makes them anew."""
        self._trips.clear()

    def throw_if_failed(self) -> None:
        """Not DeepEP's: once the stream has been waited for, raises the FaultError that calls with tensors of a GPU have met."""
        self._trips.throw_if_failed()

    def reset(self, live: Sequence[bool] | None = None) -> None:
        """Not DeepEP's: ends all trips, after a FaultError or instead of their combines. Collective of the ranks that go on; live:
        as Workspace.reset's."""
        self._trips.reset(live)

    @staticmethod
    def get_buffer_size_hint(
        group: Any,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Bytes of a rank's part of the workspace of calls with these sizes. num_topk 0: for 16 choices."""
        ranks, topk = group.ranks if hasattr(group, "ranks") else group.size(), num_topk if num_topk else 16
        shape = LayerShape(hidden=hidden, intermediate=64, experts=-(-topk // ranks) * ranks, topk=topk)
        request = PlanRequest(shape=shape, ranks=ranks, tokens=num_max_tokens_per_rank, cap=num_max_tokens_per_rank, wire="bf16")
        own = next(section for section in plan(request) if section.name == "own_layouts")
        return int(next(quantity.value for quantity in own.quantities if quantity.name == "elastic"))

    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True) -> None:
        """Waits for all ranks."""
        self._group.barrier()

    @staticmethod
    def capture() -> EventHandle:
        return EventHandle()

    def get_physical_domain_size(self) -> tuple[int, int]:
        """One machine, and the ranks of it."""
        return 1, self._group.ranks

    def get_logical_domain_size(self) -> tuple[int, int]:
        return 1, self._group.ranks

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 200,
        sm_write_gbs: float = 50,
    ) -> int:
        """0: the host engine has none."""
        return 0

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """0, likewise."""
        return 0

    def dispatch(
        self,
        x: Any,
        topk_idx: Any = None,
        topk_weights: Any = None,
        cumulative_local_expert_recv_stats: Any = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | None = None,
        previous_event_before_epilogue: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Any, Any, Any, EPHandle, EventOverlap]:
        """Every token to the ranks of its experts. Collective.

        x: bfloat16 [T, H], or a pair float8_e4m3fn [T, H] and scales float32 or int32 [T, G]; topk_idx int64 [T, k], -1: none;
        topk_weights float32 [T, k] or None; T at most num_max_tokens_per_rank (C, the same on all ranks).

        Returns recv_x like x; without do_expand recv_topk_idx int64 [rows, k], local numbers, -1: another rank's, none or padding,
        and recv_topk_weights float32 [rows, k]; with it rows by local expert, each expert's first at a multiple of
        expert_alignment, None, and recv_topk_weights float32 [rows]; the handle; an event. do_cpu_sync (None: yes, without a
        handle): as many rows as came, else C * ranks, or with do_expand C * ranks * min(k, local experts) and room to align.
        Padding is zero. The stats, int32 [local experts], are added to.

        handle: x goes where its tokens went, in its layout; topk_idx is None, topk_weights may be given."""
        rows = Rows(x)
        place = rows.place
        if handle is None:
            if topk_idx is None or num_experts is None:
                raise InputError("expected topk_idx and num_experts, or a handle; got None")
            ids = choices(place, topk_idx, num_experts, len(rows.sent))
            kept = topk_idx.copy() if isinstance(topk_idx, numpy.ndarray) else topk_idx.clone()
            cap = num_max_tokens_per_rank if num_max_tokens_per_rank is not None else self.num_max_tokens_per_rank
            alignment, exact = expert_alignment if expert_alignment is not None else 1, do_cpu_sync is not False
        else:
            self._check_handle(handle, rows, topk_idx, (num_experts, num_max_tokens_per_rank, expert_alignment), do_cpu_sync)
            ids, kept, do_expand, num_experts = handle.ids, handle.topk_idx, handle.do_expand, handle.num_experts
            cap, alignment, exact = handle.num_max_tokens_per_rank, handle.expert_alignment, handle.trip.options.cpu_sync
        check_alignment(alignment)
        if cap < 1 or len(ids) > cap:
            raise InputError(f"x: expected at most num_max_tokens_per_rank = {cap} tokens, got {len(ids)}")
        stats = lend_stats(place, cumulative_local_expert_recv_stats, num_experts, self.num_ranks)
        trip = self._start(rows, ids, topk_weights, num_experts, cap, exact, do_expand)
        made = EPHandle(trip, place, kept if do_handle_copy or topk_idx is None else topk_idx, ids, do_expand, alignment, num_sms)
        counts = self._count(made, exact)
        if stats is not None:
            stats += place.from_host(counts, stats)
        if handle is not None:  # the caller goes on with the one it has
            handle.trip, made = trip, handle
        recv_x = rows.unpack(self._received(made, trip.arrived.bf16()), TMA_ROWS if use_tma_aligned_col_major_sf else None)
        recv_ids, recv_weights = (None if one is None else place.like(one, rows.kind) for one in self._routing(made))
        return recv_x, recv_ids, recv_weights if topk_weights is not None else None, made, passed()

    @staticmethod
    def _check_handle(handle: EPHandle, rows: Rows, topk_idx: Any, given: tuple[int | None, ...], do_cpu_sync: bool | None) -> None:
        if topk_idx is not None or do_cpu_sync:
            raise InputError("handle: expected topk_idx=None and no do_cpu_sync beside it, got them as well")
        own = (handle.num_experts, handle.num_max_tokens_per_rank, handle.expert_alignment)
        if any(value not in (None, of) for value, of in zip(given, own)):
            raise InputError(f"num_experts, num_max_tokens_per_rank, expert_alignment: its handle has {own}, got {given}")
        if not handle.trip.over:
            raise InputError("handle: its round trip is under way: combine comes before it is used for another dispatch")
        if rows.place.gpu != handle.place.gpu:
            raise InputError(f"x: expected {handle.place.name}, where its handle was made, got {rows.place.name}")
        if tuple(rows.sent.shape) != (handle.trip.tokens, handle.trip.options.hidden):
            raise InputError(
                f"x: expected {[handle.trip.tokens, handle.trip.options.hidden]}, as its handle was made with, "
                f"got {list(rows.sent.shape)}"
            )

    def _start(self, rows: Rows, ids: Any, topk_weights: Any, experts: int, cap: int, exact: bool, expand: bool) -> Trip:
        experts_a_rank(experts, self.num_ranks)
        weights = rows.place.full(ids.shape, 1, "float32")
        if topk_weights is not None:
            weights[...] = rows.place.lend(topk_weights, "topk_weights", "float32", ids.shape)
        options = ExchangeOptions(
            hidden=rows.hidden,
            experts=experts,
            topk=int(ids.shape[1]),
            cap=cap,
            way="elastic",
            arrived="contiguous" if expand else "routed",
            cpu_sync=exact,
        )
        return self._trips.start(options, rows.sent, ids, weights, Step(cap, "decode"), rows.place.gpu)

    def _count(self, handle: EPHandle, exact: bool) -> Any:
        """The rows of each local expert; the handle's numbers are filled in. Ranks tell each other how many they sent where."""
        place = handle.place
        there = place.to_host(rank_membership(place, handle.ids, handle.num_experts, self.num_ranks).sum(0))
        told = self._group.exchange(" ".join(str(number) for number in there), "rows from each rank")
        sources = numpy.array([int(text.split()[self.rank_idx]) if text else 0 for text in told], numpy.int32)
        arrived, local = handle.trip.arrived, experts_a_rank(handle.num_experts, self.num_ranks)
        counts = place.to_host(arrived.counts if handle.do_expand else place.count(arrived.local_ids, local))
        copies = min(local, handle.trip.options.topk) if handle.do_expand else 1
        handle.count(counts, sources, None if exact else handle.num_max_tokens_per_rank * self.num_ranks * copies)
        return counts

    @staticmethod
    def _received(handle: EPHandle, rows: Any) -> Any:
        memory = handle.place.zeros((handle.rows, *rows.shape[1:]), element_of(rows))
        if not handle.do_expand:
            memory[: handle.num_recv_tokens] = rows[: handle.num_recv_tokens]
        for there, here in handle.moves:
            memory[there] = rows[here]
        return memory

    def _routing(self, handle: EPHandle) -> tuple[Any, Any]:
        arrived, place = handle.trip.arrived, handle.place
        if handle.do_expand:
            return None, self._received(handle, arrived.row_weights)
        ids = place.full((handle.rows, handle.ids.shape[1]), -1, "int64")
        ids[: handle.num_recv_tokens] = arrived.local_ids[: handle.num_recv_tokens]
        return ids, place.cast(place.where(ids >= 0, self._received(handle, arrived.weights), 0), "float32")

    def combine(
        self,
        x: Any,
        handle: EPHandle,
        topk_weights: Any = None,
        bias: Any = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | None = None,
        previous_event_before_epilogue: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, Any, EventOverlap]:
        """Results home, added without weights: a rank's first, rounded, then over ranks in rank order. Collective.

        x: bfloat16 [rows of recv_x, H]; bias: none, one or two bfloat16 [T, H], added last. Returns bfloat16 [T, H], the weights
        float32 [T, k] or None, and an event. topk_weights: only as dispatch returned them, then the senders' come back."""
        trip, place = handle.trip, handle.place
        if trip.over:
            raise InputError("handle: its round trip is over; a dispatch comes before the next combine")
        hidden = trip.options.hidden
        results = place.lend(x, "x", "bfloat16", (handle.rows, hidden))
        sent = None
        if topk_weights is not None:
            expected = self._routing(handle)[1]
            if bool((place.lend(topk_weights, "topk_weights", "float32", tuple(expected.shape)) != expected).any()):
                raise InputError("topk_weights: not supported but as dispatch returned them (docs/adapters.md)")
            sent = place.cast(place.where(handle.ids >= 0, trip.weights, 0), "float32")
        out = place.empty((trip.tokens, hidden), "bfloat16")
        added = lend_bias(place, bias, out.shape)
        laid = place.zeros((trip.arrived.room, hidden), "bfloat16")
        if not handle.do_expand:
            laid[: handle.num_recv_tokens] = results[: handle.num_recv_tokens]
        for there, here in handle.moves:
            laid[here] = results[there]
        trip.combine(laid, out)
        add_bias(place, out, added)
        return place.like(out, x), None if sent is None else place.like(sent, x), passed()
