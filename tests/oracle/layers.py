"""Random layers and batches, written with the safetensors package under every naming and kind of docs/files.md."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import TensorSpec, serialize_file

from oracle import Batch, Expert, Layer
from router import Router
from weights import E4M3, E8M0, random_weight

# naming: (block, gate, up, down, shared expert's name)
NAMES = {
    "hf": ("mlp.", "gate_proj", "up_proj", "down_proj", "shared_experts"),
    "qwen": ("mlp.", "gate_proj", "up_proj", "down_proj", "shared_expert"),
    "mixtral": ("block_sparse_moe.", "w1", "w3", "w2", None),
    "v4": ("ffn.", "w1", "w3", "w2", "shared_experts"),
    "fused": ("mlp.", None, None, None, None),
    "fused_transposed": ("mlp.", None, None, None, None),
}


@dataclass
class F4:
    """Packed e2m1 bytes [N, K/2] that the file shall call F4 [N, K]."""

    packed: np.ndarray


@dataclass
class LayerSpec:
    name: str
    naming: str
    kind: str
    hidden: int = 256
    intermediate: int = 128
    experts: int = 8
    shared: str = None  # the shared expert's kind
    shared_gate: bool = False
    router: dict = None  # fields of Router, without the tensors; "bias": True adds one
    clamp: float = None
    form: str = "file"  # file, index (three shards), folder (one file), folder_sharded
    config: bool = True
    prefix: str = "model.layers.3."
    block_scale: str = "f32"
    packed_dtype: str = "uint8"  # int8, uint8 or F4, where e2m1 pairs may be called so
    byte_scale_dtype: str = "uint8"  # or e8m0
    scalar_shape: tuple = ()
    neighbour: bool = False  # a second sparse layer in the same file; --layer-index picks
    extra: dict = field(default_factory=dict)  # more entries of config.json


@dataclass
class SavedLayer:
    spec: LayerSpec
    layer: Layer
    path: Path  # what --layer takes


def save_tensors(tensors, path):
    """Writes a dictionary of arrays (ml_dtypes types included) or F4 to a safetensors file."""
    specs = {}
    kept = []
    for name, tensor in tensors.items():
        array = np.array(tensor.packed if isinstance(tensor, F4) else tensor, order="C")  # ascontiguousarray would turn [] into [1]
        kept.append(array)
        dtype = "float4_e2m1fn_x2" if isinstance(tensor, F4) else array.dtype.name
        specs[name] = TensorSpec(dtype=dtype, shape=array.shape, data_ptr=array.ctypes.data, data_len=array.nbytes)
    serialize_file(specs, str(path), metadata={"format": "pt"})


def _random_expert(random, kind, hidden, intermediate, block_scale):
    into = 1.5 / np.sqrt(hidden)
    return Expert(
        gate=random_weight(random, kind, intermediate, hidden, into, block_scale),
        up=random_weight(random, kind, intermediate, hidden, into, block_scale),
        down=random_weight(random, kind, hidden, intermediate, 1.0 / np.sqrt(intermediate), block_scale),
    )


def _random_router(random, spec):
    fields = dict(spec.router)
    bias = random.normal(0, 0.1, spec.experts).astype(np.float32) if fields.pop("bias", False) else None
    weight = random.normal(0, 1 / np.sqrt(spec.hidden), (spec.experts, spec.hidden)).astype(ml_dtypes.bfloat16)
    return Router(weight=weight, bias=bias, **fields)


def random_layer(random, spec):
    experts = [_random_expert(random, spec.kind, spec.hidden, spec.intermediate, spec.block_scale) for _ in range(spec.experts)]
    shared = _random_expert(random, spec.shared, spec.hidden, spec.intermediate, spec.block_scale) if spec.shared else None
    gate = random.normal(0, 1 / np.sqrt(spec.hidden), (1, spec.hidden)).astype(ml_dtypes.bfloat16) if spec.shared_gate else None
    router = _random_router(random, spec) if spec.router else None
    return Layer(spec.hidden, spec.intermediate, experts, shared, gate, router, spec.clamp)


def _as_e8m0_or_bytes(scales, dtype):
    return scales.view(E8M0) if dtype == "e8m0" else scales


def _stored_v4(weight, spec):
    if weight.kind == "mxfp4":
        packed = {"F4": F4, "int8": lambda codes: codes.view(np.int8), "uint8": lambda codes: codes}[spec.packed_dtype](
            weight.codes
        )
        return {".weight": packed, ".scale": _as_e8m0_or_bytes(weight.scales, spec.byte_scale_dtype)}
    if weight.kind == "fp8_block":
        scales = weight.scales.view(E8M0) if weight.scales.dtype == np.uint8 else weight.scales
        return {".weight": weight.codes.view(E4M3), ".scale": scales}
    return {".weight": weight.codes}


def _stored_hf(weight, spec):
    if weight.kind == "fp8_block":
        return {".weight": weight.codes.view(E4M3), ".weight_scale_inv": weight.scales}
    scalar = None if weight.tensor_scale is None else np.full(spec.scalar_shape, weight.tensor_scale, np.float32)
    if weight.kind == "nvfp4":
        return {".weight": weight.codes, ".weight_scale": weight.scales.view(E4M3), ".weight_scale_2": scalar}
    if weight.kind == "nvfp4_packed":
        return {".weight_packed": weight.codes, ".weight_scale": weight.scales.view(E4M3), ".weight_global_scale": scalar}
    if weight.kind == "mxfp8":
        return {".weight": weight.codes.view(E4M3), ".weight_scale": _as_e8m0_or_bytes(weight.scales, spec.byte_scale_dtype)}
    return {".weight": weight.codes}


def _expert_tensors(base, expert, spec):
    stored = _stored_v4 if spec.naming == "v4" else _stored_hf
    _, gate, up, down, _ = NAMES[spec.naming]
    return {
        f"{base}.{name}{suffix}": tensor
        for name, weight in ((gate, expert.gate), (up, expert.up), (down, expert.down))
        for suffix, tensor in stored(weight, spec).items()
    }


def _fused_tensors(block, layer, transposed):
    gate_up = np.stack([np.concatenate([expert.gate.codes, expert.up.codes]) for expert in layer.experts])
    down = np.stack([expert.down.codes for expert in layer.experts])
    if transposed:
        gate_up, down = gate_up.swapaxes(1, 2), down.swapaxes(1, 2)
    return {f"{block}experts.gate_up_proj": gate_up, f"{block}experts.down_proj": down}


def _router_tensors(block, router, naming):
    tensors = {f"{block}gate.weight": router.weight.astype(router.weight_dtype)}
    if router.bias is not None:
        tensors[f"{block}gate.bias" if naming == "v4" else f"{block}gate.e_score_correction_bias"] = router.bias
    return tensors


def layer_tensors(layer, spec, prefix):
    """All tensors of the layer by name."""
    block = prefix + NAMES[spec.naming][0]
    tensors = {}
    if spec.naming.startswith("fused"):
        tensors |= _fused_tensors(block, layer, spec.naming == "fused_transposed")
    else:
        for number, expert in enumerate(layer.experts):
            tensors |= _expert_tensors(f"{block}experts.{number}", expert, spec)
    if layer.shared:
        shared = NAMES[spec.naming][4]
        tensors |= _expert_tensors(f"{block}{shared}", layer.shared, spec)
        if layer.shared_gate is not None:
            tensors[f"{block}{shared}_gate.weight"] = layer.shared_gate
    if layer.router:
        tensors |= _router_tensors(block, layer.router, spec.naming)
    return tensors


def bystanders(random, spec):
    """Tensors of the model that are no part of the layer: norms, attention, a dense layer before it."""
    noise = random.normal(0, 1, (64, spec.hidden)).astype(ml_dtypes.bfloat16)
    tensors = {
        "model.embed_tokens.weight": noise,
        f"{spec.prefix}input_layernorm.weight": noise[0].copy(),
        f"{spec.prefix}self_attn.o_proj.weight": noise.copy(),
    }
    for name in ("gate_proj", "up_proj"):
        tensors[f"model.layers.0.mlp.{name}.weight"] = noise.copy()
    tensors["model.layers.0.mlp.down_proj.weight"] = noise.T.copy()
    return tensors


def config_of(spec, layer):
    """config.json with the keys that public models use."""
    config = {"hidden_size": spec.hidden, "moe_intermediate_size": spec.intermediate}
    if spec.clamp is not None:
        config["swiglu_limit"] = spec.clamp
    if spec.naming == "mixtral":
        config = {"model_type": "mixtral", "hidden_size": spec.hidden, "intermediate_size": spec.intermediate}
        config["num_local_experts"] = spec.experts
    elif spec.naming == "qwen":
        config |= {"model_type": "qwen2_moe", "num_experts": spec.experts, "shared_expert_intermediate_size": spec.intermediate}
    else:
        config |= {"model_type": "deepseek_v4" if spec.naming == "v4" else "deepseek_v3", "n_routed_experts": spec.experts}
    router = layer.router
    if router:
        config["num_experts_per_tok"] = router.topk
        if spec.naming not in ("mixtral", "qwen"):
            config |= {"scoring_func": router.score, "topk_method": "noaux_tc", "routed_scaling_factor": router.route_scale}
        if spec.naming != "mixtral":
            config["norm_topk_prob"] = router.renormalise
        if router.groups > 1:
            config |= {"n_group": router.groups, "topk_group": router.topk_groups}
    return config | spec.extra


def _save_sharded(tensors, folder, shards=3):
    """Shards that split experts in the middle, and their index."""
    names = list(tensors)
    files = [f"model-{shard + 1:05d}-of-{shards:05d}.safetensors" for shard in range(shards)]
    where = {name: files[position * shards // len(names)] for position, name in enumerate(names)}
    for file in files:
        save_tensors({name: tensors[name] for name in names if where[name] == file}, folder / file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": where}))
    return index


def save_layer(random, spec, folder):
    """Draws a layer, writes it below `folder` in the form asked for, and returns it with the path for --layer."""
    layer = random_layer(random, spec)
    folder = Path(folder) / spec.name
    folder.mkdir(parents=True)
    tensors = layer_tensors(layer, spec, spec.prefix)
    if spec.form != "file":
        tensors = bystanders(random, spec) | tensors
    if spec.neighbour:
        tensors |= layer_tensors(random_layer(random, spec), spec, spec.prefix.replace(".3.", ".4."))
    if spec.config:
        (folder / "config.json").write_text(json.dumps(config_of(spec, layer)))
    if spec.form in ("index", "folder_sharded"):
        path = _save_sharded(tensors, folder)
    else:
        path = folder / "model.safetensors"
        save_tensors(tensors, path)
    return SavedLayer(spec, layer, folder if spec.form.startswith("folder") else path)


def random_hidden(random, tokens, hidden):
    """Gaussian rows with a few outlier channels, bf16 [T, H]."""
    values = random.normal(0, 1, (tokens, hidden))
    values[:, random.choice(hidden, 3, replace=False)] *= 8
    return values.astype(ml_dtypes.bfloat16)


def random_batch(random, layer, tokens, topk, tokens_per_rank=None, absent=0.1):
    """A batch with its own routing. About `absent` of the choices are -1 (with junk weights); the second token has none at all."""
    hidden = random_hidden(random, tokens, layer.hidden)
    experts = len(layer.experts)
    ids = np.argsort(random.random((tokens, experts)), axis=1)[:, :topk].astype(np.int32)
    weights = random.uniform(0.05, 1.0, (tokens, topk)).astype(np.float32)
    if absent > 0:
        gone = random.random((tokens, topk)) < absent
        gone[1:2] = True
        ids[gone] = -1
        weights[gone] = 1e30
    return Batch(hidden, ids, weights, tokens_per_rank)


def batch_tensors(batch, ids_dtype=np.int32):
    tensors = {"hidden_states": batch.hidden}
    if batch.ids is not None:
        tensors |= {"topk_ids": batch.ids.astype(ids_dtype), "topk_weights": batch.weights}
    if batch.tokens_per_rank is not None:
        tensors["tokens_per_rank"] = np.asarray(batch.tokens_per_rank, np.int32)
    return tensors
