"""The exchange alone, on a GPU: rows to the ranks of their experts, results home. For experts of one's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from heddle import _core
from heddle.errors import InputError
from heddle.exchange import Arrived, ExchangeOptions
from heddle.options import Step
from heddle.streams import as_kind, current_stream, lend, lend_inputs, need_cuda_part, new_output, of_ranks, telling


class DeviceExchange:
    """A way on one GPU, for all ranks that live there, with a workspace of its own: heddle.Exchange with arrays in the GPU's memory.
    Calls queue kernels on a stream and return, but a dispatch of normal and of elastic with cpu_sync, which waits for counts. With
    other ways dispatch, combine and what is between them may be captured in a graph.

    group: of processes, one GPU and one member each (None: this process is alone); device: as the process numbers it; ranks: of
    this process, the same of all, on that GPU; deadline: seconds of the longest wait of kernels; sms: CTAs for the transfer, 0: all
    SMs. Collective. Raises InputError for options that do not fit together or differ between processes, and for GPUs that cannot
    reach each other or lack the memory, FaultError for a process that does not come."""

    def __init__(
        self,
        options: ExchangeOptions,
        *,
        group: _core.Group | None = None,
        device: int = 0,
        ranks: int = 1,
        deadline: float = 30.0,
        sms: int = 0,
    ) -> None:
        need_cuda_part()
        self.options, self.device = options, device
        self._held: _core.RankDeviceExchange | None = _core.RankDeviceExchange(group, options, device, ranks, deadline, sms)
        self._sent: tuple[Any, ...] | None = None

    @property
    def _core(self) -> _core.RankDeviceExchange:
        if self._held is None:
            raise InputError("this exchange is closed")
        return self._held

    @property
    def experts(self) -> list[int]:
        """Of the first rank that lives here, in local order."""
        return self._core.experts(0)

    @property
    def ranks(self) -> int:
        """Of all processes."""
        return self._core.ranks

    @property
    def first_rank(self) -> int:
        """The lowest rank that lives here."""
        return self._core.first_rank

    @property
    def live(self) -> list[bool]:
        """By rank: which go on after the last reset."""
        return self._core.live

    @property
    def bytes(self) -> int:
        """Of each rank's part of the workspace."""
        return self._core.bytes

    def experts_of(self, local: int) -> list[int]:
        """Of the local-th rank that lives here, in local order."""
        return self._core.experts(local)

    def dispatch(self, hidden: Any, ids: Any, weights: Any, *, step: Step, tokens: Any = None, stream: int | None = None) -> Any:
        """Every rank's tokens to the ranks of their experts, queued on a stream. Returns what arrives on the rank that lives here, an
        Arrived with arrays of hidden's framework; with several ranks here inputs are lists, by rank, and so is what is returned.

        hidden: bfloat16 [T, H]; ids: int32 [T, k], -1: none; weights: float32 [T, k]; in C order on the GPU, hidden 16-byte aligned.
        They are read again by combine and must stay as they are until it has run. step: the same on all ranks; tokens: int32 [1] on
        the device, None: all of hidden's; stream: a cudaStream_t as a number, None: the current one of hidden's framework.

        Raises InputError before a launch, which the other ranks are told, unless a graph is being captured; a bad id is found on
        the GPU. Faults are found when the stream has been waited for: throw_if_failed; then all that go on call reset."""
        core = self._core
        with telling(core, stream):
            inputs = lend_inputs(hidden, ids, weights, tokens)
            on = current_stream(of_ranks(hidden)[0]) if stream is None else stream
        core.dispatch(inputs, step, on)
        self._sent = (hidden, ids, weights, tokens)  # alive until combine
        kinds = of_ranks(hidden)
        arrived = [self._arrived(core.arrived(local), kind) for local, kind in enumerate(kinds)]
        return arrived if isinstance(hidden, list | tuple) else arrived[0]

    def _arrived(self, fields: dict[str, Any], kind: Any) -> Arrived:
        words = {"layout", "wire", "received", "real", "host_waited", "slots_wanted"}
        arrays = {name: value if name in words or value is None else as_kind(value, kind) for name, value in fields.items()}
        return Arrived(**arrays, options=self.options)

    def combine(self, results: Any, out: Any = None, *, stream: int | None = None) -> Any:
        """Results home, summed in an order that never changes, queued on a stream. results: bfloat16 [room, H], where
        Arrived.slots_wanted [room, k, H], 16-byte aligned; out: bfloat16 [T, H], None: a new array of hidden's kind. With several
        ranks here both are lists. Returns out. Raises as dispatch."""
        core = self._core
        if self._sent is None:
            raise InputError("nothing has arrived: dispatch comes first")
        with telling(core, stream):
            hidden = self._sent[0]
            if out is None:
                several = isinstance(hidden, list | tuple)
                out = [new_output(rank, stream) for rank in hidden] if several else new_output(hidden, stream)
            given, outputs = [lend(one) for one in of_ranks(results)], [lend(one) for one in of_ranks(out)]
            on = current_stream(of_ranks(hidden)[0]) if stream is None else stream
        core.combine(given, outputs, on)
        self._sent = None
        return out

    def throw_if_failed(self) -> None:
        """Once the stream has been waited for: raises the FaultError of a rank that gave up."""
        self._core.throw_if_failed()

    def set_deadline(self, seconds: float) -> None:
        """Longest wait of kernels from now on, of captured graphs too. This process only."""
        self._core.set_deadline(seconds)

    def reset(self, live: Sequence[bool] | None = None) -> None:
        """After a fault, as DeviceWorkspace.reset."""
        self._sent = None
        self._core.reset(list(live) if live is not None else None)

    def close(self) -> None:
        """The exchange takes no more calls; its memory goes with the last array of what has arrived. Not collective."""
        self._held = self._sent = None
