"""Arrays and streams of GPUs: how what a framework has is lent for a call, on which stream, and what comes back is its own again."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from heddle import _core
from heddle.arrays import empty_like
from heddle.errors import Error, InputError


def is_built() -> bool:
    """Was this package built with the CUDA part?"""
    return hasattr(_core, "DeviceContext")


def gpus_present() -> int:
    """GPUs that this process sees; 0 without the CUDA part."""
    return _core.gpus_present() if is_built() else 0


def need_cuda_part() -> None:
    if not is_built():
        raise Error("this package was built without the CUDA part: nvcc 13 was not found when it was installed (docs/python.md)")


_CUDA = 2  # DLPack's number of it


def _is_cupy(array: Any) -> bool:
    return type(array).__module__.partition(".")[0] == "cupy"


def _is_torch(array: Any) -> bool:
    return "torch" in sys.modules and isinstance(array, sys.modules["torch"].Tensor)


def current_stream(array: Any) -> int:
    """The cudaStream_t on which the array's framework queues its work now: torch's or CuPy's current stream."""
    if _is_torch(array):
        return int(sys.modules["torch"].cuda.current_stream(array.device).cuda_stream)
    if _is_cupy(array):
        return int(sys.modules["cupy"].cuda.get_current_stream().ptr)
    raise InputError(f"no current stream is known of a {type(array).__name__}: give stream=, a cudaStream_t as a number")


def new_output(hidden: Any, stream: int | None) -> Any:
    """Memory for outputs that are written on a stream, None: the current one. It comes from that stream's own, since memory of another
    one may still be used by work that is queued there."""
    if stream is None or (_is_torch(hidden) and not hidden.is_cuda):  # what is in host memory is refused when it is lent
        return empty_like(hidden, "out")
    if _is_torch(hidden):
        cuda = sys.modules["torch"].cuda
        with cuda.stream(cuda.ExternalStream(stream, device=hidden.device)):
            return empty_like(hidden, "out")
    if _is_cupy(hidden):
        with sys.modules["cupy"].cuda.ExternalStream(stream):
            return empty_like(hidden, "out")
    raise InputError(f"how memory of a stream is made is not known of a {type(hidden).__name__}: give out=")


def lend(array: Any) -> Any:
    """By DLPack, without waiting for anything (-1): the stream's order is the caller's. torch's tensors are lent by the module itself,
    whichever device is the current one, and what is in host memory is refused there."""
    if _is_torch(array) or not hasattr(array, "__dlpack_device__"):
        return array
    return array.__dlpack__(stream=-1) if array.__dlpack_device__()[0] == _CUDA else array


def of_ranks(given: Any) -> list[Any]:
    return list(given) if isinstance(given, list | tuple) else [given]


def lend_inputs(hidden: Any, ids: Any, weights: Any, tokens: Any) -> list[tuple[Any, ...]]:
    """(hidden, ids, weights, tokens) of each rank that lives on a GPU; what is None stays so."""
    ranks = of_ranks(hidden)
    inputs = [ranks, *([None] * len(ranks) if given is None else of_ranks(given) for given in (ids, weights))]
    counts = [None] * len(inputs[0]) if tokens is None else of_ranks(tokens)
    if len({len(inputs[0]), len(inputs[1]), len(inputs[2]), len(counts)}) != 1:
        raise InputError("hidden, ids, weights and tokens are of different numbers of ranks")
    return [tuple(None if given is None else lend(given) for given in four) for four in zip(*inputs, counts, strict=True)]


@contextmanager
def telling(core: Any, stream: int | None) -> Iterator[None]:
    """What is found wrong here, before a call is begun, is told to the other ranks, as what is found in it."""
    try:
        yield
    except Exception:
        core.refuse(stream if stream is not None else 0)
        raise


def as_kind(view: Any, kind: Any) -> Any:
    """Memory of a GPU that the library lends, as an array of kind's framework. Nothing is waited for."""
    if _is_torch(kind):
        return sys.modules["torch"].utils.dlpack.from_dlpack(view.__dlpack__())
    if _is_cupy(kind):
        return sys.modules["cupy"].from_dlpack(view)
    return view
