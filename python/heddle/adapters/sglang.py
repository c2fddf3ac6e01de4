"""SGLang's token dispatcher and a fused function (docs/adapters.md).

    from heddle.adapters.sglang import DeepEPDispatcher    # instead of: from sglang.srt.layers.moe.token_dispatcher import ...

DeepEPDispatcher takes rows to their experts by way normal for prompts and low_latency for decode steps; the runner is SGLang's.
With StandardDispatcher and fused_experts a heddle.MoeLayer runs everything. Where SGLang's modules are loaded when this one is
imported, its base class and enumerations are taken; else stand-ins of the same names. Names are those of SGLang 0.5.23."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from heddle.adapters.casts import quantised
from heddle.adapters.deepep import Buffer
from heddle.adapters.places import place_of
from heddle.adapters.sglang_base import BaseDispatcher, CombineInputFormat, DeepEPMode, DispatchOutputFormat, RemovableHook
from heddle.device import DeviceLayer
from heddle.errors import InputError
from heddle.layer import MoeLayer
from heddle.options import Step

MOST_TOKENS_VARIABLE = "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"


class DeepEPNormalDispatchOutput(NamedTuple):
    """Rows once a rank: hidden_states [rows, H], topk_ids local or -1 [rows, k], topk_weights, and rows of each local expert."""

    hidden_states: Any
    hidden_states_scale: Any
    topk_ids: Any
    topk_weights: Any
    num_recv_tokens_per_expert: list[int]

    @property
    def format(self) -> Any:
        return DispatchOutputFormat.DEEPEP_NORMAL


class DeepEPLLDispatchOutput(NamedTuple):
    """Rows by local expert: hidden_states [local experts, C * ranks, H], of which the first masked_m are real; the choices and
    weights are this rank's own tokens'. expected_m: rows that an expert gets on average, at least."""

    hidden_states: Any
    hidden_states_scale: Any
    topk_ids: Any
    topk_weights: Any
    masked_m: Any
    expected_m: int

    @property
    def format(self) -> Any:
        return DispatchOutputFormat.DEEPEP_LL


class DeepEPNormalCombineInput(NamedTuple):
    """Weighted sums of this rank's experts, bfloat16 [rows, H]."""

    hidden_states: Any
    topk_ids: Any
    topk_weights: Any

    @property
    def format(self) -> Any:
        return CombineInputFormat.DEEPEP_NORMAL


class DeepEPLLCombineInput(NamedTuple):
    """Results without weights, bfloat16 [local experts, C * ranks, H], and the choices and weights of dispatch."""

    hidden_states: Any
    topk_ids: Any
    topk_weights: Any

    @property
    def format(self) -> Any:
        return CombineInputFormat.DEEPEP_LL


class StandardDispatchOutput(NamedTuple):
    """This rank's tokens and their choices, as they came."""

    hidden_states: Any
    hidden_states_scale: Any
    topk_output: Any
    hidden_states_pre_quant: Any = None

    @property
    def format(self) -> Any:
        return DispatchOutputFormat.STANDARD


class StandardCombineInput(NamedTuple):
    """Outputs, bfloat16 [T, H]."""

    hidden_states: Any

    @property
    def format(self) -> Any:
        return CombineInputFormat.STANDARD


_buffers: dict[int, Buffer] = {}


def buffer_of(group: Any) -> Buffer:
    """The one buffer that all layers of a group share. Collective when it is made; `forget_buffer` gives it back."""
    if id(group) not in _buffers:  # the buffer keeps the group, so its id stays
        _buffers[id(group)] = Buffer(group, low_latency_mode=True)
    return _buffers[id(group)]


def forget_buffer(group: Any) -> None:
    _buffers.pop(id(group), None)


def _is_prompt_in_batch() -> bool:
    """As SGLang's forward pass says."""
    attention = sys.modules.get("sglang.srt.layers.dp_attention")
    if attention is None:
        raise InputError("deepep_mode auto: expected SGLang to be loaded, which says what a batch is, or is_extend_in_batch=")
    return bool(attention.get_is_extend_in_batch())


