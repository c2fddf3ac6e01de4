"""Arrays as they come: what they must offer, and outputs like them."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from heddle.errors import InputError


@runtime_checkable
class Array(Protocol):
    """NumPy's, torch's, CuPy's: anything that lends its memory by DLPack (NumPy's bfloat16 is ml_dtypes.bfloat16)."""

    def __dlpack__(self, *, stream: Any = None) -> Any: ...


def empty_like(array: Any, name: str) -> Any:
    """New memory of the same kind, shape, dtype and device. `name`: of the argument that would spare it."""
    if hasattr(array, "new_empty"):  # torch
        return array.new_empty(array.shape)
    if hasattr(array, "__array_namespace__"):  # NumPy 2, CuPy and others
        return array.__array_namespace__().empty_like(array)
    if type(array).__module__ == "numpy":
        import numpy

        return numpy.empty_like(array)
    if not isinstance(array, Array):
        raise TypeError(f"expected an array with __dlpack__, got {type(array).__name__}")
    raise InputError(
        f"no way is known to make outputs like a {type(array).__name__}: give {name}=, an array of the same shape and dtype"
    )
