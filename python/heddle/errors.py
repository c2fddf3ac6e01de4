"""What the library raises; each message says what happened, where, with which numbers, and what would be right."""

from __future__ import annotations


class Error(Exception):
    """Any error of this library."""


class InputError(Error, ValueError):
    """Bad arguments, arrays or files. Nothing was computed; ranks that had begun a call of a layer are told and raise
    FaultError."""


class FaultError(Error, RuntimeError):
    """A run-time fault: a deadline passed, or a rank refused its input, died or gave up. After it the ranks that go on call
    Workspace.reset.

    rank: the one that gave up. peer: the one that it was waiting for, None where no single rank is meant. phase and word: the
    step of the protocol and what was waited for. expected and seen: the numbers of that word.
    """

    rank: int
    peer: int | None
    phase: str
    word: str
    expected: int
    seen: int
