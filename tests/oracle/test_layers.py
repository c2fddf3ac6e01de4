"""What layers.py writes, read back with the safetensors package: names, types and shapes of docs/files.md."""

import one_thread  # noqa: F401, first: before NumPy

import json
import re
import tempfile
import unittest
from pathlib import Path

import numpy as np
from safetensors import deserialize

from cases import LAYERS
from command import read_tensors
from layers import F4, LayerSpec, batch_tensors, random_batch, save_layer, save_tensors

H, D = 256, 192
TABLE = [  # spec, {suffix of expert 1's up or gate: (type, shape)}
    (LayerSpec("bf16", "hf", "bf16"), {"up_proj.weight": ("BF16", [D, H])}),
    (LayerSpec("fp8", "hf", "fp8_block"), {"up_proj.weight": ("F8_E4M3", [D, H]), "up_proj.weight_scale_inv": ("F32", [2, 2])}),
    (LayerSpec("mixtral", "mixtral", "bf16"), {"w1.weight": ("BF16", [D, H]), "w2.weight": ("BF16", [H, D])}),
    (LayerSpec("i8", "v4", "mxfp4", packed_dtype="int8"), {"w3.weight": ("I8", [D, H // 2]), "w3.scale": ("U8", [D, H // 32])}),
    (
        LayerSpec("f4", "v4", "mxfp4", packed_dtype="F4", byte_scale_dtype="e8m0"),
        {"w3.weight": ("F4", [D, H]), "w3.scale": ("F8_E8M0", [D, H // 32])},
    ),
    (
        LayerSpec("v4-fp8", "v4", "fp8_block", block_scale="ue8m0"),
        {"w1.weight": ("F8_E4M3", [D, H]), "w1.scale": ("F8_E8M0", [2, 2])},
    ),
    (
        LayerSpec("nvfp4", "hf", "nvfp4"),
        {
            "up_proj.weight": ("U8", [D, H // 2]),
            "up_proj.weight_scale": ("F8_E4M3", [D, H // 16]),
            "up_proj.weight_scale_2": ("F32", []),
        },
    ),
    (
        LayerSpec("packed", "hf", "nvfp4_packed", scalar_shape=(1,)),
        {"up_proj.weight_packed": ("U8", [D, H // 2]), "up_proj.weight_global_scale": ("F32", [1])},
    ),
    (LayerSpec("mxfp8", "hf", "mxfp8"), {"up_proj.weight": ("F8_E4M3", [D, H]), "up_proj.weight_scale": ("U8", [D, H // 32])}),
]


def contents(path):
    return {name: (view["dtype"], list(view["shape"])) for name, view in deserialize(Path(path).read_bytes())}


class Files(unittest.TestCase):
    def setUp(self):
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.random = np.random.default_rng(3)

    def test_names_types_and_shapes(self):
        for spec, expected in TABLE:
            spec.hidden, spec.intermediate, spec.experts = H, D, 2
            found = contents(save_layer(self.random, spec, self.folder).path)
            for suffix, value in expected.items():
                names = [name for name in found if re.search(rf"experts\.1\.{re.escape(suffix)}$", name)]
                self.assertEqual([found[name] for name in names], [value], f"{spec.name}: {suffix}")

    def test_fused_layouts(self):
        for naming, up, down in (("fused", [8, 2 * D, H], [8, H, D]), ("fused_transposed", [8, H, 2 * D], [8, D, H])):
            found = contents(save_layer(self.random, LayerSpec(naming, naming, "bf16", H, D), self.folder).path)
            self.assertEqual(found["model.layers.3.mlp.experts.gate_up_proj"], ("BF16", up))
            self.assertEqual(found["model.layers.3.mlp.experts.down_proj"], ("BF16", down))

    def test_shards_and_index_agree(self):
        spec = next(spec for spec in LAYERS if spec.form == "folder_sharded")
        folder = save_layer(self.random, spec, self.folder).path
        where = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        found = {file: contents(folder / file).keys() for file in set(where.values())}
        self.assertEqual(len(found), 3)
        self.assertEqual({name: file for file, names in found.items() for name in names}, where)

    def test_bytes_survive(self):
        packed = np.arange(8, dtype=np.uint8).reshape(2, 4)
        save_tensors({"a": F4(packed), "b": np.float32(3.0), "c": np.arange(6, dtype=np.int32).reshape(3, 2).T}, self.folder / "x")
        found = read_tensors(self.folder / "x")
        self.assertEqual((found["a"][0], found["a"][1].tolist()), ("F4", list(range(8))))
        self.assertEqual((found["b"][1].shape, float(found["b"][1])), ((), 3.0))
        self.assertEqual(found["c"][1].tolist(), [[0, 2, 4], [1, 3, 5]])

    def test_batches(self):
        layer = save_layer(self.random, LayerSpec("b", "hf", "bf16", H, D), self.folder).layer
        batch = random_batch(self.random, layer, 30, 4, tokens_per_rank=[10, 0, 20])
        save_tensors(batch_tensors(batch, np.int64), self.folder / "batch")
        types = {name: value[0] for name, value in contents(self.folder / "batch").items()}
        self.assertEqual(types, {"hidden_states": "BF16", "topk_ids": "I64", "topk_weights": "F32", "tokens_per_rank": "I32"})
        for row in batch.ids:
            chosen = row[row >= 0]
            self.assertEqual(len(set(chosen)), len(chosen))
        self.assertTrue((batch.ids[1] == -1).all() and (batch.ids >= 0).mean() > 0.7)


if __name__ == "__main__":
    unittest.main()
