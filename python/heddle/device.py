"""The layer on GPUs: every call queues kernels on a stream and returns. Needs a build with the CUDA part and Hopper GPUs.

One process a GPU, one rank a process, as under torchrun: every process makes a DeviceWorkspace over the group that heddle.join()
gave, and a DeviceLayer in it. One process with several GPUs, or several ranks a GPU, has a layer a GPU and lists of arrays, one a
rank.

Arrays are torch's or CuPy's, lent by DLPack: read and written where they are, on the device of the layer. No synchronisation is
asked of them: what makes them and what uses the outputs belongs on the same stream, or is ordered with it by the caller. They
stay alive and unchanged until the call has run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from heddle import _core
from heddle.device_exchange import DeviceExchange
from heddle.experts import parts_of
from heddle.layer import Layers
from heddle.options import ExpertOptions, LayerOptions, LayerShape, Step
from heddle.source import RankWeights
from heddle.streams import current_stream, gpus_present, is_built, lend, lend_inputs, need_cuda_part, new_output, of_ranks, telling

__all__ = [
    "DeviceExchange",
    "DeviceExperts",
    "DeviceLayer",
    "DeviceSeconds",
    "DeviceWorkspace",
    "current_stream",
    "gpus_present",
    "is_built",
]


@dataclass(frozen=True)
class DeviceSeconds:
    """Of the last call on one GPU, measured with events."""

    dispatch: float
    experts: float
    """Of all its ranks."""
    shared: float
    """On the second stream, beside the others."""
    combine: float


class DeviceWorkspace:
    """The symmetric heap of one context on this process's GPUs, shared by the layers that use it.

    layers: weights and options of each, as for Workspace. group: of processes, one member each (None: this process has all GPUs
    of the group); devices: this process's GPUs as it numbers them; ranks: of this process, spread over its GPUs; deadline:
    seconds of the longest wait of kernels. Collective. Raises InputError for GPUs that cannot reach each other or lack the
    memory, FaultError for a process that does not come."""

    def __init__(
        self,
        layers: Layers,
        *,
        group: _core.Group | None = None,
        devices: Sequence[int] = (0,),
        ranks: int = 1,
        deadline: float = 30.0,
    ) -> None:
        need_cuda_part()
        self._core = _core.DeviceContext(
            group, ranks, list(devices), deadline, [(weights._core, options) for weights, options in layers]
        )

    @property
    def ranks(self) -> int:
        """Of all processes."""
        return self._core.ranks

    @property
    def gpus(self) -> int:
        """Of this process."""
        return self._core.gpus

    @property
    def bytes(self) -> int:
        """Of each rank's part."""
        return self._core.bytes

    @property
    def live(self) -> list[bool]:
        """By rank: which go on after the last reset."""
        return self._core.live

    def device(self, gpu: int = 0) -> int:
        """The CUDA device of GPU number `gpu` of this process."""
        return self._core.device(gpu)

    def first_rank(self, gpu: int = 0) -> int:
        """The lowest rank that lives on GPU number `gpu` of this process."""
        return self._core.first_rank(gpu)

    def ranks_on(self, gpu: int = 0) -> int:
        """How many ranks live on GPU number `gpu` of this process."""
        return self._core.ranks_on(gpu)

    def throw_if_aborted(self) -> None:
        """Raises the FaultError of the first rank of this process that gave up, or left a call because of one that did. Looks at
        host memory only; for what a stream does, synchronise it first."""
        self._core.throw_if_aborted()

    def set_deadline(self, seconds: float) -> None:
        """Longest wait of kernels from now on, of captured graphs too. This process only."""
        self._core.set_deadline(seconds)

    def reset(self, live: Sequence[bool] | None = None) -> None:
        """After a fault, by every process that goes on: waits for its GPUs, meets the others without ranks that are not live."""
        self._core.reset(list(live) if live is not None else None)


