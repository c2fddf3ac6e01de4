"""Inputs that `heddle run` must refuse: exit status 2, one line on stderr, nothing at --out."""

import json
import shutil
import struct
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from layers import LayerSpec, batch_tensors, layer_tensors, random_batch, random_layer, save_layer, save_tensors

SPEC = LayerSpec("good", "hf", "bf16", 128, 64, 6, config=False)
TOKENS, TOPK = 6, 2


@dataclass
class Refusal:
    name: str
    arguments: list
    about: tuple = ()  # at least one of these words must be in the line; none: any line will do


class Contract:
    """Writes one good layer and batch, and spoils them in every way that the contract names."""

    def __init__(self, random, folder):
        self.random, self.folder = random, folder
        folder.mkdir()
        saved = save_layer(random, SPEC, folder)
        self.layer, self.layer_path = saved.layer, saved.path
        self.tensors = layer_tensors(self.layer, SPEC, SPEC.prefix)
        self.batch = random_batch(random, self.layer, TOKENS, TOPK, absent=0)
        self.batch_path = self.save("batch.safetensors", batch_tensors(self.batch))

    def save(self, name, tensors):
        path = self.folder / name
        save_tensors(tensors, path)
        return path

    def arguments(self, layer=None, batch=None, ranks=2, way="gather", flags=()):
        return ["--layer", layer or self.layer_path, "--batch", batch or self.batch_path, "--ranks", ranks, "--way", way, *flags]

    def with_batch(self, name, **changes):
        """The good batch with tensors replaced, or left out where None."""
        tensors = {key: value for key, value in (batch_tensors(self.batch) | changes).items() if value is not None}
        return self.arguments(batch=self.save(f"batch-{name}.safetensors", tensors))

    def with_layer(self, name, changes):
        tensors = {key: value for key, value in (self.tensors | changes).items() if value is not None}
        return self.arguments(layer=self.save(f"layer-{name}.safetensors", tensors))

    def with_bytes(self, name, content):
        path = self.folder / f"{name}.safetensors"
        path.write_bytes(content)
        return path

    def refusals(self):
        return self.files() + self.batches() + self.layers() + self.flags()

    def files(self):
        layer, batch = self.layer_path.read_bytes(), self.batch_path.read_bytes()
        data = 8 + struct.unpack("<Q", batch[:8])[0]
        header = json.loads(batch[8:data])
        names = [name for name in header if name != "__metadata__"]
        header[names[1]]["data_offsets"] = header[names[0]]["data_offsets"]
        overlapping = json.dumps(header).encode()
        empty_folder = self.folder / "empty"
        empty_folder.mkdir()
        index = self.folder / "lost.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": {name: "lost-00001-of-00001.safetensors" for name in self.tensors}}))
        return [
            Refusal("no such layer", self.arguments(layer=self.folder / "none.safetensors"), ("none.safetensors",)),
            Refusal("no such batch", self.arguments(batch=self.folder / "none.safetensors"), ("none.safetensors",)),
            Refusal("folder without a layer", self.arguments(layer=empty_folder), ("empty",)),
            Refusal("index names a lost shard", self.arguments(layer=index), ("lost",)),
            Refusal("layer cut in its data", self.arguments(layer=self.with_bytes("cut-layer", layer[:-100])), ("cut-layer",)),
            Refusal("layer cut in its header", self.arguments(layer=self.with_bytes("cut-header", layer[:40])), ("cut-header",)),
            Refusal("layer of five bytes", self.arguments(layer=self.with_bytes("five", layer[:5])), ("five",)),
            Refusal("empty layer", self.arguments(layer=self.with_bytes("nothing", b"")), ("nothing",)),
            Refusal("batch cut", self.arguments(batch=self.with_bytes("cut-batch", batch[:-1])), ("cut-batch",)),
            Refusal(
                "huge header", self.arguments(batch=self.with_bytes("huge", struct.pack("<Q", 1 << 60) + batch[8:])), ("huge",)
            ),
            Refusal(
                "header is no JSON", self.arguments(batch=self.with_bytes("noise", batch[:8] + b"?" * (len(batch) - 8))), ("noise",)
            ),
            Refusal(
                "overlapping tensors",
                self.arguments(batch=self.with_bytes("overlap", struct.pack("<Q", len(overlapping)) + overlapping + batch[data:])),
                ("overlap",),
            ),
        ]

    def batches(self):
        ids, weights, hidden = self.batch.ids, self.batch.weights, self.batch.hidden
        too_high, too_low, repeated = ids.copy(), ids.copy(), ids.copy()
        too_high[4, 1], too_low[2, 0] = len(self.layer.experts), -2
        repeated[5] = repeated[5, 0]
        counts = np.array([3, 3], np.int32)
        return [
            Refusal("id beyond the experts", self.with_batch("high", topk_ids=too_high), ("6",)),
            Refusal("id below -1", self.with_batch("low", topk_ids=too_low), ("-2",)),
            Refusal("id repeated in a token", self.with_batch("repeated", topk_ids=repeated), (str(repeated[5, 0]),)),
            Refusal(
                "neither ids nor router", self.with_batch("unrouted", topk_ids=None, topk_weights=None), ("router", "topk_ids")
            ),
            Refusal("ids without weights", self.with_batch("weightless", topk_weights=None), ("topk_weights",)),
            Refusal("weights of another shape", self.with_batch("shape", topk_weights=weights[:, :1].copy()), ("topk_weights",)),
            Refusal("fewer ids than tokens", self.with_batch("few", topk_ids=ids[:3], topk_weights=weights[:3]), ("topk",)),
            Refusal("float ids", self.with_batch("float", topk_ids=ids.astype(np.float32)), ("topk_ids",)),
            Refusal("no hidden states", self.with_batch("headless", hidden_states=None), ("hidden_states",)),
            Refusal("f64 hidden states", self.with_batch("f64", hidden_states=hidden.astype(np.float64)), ("hidden_states",)),
            Refusal("another hidden size", self.with_batch("narrow", hidden_states=hidden[:, :64].copy()), ("64",)),
            Refusal("counts miss a token", self.with_batch("sum", tokens_per_rank=counts - [0, 1]), ("tokens_per_rank",)),
            Refusal("negative count", self.with_batch("negative", tokens_per_rank=counts + [4, -4]), ("tokens_per_rank", "-1")),
            Refusal("counts of other ranks", self.with_batch("three", tokens_per_rank=np.int32([2, 2, 2])), ("tokens_per_rank",)),
        ]

    def layers(self):
        base = f"{SPEC.prefix}mlp.experts"
        up = self.tensors[f"{base}.3.up_proj.weight"]
        return [
            Refusal("expert lacks a matrix", self.with_layer("gap", {f"{base}.3.up_proj.weight": None}), ("3",)),
            Refusal(
                "matrix of another shape", self.with_layer("tall", {f"{base}.3.up_proj.weight": up[:32].copy()}), ("up_proj", "32")
            ),
            Refusal(
                "matrix of another type",
                self.with_layer("int", {f"{base}.3.up_proj.weight": up.view(np.int16)}),
                ("up_proj", "I16"),
            ),
            Refusal("no experts", self.arguments(layer=self.batch_path), ("expert",)),
            self.odd_hidden(),
            self.nan_scale(),
            self.missing_scale(),
            self.fused("square", 128, {}),
            self.fused("biased", 64, {"mlp.experts.gate_up_proj_bias": np.zeros((6, 128), ml_dtypes.bfloat16)}),
            self.router_without_topk(),
        ]

    def of_spec(self, name, spec, change=lambda tensors: None):
        layer = random_layer(self.random, spec)
        tensors = layer_tensors(layer, spec, spec.prefix)
        change(tensors)
        batch = random_batch(self.random, layer, TOKENS, TOPK, absent=0)
        batch_path = self.save(f"{name}-batch.safetensors", batch_tensors(batch))
        return self.arguments(layer=self.save(f"{name}.safetensors", tensors), batch=batch_path)

    def odd_hidden(self):
        return Refusal("hidden size of no 64", self.of_spec("odd", LayerSpec("odd", "hf", "bf16", 160, 64, 4)), ("64",))

    def nan_scale(self):
        def spoil(tensors):
            tensors["ffn.experts.2.w3.scale"][5, 1] = 0xFF

        spec = LayerSpec("nan", "v4", "mxfp4", 128, 64, 4, prefix="")
        return Refusal("mxfp4 scale of NaN", self.of_spec("v4", spec, spoil), ("ffn.experts.2.w3.scale", "scale"))

    def missing_scale(self):
        def spoil(tensors):
            del tensors["mlp.experts.1.down_proj.weight_scale_inv"]

        spec = LayerSpec("bare", "hf", "fp8_block", 128, 64, 4, prefix="")
        return Refusal("fp8 without its scales", self.of_spec("bare", spec, spoil), ("weight_scale_inv", "scale"))

    def fused(self, name, intermediate, extra):
        spec = LayerSpec(name, "fused", "bf16", 128, intermediate, 6, prefix="")
        arguments = self.of_spec(f"fused-{intermediate}", spec, lambda tensors: tensors.update(extra))
        return Refusal(f"fused, {name}", arguments, ("bias",) if extra else ("ambiguous", "config"))

    def router_without_topk(self):
        spec = LayerSpec("k", "hf", "bf16", 128, 64, 6, router={"topk": 2}, prefix="")
        layer = random_layer(self.random, spec)
        path = self.save("no-topk.safetensors", layer_tensors(layer, spec, spec.prefix))
        batch = self.save("no-topk-batch.safetensors", {"hidden_states": self.batch.hidden})
        return Refusal("router without a top-k", self.arguments(layer=path, batch=batch), ("topk", "top-k"))

    def flags(self):
        good = self.arguments()
        return [
            Refusal("cap too small", self.arguments(flags=("--cap", 2)), ("2",)),
            Refusal("unknown way", self.arguments(way="carrier_pigeon"), ("carrier_pigeon",)),
            Refusal("ascend way", self.arguments(way="ascend_fuseep"), ("ascend_fuseep",)),
            Refusal("mega with weights at combine", self.arguments(way="mega", flags=("--weight-at", "combine"))),
            Refusal("no ranks", self.arguments(ranks=0), ("0",)),
            Refusal("ranks of letters", self.arguments(ranks="two"), ("two",)),
            Refusal("unknown flag", [*good, "--no-such-flag"], ("no-such-flag",)),
            Refusal("no layer asked for", good[2:], ("layer",)),
            Refusal("no batch asked for", good[:2] + good[4:], ("batch",)),
            Refusal("group of 48", [*good, "--group", 48], ("48",)),
            Refusal("unknown scale", [*good, "--scale", "ue4m3"], ("ue4m3",)),
            Refusal("unknown wire", [*good, "--wire", "int8"], ("int8",)),
            Refusal("clamp of letters", [*good, "--clamp", "tight"], ("tight",)),
            Refusal("no such layer index", [*good, "--layer-index", 9], ("9",)),
        ]


