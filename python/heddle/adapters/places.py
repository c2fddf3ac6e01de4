"""Where the arrays of a call lie, in host memory or on a GPU, and the few things that adapters do to them there: by NumPy, or by
torch, queued on its current stream without a wait unless said so."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy

from heddle.adapters import tensors
from heddle.adapters.tensors import Size, gpu_of, is_on_gpu
from heddle.arrays import view_as
from heddle.errors import InputError


class Place(ABC):
    """Element types are named as torch and NumPy (with ml_dtypes) both name them."""

    gpu: int | None = None
    """The number of the GPU, as this process counts them; None: host memory."""

    @property
    def name(self) -> str:
        return "host memory" if self.gpu is None else f"GPU {self.gpu}"

    @abstractmethod
    def lend(self, array: Any, name: str, elements: str | Sequence[str], shape: Sequence[Size]) -> Any:
        """The same memory, for what follows; raises InputError for another place, element type or shape."""

    @abstractmethod
    def lend_writable(self, array: Any, name: str, elements: str, shape: Sequence[Size]) -> Any:
        """lend, for what a call writes to."""

    @abstractmethod
    def like(self, array: Any, kind: Any) -> Any:
        """An array's memory as an array of kind's kind."""

    @abstractmethod
    def to_host(self, array: Any) -> Any:
        """A copy as NumPy's. Waits for the GPU; not while a graph is captured."""

    @abstractmethod
    def from_host(self, array: Any, kind: Any) -> Any:
        """NumPy's as an array of kind's framework, in this place."""

    @abstractmethod
    def numbers(self, values: Sequence[int], kind: Any) -> Any:
        """int32, of kind's framework, in host memory in either place."""

    @abstractmethod
    def full(self, shape: Sequence[int], value: int, element: str) -> Any: ...

    @abstractmethod
    def empty(self, shape: Sequence[int], element: str) -> Any: ...

    @abstractmethod
    def cast(self, array: Any, element: str) -> Any:
        """In C order; the same memory where it is so already."""

    @abstractmethod
    def powers_of_two(self, codes: Any) -> Any:
        """float32 of ue8m0 bytes in C order."""

    @abstractmethod
    def where(self, condition: Any, chosen: Any, other: Any) -> Any: ...

    @abstractmethod
    def count(self, ids: Any, numbers: int) -> Any:
        """int32 [numbers]: how often each is there, -1 left out."""

    @abstractmethod
    def is_there(self, ids: Any, numbers: int) -> Any:
        """bool [tokens, numbers] of ids [tokens, k]: is it one of the token's?"""

    @abstractmethod
    def check_ids(self, ids: Any, below: int) -> None:
        """Raises InputError for what is not -1 to below - 1, where that can be seen now."""

    def zeros(self, shape: Sequence[int], element: str) -> Any:
        return self.full(shape, 0, element)


class HostPlace(Place):
    """NumPy's arrays and torch's CPU tensors, which lend and like turn into NumPy's and back."""

    def lend(self, array: Any, name: str, elements: str | Sequence[str], shape: Sequence[Size]) -> Any:
        return tensors.lend(array, name, elements, shape)

    def lend_writable(self, array: Any, name: str, elements: str, shape: Sequence[Size]) -> Any:
        return tensors.lend_writable(array, name, elements, shape)

    def like(self, array: Any, kind: Any) -> Any:
        return tensors.like(array, kind)

    def to_host(self, array: Any) -> Any:
        return numpy.array(array)

    def from_host(self, array: Any, kind: Any) -> Any:
        return self.like(array, kind)

    def numbers(self, values: Sequence[int], kind: Any) -> Any:
        return self.like(numpy.array(values, numpy.int32), kind)

    def full(self, shape: Sequence[int], value: int, element: str) -> Any:
        return numpy.full(shape, value, element)

    def empty(self, shape: Sequence[int], element: str) -> Any:
        return numpy.empty(shape, element)

    def cast(self, array: Any, element: str) -> Any:
        return numpy.ascontiguousarray(array, element)

    def powers_of_two(self, codes: Any) -> Any:
        return view_as(codes, "float8_e8m0fnu").astype(numpy.float32)

    def where(self, condition: Any, chosen: Any, other: Any) -> Any:
        return numpy.where(condition, chosen, other)

    def count(self, ids: Any, numbers: int) -> Any:
        return numpy.bincount(ids[ids >= 0], minlength=numbers).astype(numpy.int32)

    def is_there(self, ids: Any, numbers: int) -> Any:
        return (ids[:, :, None] == numpy.arange(numbers)).any(axis=1)

    def check_ids(self, ids: Any, below: int) -> None:
        if ids.size and not (-1 <= ids.min() and ids.max() < below):
            raise InputError(f"topk_idx: expected -1 to {below - 1}, got {ids.min()} to {ids.max()}")


