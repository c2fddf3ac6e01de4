"""Arrays as they come: what they must offer, and outputs like them."""

from __future__ import annotations

import sys
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
    if (library := type(array).__module__.partition(".")[0]) in ("numpy", "cupy"):
        return sys.modules[library].empty_like(array)
    if not isinstance(array, Array):
        raise TypeError(f"expected an array with __dlpack__, got {type(array).__name__}")
    raise InputError(
        f"no way is known to make outputs like a {type(array).__name__}: give {name}=, an array of the same shape and dtype"
    )


def as_bytes(array: Any) -> Any:
    """The same memory as uint8 where elements are of one byte: what is lent of types that DLPack does not know."""
    if str(getattr(array, "dtype", "")).removeprefix("torch.") in ("float8_e4m3fn", "float8_e8m0fnu", "int8"):
        torch = sys.modules.get("torch")
        return array.view(torch.uint8 if torch is not None and isinstance(array, torch.Tensor) else "uint8")
    return array


def view_as(array: Any, element: str) -> Any:
    """The same memory as elements of a type by its name, one of torch's or NumPy's and ml_dtypes'; the last dimension follows."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        kind = getattr(torch, element)
        if not array.is_contiguous():
            return array.view(kind)
        # Flat first: of a single column, or of no row, torch looks at a stride that means nothing.
        *before, last = array.shape
        return array.reshape(-1).view(kind).reshape(*before, last * array.element_size() // kind.itemsize)
    import ml_dtypes

    return array.view(getattr(ml_dtypes, element, element))
