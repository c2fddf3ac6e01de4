"""What the runner asks of the command: layers, batches and the options they are run with."""

from dataclasses import dataclass, field

import numpy as np

from layers import LayerSpec

EXCHANGES = ("gather", "normal", "low_latency", "elastic home", "elastic rank", "one_sided")
ALL_WAYS = (*EXCHANGES, "mega")  # which takes neither weights at the combine nor a quantised wire back
SLOT_WAYS = ("low_latency", "elastic home", "mega")  # their output does not depend on the number of ranks
RANKS = (1, 2, 3, 8)


@dataclass
class Study:
    """One layer and batch through several ways and rank counts; every run is checked, those that must agree bit for bit."""

    name: str
    layer: str
    tokens: int = 24
    topk: int = 3  # 0: the layer's router chooses
    ways: tuple = ALL_WAYS
    ranks: tuple = RANKS
    options: dict = field(default_factory=dict)  # fields of oracle.Options that differ from the command's defaults
    flags: tuple = ()  # passed as they are, beyond what `options` becomes
    same: tuple = ()  # more flags, a tuple each, that must not change a bit
    split: str = "even"  # even: no tokens_per_rank; gaps: zeros among them; one: all tokens on the last rank
    absent: float = 0.1
    ids_dtype: type = np.int32
    special: str = None  # "infinite" or "nan": one such value in the fourth token; "hot": every token to the first experts


DEEPSEEK_V3 = {"topk": 4, "score": "sigmoid", "bias": True, "groups": 4, "topk_groups": 2, "route_scale": 2.5}
DEEPSEEK_V4 = {"topk": 4, "score": "sqrtsoftplus", "bias": True, "route_scale": 1.5}
MIXTRAL = {"topk": 2, "score": "softmax", "renormalise": True}
QWEN = {"topk": 4, "score": "softmax", "renormalise": False}

LAYERS = [
    LayerSpec("hf-bf16", "hf", "bf16", 512, 192, 10, form="file", config=False),
    LayerSpec("hf-fp8", "hf", "fp8_block", 640, 320, 12, form="index", prefix="model.layers.17."),
    LayerSpec("v3", "hf", "fp8_block", 384, 128, 16, shared="fp8_block", router=DEEPSEEK_V3, form="folder_sharded"),
    LayerSpec("v3-f32-router", "hf", "fp8_block", 256, 128, 16, router=DEEPSEEK_V3 | {"weight_dtype": "float32"}, config=False),
    LayerSpec("qwen", "qwen", "bf16", 256, 192, 24, shared="bf16", shared_gate=True, router=QWEN, form="folder"),
    LayerSpec("mixtral", "mixtral", "bf16", 320, 256, 8, router=MIXTRAL, form="folder"),
    LayerSpec(
        "v4-i8",
        "v4",
        "mxfp4",
        512,
        256,
        20,
        shared="fp8_block",
        block_scale="ue8m0",
        router=DEEPSEEK_V4,
        clamp=2.5,
        form="folder_sharded",
        prefix="layers.3.",
        packed_dtype="int8",
        byte_scale_dtype="e8m0",
    ),
    LayerSpec("v4-u8", "v4", "mxfp4", 256, 192, 9, form="file", prefix="", config=False),
    LayerSpec("v4-f4", "v4", "mxfp4", 320, 128, 6, shared="bf16", form="folder", packed_dtype="F4", byte_scale_dtype="e8m0"),
    LayerSpec("v4-fp8-e8m0", "v4", "fp8_block", 384, 192, 6, shared="mxfp4", form="folder", block_scale="ue8m0"),
    LayerSpec("v4-fp8-f32", "v4", "fp8_block", 320, 192, 6, form="file"),
    LayerSpec("nvfp4", "hf", "nvfp4", 384, 192, 8, shared="nvfp4", form="folder"),
    LayerSpec("nvfp4-bf16-shared", "hf", "nvfp4", 256, 128, 8, shared="bf16", scalar_shape=(1,)),
    LayerSpec("nvfp4-packed", "hf", "nvfp4_packed", 320, 192, 8, scalar_shape=(1,), form="index"),
    LayerSpec("mxfp8-u8", "hf", "mxfp8", 384, 192, 8, shared="mxfp8"),
    LayerSpec("mxfp8-e8m0", "hf", "mxfp8", 256, 192, 8, byte_scale_dtype="e8m0", form="folder"),
    LayerSpec("fused", "fused", "bf16", 256, 192, 8),
    LayerSpec("fused-transposed", "fused_transposed", "bf16", 256, 192, 8, form="folder"),
    LayerSpec("two-layers", "hf", "bf16", 256, 128, 5, neighbour=True, form="folder"),
    LayerSpec("wide-2880", "v4", "mxfp4", 2880, 128, 4, prefix="layers.0."),
    LayerSpec("wide-5120", "hf", "fp8_block", 5120, 192, 4),
]

