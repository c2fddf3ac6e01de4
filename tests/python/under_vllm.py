"""A process in which vLLM's modular kernel is loaded from its own files, and nothing else of vLLM: test_vllm.py starts it."""

import enum
import importlib.util
import sys
import types
from pathlib import Path

HOME = "vllm.model_executor.layers.fused_moe"


def stand_in(name, **contents):
    """A module of that name, its parents with it."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        parent = ".".join(parts[:end])
        if parent not in sys.modules:
            sys.modules[parent] = types.ModuleType(parent)
            sys.modules[parent].__path__ = []
        if end > 1:
            setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], sys.modules[parent])
    sys.modules[name].__dict__.update(contents)


def load(folder, name):
    """vLLM's own."""
    stand_in(f"{HOME}.{name}")
    spec = importlib.util.spec_from_file_location(f"{HOME}.{name}", Path(folder) / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    setattr(sys.modules[HOME], name, module)
    spec.loader.exec_module(module)
    return module


def load_kernel(folder):
    class Platform:
        device_name = "cpu"

        def __getattr__(self, name):
            return lambda *_: name == "is_cpu"

    def nothing(*_, **__):
        return None

    stand_in("vllm.envs", VLLM_BATCH_INVARIANT=False)
    stand_in("vllm._custom_ops")
    stand_in("vllm.logger", init_logger=lambda name: None)
    stand_in("vllm.platforms", current_platform=Platform())
    stand_in("vllm.utils.torch_utils", PIN_MEMORY=False)
    stand_in("vllm.v1.worker.workspace", current_workspace_manager=nothing)
    stand_in(
        "vllm.v1.worker.ubatching",
        dbo_enabled=lambda: False,
        dbo_maybe_run_recv_hook=nothing,
        dbo_register_recv_hook=nothing,
        dbo_yield=nothing,
    )
    stand_in("vllm.model_executor.layers.quantization.utils.quant_utils", QuantKey=object)
    config = ("FusedMoEConfig", "FusedMoEParallelConfig", "FusedMoEQuantConfig", "RoutingMethodType")
    stand_in(f"{HOME}.config", **dict.fromkeys(config, object))
    stand_in(f"{HOME}.routed_experts_capturer", RoutedExpertsSink=object)
    order = enum.IntEnum("SharedExpertsOrder", ["MK_INTERNAL_OVERLAPPED"])
    stand_in(f"{HOME}.runner.shared_experts", SharedExperts=object, SharedExpertsOrder=order)
    stand_in(f"{HOME}.utils", _resize_cache=lambda memory, shape: memory.flatten()[: _product(shape)].view(*shape))
    stand_in(f"{HOME}.experts.fused_humming_moe", HummingIndexedExperts=type("HummingIndexedExperts", (), {}))
    load(folder, "activation")
    load(folder, "moe_output")
    kernel = load(folder, "modular_kernel")
    load(folder, "topk_weight_and_reduce")
    return kernel


def _product(shape):
    result = 1
    for size in shape:
        result *= size
    return result


def main(folder):
    modular = load_kernel(folder)

    import adapted
    import heddle
    import numpy as np
    from heddle.adapters import vllm
    from heddle.adapters.deepep import Buffer

    silu = sys.modules[f"{HOME}.activation"].MoEActivation.SILU
    assert issubclass(vllm.HeddlePrepareAndFinalize, modular.FusedMoEPrepareAndFinalizeModular)
    assert issubclass(vllm.HeddleBatchedExperts, modular.FusedMoEExpertsModular)
    for experts in (vllm.HeddleExperts, vllm.HeddleBatchedExperts):
        model = types.SimpleNamespace(is_act_and_mul=True, activation=silu, moe_parallel_config=None, routing_method=None)
        model.__dict__.update(has_hash_routing=False, require_decomposed_backend=False, router_logits_dtype=None)
        model.__dict__.update(hidden_dim=adapted.HIDDEN, is_lora_enabled=False)
        assert experts.is_supported_config(experts, model, None, None, experts.activation_format()) == (True, None)

    quant = dict.fromkeys(("gemm1_clamp_limit", "gemm1_alpha", "gemm1_beta", "quant_dtype", "a2_scale", "w1_bias", "w2_bias"))
    limits = ("swiglu_limit", "swiglu_alpha", "swiglu_beta", "activation_situ_beta", "activation_situ_linear_beta")
    configs = {
        "moe_config": types.SimpleNamespace(**dict.fromkeys(limits), moe_parallel_config=None),
        "quant_config": types.SimpleNamespace(**quant),
    }
    layer, most = adapted.Layer(0), 16

    def rank_main(group):
        buffer, ranks, local = Buffer(group), group.ranks, adapted.EXPERTS // group.ranks
        first = group.rank * local
        here = slice(first, first + local)
        w1 = adapted.to("torch", np.concatenate([layer.gate[here], layer.up[here]], axis=1))
        w2 = adapted.to("torch", layer.down[here])
        places = np.full(adapted.EXPERTS, -1, np.int32)
        places[here] = np.arange(local)
        kernels = (
            modular.FusedMoEKernel(
                vllm.HeddlePrepareAndFinalize(buffer, ranks, 1, first), vllm.HeddleExperts(**configs)
            ),
            modular.FusedMoEKernel(
                vllm.HeddleBatchedPrepareAndFinalize(buffer, most, ranks),
                vllm.HeddleBatchedExperts(**configs, max_num_tokens=most, num_dispatchers=ranks),
            ),
        )
        for step, base in enumerate((9, 3)):
            for kernel in kernels:
                batch = adapted.Batch(group.rank, adapted.tokens_of(group.rank, ranks, base), step)
                hidden, ids, weights = batch.given("torch")
                out = kernel.apply(
                    hidden, w1, w2, weights, ids, silu, adapted.EXPERTS, adapted.to("torch", places), False
                )
                adapted.check(Same(), layer, batch, out)

    for ranks in (1, 2, 4):
        heddle.run_threads(ranks, rank_main, deadline=20)


class Same:
    """What check() asks of a test."""

    @staticmethod
    def assertEqual(left, right):
        assert left == right, (left, right)

    @staticmethod
    def assertLess(left, right):
        assert left < right, (left, right)
