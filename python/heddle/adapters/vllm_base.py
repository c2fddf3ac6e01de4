"""vLLM's words for modular kernels: its own where it is loaded, stand-ins of the same names where it is not."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

HOME = "vllm.model_executor.layers.fused_moe"


def loaded(module: str, name: str, own: Any) -> Any:
    """vLLM's object of that name, if the module is in this process."""
    return getattr(sys.modules.get(f"{HOME}.{module}"), name, own)


class _FusedMoEActivationFormat(Enum):
    Standard = ("standard",)
    BatchedExperts = ("batched_experts",)


@dataclass
class _ExpertTokensMetadata:
    """Rows of each local expert, int32 [local experts]."""

    expert_num_tokens: Any
    expert_num_tokens_cpu: Any
    psum_recv_per_rank: Any = None
    rank_expert_offset: int | None = None


class _TopKWeightAndReduce(ABC):
    @abstractmethod
    def apply(
        self, output: Any, fused_expert_output: Any, topk_weights: Any, topk_ids: Any, apply_router_weight_on_input: bool
    ) -> Any: ...


class _TopKWeightAndReduceDelegate(_TopKWeightAndReduce):
    """Weights and sums are combine's."""

    def apply(
        self, output: Any, fused_expert_output: Any, topk_weights: Any, topk_ids: Any, apply_router_weight_on_input: bool
    ) -> Any:
        raise RuntimeError("weights and sums belong to who combines")


class _TopKWeightAndReduceNoOP(_TopKWeightAndReduce):
    """The experts have weighted and summed."""

    def apply(
        self, output: Any, fused_expert_output: Any, topk_weights: Any, topk_ids: Any, apply_router_weight_on_input: bool
    ) -> Any:
        if output is None or output is fused_expert_output:
            return fused_expert_output
        output[...] = fused_expert_output
        return output


class _FusedMoEPrepareAndFinalizeModular(ABC):
    def post_init_setup(self, fused_experts: Any) -> None:
        return None

    def allocate_fused_expert_output(self, shape: Any, dtype: Any, device: Any, weight_and_reduce_impl: Any) -> Any:
        return None

    def supports_deferred_moe_finalize(self) -> bool:
        return False

    @abstractmethod
    def prepare(
        self,
        a1: Any,
        topk_weights: Any,
        topk_ids: Any,
        num_experts: int,
        expert_map: Any,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool,
    ) -> tuple[Any, ...]: ...

    @abstractmethod
    def finalize(
        self,
        output: Any,
        fused_expert_output: Any,
        topk_weights: Any,
        topk_ids: Any,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> None: ...


class _FusedMoEExpertsModular(ABC):
    post_gemm2_hook: Callable[..., None] | None = None

    def __init__(
        self, moe_config: Any, quant_config: Any, max_num_tokens: int | None = None, num_dispatchers: int | None = None
    ) -> None:
        self.moe_config, self.quant_config = moe_config, quant_config
        self.max_num_tokens, self.num_dispatchers = max_num_tokens, num_dispatchers

    @staticmethod
    def is_monolithic() -> bool:
        return False

    @property
    def expects_unquantized_inputs(self) -> bool:
        return False

    @property
    def a2_scale(self) -> Any:
        return getattr(self.quant_config, "a2_scale", None)

    def workspace_dtype(self, act_dtype: Any) -> Any:
        return act_dtype

    def output_hidden_dim(self, hidden_dim: int) -> int:
        return hidden_dim


FusedMoEActivationFormat: Any = loaded("modular_kernel", "FusedMoEActivationFormat", _FusedMoEActivationFormat)
ExpertTokensMetadata: Any = loaded("modular_kernel", "ExpertTokensMetadata", _ExpertTokensMetadata)
FusedMoEPrepareAndFinalizeModular: Any = loaded(
    "modular_kernel", "FusedMoEPrepareAndFinalizeModular", _FusedMoEPrepareAndFinalizeModular
)
FusedMoEExpertsModular: Any = loaded("modular_kernel", "FusedMoEExpertsModular", _FusedMoEExpertsModular)
TopKWeightAndReduceDelegate: Any = loaded("topk_weight_and_reduce", "TopKWeightAndReduceDelegate", _TopKWeightAndReduceDelegate)
TopKWeightAndReduceNoOP: Any = loaded("topk_weight_and_reduce", "TopKWeightAndReduceNoOP", _TopKWeightAndReduceNoOP)