def check_refusals(report, command, random, folder):
    contract = Contract(random, folder)
    good = command.run(contract.arguments(), with_json=True)
    report.check("the good inputs run", good.status == 0, good.why())
    for refusal in contract.refusals():
        result = command.run(refusal.arguments)
        lines = result.errors.strip().splitlines()
        report.check(f"{refusal.name}: exit 2", result.status == 2, result.why())
        report.check(f"{refusal.name}: one line", len(lines) == 1, f"{len(lines)} lines: {result.errors.strip()[:300]!r}")
        text = result.errors.strip().replace(str(folder.parent), "")  # a word in the folder's name is no news
        told = not refusal.about or any(word in text for word in refusal.about)
        report.check(f"{refusal.name}: says what", told, f"none of {refusal.about} in {text[:300]!r}")
        left = result.leftovers + sorted(result.tensors)
        report.check(f"{refusal.name}: leaves nothing", not left, f"left {left}")
        report.note(refusal.name, lines[0][:110] if lines else "")
    _check_out(report, command, contract, folder)


def _check_out(report, command, contract, folder):
    """--out itself: a folder that is not there, and an older file that a failed run must not touch."""
    lost = command.run(contract.arguments(), out=folder / "no-such-folder" / "O.safetensors")
    report.check("out in no folder: exit 2", lost.status == 2, lost.why())
    report.check("out in no folder: one line", len(lost.errors.strip().splitlines()) == 1, lost.errors.strip()[:300])
    report.check("out in no folder: makes none", not (folder / "no-such-folder").exists())
    older = folder / "older.safetensors"
    shutil.copy(contract.batch_path, older)
    before = older.read_bytes()
    failed = command.run(contract.arguments(flags=("--cap", 2)), out=older)
    report.check("a failed run keeps an older file", failed.status == 2 and older.read_bytes() == before, failed.why())
    done = command.run(contract.arguments(), out=older)
    report.check("a good run replaces it", done.status == 0 and "output" in done.tensors, done.why())