class GpuPlace(Place):
    """torch's tensors of one GPU. Ids are looked at by the kernels of the exchange."""

    def __init__(self, like: Any) -> None:
        self.gpu, self._device = gpu_of(like), like.device

    @property
    def _torch(self) -> Any:
        return sys.modules["torch"]

    def lend(self, array: Any, name: str, elements: str | Sequence[str], shape: Sequence[Size]) -> Any:
        allowed = [elements] if isinstance(elements, str) else list(elements)
        where = getattr(array, "device", None)
        if where != self._device:
            raise InputError(f"{name}: expected a tensor of {self._device}, got {where if where else type(array).__name__}")
        fits = len(array.shape) == len(shape) and all(isinstance(of, str) or size == of for size, of in zip(array.shape, shape))
        element = str(array.dtype).removeprefix("torch.")
        if element not in allowed or not fits:
            wanted = ", ".join(str(size) for size in shape)
            raise InputError(f"{name}: expected {' or '.join(allowed)} [{wanted}], got {element} {list(array.shape)}")
        return array.detach()

    def lend_writable(self, array: Any, name: str, elements: str, shape: Sequence[Size]) -> Any:
        return self.lend(array, name, elements, shape)

    def like(self, array: Any, kind: Any) -> Any:
        return array

    def to_host(self, array: Any) -> Any:
        return array.cpu().numpy().copy()

    def from_host(self, array: Any, kind: Any) -> Any:
        return self._torch.from_numpy(array).to(self._device)

    def numbers(self, values: Sequence[int], kind: Any) -> Any:
        return self._torch.tensor(values, dtype=self._torch.int32)

    def full(self, shape: Sequence[int], value: int, element: str) -> Any:
        return self._torch.full(tuple(shape), value, dtype=getattr(self._torch, element), device=self._device)

    def empty(self, shape: Sequence[int], element: str) -> Any:
        return self._torch.empty(tuple(shape), dtype=getattr(self._torch, element), device=self._device)

    def cast(self, array: Any, element: str) -> Any:
        return array.to(getattr(self._torch, element)).contiguous()

    def powers_of_two(self, codes: Any) -> Any:
        """By their bits, since not every torch casts the type on a GPU. 2^-127 is no scale of rows, and becomes 0."""
        exponents = (self.cast(codes, "int32") << 23).view(self._torch.float32)
        return self._torch.where(codes == 0xFF, float("nan"), exponents)

    def where(self, condition: Any, chosen: Any, other: Any) -> Any:
        return self._torch.where(condition, chosen, other)

    def count(self, ids: Any, numbers: int) -> Any:
        places = (ids.reshape(-1).long() + 1).clamp(0, numbers)  # those of -1 are thrown away
        counts = self.zeros((numbers + 1,), "int32")
        return counts.scatter_add_(0, places, self._torch.ones_like(places, dtype=counts.dtype))[1:]

    def is_there(self, ids: Any, numbers: int) -> Any:
        return (ids[:, :, None] == self._torch.arange(numbers, device=self._device)).any(dim=1)

    def check_ids(self, ids: Any, below: int) -> None:
        """Not here."""


HOST = HostPlace()


def place_of(array: Any) -> Place:
    """By an array, or the values of a pair of values and scales."""
    first = array[0] if isinstance(array, tuple) else array
    return GpuPlace(first) if is_on_gpu(first) else HOST


def as_bytes(array: Any) -> Any:
    """uint8 [.., bytes] of what lies in C order."""
    return view_as(array, "uint8")


def element_of(array: Any) -> str:
    return str(array.dtype).removeprefix("torch.")


def column_major(scales: Any, multiple: int = 1) -> Any:
    """The same values [..., rows, groups], with neighbouring rows beside each other in memory; columns are padded to a multiple of
    `multiple` rows."""
    *before, rows, groups = scales.shape
    memory = place_of(scales).zeros((*before, groups, -(-rows // multiple) * multiple), element_of(scales))
    memory[..., :rows] = scales.swapaxes(-1, -2)
    return memory[..., :rows].swapaxes(-1, -2)