class DeepEPDispatcher(BaseDispatcher):
    """One layer's dispatcher on one rank.

    Positional arguments are SGLang's; group: a torch process group or a heddle.Group; permute_fusion, async_finish,
    return_recv_hook and params_dtype are kept and not used. Heddle's own: is_extend_in_batch, called for every dispatch in mode
    auto (None: SGLang's); num_max_dispatch_tokens_per_rank (None: SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK, else 128);
    output_dtype of rows, fp8 with float32 scales of 128 columns; expert_alignment of the counts of prompts.
    """

    def __init__(
        self,
        group: Any,
        router_topk: int,
        permute_fusion: bool = False,
        num_experts: int | None = None,
        num_local_experts: int | None = None,
        hidden_size: int | None = None,
        params_dtype: Any = None,
        deepep_mode: Any = DeepEPMode.AUTO,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        runner_backend: Any = None,
        *,
        is_extend_in_batch: Callable[[], bool] | None = None,
        num_max_dispatch_tokens_per_rank: int | None = None,
        output_dtype: Literal["bf16", "fp8"] = "bf16",
        expert_alignment: int = 1,
    ) -> None:
        super().__init__()
        if num_experts is None or hidden_size is None:
            raise InputError(f"expected num_experts and hidden_size, got {num_experts} and {hidden_size}")
        self.buffer = buffer_of(group)
        if num_local_experts is not None and num_local_experts * self.buffer.group_size != num_experts:
            raise InputError(
                f"num_local_experts: expected {num_experts} / {self.buffer.group_size} of the ranks, got {num_local_experts}"
            )
        if output_dtype not in ("bf16", "fp8"):
            raise InputError(f"output_dtype: expected bf16 or fp8, got {output_dtype}")
        most = num_max_dispatch_tokens_per_rank
        self.group, self.router_topk, self.num_experts, self.hidden_size = group, router_topk, num_experts, hidden_size
        self.deepep_mode, self.runner_backend = deepep_mode, runner_backend
        self.num_max_dispatch_tokens_per_rank = most if most is not None else int(os.environ.get(MOST_TOKENS_VARIABLE, "128"))
        self.is_extend_in_batch = is_extend_in_batch if is_extend_in_batch is not None else _is_prompt_in_batch
        self.use_fp8, self.expert_alignment = output_dtype == "fp8", expert_alignment
        self._taken: Any = None
        self._handle: Any = None
        self._low_latency_handle: Any = None
        self._begin_anew()
        self._dispatch_hooks: dict[int, Callable[[Any], None]] = {}

    def reset(self, live: Sequence[bool] | None = None) -> None:
        """Not SGLang's: after a FaultError, or instead of a combine. Ends the trips of the group's buffer, and so those of all its
        dispatchers, which begin anew with their next dispatch. Collective of the ranks that go on, called for one dispatcher;
        live: as Workspace.reset's."""
        self.buffer.reset(live)
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._stage = "combine"
        self._taken = self._handle = self._low_latency_handle = None

    def _is_ended(self) -> bool:
        """Has a reset ended the trip that this dispatcher waits for?"""
        handle = self._handle if self._handle is not None else self._low_latency_handle
        return handle is not None and handle.trip.over

    def _after(self, before: str, stage: str) -> None:
        if self._stage != before:
            raise InputError(f"{stage}: expected after {before}, got it after {self._stage}")
        self._stage = stage

    def dispatch(self, hidden_states: Any, topk_output: Any) -> Any:
        """hidden_states bfloat16 [T, H] and topk_output with topk_ids int64 or int32 [T, k] (-1: none) and topk_weights float32
        [T, k], to a DeepEPNormalDispatchOutput or a DeepEPLLDispatchOutput. Collective."""
        self.dispatch_a(hidden_states, topk_output)
        for hook in list(self._dispatch_hooks.values()):
            hook(self)
        return self.dispatch_b()

    def dispatch_a(self, hidden_states: Any, topk_output: Any) -> None:
        """The first half; all is done in it."""
        if tuple(topk_output.topk_ids.shape) != (hidden_states.shape[0], self.router_topk):
            expected = [int(hidden_states.shape[0]), self.router_topk]
            raise InputError(f"topk_ids: expected {expected}, got {list(topk_output.topk_ids.shape)}")
        place_of(hidden_states).lend(hidden_states, "hidden_states", "bfloat16", ("tokens", self.hidden_size))
        prompt = self.deepep_mode.is_normal() or (self.deepep_mode.is_auto() and self.is_extend_in_batch())
        if self._is_ended():
            self._begin_anew()
        self._after("combine", "dispatch_a")
        try:
            self._taken = (self._dispatch_prompt if prompt else self._dispatch_decode)(hidden_states, topk_output)
        except Exception:
            self._stage = "combine"
            raise

    def dispatch_b(self) -> Any:
        self._after("dispatch_a", "dispatch")
        taken, self._taken = self._taken, None
        return taken

    def _dispatch_prompt(self, hidden_states: Any, topk_output: Any) -> DeepEPNormalDispatchOutput:
        x = quantised(hidden_states, "hidden_states") if self.use_fp8 else hidden_states
        to_ranks, to_nodes, to_experts, is_there, _ = self.buffer.get_dispatch_layout(topk_output.topk_ids, self.num_experts)
        rows, ids, weights, counts, self._handle, _ = self.buffer.dispatch(
            x,
            num_tokens_per_rank=to_ranks,
            num_tokens_per_rdma_rank=to_nodes,
            is_token_in_rank=is_there,
            num_tokens_per_expert=to_experts,
            topk_idx=topk_output.topk_ids,
            topk_weights=topk_output.topk_weights,
            expert_alignment=self.expert_alignment,
        )
        hidden, scale = rows if isinstance(rows, tuple) else (rows, None)
        return DeepEPNormalDispatchOutput(hidden, scale, ids, weights, counts)

    def _dispatch_decode(self, hidden_states: Any, topk_output: Any) -> DeepEPLLDispatchOutput:
        rows, counts, self._low_latency_handle, _, _ = self.buffer.low_latency_dispatch(
            hidden_states,
            topk_output.topk_ids,
            self.num_max_dispatch_tokens_per_rank,
            self.num_experts,
            use_fp8=self.use_fp8,
        )
        hidden, scale = rows if isinstance(rows, tuple) else (rows, None)
        pairs = int(hidden_states.shape[0]) * self.buffer.group_size * self.router_topk
        expected_m = (pairs + self.num_experts) // self.num_experts
        return DeepEPLLDispatchOutput(hidden, scale, topk_output.topk_ids, topk_output.topk_weights, counts, expected_m)

    def combine(self, combine_input: Any) -> Any:
        """A DeepEPNormalCombineInput or a DeepEPLLCombineInput, as dispatch was, to outputs bfloat16 [T, H]. Collective."""
        self.combine_a(combine_input)
        return self.combine_b()

    def combine_a(self, combine_input: Any) -> None:
        """The first half; all is done in it."""
        hidden_states, topk_ids, topk_weights = combine_input
        given, dispatched = combine_input.format.value, "deepep_normal" if self._handle is not None else "deepep_ll"
        if self._stage == "dispatch" and given != dispatched:
            raise InputError(f"combine_input: expected {dispatched}, as was dispatched, got {given}")
        self._after("dispatch", "combine_a")
        try:
            if self._handle is not None:
                self._taken, _, _ = self.buffer.combine(hidden_states, self._handle)
            else:
                self._taken, _, _ = self.buffer.low_latency_combine(
                    hidden_states, topk_ids, topk_weights, self._low_latency_handle
                )
        except Exception:
            self._stage = "dispatch"
            raise
        self._handle = self._low_latency_handle = None

    def combine_b(self) -> Any:
        self._after("combine_a", "combine")
        taken, self._taken = self._taken, None
        return taken

    def register_deepep_dispatch_hook(self, hook: Callable[[Any], None]) -> RemovableHook:
        """Called with the dispatcher between the halves of dispatch."""
        number = max(self._dispatch_hooks, default=-1) + 1
        self._dispatch_hooks[number] = hook
        return RemovableHook(self._dispatch_hooks, number)


