"""The experts of vLLM's modular kernel: Heddle's runners over the weights that vLLM hands to every call."""

from __future__ import annotations

import sys
from typing import Any

from heddle.adapters.vllm_base import (
    HOME,
    FusedMoEActivationFormat,
    FusedMoEExpertsModular,
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNoOP,
)
from heddle.adapters.vllm_runners import DeviceRunner, HostRunner, Weights
from heddle.device import is_built
from heddle.errors import InputError

Shapes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def quantises(quant_config: Any) -> bool:
    """Do the experts take fp8 rows with a scale of 128 columns? False: bfloat16. Raises InputError for other formats."""
    kind = getattr(quant_config, "quant_dtype", None)
    if kind is None:
        return False
    block = list(getattr(quant_config, "block_shape", None) or ())
    if str(kind).removeprefix("torch.") != "float8_e4m3fn" or block != [128, 128]:
        raise InputError(f"quant_config: expected no quantisation, or float8_e4m3fn in blocks [128, 128], got {kind} in {block}")
    return True


class _Experts(FusedMoEExpertsModular):
    """What the two kinds have in common. One object a layer; the weights of its last call are kept as they were lent."""

    def __init__(
        self, moe_config: Any, quant_config: Any, max_num_tokens: int | None = None, num_dispatchers: int | None = None
    ) -> None:
        super().__init__(moe_config, quant_config, max_num_tokens, num_dispatchers)
        for name in ("w1_bias", "w2_bias"):
            if getattr(quant_config, name, None) is not None:
                raise InputError(f"quant_config.{name}: expected None, experts have no biases here")
        self._is_fp8 = quantises(quant_config)
        self._made: tuple[Weights, HostRunner | DeviceRunner] | None = None

    @staticmethod
    def _supports_current_device() -> bool:
        """A CPU, or a Hopper GPU where the package was built for it."""
        platform = getattr(sys.modules.get("vllm.platforms"), "current_platform", None)
        if platform is None or platform.is_cpu():
            return True
        return is_built() and bool(platform.is_cuda() and platform.is_device_capability_family(90))

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        """None, or fp8 in blocks of 128."""
        if weight_key is None and activation_key is None:
            return True
        keys = sys.modules.get(f"{HOME.rpartition('.')[0]}.quantization.utils.quant_utils")
        known = getattr(keys, "kFp8Static128BlockSym", None), getattr(keys, "kFp8Dynamic128Sym", None)
        return keys is not None and (weight_key, activation_key) == known

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return bool(getattr(activation, "value", activation) == "silu")

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return True

    @staticmethod
    def _supports_shape(hidden_dim: int) -> bool:
        return hidden_dim % 64 == 0

    def _clamp(self) -> float | None:
        limit = getattr(self.quant_config, "gemm1_clamp_limit", None)
        return limit if limit is not None else getattr(self.moe_config, "swiglu_limit", None)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Weights that a GPU has laid out are read again by the next call."""
        self._made = None

    def _runner(self, w1: Any, w2: Any, activation: Any) -> HostRunner | DeviceRunner:
        """Over w1 [E, 2 D, H], gate before up, and w2 [E, H, D]. Made once for weights in one place, which are kept."""
        if not self._supports_activation(activation):
            raise InputError(f"activation: expected silu, got {getattr(activation, 'value', activation)}")
        if self._made is None or (_place(self._made[0].w1), _place(self._made[0].w2)) != (_place(w1), _place(w2)):
            scales = (self.quant_config.w1_scale, self.quant_config.w2_scale) if self._is_fp8 else None
            weights = Weights(w1, w2, scales, self._clamp())
            self._made = weights, DeviceRunner(weights) if weights.is_on_gpu else HostRunner(weights)
        return self._made[1]


def _place(array: Any) -> tuple[Any, ...]:
    """Where an array's memory begins, and its sizes."""
    begin = array.data_ptr() if hasattr(array, "data_ptr") else array.__array_interface__["data"][0]
    return begin, *array.shape


class HeddleExperts(_Experts):
    """Rows once a rank to weighted sums over this rank's experts, by the routed runner."""

    @staticmethod
    def activation_format() -> Any:
        return FusedMoEActivationFormat.Standard

    def finalize_weight_and_reduce_impl(self) -> Any:
        return TopKWeightAndReduceNoOP()

    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: Any,
        activation: Any,
    ) -> Shapes:
        """No workspaces: runners have their own."""
        return (0,), (0,), (M, K)

    def apply(
        self,
        output: Any,
        hidden_states: Any,
        w1: Any,
        w2: Any,
        topk_weights: Any,
        topk_ids: Any,
        activation: Any,
        global_num_experts: int,
        expert_map: Any,
        a1q_scale: Any,
        a2_scale: Any,
        workspace13: Any,
        workspace2: Any,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        """hidden_states bfloat16 [M, H], or float8_e4m3fn with a1q_scale float32 [M, H / 128]; topk_ids [M, k] over all experts and
        expert_map int32 [all experts], -1: not local; None: all are. output: bfloat16 [M, H], times topk_weights float32 [M, k]
        unless those were applied on the input."""
        weights = None if apply_router_weight_on_input else topk_weights
        runner = self._runner(w1, w2, activation)
        runner.routed(hidden_states, a1q_scale, topk_ids, weights, expert_map, output)


class HeddleBatchedExperts(_Experts):
    """Blocks of rows by expert to results without weights, by the masked runner. max_num_tokens: of a rank; num_dispatchers: the
    ranks."""

    @staticmethod
    def activation_format() -> Any:
        return FusedMoEActivationFormat.BatchedExperts

    def finalize_weight_and_reduce_impl(self) -> Any:
        return TopKWeightAndReduceDelegate()

    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: Any,
        activation: Any,
    ) -> Shapes:
        """No workspaces: runners have their own."""
        if self.max_num_tokens is None or self.num_dispatchers is None:
            raise InputError(
                f"expected max_num_tokens and num_dispatchers, got {self.max_num_tokens} and {self.num_dispatchers}"
            )
        return (0,), (0,), (local_num_experts, self.max_num_tokens * self.num_dispatchers, K)

    def apply(
        self,
        output: Any,
        hidden_states: Any,
        w1: Any,
        w2: Any,
        topk_weights: Any,
        topk_ids: Any,
        activation: Any,
        global_num_experts: int,
        expert_map: Any,
        a1q_scale: Any,
        a2_scale: Any,
        workspace13: Any,
        workspace2: Any,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        """hidden_states bfloat16 [local experts, B, H], or float8_e4m3fn with a1q_scale float32 [local experts, B, H / 128], of
        which the first expert_tokens_meta.expert_num_tokens (int32 [local experts]) are real. output: bfloat16 [local experts, B,
        H], written there."""
        if expert_tokens_meta is None:
            raise InputError("expert_tokens_meta: expected the rows of each expert, got None")
        counts, runner = expert_tokens_meta.expert_num_tokens, self._runner(w1, w2, activation)
        runner.masked(hidden_states, a1q_scale, counts, int(topk_ids.shape[1]), output)
