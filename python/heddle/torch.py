"""The layer as an operator of PyTorch, for torch.compile and modules. Imported where torch is (2.4 or newer): import
heddle.torch."""

import itertools
import weakref
from typing import Any

import torch

from heddle.device import DeviceLayer
from heddle.errors import InputError
from heddle.layer import MoeLayer
from heddle.options import PhaseName, Step

# Operators take tensors and numbers; a layer goes by its number here, as long as it lives.
_layers: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()
_numbers = itertools.count()


def _number_of(layer: MoeLayer | DeviceLayer) -> int:
    number = next(_numbers)
    _layers[number] = layer
    return number


def _layer_of(number: int) -> Any:
    try:
        return _layers[number]
    except KeyError:
        raise InputError("this operator's layer is gone: keep the MoeModule as long as what was compiled with it") from None


# Not torch.library.custom_op, whose wrapper takes 4 us a call.
_library: Any = torch.library.Library("heddle", "FRAGMENT")
_library.define(
    "moe(Tensor hidden, Tensor ids, Tensor weights, int layer, SymInt? max_tokens, bool prefill) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _run(
    hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, layer: int, max_tokens: int | None, prefill: bool
) -> torch.Tensor:
    phase: PhaseName = "prefill" if prefill else "decode"
    out = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    called = _layer_of(layer)
    if max_tokens is not None:
        called.forward(hidden, ids, weights, out, step=Step(max_tokens, phase))
    elif isinstance(called, MoeLayer):
        called.forward(hidden, ids, weights, out, phase=phase)
    else:
        raise InputError("a layer on GPUs needs the step: its calls do not wait for a host exchange")
    return out


def _describe(
    hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, layer: int, max_tokens: int | None, prefill: bool
) -> torch.Tensor:
    """What _run gives, of tensors without values."""
    torch._check(hidden.dtype == torch.bfloat16, lambda: f"hidden: expected bfloat16 [tokens, hidden], got {hidden.dtype}")
    torch._check(ids.dtype == torch.int32, lambda: f"ids: expected int32 [tokens, topk], got {ids.dtype}")
    torch._check(weights.dtype == torch.float32, lambda: f"weights: expected float32 [tokens, topk], got {weights.dtype}")
    torch._check(
        hidden.dim() == 2 and ids.dim() == 2 and ids.shape == weights.shape and ids.shape[0] == hidden.shape[0],
        lambda: (
            f"hidden {list(hidden.shape)}, ids {list(ids.shape)}, weights {list(weights.shape)}: expected [T, H], [T, k], [T, k]"
        ),
    )
    return torch.empty_like(hidden, memory_format=torch.contiguous_format)


_library.impl("moe", _run, "CompositeExplicitAutograd")
torch.library.register_fake("heddle::moe", _describe, lib=_library)

# The operator heddle::moe: hidden bfloat16 [T, H], ids int32 [T, k], weights float32 [T, k] to a new bfloat16 [T, H], through the layer
# of that number. max_tokens and prefill: the step; None: the ranks find it out (host engine only).
moe = torch.ops.heddle.moe.default


class MoeModule(torch.nn.Module):
    """A MoeLayer (CPU tensors) or DeviceLayer (tensors of its GPU, queued on the current stream) as a module. It has no parameters:
    the weights are the layer's own. No gradients."""

    def __init__(self, layer: MoeLayer | DeviceLayer) -> None:
        super().__init__()
        self.layer = layer
        self._number = _number_of(layer)

    def forward(
        self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, step: Step | None = None, phase: PhaseName = "decode"
    ) -> torch.Tensor:
        """As MoeLayer.forward and DeviceLayer.forward; a new tensor each time. A step that changes from call to call is compiled
        for each of its values, or for any where torch.compile is dynamic."""
        most = None if step is None else step.max_tokens
        prefill = (phase if step is None else step.phase) == "prefill"
        result: torch.Tensor = moe(hidden, ids, weights, self._number, most, prefill)
        return result
