"""The layers behind one buffer of DeepGEMM's mega MoE: on the host engine, or on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from heddle import _core
from heddle.device import DeviceLayer, DeviceWorkspace
from heddle.exchange import Exchange, ExchangeOptions
from heddle.layer import MoeLayer, Workspace
from heddle.options import LayerOptions, Step
from heddle.source import RankWeights

Arrays = tuple[Any, Any, Any]
"""hidden bfloat16 [T, H], ids int32 [T, k], weights float32 [T, k]."""


class HostLayers:
    """Made by the first call with their weights and options, which all ranks make alike. Those of equal options share a
    workspace."""

    def __init__(self, group: _core.Group) -> None:
        self._group = group
        # By a small exchange ranks can meet again after a fault, however far each had come.
        self._meeting = Exchange(group, ExchangeOptions(hidden=64, experts=group.ranks, topk=1, cap=1))
        self._workspaces: dict[float | None, Workspace] = {}  # by clamp, in which options differ
        self._layers: dict[tuple[Any, ...], tuple[Any, MoeLayer]] = {}

    def call(
        self, key: tuple[Any, ...], kept: Any, load: Callable[[], RankWeights], options: LayerOptions, given: Arrays, out: Any
    ) -> None:
        """kept: what must live as long as the key. Collective."""
        if key not in self._layers:
            weights = load()
            if options.clamp not in self._workspaces:
                self._workspaces[options.clamp] = Workspace(self._group, [(weights, options)])
            self._layers[key] = kept, MoeLayer(self._workspaces[options.clamp], weights, options)
        self._layers[key][1].forward(*given, out, step=Step(options.cap))

    def clear(self) -> None:
        self._layers, self._workspaces = {}, {}

    def reset(self, live: Sequence[bool] | None) -> None:
        """Collective of those that go on. Layers are made anew: ranks may have had different ones."""
        self._meeting.reset(live)
        self.clear()


class DeviceLayers:
    """The same on one GPU: calls are queued on the current stream. A fault of a call is raised by a later one."""

    def __init__(self, group: _core.Group, device: int) -> None:
        self._group, self._device = group, device
        self._workspaces: dict[float | None, DeviceWorkspace] = {}
        self._layers: dict[tuple[Any, ...], tuple[Any, DeviceLayer]] = {}

    def call(
        self, key: tuple[Any, ...], kept: Any, load: Callable[[], RankWeights], options: LayerOptions, given: Arrays, out: Any
    ) -> None:
        """As HostLayers.call. The first call of a layer lays its weights out and is not captured."""
        if key not in self._layers:
            weights = load()
            if options.clamp not in self._workspaces:
                group = self._group if self._group.ranks > 1 else None
                self._workspaces[options.clamp] = DeviceWorkspace(
                    [(weights, options)], group=group, devices=[self._device], deadline=self._group.deadline
                )
            self._layers[key] = kept, DeviceLayer(self._workspaces[options.clamp], weights, options)
        self._workspaces[options.clamp].throw_if_aborted()
        self._layers[key][1].forward(*given, out, step=Step(options.cap))

    def clear(self) -> None:
        self._layers, self._workspaces = {}, {}

    def reset(self, live: Sequence[bool] | None) -> None:
        """Collective of those that go on, which have the same layers."""
        for workspace in self._workspaces.values():
            workspace.reset(live)
