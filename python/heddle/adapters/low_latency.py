"""DeepEP's low-latency calls over way low_latency: blocks of rows by local expert, weights applied when results are summed. In host
memory, or on a GPU, where calls are queued on torch's current stream and may be captured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy

from heddle.adapters.places import Place, as_bytes, column_major, place_of
from heddle.adapters.trips import Trip, Trips, choices, experts_a_rank
from heddle.arrays import view_as
from heddle.errors import InputError
from heddle.exchange import ExchangeOptions
from heddle.options import Quantisation, Step


@dataclass(frozen=True)
class Cast:
    """What rows are cast to on their way."""

    fp8: bool
    round_scale: bool
    ue8m0: bool


class LowLatencyHandle:
    """What low_latency_dispatch returns for its combine."""

    def __init__(self, trip: Trip, place: Place, ids: Any, blocks: tuple[int, int], kind: Any) -> None:
        self.trip = trip
        self.place = place
        self.ids = ids
        self.blocks = blocks
        """Local experts, and rows of each."""
        self.kind = kind


def _options(x: Any, ids: Any, most: int, experts: int, cast: Cast) -> ExchangeOptions:
    if cast.ue8m0 and not (cast.fp8 and cast.round_scale):
        raise InputError("use_ue8m0: expected use_fp8=True and round_scale=True beside it")
    group_columns = 512 if cast.ue8m0 else 128
    if cast.fp8 and x.shape[1] % group_columns != 0:
        raise InputError(f"x: expected a multiple of {group_columns} columns for these scales, got {x.shape[1]}")
    return ExchangeOptions(
        hidden=int(x.shape[1]),
        experts=experts,
        topk=int(ids.shape[1]),
        cap=most,
        way="low_latency",
        arrived="masked",
        wire="fp8" if cast.fp8 else "bf16",
        quantisation=Quantisation(128, "ue8m0" if cast.round_scale else "f32"),
        weight_at="combine",
    )


def dispatch(trips: Trips, x: Any, topk_idx: Any, most: int, experts: int, cast: Cast) -> tuple[Any, Any, LowLatencyHandle]:
    """Rows by expert, their counts, and the handle; NumPy arrays, or tensors of the GPU that x is on."""
    place = place_of(x)
    hidden = place.lend(x, "x", "bfloat16", ("tokens", "hidden"))
    ids = choices(place, topk_idx, experts, len(hidden))
    if len(hidden) > most:
        raise InputError(f"x: expected at most num_max_dispatch_tokens_per_rank = {most} tokens, got {len(hidden)}")
    blocks = experts_a_rank(experts, trips.group.ranks), most * trips.group.ranks
    # The weights come with combine and are read by it alone; until then the exchange has memory for them.
    weights = place.full(ids.shape, 1, "float32")
    trip = trips.start(_options(hidden, ids, most, experts, cast), hidden, ids, weights, Step(most, "decode"), place.gpu)
    counts = place.cast(trip.arrived.counts + 0, "int32")  # in memory of their own
    return _rows(trip, place, counts, blocks, cast), counts, LowLatencyHandle(trip, place, ids, blocks, x)


def _rows(trip: Trip, place: Place, counts: Any, blocks: tuple[int, int], cast: Cast) -> Any:
    """What arrived: in host memory a copy, where what is nobody's is zero; on a GPU rows of bfloat16 are where they arrived, good
    until the next dispatch, and what is nobody's is anything."""
    if not cast.fp8:
        return _laid(trip.arrived.bf16(), place, counts, blocks)
    codes, scales = trip.arrived.fp8()
    codes = view_as(_laid(as_bytes(codes), place, counts, blocks), "float8_e4m3fn")
    if cast.round_scale and not cast.ue8m0:
        return codes, column_major(place.powers_of_two(_laid(as_bytes(scales), place, counts, blocks)))
    scales = _laid(as_bytes(scales) if cast.ue8m0 else scales, place, counts, blocks)
    return codes, column_major(view_as(scales, "int32") if cast.ue8m0 else scales)  # four of one byte


def _laid(rows: Any, place: Place, counts: Any, blocks: tuple[int, int]) -> Any:
    """[local experts, rows of each, columns], in C order."""
    by_expert = rows.reshape(*blocks, rows.shape[1])
    if place.gpu is not None:
        return by_expert.contiguous()
    memory = numpy.zeros(by_expert.shape, rows.dtype)
    for expert, count in enumerate(counts):
        memory[expert, :count] = by_expert[expert, :count]
    return memory


def combine(x: Any, topk_idx: Any, topk_weights: Any, handle: LowLatencyHandle, out: Any) -> Any:
    trip, place = handle.trip, handle.place
    if trip.over:
        raise InputError("handle: its round trip is over; a low_latency_dispatch comes before the next combine")
    hidden = trip.options.hidden
    results = place.lend(x, "x", "bfloat16", (*handle.blocks, hidden))
    if place.gpu is None and (choices(place, topk_idx, trip.options.experts, trip.tokens) != handle.ids).any():
        raise InputError("topk_idx: expected the choices that were dispatched, got others")
    weights = place.lend(topk_weights, "topk_weights", "float32", handle.ids.shape)
    sizes = (trip.tokens, hidden)
    home = place.lend(out, "out", "bfloat16", sizes) if out is not None else place.empty(sizes, "bfloat16")
    trip.weights[...] = weights
    trip.combine(place.cast(results, "bfloat16").reshape(-1, hidden), home)
    return out if out is not None else place.like(home, x)
