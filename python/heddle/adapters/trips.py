"""Round trips as other systems make them: exchanges made when the first call tells their sizes, and several trips under way."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from heddle import _core
from heddle.adapters.places import Place, as_bytes, column_major, element_of, place_of
from heddle.arrays import view_as
from heddle.device import DeviceExchange
from heddle.errors import InputError
from heddle.exchange import Arrived, Exchange, ExchangeOptions
from heddle.group import join
from heddle.options import Step

MOST_TRIPS = 2
"""Trips of one kind that may be under way at once: what overlaps two halves of a batch needs."""


def joined(group: Any, comm: Any = None, deadline: float = 30.0) -> _core.Group:
    """A heddle.Group from one, from a torch process group, or from an mpi4py communicator. Collective for the latter two."""
    if isinstance(group, _core.Group):
        return group
    if group is not None:
        return join(process_group=group, deadline=deadline)
    if comm is None:
        raise InputError("expected group (a heddle.Group or a torch process group) or comm (an mpi4py communicator), got neither")
    rank = comm.Get_rank()
    return join(comm.bcast(uuid.uuid4().hex if rank == 0 else None), rank, comm.Get_size(), deadline=deadline)


def meeting_of(group: _core.Group) -> Exchange:
    """A small exchange, by whose reset ranks can meet again after a fault however far each had come. Collective."""
    return Exchange(group, ExchangeOptions(hidden=64, experts=group.ranks, topk=1, cap=1))


AnyExchange = Exchange | DeviceExchange


def _gpu_of(exchange: AnyExchange) -> int | None:
    return exchange.device if isinstance(exchange, DeviceExchange) else None


class Trip:
    """One round trip under way: rows have arrived, results have not gone home."""

    def __init__(self, exchange: AnyExchange, hidden: Any, ids: Any, weights: Any, step: Step) -> None:
        self._exchange = exchange
        self.tokens = int(ids.shape[0])
        self.weights = weights
        self.arrived: Arrived = exchange.dispatch(hidden, ids, weights, step=step)
        self.over = False

    @property
    def options(self) -> ExchangeOptions:
        return self._exchange.options

    def combine(self, results: Any, out: Any) -> None:
        """results and out: as the exchange's combine has them."""
        self._exchange.combine(results, out)
        self.over = True

    def uses(self, exchange: AnyExchange) -> bool:
        return self._exchange is exchange and not self.over


class Trips:
    """The exchanges of one rank, by what they were made with. All ranks make the same calls, so all take the same ones. Collective
    to make."""

    def __init__(self, group: _core.Group) -> None:
        self.group = group
        self._meeting = meeting_of(group)
        self._made: dict[int, AnyExchange] = {}  # numbered as all ranks made them
        self._next = 0
        self._under_way: list[Trip] = []

    def start(
        self, options: ExchangeOptions, hidden: Any, ids: Any, weights: Any, step: Step, gpu: int | None = None
    ) -> Trip:
        """Collective. Makes an exchange if those with these options are under way; gpu: where the arrays are, None: in host
        memory."""
        self._under_way = [trip for trip in self._under_way if not trip.over]
        made = [exchange for exchange in self._made.values() if exchange.options == options and _gpu_of(exchange) == gpu]
        idle = [exchange for exchange in made if not any(trip.uses(exchange) for trip in self._under_way)]
        if not idle and len(made) == MOST_TRIPS:
            raise InputError(f"{MOST_TRIPS} dispatches of way {options.way} have no combine yet: combine one before the next")
        if not idle:
            idle = [self._make(options, gpu)]
            self._made[self._next] = idle[0]
            self._next += 1
        if isinstance(idle[0], DeviceExchange):
            idle[0].throw_if_failed()
        trip = Trip(idle[0], hidden, ids, weights, step)
        self._under_way.append(trip)
        return trip

    def _make(self, options: ExchangeOptions, gpu: int | None) -> AnyExchange:
        if gpu is None:
            return Exchange(self.group, options)
        processes = self.group if self.group.ranks > 1 else None
        return DeviceExchange(options, group=processes, device=gpu, deadline=self.group.deadline)

    def _reset(self, exchange: AnyExchange) -> None:
        """With the ranks that the group has now; an exchange on a GPU keeps a list of its own."""
        if isinstance(exchange, DeviceExchange):
            exchange.reset(self.group.live)
        else:
            exchange.reset()

    def throw_if_failed(self) -> None:
        """Raises the FaultError that calls on a GPU have met so far."""
        for exchange in self._made.values():
            if isinstance(exchange, DeviceExchange):
                exchange.throw_if_failed()

    def forget(self, way: str, cap: int) -> None:
        """Collective: closes the exchanges of a way that are made for another cap; trips under way keep theirs, whose pages go when
        the group ends."""
        for number, exchange in list(self._made.items()):
            if exchange.options.way != way or exchange.options.cap == cap:
                continue
            del self._made[number]
            if not any(trip.uses(exchange) for trip in self._under_way):
                exchange.close()

    def end(self, way: str) -> None:
        """Collective: ends all trips of a way."""
        for exchange in self._made.values():
            if exchange.options.way == way:
                for trip in self._under_way:
                    trip.over = trip.over or trip.uses(exchange)
                self._reset(exchange)

    def reset(self, live: Sequence[bool] | None = None) -> None:
        """Collective of those that go on: ends all trips, after a fault as well. Exchanges that not all ranks have made go."""
        for trip in self._under_way:
            trip.over = True
        self._meeting.reset(live)
        told = self.group.exchange(" ".join(["made", *map(str, self._made)]), "exchanges to keep")
        numbers = [{int(number) for number in text.split()[1:]} for text in told if text]
        kept = sorted(set.intersection(*numbers))
        self._made = {number: self._made[number] for number in kept}
        self._next = max((number + 1 for of_one in numbers for number in of_one), default=0)
        for exchange in self._made.values():
            self._reset(exchange)

    def clear(self) -> None:
        """Collective: ends all trips and closes the exchanges."""
        made = list(self._made.values())
        self._made, self._under_way = {}, []
        for exchange in made:
            exchange.close()