class StandardDispatcher(BaseDispatcher):
    """Hands everything on: for fused_experts, which does the exchange itself."""

    def __init__(self, moe_runner_config: Any = None) -> None:
        super().__init__()
        self.moe_runner_config = moe_runner_config

    def dispatch(self, hidden_states: Any, topk_output: Any) -> StandardDispatchOutput:
        return StandardDispatchOutput(hidden_states, None, topk_output)

    def combine(self, combine_input: Any) -> Any:
        return combine_input.hidden_states


@dataclass
class HeddleMoeQuantInfo:
    """What fused_experts runs: a layer, and the step (None: the ranks find it out, on a GPU it is that of the cap)."""

    layer: MoeLayer | DeviceLayer
    step: Step | None = None


# What a runner_config may ask for: these and nothing else.
_RUN = {"activation": "silu", "is_gated": True, "apply_router_weight_on_input": False, "no_combine": False}


def fused_experts(dispatch_output: Any, quant_info: HeddleMoeQuantInfo, runner_config: Any = None) -> StandardCombineInput:
    """A whole call of quant_info.layer, a MoeLayer or a DeviceLayer: tokens to experts and outputs home. Collective.

    dispatch_output: a StandardDispatchOutput, hidden_states bfloat16 [T, H], topk_output.topk_ids int32 or int64 [T, k], numbers
    over all ranks, topk_weights float32 [T, k]. runner_config: SGLang's; what a layer does not do is an InputError. Its
    routed_scaling_factor is not applied: it belongs into the weights."""
    for name, expected in _RUN.items():
        got = getattr(runner_config, name, expected)
        if got != expected:
            raise InputError(f"runner_config.{name}: expected {expected}, got {got}")
    limit = getattr(runner_config, "swiglu_limit", None)
    clamp = quant_info.layer.options.clamp if quant_info.layer.options.clamp is not None else quant_info.layer.shape.clamp
    if limit is not None and limit != clamp:
        raise InputError(f"runner_config.swiglu_limit: expected the layer's clamp, {clamp}, got {limit}")
    hidden, choice, layer = dispatch_output.hidden_states, dispatch_output.topk_output, quant_info.layer
    place, tokens = place_of(hidden), int(hidden.shape[0])
    ids = place.lend(choice.topk_ids, "topk_ids", ("int64", "int32"), (tokens, layer.shape.topk))
    given = hidden, place.cast(ids, "int32"), choice.topk_weights
    if isinstance(layer, DeviceLayer):
        out = layer.forward(*given, step=quant_info.step if quant_info.step is not None else Step(layer.options.cap))
    else:
        out = layer.forward(*given, step=quant_info.step)
    return StandardCombineInput(out)
