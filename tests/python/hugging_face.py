"""Tiny models of Hugging Face's transformers with random weights, saved as its users save them: an oracle that somebody else wrote.

Its sparse MoE block computes in float32 here, from the weights that the checkpoint holds and with its own router. Nothing of this
project's oracle is in it."""

import contextlib
import io
import os
from dataclasses import dataclass, field
from pathlib import Path

from support import SEED

import ml_dtypes
import numpy as np

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is fetched
try:
    import torch
    import transformers

    missing = None if int(transformers.__version__.split(".")[0]) >= 5 else f"transformers {transformers.__version__} is older than 5"
except ImportError as error:
    missing = f"no oracle of Hugging Face: {error}"

LAYER = 1  # of two
MODEL = {"vocab_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}


@dataclass
class Model:
    """What is drawn: the name of a configuration of transformers, its sizes, and whether experts are saved fused."""

    config: str
    sizes: dict
    fused: bool = False

    def __str__(self):
        return f"{self.config.removesuffix('Config')}{' fused' if self.fused else ''} {self.sizes}"


@dataclass
class SavedModel:
    """A checkpoint's folder and what transformers computes from it."""

    folder: Path
    hidden: np.ndarray  # bfloat16 [T, H]
    output: np.ndarray  # float32 [T, H]
    choices: list = field(default_factory=list)  # of each token: {expert: weight}


def save(model, folder, tokens):
    """Draws the model and hidden states, and computes with what was saved."""
    torch.manual_seed(SEED)
    config = getattr(transformers, model.config)(**MODEL | model.sizes)
    drawn = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    _draw(_moe_block(drawn))
    with contextlib.redirect_stderr(io.StringIO()):  # bars of progress
        drawn.save_pretrained(folder, save_original_format=not model.fused)
        block = _moe_block(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())
    random = np.random.default_rng([SEED, tokens])
    hidden = random.normal(size=(tokens, config.hidden_size)).astype(ml_dtypes.bfloat16)
    with torch.no_grad():
        states = torch.from_numpy(hidden.astype(np.float32))
        _, weights, ids = block.gate(states)
        output = block(states[None])[0].numpy()
    choices = [dict(zip(*pair, strict=True)) for pair in zip(ids.tolist(), weights.tolist(), strict=True)]
    return SavedModel(Path(folder), hidden, output, choices)


def _moe_block(model):
    """The one of layer LAYER."""
    layer = model.model.layers[LAYER]
    return next(part for part in layer.modules() if hasattr(part, "gate") and hasattr(part, "experts"))


def _draw(block):
    """Weights under which outputs are about as large as inputs, and choices of experts are far apart."""
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(0, parameter.shape[-1] ** -0.5)
        for name, buffer in block.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.3)