class Rows:
    """Tokens to send: bfloat16 [T, H], or float8_e4m3fn [T, H] with scales of 4 bytes a group. The latter cross as they are: bytes
    inside rows of bfloat16, so that nothing is rounded again."""

    def __init__(self, x: Any, place: Place | None = None) -> None:
        self.kind = x[0] if isinstance(x, tuple) else x
        self.place = place_of(x) if place is None else place
        if not isinstance(x, tuple):
            self.sent = self.place.lend(x, "x", "bfloat16", ("tokens", "hidden"))
            self.scales = None
            self.hidden = int(self.sent.shape[1])
            return
        if len(x) != 2:
            raise InputError(f"x: expected rows, or a pair of rows and scales, got {len(x)} arrays")
        codes = self.place.lend(x[0], "x[0]", "float8_e4m3fn", ("tokens", "hidden"))
        self.scales = self.place.lend(x[1], "x[1]", ("float32", "int32"), (codes.shape[0], "groups"))
        self.hidden = int(codes.shape[1])
        scale_bytes = 4 * int(self.scales.shape[1])
        if scale_bytes > self.hidden:
            raise InputError(f"x[1]: expected at most {self.hidden // 4} scales a row, got {self.scales.shape[1]}")
        sent = self.place.zeros((len(codes), 2 * self.hidden), "uint8")
        sent[:, : self.hidden] = as_bytes(codes)
        sent[:, self.hidden : self.hidden + scale_bytes] = as_bytes(self.place.cast(self.scales, element_of(self.scales)))
        self.sent = view_as(sent, "bfloat16")

    def unpack(self, received: Any, aligned_columns: int | None = None) -> Any:
        """Received rows, bfloat16 [rows, H] in memory of their own, as what was sent and of its kind: rows, or the pair.
        aligned_columns: scales in columns, of a multiple of so many rows."""
        place = self.place
        if self.scales is None:
            return place.like(received, self.kind)
        received = as_bytes(received)
        scale_bytes = 4 * int(self.scales.shape[1])
        codes = view_as(place.cast(received[:, : self.hidden], "uint8"), "float8_e4m3fn")
        scales = place.cast(received[:, self.hidden : self.hidden + scale_bytes], "uint8")
        scales = view_as(scales, element_of(self.scales))
        if aligned_columns is not None:
            scales = column_major(scales, aligned_columns)
        return place.like(codes, self.kind), place.like(scales, self.kind)


def experts_a_rank(experts: int, ranks: int) -> int:
    if experts < 1 or experts % ranks != 0:
        raise InputError(f"num_experts: expected a multiple of the {ranks} ranks, got {experts}")
    return experts // ranks


def choices(place: Place, topk_idx: Any, experts: int, tokens: int | None = None) -> Any:
    """The chosen experts as the library has them: int32 [tokens, k], -1: none."""
    ids = place.lend(topk_idx, "topk_idx", ("int64", "int32"), (tokens if tokens is not None else "tokens", "topk"))
    place.check_ids(ids, experts)
    return place.cast(ids, "int32")


def rank_membership(place: Place, ids: Any, experts: int, ranks: int) -> Any:
    """bool [tokens, ranks]: does a token have an expert there?"""
    per = experts_a_rank(experts, ranks)
    return place.is_there(place.where(ids < 0, -1, ids // per), ranks)


def check_alignment(expert_alignment: int) -> None:
    if expert_alignment < 1:
        raise InputError(f"expert_alignment: expected at least 1, got {expert_alignment}")


def aligned(counts: Any, alignment: int) -> Any:
    return -(-counts // alignment) * alignment


def lend_bias(place: Place, bias: Any, shape: Sequence[int]) -> list[Any]:
    """None, one or two arrays bfloat16 of that shape. Asked for before results travel: a refusal after that would come when the
    other ranks have gone on."""
    given = () if bias is None else bias if isinstance(bias, tuple) else (bias,)
    if len(given) > 2:
        raise InputError(f"bias: expected at most 2 arrays, got {len(given)}")
    return [place.lend(one, "bias", "bfloat16", shape) for one in given]


def add_bias(place: Place, out: Any, added: Sequence[Any]) -> None:
    """float32 between, rounded once more."""
    if added:
        sums = place.cast(out, "float32") + sum(place.cast(one, "float32") for one in added)
        out[...] = place.cast(sums, "bfloat16")


def lend_stats(place: Place, stats: Any, experts: int, ranks: int) -> Any:
    """The counters that a dispatch adds to, int32 [local experts], or None. Asked for before anything is sent."""
    if stats is None:
        return None
    return place.lend_writable(stats, "cumulative_local_expert_recv_stats", "int32", (experts_a_rank(experts, ranks),))