class DeviceLayer:
    """One layer on GPU number `gpu` of a workspace, for all ranks that live there. All memory is taken here.

    weights: of those ranks, in their order; read here and not needed later. sms: CTAs a GPU for the transfer, 0: all SMs. timed:
    events around the parts of a call (`seconds`). Raises InputError for what does not fit together or what GPUs do not compute
    (docs/gpu.md)."""

    def __init__(
        self,
        workspace: DeviceWorkspace,
        weights: RankWeights | Sequence[RankWeights],
        options: LayerOptions,
        *,
        gpu: int = 0,
        sms: int = 0,
        timed: bool = False,
    ) -> None:
        need_cuda_part()
        of_ranks = [weights] if isinstance(weights, RankWeights) else list(weights)
        self.workspace = workspace
        self.options = options
        self.gpu = gpu
        self._core = _core.RankDeviceLayer(workspace._core, gpu, [rank._core for rank in of_ranks], options, sms, timed)
        self.shape: LayerShape = of_ranks[0].shape
        self._begun: Any = None

    def begin(
        self, hidden: Any, ids: Any = None, weights: Any = None, *, step: Step, tokens: Any = None, stream: int | None = None
    ) -> None:
        """First part of a call; see forward. With ways whose host waits for counts (normal, elastic with cpu_sync) every GPU of
        this process begins before one of them ends."""
        with telling(self._core, stream):
            ranks = lend_inputs(hidden, ids, weights, tokens)
            on = current_stream(of_ranks(hidden)[0]) if stream is None else stream
        self._core.begin(ranks, step, on)
        self._begun = (hidden, ids, weights, tokens)  # alive until the call has ended

    def end(self, out: Any, *, stream: int | None = None) -> None:
        """Second part: experts and outputs."""
        with telling(self._core, stream):
            outputs = of_ranks(out)
            lent, on = [lend(of_rank) for of_rank in outputs], current_stream(outputs[0]) if stream is None else stream
        self._core.end(lent, on)
        self._begun = None

    def forward(
        self,
        hidden: Any,
        ids: Any = None,
        weights: Any = None,
        out: Any = None,
        *,
        step: Step,
        tokens: Any = None,
        stream: int | None = None,
    ) -> Any:
        """Tokens through the layer, queued on a stream; every rank calls, also without tokens. Returns out.

        hidden: bfloat16 [T, H] of a rank (with tensor_parallel the whole batch); ids: int32 [T, k], -1: no expert; weights: float32
        [T, k]; out: bfloat16 [T, H], None: a new array. All in C order on this layer's device, hidden and out 16-byte aligned. With
        several ranks a GPU each of them is a list, by rank. Neither ids nor weights: the layer's own router chooses, on the GPU, with
        the host's ids and weights bit for bit (InputError where the checkpoint has none). step: the same on all ranks.

        tokens: int32 [1] on the device, the number of tokens that count, so that a captured graph is replayed with another one.
        None: all of hidden's, fixed when captured. stream: a cudaStream_t as a number; None: the current one of hidden's
        framework; a new array is of this stream's memory. The call may be captured in a graph (ways other than normal and elastic
        with cpu_sync); nothing is allocated but `out`, if it is not given, and with overflow="split" where hidden is larger than
        ever before, a table of numbers.

        Raises InputError before a launch: then the other ranks, unless a graph is being captured, find a FaultError that names this
        one, and all that go on call DeviceWorkspace.reset before the next call. Faults are found when the stream has been waited
        for: throw_if_failed. One thread at a time makes calls of a GPU.
        """
        with telling(self._core, stream):
            if out is None:
                several = isinstance(hidden, list | tuple)
                out = [new_output(rank, stream) for rank in hidden] if several else new_output(hidden, stream)
            inputs = lend_inputs(hidden, ids, weights, tokens)
            outputs = [lend(of_rank) for of_rank in of_ranks(out)]
            on = current_stream(of_ranks(hidden)[0]) if stream is None else stream
        self._core.forward(inputs, outputs, step, on)
        return out

    __call__ = forward

    def explain(self, step: Step) -> str:
        """Which way a call of this step goes, and why: times of the candidates and who says so. Changes nothing."""
        return self._core.explain(step)

    def throw_if_failed(self) -> None:
        """Once the stream has been waited for: raises the FaultError of a rank that gave up, or Error where experts met a count
        that cannot be."""
        self._core.throw_if_failed()

    @property
    def seconds(self) -> DeviceSeconds:
        """With timed, of the last call, which must have run and not have been captured."""
        return self._core.seconds

    @property
    def weight_bytes(self) -> int:
        """Of device memory, of all local ranks."""
        return self._core.weight_bytes

    @property
    def buffer_bytes(self) -> int:
        """Of device memory beside weights, heap and exchange."""
        return self._core.buffer_bytes


