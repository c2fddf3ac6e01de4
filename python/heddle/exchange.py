"""The exchange alone, on the host engine: rows to the ranks of their experts, results home. For experts of one's own. On a GPU it is
heddle.device.DeviceExchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal

from heddle import _core
from heddle.arrays import Array, empty_like, view_as
from heddle.options import LayoutName, Quantisation, Step, WayName, WireName


@dataclass(frozen=True, kw_only=True)
class ExchangeOptions:
    """What an exchange is created with, the same on all ranks."""

    hidden: int
    experts: int
    """Over all ranks."""
    topk: int
    cap: int
    """Most tokens a rank may bring."""
    way: WayName = "low_latency"
    """Any but mega, which is a whole layer."""
    placement: Sequence[int] | None = None
    """The rank of each expert; None: contiguous."""
    wire: WireName = "bf16"
    combine_wire: WireName = "bf16"
    quantisation: Quantisation = field(default_factory=Quantisation)
    """Of fp8 wires."""
    arrived: LayoutName | None = None
    """What arrived rows shall lie like; None: what the way hands over without further copies."""
    weight_at: Literal["activation", "combine"] = "activation"
    """activation: results come weighted; combine: the exchange multiplies by the weights when it sums."""
    reduce: Literal["rank", "home"] = "rank"
    cpu_sync: bool = False
    workers: int = 1


@dataclass(frozen=True)
class Arrived:
    """What arrived on this rank, as views of the exchange's memory that nobody writes to, good until this rank's combine: NumPy's,
    read-only, or on a GPU arrays of hidden's framework. `room` rows are there, those of nobody included."""

    layout: LayoutName
    wire: WireName
    rows: Any
    """uint8 [room, bytes a row], in wire format, with what a way sends beside them (see bf16 and fp8)."""
    received: int | None
    """Rows that came over, this rank's own included; None: only the GPU knows."""
    real: int | None
    """Pairs of a row and an expert of this rank; None likewise."""
    host_waited: bool
    begins: Any
    """contiguous and masked: int32 [local experts], the first row of each."""
    counts: Any
    """contiguous and masked: int32 [local experts], the rows of each."""
    row_weights: Any
    """contiguous and masked: float32 [room], set in rows of an expert."""
    local_ids: Any
    """routed: int32 [room, k], -1: another rank's expert, none, or padding."""
    weights: Any
    """routed: float32 [room, k]."""
    slots_wanted: bool
    """routed: results are [room, k, H], one a choice, instead of sums [room, H]."""
    options: ExchangeOptions

    @property
    def room(self) -> int:
        return int(self.rows.shape[0])

    def bf16(self) -> Any:
        """Rows of a bf16 wire: bfloat16 [room, H]."""
        return view_as(self.rows[:, : 2 * self.options.hidden], "bfloat16")

    def fp8(self) -> tuple[Any, Any]:
        """Rows of an fp8 wire: float8_e4m3fn [room, H] and the scales of their groups [room, H / group], float8_e8m0fnu or
        float32."""
        hidden, how = self.options.hidden, self.options.quantisation
        kind, size = ("float32", 4) if how.scale == "f32" else ("float8_e8m0fnu", 1)
        scale_bytes = size * -(-hidden // how.group)
        codes, scales = self.rows[:, :hidden], self.rows[:, hidden : hidden + scale_bytes]  # hidden is a multiple of 16
        return view_as(codes, "float8_e4m3fn"), view_as(scales, kind)


class Exchange:
    """A way on one rank, with a workspace of its own. Collective; a dispatch is followed by its combine.

    Raises InputError for options that do not fit together or differ between ranks.
    """

    def __init__(self, group: _core.Group, options: ExchangeOptions) -> None:
        self.options = options
        self._core = _core.RankExchange(group, options)
        self._hidden: Any = None

    @property
    def experts(self) -> list[int]:
        """This rank's experts, in local order."""
        return self._core.experts

    @property
    def bytes(self) -> int:
        """Of this rank's part of the workspace."""
        return self._core.bytes

    def dispatch(self, hidden: Array, ids: Array, weights: Array, *, step: Step | None = None) -> Arrived:
        """Every rank's tokens to the ranks of their experts: hidden bfloat16 [T, H], ids int32 [T, k] (-1: none), weights float32
        [T, k], in host memory, C order, read where they are and held until combine. step: as MoeLayer.forward's. Raises InputError
        before anything is sent, FaultError when a rank does not answer; then all live ranks call reset."""
        self._core.dispatch(hidden, ids, weights, step)
        self._hidden = hidden
        return Arrived(**self._core.arrived, options=self.options)

    def combine(self, results: Array, out: Any = None) -> Any:
        """Results home, summed in an order that never changes. results: bfloat16 [room, H], where Arrived.slots_wanted [room, k,
        H]; out: bfloat16 [T, H], None: a new array of hidden's kind. Returns out."""
        if out is None and self._hidden is not None:
            out = empty_like(self._hidden, "out")
        self._core.combine(results, out)
        self._hidden = None
        return out

    def reset(self, live: Sequence[bool] | None = None) -> None:
        """After a fault, as Workspace.reset."""
        self._hidden = None
        self._core.reset(list(live) if live is not None else None)

    def close(self) -> None:
        """Collective end: gives the memory back, also that of what has arrived; the exchange takes no more calls. Without it the pages
        go when the group ends."""
        self._hidden = None
        self._core.close()

    def __enter__(self) -> Exchange:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:  # after an error other ranks may not come
            self.close()
