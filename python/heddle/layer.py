"""The layer on the host engine: workspaces and MoeLayer."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

from heddle import _core
from heddle.arrays import Array, empty_like
from heddle.options import LayerOptions, LayerReport, LayerShape, PhaseName, Step
from heddle.source import RankWeights, Source

Layers = Sequence[tuple[RankWeights, LayerOptions]]


def workspace_bytes(layers: Layers) -> int:
    """Bytes of a rank's part of the workspace that these layers share, before anything is allocated."""
    return _core.workspace_bytes([(weights._core, options) for weights, options in layers])


class Workspace:
    """The memory of one context, shared by all layers that use it, one call at a time.

    layers: weights and options of each, the same on all ranks; they are compared. Collective. Raises InputError on every rank where
    ranks disagree or memory does not suffice.
    """

    def __init__(self, group: _core.Group, layers: Layers) -> None:
        self.group = group
        self._core = _core.RankWorkspace(group, [(weights._core, options) for weights, options in layers])

    @property
    def bytes(self) -> int:
        """Of this rank's part."""
        return self._core.bytes

    def throw_if_aborted(self) -> None:
        """Raises the FaultError that another rank has left here, if one has."""
        self._core.throw_if_aborted()

    def reset(self, live: Sequence[bool] | None = None) -> None:
        """After a fault, by every rank that goes on: meets again, without those that are not live (by rank, all ranks alike;
        None: as before). Waits up to three deadlines; one that failed may be repeated."""
        self._core.reset(list(live) if live is not None else None)

    def close(self) -> None:
        """Collective end: gives the memory back. Layers of it take no more calls."""
        self._core.close()

    def __enter__(self) -> Workspace:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:  # after an error other ranks may not come
            self.close()


class MoeLayer:
    """One layer on one rank of the host engine. Layers that share a workspace are called one after the other.

    weights: this rank's, of the workspace's layers. options: the same on all ranks. Raises InputError for what does not fit
    together."""

    def __init__(self, workspace: Workspace, weights: RankWeights, options: LayerOptions) -> None:
        self.workspace = workspace
        self.shape: LayerShape = weights.shape
        self.options = options
        self._core = _core.RankLayer(workspace._core, weights._core, options)
        self._forward = self._core.forward

    @classmethod
    def create(
        cls, group: _core.Group, source: Source, options: LayerOptions, *, placement: Sequence[int] | None = None
    ) -> MoeLayer:
        """A layer with a workspace of its own: loads this rank's weights, meets the others. Collective."""
        weights = source.load(group.rank, group.ranks, placement=placement, options=options)
        return cls(Workspace(group, [(weights, options)]), weights, options)

    def forward(
        self,
        hidden: Array,
        ids: Array | None = None,
        weights: Array | None = None,
        out: Any = None,
        *,
        step: Step | None = None,
        phase: PhaseName = "decode",
    ) -> Any:
        """Tokens through the layer; every rank calls, also without tokens.

        hidden: bfloat16 [T, H], this rank's tokens (with tensor_parallel the whole batch); ids: int32 [T, k], -1: no expert;
        weights: float32 [T, k]; neither: the layer's own router chooses (`routing`); out: bfloat16 [T, H] to write to, None: a new
        array of hidden's kind. All in C order in host memory, read and written where they are. Returns out.

        step: the largest batch of any rank and the phase, the same on all ranks. None: the ranks find it out in an exchange of
        their own, phase being this rank's; then all ranks leave it out.

        Raises InputError before anything is sent (the other ranks raise FaultError), FaultError when a rank does not answer within
        the group's deadline or has given up. After either all live ranks call Workspace.reset before the next call.
        """
        if out is None:  # what is no array is refused by the call itself, which tells the other ranks
            out = empty_like(hidden, "out") if hasattr(hidden, "__dlpack__") else hidden
        self._forward(hidden, ids, weights, out, step, phase)
        return out

    __call__ = forward

    def explain(self, step: Step) -> str:
        """Which way a call of this step goes, and why: times of the candidates and who says so. Changes nothing."""
        return self._core.explain(step)

    @property
    def routing(self) -> tuple[Any, Any]:
        """What the layer's router chose in the last call without ids: ids int32 [T, k] and weights float32 [T, k], NumPy arrays."""
        import numpy

        ids, weights = self._core.routing
        if ids is None:
            return numpy.empty((0, self.shape.topk), numpy.int32), numpy.empty((0, self.shape.topk), numpy.float32)
        return ids.copy(), weights.copy()

    @property
    def report(self) -> LayerReport:
        """What the last call did on this rank: seconds, bytes and rows."""
        return self._core.report