class DeviceExperts:
    """The experts of one rank on one GPU, without an exchange: heddle.Experts, with arrays in the GPU's memory. Calls queue kernels
    on a stream and return; they allocate nothing but `out`, if it is not given, and may be captured in a graph. Counts and ids are
    read when the kernels run: with other values a captured call computes other rows. All memory is taken here.

    weights: in host memory, read here and not needed later. device: as the process numbers it; most_rows: pairs of a row and an
    expert in a call; most_tokens and topk: of routed calls (0: there are none). Raises InputError for what does not fit together
    or what GPUs do not compute (docs/gpu.md)."""

    def __init__(
        self,
        weights: RankWeights,
        options: ExpertOptions | None = None,
        *,
        device: int = 0,
        most_rows: int,
        most_tokens: int = 0,
        topk: int = 0,
    ) -> None:
        need_cuda_part()
        self.options = options if options is not None else ExpertOptions()
        self.device, self.most_rows, self.most_tokens, self.topk = device, most_rows, most_tokens, topk
        self._core = _core.RankDeviceExperts(weights._core, self.options, device, most_rows, most_tokens, topk)

    def contiguous(
        self,
        rows: Any,
        begins: Any,
        counts: Any,
        row_weights: Any = None,
        out: Any = None,
        *,
        expected_rows: int = 0,
        stream: int | None = None,
    ) -> Any:
        """heddle.Experts.contiguous; rows and out 16-byte aligned, scales of a multiple of 4 bytes a row. The runs must lie in
        rows: they are not looked at before. expected_rows: of an expert (0: most_rows spread evenly), picks the kernel and changes
        no bit. stream: a cudaStream_t as a number; None: the current one of rows' framework. Returns out."""
        (values, scales), out, stream = self._call(rows, out, stream)
        lent = lend(values), lend(scales), lend(begins), lend(counts), lend(row_weights), lend(out)
        self._core.contiguous(*lent, expected_rows, stream)
        return out

    def masked(
        self,
        rows: Any,
        counts: Any,
        row_weights: Any = None,
        out: Any = None,
        *,
        expected_rows: int = 0,
        stream: int | None = None,
    ) -> Any:
        """heddle.Experts.masked, likewise. Rows beyond the counts may be read, and are not written."""
        (values, scales), out, stream = self._call(rows, out, stream)
        lent = lend(values), lend(scales), lend(counts), lend(row_weights), lend(out)
        self._core.masked(*lent, expected_rows, stream)
        return out

    def routed(
        self,
        rows: Any,
        local_ids: Any,
        weights: Any,
        out: Any = None,
        *,
        expected_rows: int = 0,
        stream: int | None = None,
    ) -> Any:
        """heddle.Experts.routed, likewise, of at most most_tokens tokens with topk choices."""
        (values, scales), out, stream = self._call(rows, out, stream)
        lent = lend(values), lend(scales), lend(local_ids), lend(weights), lend(out)
        self._core.routed(*lent, expected_rows, stream)
        return out

    @staticmethod
    def _call(rows: Any, out: Any, stream: int | None) -> tuple[tuple[Any, Any], Any, int]:
        values, scales = parts_of(rows, out)
        if out is None:
            out = new_output(values, stream)
        return (values, scales), out, current_stream(values) if stream is None else stream

    def throw_if_failed(self) -> None:
        """Once the stream has been waited for: raises Error where a call met a count that did not fit."""
        self._core.throw_if_failed()

    @property
    def weight_bytes(self) -> int:
        """Of device memory."""
        return self._core.weight_bytes

    @property
    def buffer_bytes(self) -> int:
        """Of device memory beside the weights."""
        return self._core.buffer_bytes
