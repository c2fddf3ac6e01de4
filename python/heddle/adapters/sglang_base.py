"""SGLang's words for dispatchers: its own where it is loaded, stand-ins of the same names and values where it is not."""

from __future__ import annotations

import itertools
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import Enum
from typing import Any

HOME = "sglang.srt.layers.moe"


def _loaded(module: str, name: str, own: Any) -> Any:
    """SGLang's class of that name, if the module is in this process."""
    return getattr(sys.modules.get(f"{HOME}.{module}"), name, own)


class _DispatchOutputFormat(Enum):
    STANDARD = "standard"
    DEEPEP_NORMAL = "deepep_normal"
    DEEPEP_LL = "deepep_ll"

    def is_standard(self) -> bool:
        return self.value == "standard"

    def is_deepep_normal(self) -> bool:
        return self.value == "deepep_normal"

    def is_deepep_ll(self) -> bool:
        return self.value == "deepep_ll"

    def is_deepep(self) -> bool:
        return self.is_deepep_normal() or self.is_deepep_ll()


class _CombineInputFormat(Enum):
    STANDARD = "standard"
    DEEPEP_NORMAL = "deepep_normal"
    DEEPEP_LL = "deepep_ll"


class _DeepEPMode(Enum):
    NORMAL = "normal"
    LOW_LATENCY = "low_latency"
    AUTO = "auto"

    def enable_normal(self) -> bool:
        return self.value != "low_latency"

    def enable_low_latency(self) -> bool:
        return self.value != "normal"

    def resolve(self, is_extend_in_batch: bool) -> _DeepEPMode:
        if self.value != "auto":
            return self
        return _DeepEPMode.NORMAL if is_extend_in_batch else _DeepEPMode.LOW_LATENCY

    def is_normal(self) -> bool:
        return self.value == "normal"

    def is_low_latency(self) -> bool:
        return self.value == "low_latency"

    def is_auto(self) -> bool:
        return self.value == "auto"


class RemovableHook:
    """What registering a hook returns."""

    def __init__(self, hooks: dict[int, Callable[..., Any]], number: int) -> None:
        self._hooks, self._number = hooks, number

    def remove(self) -> None:
        self._hooks.pop(self._number, None)


class _BaseDispatcher(ABC):
    """Hooks around dispatch and combine: each may return what goes on instead of what it was given, or None."""

    def __init__(self) -> None:
        self.quant_config: dict[str, Any] = {}
        self.runner_backend: Any = None
        self.overlap_args: Any = None
        self.meta_overlap_args: dict[str, Any] | None = None
        self._hooks: dict[str, dict[int, Callable[..., Any]]] = {}
        self._numbers = itertools.count()

    @abstractmethod
    def dispatch(self, hidden_states: Any, topk_output: Any) -> Any: ...

    @abstractmethod
    def combine(self, combine_input: Any) -> Any: ...

    def _passed(self, moment: str, *given: Any) -> tuple[Any, ...]:
        for hook in list(self._hooks.get(moment, {}).values()):
            result = hook(self, *given)
            if result is not None:
                given = result if len(given) > 1 else (result,)
        return given

    def _register(self, moment: str, hook: Callable[..., Any]) -> RemovableHook:
        if not self._hooks:
            plain_dispatch, plain_combine = self.dispatch, self.combine

            def dispatch(hidden_states: Any, topk_output: Any) -> Any:
                given = self._passed("pre_dispatch", hidden_states, topk_output)
                return self._passed("post_dispatch", plain_dispatch(*given))[0]

            def combine(combine_input: Any) -> Any:
                return self._passed("post_combine", plain_combine(*self._passed("pre_combine", combine_input)))[0]

            setattr(self, "dispatch", dispatch)
            setattr(self, "combine", combine)
        hooks, number = self._hooks.setdefault(moment, {}), next(self._numbers)
        hooks[number] = hook
        return RemovableHook(hooks, number)

    def register_pre_dispatch_hook(self, hook: Callable[..., Any]) -> RemovableHook:
        return self._register("pre_dispatch", hook)

    def register_post_dispatch_hook(self, hook: Callable[..., Any]) -> RemovableHook:
        return self._register("post_dispatch", hook)

    def register_pre_combine_hook(self, hook: Callable[..., Any]) -> RemovableHook:
        return self._register("pre_combine", hook)

    def register_post_combine_hook(self, hook: Callable[..., Any]) -> RemovableHook:
        return self._register("post_combine", hook)

    def set_quant_config(self, quant_config: dict[str, Any]) -> None:
        self.quant_config = quant_config

    def set_overlap_args(self, combine_overlap_args: Any, meta_overlap_args: dict[str, Any]) -> None:
        self.overlap_args, self.meta_overlap_args = combine_overlap_args, meta_overlap_args

    def clear_overlap_args(self) -> None:
        self.overlap_args, self.meta_overlap_args = None, None


BaseDispatcher: Any = _loaded("token_dispatcher.base", "BaseDispatcher", _BaseDispatcher)
DispatchOutputFormat: Any = _loaded("token_dispatcher.base", "DispatchOutputFormat", _DispatchOutputFormat)
CombineInputFormat: Any = _loaded("token_dispatcher.base", "CombineInputFormat", _CombineInputFormat)
DeepEPMode: Any = _loaded("utils", "DeepEPMode", _DeepEPMode)
