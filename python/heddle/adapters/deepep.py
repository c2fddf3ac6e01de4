"""DeepEP's names over heddle.Exchange: Buffer (way normal, and low_latency) and ElasticBuffer (way elastic).

    from heddle.adapters.deepep import Buffer              # instead of: from deep_ep import Buffer

Arguments, defaults and what calls return are those of DeepEP's second version (docs/adapters.md says what differs). Arrays are
torch's CPU tensors or NumPy's, whose calls are over when they return, or tensors of a GPU, whose calls are queued on torch's current
stream. What comes back is of the kind of x, events have passed and hooks do nothing. Experts lie contiguous,
num_experts / ranks on each rank. Errors are heddle.InputError and heddle.FaultError."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from heddle.adapters import low_latency
from heddle.adapters.elastic import ElasticBuffer, EPHandle
from heddle.adapters.events import EventHandle, EventOverlap, nothing_to_receive, passed
from heddle.adapters.low_latency import LowLatencyHandle
from heddle.adapters.places import Place, place_of
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
from heddle.device import is_built
from heddle.errors import InputError
from heddle.exchange import ExchangeOptions
from heddle.options import LayerShape, Step
from heddle.planning import PlanRequest, plan

__all__ = ["Buffer", "Config", "EPHandle", "ElasticBuffer", "EventHandle", "EventOverlap", "Handle", "LowLatencyHandle"]

SMALLEST_CAP = 128
"""Tokens a rank, of way normal."""


def _none_here(name: str, why: str) -> NoReturn:
    raise InputError(f"{name}: not supported: {why} (docs/adapters.md)")


class Config:
    """Tuning of DeepEP's kernels. Kept and not used: Heddle's ways have nothing to tune here."""

    def __init__(
        self,
        num_sms: int = 20,
        num_max_nvl_chunked_send_tokens: int = 6,
        num_max_nvl_chunked_recv_tokens: int = 256,
        num_max_rdma_chunked_send_tokens: int = 6,
        num_max_rdma_chunked_recv_tokens: int = 256,
    ) -> None:
        self.num_sms = num_sms
        self.num_max_nvl_chunked_send_tokens = num_max_nvl_chunked_send_tokens
        self.num_max_nvl_chunked_recv_tokens = num_max_nvl_chunked_recv_tokens
        self.num_max_rdma_chunked_send_tokens = num_max_rdma_chunked_send_tokens
        self.num_max_rdma_chunked_recv_tokens = num_max_rdma_chunked_recv_tokens

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """0: memory is made when the first call tells its sizes."""
        return 0

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """0, likewise."""
        return 0


class Handle:
    """What Buffer.dispatch returns for its combine, and for a dispatch of other rows the same way."""

    def __init__(self, trip: Trip, place: Place, ids: Any, num_experts: int, rows: int) -> None:
        self.trip = trip
        self.place = place
        self.ids = ids
        self.num_experts = num_experts
        self.rows = rows
        """Of recv_x, padding included."""


class Buffer:
    """Round trips of one rank. group: a heddle.Group, or a torch process group, whose ranks then join one (collective); comm: an
    mpi4py communicator instead. Other arguments are kept and not used: exchanges are made by the first call of each size."""

    num_sms: int = 20

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
        *,
        use_fabric: bool = False,
    ) -> None:
        if enable_shrink:
            _none_here("enable_shrink", "ranks are masked by reset(live)")
        self.group = group if group is not None else comm
        self._group = joined(group, comm)
        self._trips = Trips(self._group)
        self._cap = SMALLEST_CAP  # of way normal, the same on all ranks; grows with their batches
        self.rank, self.group_size = self._group.rank, self._group.ranks
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.explicitly_destroy, self.enable_shrink = low_latency_mode, explicitly_destroy, enable_shrink

    def destroy(self) -> None:
        """Collective: gives the exchanges' memory back. A later call makes them anew."""
        self._trips.clear()

    def reset(self, live: Sequence[bool] | None = None) -> None:
        """Not DeepEP's: ends all trips, after a FaultError or instead of their combines. Collective of the ranks that go on; live:
        as Workspace.reset's."""
        self._trips.reset(live)

    def throw_if_failed(self) -> None:
        """Not DeepEP's: once the stream has been waited for, raises the FaultError that calls with tensors of a GPU have met."""
        self._trips.throw_if_failed()

    @staticmethod
    def is_sm90_compiled() -> bool:
        return is_built()

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Kept and not used. Raises InputError for odd numbers."""
        if new_num_sms % 2 != 0:
            raise InputError(f"new_num_sms: expected an even number, got {new_num_sms}")
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        return passed()

    @staticmethod
    def get_low_latency_rdma_size_hint(num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int) -> int:
        """Bytes of a rank's part of the workspace that low-latency calls of these sizes make, for up to 16 choices a token."""
        shape = LayerShape(hidden=hidden, intermediate=64, experts=num_experts, topk=min(16, num_experts))
        most = num_max_dispatch_tokens_per_rank
        sections = plan(PlanRequest(shape=shape, ranks=num_ranks, tokens=most, cap=most, wire="bf16"))
        own = next(section for section in sections if section.name == "own_layouts")
        return int(next(quantity.value for quantity in own.quantities if quantity.name == "low_latency"))

    def get_comm_stream(self) -> NoReturn:
        _none_here("get_comm_stream", "the host engine has no streams")

    def get_local_buffer_tensor(self, dtype: Any, size: Any = None, offset: int = 0, use_rdma_buffer: bool = False) -> NoReturn:
        _none_here("get_local_buffer_tensor", "a workspace is not handed out as one tensor")

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """The same for all numbers of ranks."""
        return Config(Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        return Config(Buffer.num_sms)

    def get_dispatch_layout(
        self,
        topk_idx: Any,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, None, Any, Any, EventOverlap]:
        """topk_idx int64 [T, k], -1: none. Returns num_tokens_per_rank int32 [ranks], None (one machine), num_tokens_per_expert
        int32 [num_experts], is_token_in_rank bool [T, ranks], and an event."""
        place = place_of(topk_idx)
        ids = choices(place, topk_idx, num_experts)
        there = rank_membership(place, ids, num_experts, self.group_size)
        results = place.cast(there.sum(0), "int32"), place.count(ids, num_experts), there
        to_ranks, to_experts, is_there = (place.like(result, topk_idx) for result in results)
        return to_ranks, None, to_experts, is_there, passed()

    def dispatch(
        self,
        x: Any,
        handle: Handle | None = None,
        num_tokens_per_rank: Any = None,
        num_tokens_per_rdma_rank: Any = None,
        is_token_in_rank: Any = None,
        num_tokens_per_expert: Any = None,
        topk_idx: Any = None,
        topk_weights: Any = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, Any, Any, Any, Handle | None, EventOverlap]:
        """Every token once to each rank that holds one of its experts, way normal. Collective.

        x: bfloat16 [T, H], or a pair float8_e4m3fn [T, H] and scales float32 or int32 [T, G], which cross as they are. The layout
        of get_dispatch_layout; topk_idx int64 [T, k], -1: none; topk_weights float32 [T, k].

        Returns recv_x like x with [received] rows, by rank and token; recv_topk_idx int64 [received, k], local numbers, -1:
        another rank's or none; recv_topk_weights float32 [received, k]; the rows of each local expert, aligned up, as a list;
        the handle for combine; an event. num_worst_tokens: rows to pad to (choices -1), with an empty list.

        handle: x goes where the handle's tokens went; topk_idx and topk_weights are None, and so is what is returned beside recv_x.
        """
        if handle is not None:
            if topk_idx is not None or topk_weights is not None:
                raise InputError("handle: expected topk_idx and topk_weights to be None beside it, got them as well")
            return self._dispatch_again(x, handle)
        if topk_idx is None or topk_weights is None or num_tokens_per_expert is None:
            raise InputError("expected topk_idx, topk_weights and the layout of get_dispatch_layout, or a handle; got None")
        rows, experts = Rows(x), int(num_tokens_per_expert.shape[0])
        place = rows.place
        ids = choices(place, topk_idx, experts, len(rows.sent))
        self._check_layout(place, ids, experts, num_tokens_per_rank, is_token_in_rank)
        check_alignment(expert_alignment)
        weights = place.cast(place.lend(topk_weights, "topk_weights", "float32", ids.shape), "float32")
        local = experts_a_rank(experts, self.group_size)
        trip = self._start(rows, ids, weights, experts)
        received = trip.arrived.room
        if 0 < num_worst_tokens < received:
            raise InputError(f"num_worst_tokens: {num_worst_tokens} is less than the {received} rows that arrived; call reset()")
        handle = Handle(trip, place, ids, experts, max(received, num_worst_tokens))
        local_ids = place.full((handle.rows, ids.shape[1]), -1, "int64")
        local_ids[:received] = trip.arrived.local_ids
        local_weights = place.zeros(local_ids.shape, "float32")
        local_weights[:received] = place.where(local_ids[:received] >= 0, trip.arrived.weights, 0)
        counts = [] if num_worst_tokens else aligned(place.count(local_ids, local), expert_alignment).tolist()
        results = place.like(local_ids, topk_idx), place.like(local_weights, topk_idx), counts
        return self._received(rows, handle), *results, handle, passed()

    def _check_layout(self, place: Place, ids: Any, experts: int, to_ranks: Any, is_there: Any) -> None:
        """On a GPU by types and sizes alone: to look at values would wait for it."""
        there = rank_membership(place, ids, experts, self.group_size)
        if to_ranks is not None:
            sums = place.lend(to_ranks, "num_tokens_per_rank", "int32", (self.group_size,))
            if place.gpu is None and (sums != there.sum(0)).any():
                raise InputError(f"num_tokens_per_rank: topk_idx says {there.sum(0).tolist()}, got {sums.tolist()}")
        if is_there is not None:
            given = place.lend(is_there, "is_token_in_rank", "bool", there.shape)
            if place.gpu is None and (given != there).any():
                raise InputError("is_token_in_rank: differs from what topk_idx says")

    def _start(self, rows: Rows, ids: Any, weights: Any, experts: int) -> Trip:
        """The ranks first tell each other their tokens: DeepEP's calls have no bound, the exchange needs one."""
        most = max(int(tokens) for tokens in self._group.exchange(str(len(ids)), "tokens of a dispatch") if tokens)
        if most > self._cap:
            self._cap = 1 << (most - 1).bit_length()
            self._trips.forget("normal", self._cap)
        options = ExchangeOptions(
            hidden=rows.hidden, experts=experts, topk=int(ids.shape[1]), cap=self._cap, way="normal", arrived="routed"
        )
        return self._trips.start(options, rows.sent, ids, weights, Step(most, "prefill"), rows.place.gpu)

    def _dispatch_again(self, x: Any, handle: Handle) -> tuple[Any, None, None, None, None, EventOverlap]:
        rows = Rows(x)
        if tuple(rows.sent.shape) != (handle.trip.tokens, handle.trip.options.hidden):
            expected = [handle.trip.tokens, handle.trip.options.hidden]
            raise InputError(f"x: expected {expected}, as its handle was made with, got {list(rows.sent.shape)}")
        if rows.place.gpu != handle.place.gpu:
            raise InputError(f"x: expected {handle.place.name}, where its handle was made, got {rows.place.name}")
        if not handle.trip.over:
            raise InputError("handle: its round trip is under way: combine comes before it is used for another dispatch")
        handle.trip = self._start(rows, handle.ids, handle.trip.weights, handle.num_experts)
        return self._received(rows, handle), None, None, None, None, passed()

    def _received(self, rows: Rows, handle: Handle) -> Any:
        arrived = handle.trip.arrived
        memory = rows.place.zeros((handle.rows, rows.hidden), "bfloat16")
        memory[: arrived.room] = arrived.bf16()
        return rows.unpack(memory)

    def combine(
        self,
        x: Any,
        handle: Handle,
        topk_weights: Any = None,
        bias: Any = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, Any, EventOverlap]:
        """Results home, added over ranks in rank order, without weights. Collective.

        x: bfloat16 [rows of recv_x, H]; bias: none, one or two bfloat16 [T, H], added last. Returns bfloat16 [T, H], the weights
        float32 [T, k] or None, and an event. topk_weights: only as dispatch returned them, then the senders' come back."""
        if handle.trip.over:
            raise InputError("handle: its round trip is over; a dispatch comes before the next combine")
        place = handle.place
        results = place.lend(x, "x", "bfloat16", (handle.rows, handle.trip.options.hidden))
        sent = self._sent_weights(handle, topk_weights) if topk_weights is not None else None
        out = place.empty((handle.trip.tokens, results.shape[1]), "bfloat16")
        added = lend_bias(place, bias, out.shape)
        handle.trip.combine(place.cast(results[: handle.trip.arrived.room], "bfloat16"), out)
        add_bias(place, out, added)
        return place.like(out, x), None if sent is None else place.like(sent, x), passed()

    @staticmethod
    def _sent_weights(handle: Handle, topk_weights: Any) -> Any:
        """Each choice is of one rank, so weights that nobody has changed add up to those that were sent."""
        arrived, place = handle.trip.arrived, handle.place
        given = place.lend(topk_weights, "topk_weights", "float32", (handle.rows, handle.ids.shape[1]))[: arrived.room]
        if bool((given != place.where(arrived.local_ids >= 0, arrived.weights, 0)).any()):
            _none_here("topk_weights", "expected those that dispatch returned; sums of others would need an exchange of float32")
        return place.cast(place.where(handle.ids >= 0, handle.trip.weights, 0), "float32")

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Collective: ends all low-latency trips. Never needed between normal and low-latency calls, whose memory is apart."""
        self._trips.end("low_latency")

    def low_latency_dispatch(
        self,
        x: Any,
        topk_idx: Any,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Any = None,
        dispatch_wait_recv_cost_stats: Any = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Any, Any, LowLatencyHandle, EventOverlap, Callable[[], None] | None]:
        """A token's row to each of its experts, way low_latency. Collective.

        x: bfloat16 [T, H], T at most num_max_dispatch_tokens_per_rank (C, the same on all ranks); topk_idx int64 [T, k], -1: none.
        Returns recv_x: bfloat16 [local experts, C * ranks, H], or with use_fp8 a pair: float8_e4m3fn of that shape and scales of
        128 columns, float32 [.., H / 128] (round_scale: powers of 2), or with use_ue8m0 four to an int32 [.., H / 512], columns
        first in memory; recv_count int32 [local experts], the rows that are real, which come first; the handle for
        low_latency_combine; an event; with return_recv_hook a hook, else None. The stats, int32 [local experts], are added to."""
        if dispatch_wait_recv_cost_stats is not None:
            _none_here("dispatch_wait_recv_cost_stats", "waits are not measured by rank")
        cast = low_latency.Cast(use_fp8, round_scale, use_ue8m0)
        most = num_max_dispatch_tokens_per_rank
        stats = lend_stats(place_of(x), cumulative_local_expert_recv_stats, num_experts, self.group_size)
        rows, counts, handle = low_latency.dispatch(self._trips, x, topk_idx, most, num_experts, cast)
        if stats is not None:
            stats += counts
        like = handle.place.like
        received = tuple(like(part, x) for part in rows) if isinstance(rows, tuple) else like(rows, x)
        return received, like(counts, x), handle, passed(), nothing_to_receive if return_recv_hook else None

    def low_latency_combine(
        self,
        x: Any,
        topk_idx: Any,
        topk_weights: Any,
        handle: LowLatencyHandle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Any = None,
        combine_wait_recv_cost_stats: Any = None,
    ) -> tuple[Any, EventOverlap, Callable[[], None] | None]:
        """Results home, times their weights, added in the order of choices. Collective.

        x: bfloat16 [local experts, C * ranks, H], rows where low_latency_dispatch had them; topk_idx as given there; topk_weights
        float32 [T, k]; out: bfloat16 [T, H], None: a new one. Returns out, an event, and with return_recv_hook a hook, else None.
        zero_copy: makes no difference, x is read where it is."""
        if use_logfmt:
            _none_here("use_logfmt", "results travel as bfloat16")
        if combine_wait_recv_cost_stats is not None:
            _none_here("combine_wait_recv_cost_stats", "waits are not measured by rank")
        result = low_latency.combine(x, topk_idx, topk_weights, handle, out)
        return result, passed(), nothing_to_receive if return_recv_hook else None

    def get_next_low_latency_combine_buffer(self, handle: LowLatencyHandle) -> Any:
        """Zeros to fill, bfloat16 [local experts, C * ranks, H], of the kind of the dispatched x."""
        return handle.place.like(handle.place.zeros((*handle.blocks, handle.trip.options.hidden), "bfloat16"), handle.kind)

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> NoReturn:
        _none_here("low_latency_update_mask_buffer", "ranks are masked by Exchange.reset(live)")

    def low_latency_query_mask_buffer(self, mask_status: Any) -> NoReturn:
        _none_here("low_latency_query_mask_buffer", "the group knows: Group.live")

    def low_latency_clean_mask_buffer(self) -> NoReturn:
        _none_here("low_latency_clean_mask_buffer", "ranks are masked by Exchange.reset(live)")
