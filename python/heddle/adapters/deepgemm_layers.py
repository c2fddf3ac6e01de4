"""The layers behind one buffer of DeepGEMM's mega MoE: on the host engine, or on a GPU."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from heddle import _core
from heddle.adapters.trips import meeting_of
from heddle.device import DeviceLayer, DeviceWorkspace
from heddle.layer import MoeLayer, Workspace
from heddle.options import LayerOptions, Step
from heddle.source import RankWeights

Arrays = tuple[Any, Any, Any]
"""hidden bfloat16 [T, H], ids int32 [T, k], weights float32 [T, k]."""


class Layers(ABC):
    """Made by the first call with their weights and options, which all ranks make alike. Those of equal options share a
    workspace."""

    _layer: type[MoeLayer] | type[DeviceLayer]

    def __init__(self, group: _core.Group) -> None:
        self._group = group
        self._workspaces: dict[float | None, Any] = {}  # by clamp, in which options differ
        self._layers: dict[tuple[Any, ...], tuple[Any, Any]] = {}

    @abstractmethod
    def _workspace(self, weights: RankWeights, options: LayerOptions) -> Any: ...

    @abstractmethod
    def reset(self, live: Sequence[bool] | None) -> None:
        """Collective of those that go on."""

    def call(
        self, key: tuple[Any, ...], kept: Any, load: Callable[[], RankWeights], options: LayerOptions, given: Arrays, out: Any
    ) -> None:
        """kept: what must live as long as the key. Collective."""
        if key not in self._layers:
            weights = load()
            if options.clamp not in self._workspaces:
                self._workspaces[options.clamp] = self._workspace(weights, options)
            self._layers[key] = kept, self._layer(self._workspaces[options.clamp], weights, options)
        self._workspaces[options.clamp].throw_if_aborted()
        self._layers[key][1].forward(*given, out, step=Step(options.cap))

    def clear(self) -> None:
        self._layers, self._workspaces = {}, {}


class HostLayers(Layers):
    """Layers are made anew after a fault: ranks may have had different ones."""

    _layer = MoeLayer

    def __init__(self, group: _core.Group) -> None:
        super().__init__(group)
        self._meeting = meeting_of(group)

    def _workspace(self, weights: RankWeights, options: LayerOptions) -> Workspace:
        return Workspace(self._group, [(weights, options)])

    def reset(self, live: Sequence[bool] | None) -> None:
        self._meeting.reset(live)
        self.clear()


class DeviceLayers(Layers):
    """On one GPU: calls are queued on the current stream, but for the first of a layer, which lays its weights out and is not
    captured. A fault of a call is raised by a later one. Those that go on after it have the same layers."""

    _layer = DeviceLayer

    def __init__(self, group: _core.Group, device: int) -> None:
        super().__init__(group)
        self._device = device

    def _workspace(self, weights: RankWeights, options: LayerOptions) -> DeviceWorkspace:
        group = self._group if self._group.ranks > 1 else None
        return DeviceWorkspace([(weights, options)], group=group, devices=[self._device], deadline=self._group.deadline)

    def reset(self, live: Sequence[bool] | None) -> None:
        for workspace in self._workspaces.values():
            workspace.reset(live)
