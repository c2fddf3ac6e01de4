"""Arrays of the systems that adapters stand in for: NumPy's and torch's in host memory, checked, and results of the same kind."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy

from heddle.errors import InputError

# Element types that NumPy does not have: as ml_dtypes calls them, and what torch and NumPy both have of the same size.
_EXTENDED: dict[str, Any] = {"bfloat16": (ml_dtypes.bfloat16, "int16"), "float8_e4m3fn": (ml_dtypes.float8_e4m3fn, "uint8")}

Size = int | str
"""Of one dimension: a number, or a word for one of any size."""


def _torch() -> Any:
    return sys.modules.get("torch")


def _of_torch(tensor: Any, name: str) -> Any:
    if tensor.device.type != "cpu":
        raise InputError(
            f"{name}: expected host memory, got {tensor.device}: this part of the adapters is of the host engine; "
            "docs/adapters.md says which take tensors of a GPU"
        )
    element = str(tensor.dtype).removeprefix("torch.")
    if element not in _EXTENDED:
        return tensor.detach().numpy()
    kind, alias = _EXTENDED[element]
    return tensor.detach().view(getattr(_torch(), alias)).numpy().view(kind)


def is_on_gpu(array: Any) -> bool:
    return getattr(getattr(array, "device", None), "type", "cpu") == "cuda"


def gpu_of(tensor: Any) -> int:
    """The number of the GPU that it lies on, as this process counts them."""
    return int(tensor.device.index or 0)


def in_host_memory(array: Any) -> Any:
    """The array, or a copy of what lies on a GPU."""
    return array.detach().cpu() if is_on_gpu(array) else array


def numpy_of(array: Any, name: str) -> Any:
    """The same memory as a NumPy array. Raises InputError for memory of a GPU, TypeError for what is no array."""
    if isinstance(array, numpy.ndarray):
        return array
    if _torch() is not None and isinstance(array, _torch().Tensor):
        return _of_torch(array, name)
    raise TypeError(f"{name}: expected a NumPy array or a torch tensor, got {type(array).__name__}")


def lend(array: Any, name: str, elements: str | Sequence[str], shape: Sequence[Size]) -> Any:
    """numpy_of, with the element types and sizes that it must have."""
    allowed = [elements] if isinstance(elements, str) else list(elements)
    lent = numpy_of(array, name)
    fits = len(lent.shape) == len(shape) and all(isinstance(of, str) or size == of for size, of in zip(lent.shape, shape))
    if lent.dtype.name not in allowed or not fits:
        wanted = ", ".join(str(size) for size in shape)
        raise InputError(f"{name}: expected {' or '.join(allowed)} [{wanted}], got {lent.dtype.name} {list(lent.shape)}")
    return lent


def lend_writable(array: Any, name: str, elements: str, shape: Sequence[Size]) -> Any:
    """lend, for what a call adds to."""
    lent = lend(array, name, elements, shape)
    if not lent.flags.writeable:
        raise InputError(f"{name}: expected memory that can be written to, got a read-only array")
    return lent


def like(array: Any, kind: Any) -> Any:
    """A NumPy array's memory as an array of kind's kind."""
    if isinstance(kind, numpy.ndarray):
        return array
    for element, (of, alias) in _EXTENDED.items():
        if array.dtype == of:
            return _torch().from_numpy(array.view(alias)).view(getattr(_torch(), element))
    return _torch().from_numpy(array)