STUDIES = [
    # Every way, on several kinds.
    Study("bf16", "hf-bf16", split="gaps"),
    Study("fp8 blocks", "hf-fp8", tokens=40, topk=4, same=(("--wire", "bf16"), ("--wire", "fp8"))),
    Study("mxfp4, short group", "v4-u8", split="gaps", ids_dtype=np.int64, same=(("--processes",),), ranks=(1, 3)),
    Study("mxfp4, router, shared fp8", "v4-i8", topk=0, tokens=30),
    Study("nvfp4, shared", "nvfp4", ranks=(1, 3)),
    Study("mxfp8, shared", "mxfp8-u8", ranks=(1, 3)),
    # Options, through every way.
    Study("bf16 activations", "hf-fp8", options={"activation": "bf16"}, ranks=(1, 3)),
    Study("group 32, f32 scales", "hf-fp8", options={"group": 32, "scale": "f32"}, ranks=(3,)),
    Study("weight at combine", "v4-u8", options={"weight_at": "combine"}, ways=EXCHANGES, ranks=(1, 3)),
    Study("weight at combine, bf16", "hf-bf16", options={"weight_at": "combine"}, ways=EXCHANGES, ranks=(3,)),
    Study("nvfp4 wire", "hf-fp8", options={"wire": "nvfp4"}, ranks=(1, 3)),
    Study("fp8 combine", "hf-fp8", options={"combine_wire": "fp8"}, ways=EXCHANGES, ranks=(1, 3)),
    Study("nvfp4 combine", "v4-u8", options={"combine_wire": "nvfp4"}, ways=EXCHANGES, ranks=(1, 3)),
    Study("fp8 combine, weight there", "hf-fp8", options={"combine_wire": "fp8", "weight_at": "combine"}, ways=EXCHANGES, ranks=(3,)),
    Study("both wires nvfp4, bf16 act.", "hf-bf16", options={"wire": "nvfp4", "combine_wire": "nvfp4"}, ways=EXCHANGES, ranks=(2,)),
    # Options, through one way of each sum.
    Study("group 32", "v4-u8", options={"group": 32}, ways=("gather", "low_latency"), ranks=(2,)),
    Study("f32 scales", "hf-fp8", options={"scale": "f32"}, ways=("normal", "low_latency"), ranks=(2,)),
    Study("fp8 on bf16 weights", "hf-bf16", options={"activation": "fp8"}, ways=("gather", "low_latency"), ranks=(3,)),
    Study("fp8 wire, bf16 act.", "hf-bf16", options={"wire": "fp8"}, ways=("gather", "low_latency"), ranks=(2,)),
    Study("clamp by flag", "hf-fp8", options={"clamp": 1.5}, ways=("gather", "low_latency"), ranks=(2,)),
    Study(
        "clamp none by flag",
        "v4-i8",
        options={"clamp": None},
        flags=("--clamp", "none"),
        ways=("gather", "elastic home"),
        ranks=(2,),
    ),
    Study("clamp in the file, by flag", "v4-i8", options={"clamp": 0.75}, ways=("normal",), ranks=(2,)),
    # Routers, shared experts, namings.
    Study("DeepSeek-V3 router", "v3", topk=0, tokens=40, ways=("gather", "low_latency", "one_sided"), ranks=(1, 8)),
    Study(
        "router by flags",
        "v3-f32-router",
        topk=0,
        tokens=40,
        ways=("normal", "elastic home"),
        ranks=(2,),
        flags=("--topk", "4", "--score", "sigmoid", "--groups", "4", "--topk-groups", "2", "--route-scale", "2.5", "--renormalise"),
    ),
    Study("Qwen, gated shared", "qwen", topk=0, tokens=33, ways=("gather", "low_latency"), ranks=(1, 3)),
    Study("Mixtral router", "mixtral", topk=0, tokens=33, ways=("gather", "low_latency", "elastic rank"), ranks=(2,)),
    Study("ids beside a router", "mixtral", ways=("gather",), ranks=(2,)),
    Study("F4, shared bf16", "v4-f4", ways=("gather", "low_latency"), ranks=(1, 3)),
    Study("V4 fp8 e8m0, shared mxfp4", "v4-fp8-e8m0", ways=("gather", "low_latency"), ranks=(2,)),
    Study("V4 fp8 f32", "v4-fp8-f32", ways=("gather", "low_latency"), ranks=(2,)),
    Study("nvfp4, shared bf16", "nvfp4-bf16-shared", ways=("gather", "low_latency"), ranks=(2,)),
    Study("nvfp4 packed", "nvfp4-packed", ways=("gather", "low_latency"), ranks=(2,)),
    Study("mxfp8 e8m0", "mxfp8-e8m0", ways=("gather", "low_latency"), ranks=(2,)),
    Study("fused", "fused", ways=("gather", "low_latency"), ranks=(2,)),
    Study("fused, transposed", "fused-transposed", ways=("gather", "low_latency"), ranks=(2,)),
    Study("layer index", "two-layers", ways=("gather",), ranks=(2,), flags=("--layer-index", "3")),
    # Shapes of batches.
    Study("all tokens on one rank", "hf-bf16", split="one", ranks=(3,)),
    Study("all to the first experts", "hf-fp8", special="hot", absent=0.0, tokens=32, ranks=(3, 8)),
    Study("most choices absent", "v4-u8", absent=0.8, ranks=(3,)),
    Study("more ranks than tokens", "v4-u8", tokens=5, ranks=(8,)),
    Study("more ranks than experts", "two-layers", tokens=16, ranks=(8,), flags=("--layer-index", "3")),
    Study("every expert chosen", "mxfp8-e8m0", topk=8, tokens=9, absent=0.0, ranks=(3,)),
    Study("one choice", "hf-fp8", topk=1, tokens=9, ways=("normal", "low_latency"), ranks=(3,)),
    Study("no tokens at all", "hf-bf16", tokens=0, ranks=(2,)),
    Study("an infinity", "hf-fp8", special="infinite", ranks=(2,)),
    Study("a NaN", "v4-u8", special="nan", ranks=(2,)),
    Study("a NaN, bf16", "hf-bf16", special="nan", ranks=(2,)),
    Study("hidden 2880", "wide-2880", tokens=6, topk=2, ranks=(3,)),
    Study("hidden 5120", "wide-5120", tokens=6, topk=2, ranks=(3,)),
    # Choices that must not change a bit.
    Study("runner routed", "v4-u8", ways=("gather", "one_sided"), ranks=(3,), same=(("--runner", "routed"),)),
    Study("runner contiguous", "v4-u8", ways=("normal", "elastic home"), ranks=(3,), same=(("--runner", "contiguous"),)),
    Study("runner masked", "v4-u8", ways=("low_latency",), ranks=(3,), same=(("--runner", "masked"),)),
    Study("cap just enough", "hf-bf16", tokens=24, ranks=(3,), same=(("--cap", "8"), ("--deadline-ms", "60000"))),
]

# Another name of a way, and the way whose bits it must give.
ALIASES = [
    ("none", "gather"),
    ("deepep_v2", "elastic rank"),
    ("flashinfer", "one_sided"),
    ("pplx", "low_latency"),
    ("mooncake", "low_latency"),
    ("nixl", "low_latency"),
    ("megamoe", "mega"),
    ("flashinfer_megamoe", "mega"),
]
