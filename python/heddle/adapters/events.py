"""Events and hooks of systems that run on streams. The host engine is done when a call returns, so there is nothing to wait for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class EventHandle:
    """A moment on a stream. Always passed."""

    def current_stream_wait(self) -> None:
        """Returns at once."""


class EventOverlap:
    """What calls return for their end; usable as a context as well."""

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[Any, ...] | None = None) -> None:
        self.event = event
        self.extra_tensors = extra_tensors
        self.hook_after_wait: Callable[[], Any] | None = None

    def current_stream_wait(self, release_handle: bool = False) -> Any:
        """Calls the hook that was registered, once, and returns what it returned."""
        hook, self.hook_after_wait = self.hook_after_wait, None
        if release_handle:
            self.event = None
        return hook() if hook is not None else None

    def wait(self) -> Any:
        return self.current_stream_wait()

    def register_hook_after_wait(self, hook_after_wait: Callable[[], Any]) -> None:
        self.hook_after_wait = hook_after_wait

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        return self

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        self.current_stream_wait()


def passed() -> EventOverlap:
    """The end of a call that is over."""
    return EventOverlap(EventHandle())


def nothing_to_receive() -> None:
    """The receiving hook: rows have arrived when the call that returned it did."""
