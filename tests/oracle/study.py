"""Carries out a study of cases.py: writes its inputs, runs the command, checks every output."""

import dataclasses
import hashlib

import numpy as np

import oracle
import router
from cases import SLOT_WAYS
from layers import batch_tensors, random_batch, save_layer, save_tensors
from oracle import Batch, Options

BOUND = {"fp8": 6e-3, "bf16": 4e-3}
FLAGS = {
    "activation": "--activation",
    "group": "--group",
    "scale": "--scale",
    "wire": "--wire",
    "combine_wire": "--combine-wire",
    "weight_at": "--weight-at",
    "clamp": "--clamp",
}


def split_tokens(split, tokens, ranks):
    """tokens_per_rank, or None for the even split that needs no saying."""
    if split == "even":
        return None
    counts = np.zeros(ranks, np.int32)
    if split == "one" or ranks == 1:
        counts[-1] = tokens
    else:  # every second rank has none; the first takes a third, the last of the others the rest
        busy = np.arange(0, ranks, 2)
        counts[busy] = tokens // (len(busy) + 1)
        counts[busy[-1]] += tokens - counts.sum()
    return counts


def spoil(batch, special):
    """The special contents that a study may ask for."""
    if special == "infinite":
        batch.hidden[3, 70] = np.inf
    if special == "nan":
        batch.hidden[3, 70] = np.nan
    if special in ("infinite", "nan"):
        batch.ids[3, 0], batch.weights[3, 0] = next(e for e in range(99) if e not in batch.ids[3, 1:]), 0.5
    if special == "hot":
        batch.ids[:] = np.argsort(batch.ids, axis=1)
    return batch


class Inputs:
    """Layers and batches, drawn and written when first asked for."""

    def __init__(self, folder, specs, generator):
        self.folder, self.generator = folder, generator
        self.specs = {spec.name: spec for spec in specs}
        self.layers, self.batches = {}, {}

    def layer(self, name):
        if name not in self.layers:
            self.layers[name] = save_layer(self.generator(name), self.specs[name], self.folder)
        return self.layers[name]

    def batch(self, study, ranks):
        """The study's batch with the split for so many ranks, and its file."""
        layer = self.layer(study.layer).layer
        if study.name not in self.batches:
            drawn = random_batch(self.generator(f"batch {study.name}"), layer, study.tokens, study.topk or 1, absent=study.absent)
            self.batches[study.name] = spoil(drawn, study.special)
        batch = dataclasses.replace(self.batches[study.name], tokens_per_rank=split_tokens(study.split, study.tokens, ranks))
        if study.topk == 0:
            batch.ids = batch.weights = None
        path = self.folder / f"batch {study.name} {ranks}.safetensors"
        if not path.exists():
            save_tensors(batch_tensors(batch, study.ids_dtype), path)
        return batch, path


class Expected:
    """The oracle's outputs; pair results and the shared expert's are kept, since many runs share them."""

    def __init__(self):
        self.kept = {}

    def _once(self, key, compute):
        if key not in self.kept:
            self.kept[key] = compute()
        return self.kept[key]

    def output(self, name, layer, batch, options):
        content = hashlib.sha256(b"".join(array.tobytes() for array in (batch.hidden, batch.ids, batch.weights))).hexdigest()
        alone = dataclasses.replace(options, combine_wire="bf16", sums="slots", ranks=1)
        pairs = self._once(("pairs", name, content, alone), lambda: oracle.pair_results(layer, batch, alone))
        shared = None
        if layer.shared:
            shared = self._once(("shared", name, content, alone), lambda: oracle.shared_result(layer, batch, alone))
        return self._once(("output", name, content, options), lambda: oracle.finish(layer, pairs, shared, options))


def way_flags(way):
    name, _, reduce = way.partition(" ")
    return ["--way", name] + (["--reduce", reduce] if reduce else [])


def same_bits(left, right):
    """Bit for bit, where any NaN is as good as another."""
    if left.shape != right.shape:
        return False
    both_nan = np.isnan(left.astype(np.float32)) & np.isnan(right.astype(np.float32))
    return bool(np.all((left.view(np.uint16) == right.view(np.uint16)) | both_nan))


class Runner:
    def __init__(self, command, inputs, report):
        self.command, self.inputs, self.report = command, inputs, report
        self.expected = Expected()

    def options(self, study, way, ranks):
        saved = self.inputs.layer(study.layer)
        defaults = {"activation": "bf16" if saved.spec.kind == "bf16" else "fp8", "clamp": saved.layer.clamp}
        return Options(**(defaults | study.options), sums="slots" if way in SLOT_WAYS else "ranks", ranks=ranks)

    def start(self, study, way, ranks, extra=(), with_json=False):
        _, batch_path = self.inputs.batch(study, ranks)
        flags = [word for key, value in study.options.items() if value is not None for word in (FLAGS[key], value)]
        arguments = ["--layer", self.inputs.layer(study.layer).path, "--batch", batch_path, "--ranks", ranks]
        return self.command.run([*arguments, *way_flags(way), *flags, *study.flags, *extra], with_json=with_json)

    def run(self, study):
        outputs = {}
        for way in study.ways:
            failed_before, worst, runs = len(self.report.failed), 0.0, 0
            for ranks in study.ranks:
                for extra in ((), *(study.same if ranks == study.ranks[-1] else ())):
                    where = " ".join([f"{study.name}, {way}, {ranks} ranks", *extra])
                    result = self.start(study, way, ranks, extra, with_json=ranks == study.ranks[0])
                    error = self.check(where, study, way, ranks, result)
                    if error is not None:
                        outputs[way, ranks, extra] = result.tensors["output"][1]
                        worst = max(worst, error)
                    runs += 1
            bound = BOUND[self.options(study, way, 1).activation]
            self.report.row(study.name, way, runs, worst, bound, len(self.report.failed) - failed_before)
        self.agreements(study, outputs)

    def check(self, where, study, way, ranks, result):
        """All checks of one run. Returns the relative error, or None if there is no output to speak of."""
        report, layer = self.report, self.inputs.layer(study.layer).layer
        batch, _ = self.inputs.batch(study, ranks)
        if not report.check(f"{where}: runs", result.status == 0, result.why()):
            return None
        report.check(f"{where}: leaves nothing else", not result.leftovers, f"left {result.leftovers}")
        if ranks == study.ranks[0]:
            report.check(
                f"{where}: --json is one object", isinstance(result.report, dict) and result.report, repr(result.report)[:80]
            )
        choices = study.topk or layer.router.topk
        shapes = {
            "output": ("BF16", (study.tokens, layer.hidden)),
            "topk_ids": ("I32", (study.tokens, choices)),
            "topk_weights": ("F32", (study.tokens, choices)),
        }
        found = {name: (dtype, array.shape) for name, (dtype, array) in result.tensors.items()}
        if not report.check(f"{where}: tensors", found == shapes, f"found {found}, expected {shapes}"):
            return None
        ids, weights = result.tensors["topk_ids"][1], result.tensors["topk_weights"][1]
        if batch.ids is None:
            if not self.check_router(where, layer, batch, ids, weights):
                return None
        else:
            report.check(f"{where}: ids as given", np.array_equal(ids, batch.ids))
            report.check(f"{where}: weights as given", np.array_equal(weights[ids >= 0], batch.weights[ids >= 0]))
            ids, weights = batch.ids, batch.weights
        return self.check_output(where, study, way, ranks, result.tensors["output"][1], Batch(batch.hidden, ids, weights))

    def check_router(self, where, layer, batch, ids, weights):
        """The ids where the oracle's decision is clear, the weights everywhere."""
        legal = ids.min() >= 0 and ids.max() < len(layer.experts) and all(len(set(row)) == len(row) for row in ids.tolist())
        if not self.report.check(f"{where}: router's ids are legal", legal, f"ids {ids.tolist()[:4]} ..."):
            return False
        decision = router.choose(layer.router, batch.hidden)
        self.report.check(f"{where}: enough clear decisions", decision.clear.mean() > 0.8, f"{decision.clear.mean():.0%} clear")
        wrong = np.flatnonzero((np.sort(ids, axis=1) != np.sort(decision.ids, axis=1)).any(axis=1) & decision.clear)
        detail = f"token {wrong[0]}: {ids[wrong[0]].tolist()}, expected {decision.ids[wrong[0]].tolist()}" if len(wrong) else ""
        self.report.check(f"{where}: router's ids", not len(wrong), detail)
        error = np.abs(weights / router.weights_of(layer.router, batch.hidden, ids) - 1).max()
        self.report.check(f"{where}: router's weights", error < 1e-4, f"off by {error:.1e}")
        return True

    def check_output(self, where, study, way, ranks, output, batch):
        """The bound, and that the result is clearly nearer to what was asked for than to what else it might have been."""
        layer = self.inputs.layer(study.layer).layer
        options = self.options(study, way, ranks)
        expected = self.expected.output(study.layer, layer, batch, options)
        error = oracle.relative_error(output, expected)
        bound = BOUND[options.activation]
        if not self.report.check(f"{where}: within the bound", error <= bound, f"error {error:.2e}, bound {bound:.0e}"):
            return error
        others = {
            "the other sum": {"sums": "ranks" if options.sums == "slots" else "slots"},
            "the other place of the weights": {"weight_at": "combine" if options.weight_at == "activation" else "activation"},
        }
        for name, change in others.items():
            other = self.expected.output(study.layer, layer, batch, dataclasses.replace(options, **change))
            distance = oracle.relative_error(other, expected)
            if distance > 0:
                detail = f"error {error:.2e}, but {name} is only {distance:.2e} away"
                self.report.check(f"{where}: not {name}", error < distance / 2, detail)
        return error

    def agreements(self, study, outputs):
        """Bit for bit: slots whatever the ranks; the two-stage ways among themselves at each rank count; variations of a run."""
        plain = {(way, ranks): output for (way, ranks, extra), output in outputs.items() if not extra}
        groups = {"slots": [key for key in plain if key[0] in SLOT_WAYS]}
        for ranks in study.ranks:
            groups[f"two stages, {ranks} ranks"] = [key for key in plain if key[0] not in SLOT_WAYS and key[1] == ranks]
        if not self.inputs.layer(study.layer).layer.shared and study.options.get("combine_wire", "bf16") == "bf16":
            groups["all ways on one rank"] = [key for key in plain if key[1] == 1]  # one partial row: rounded again, it stays
        for name, keys in groups.items():
            for key in keys[1:]:
                self.same(f"{study.name}, {name}: {key[0]} on {key[1]} is {keys[0][0]} on {keys[0][1]}", plain[key], plain[keys[0]])
        for (way, ranks, extra), output in outputs.items():
            if extra and (way, ranks) in plain:
                self.same(f"{study.name}, {way}, {ranks} ranks: {' '.join(extra)} changes nothing", output, plain[way, ranks])

    def same(self, what, left, right):
        differing = 0 if left.shape != right.shape else int(np.sum(left.view(np.uint16) != right.view(np.uint16)))
        self.report.check(f"{what}, bit for bit", same_bits(left, right), f"{differing} of {left.size} values differ")

    def aliases(self, aliases):
        """Other names of ways; and `auto`, which must give one of the two sums."""
        from cases import STUDIES  # any study with plain options will do

        study, ranks = next(study for study in STUDIES if study.layer == "v4-u8"), 3
        outputs, failed_before = {}, len(self.report.failed)
        for name, way in aliases + [("auto", None), ("low_latency", None), ("gather", None)]:
            result = self.start(study, name, ranks)
            if not self.report.check(f"--way {name}: runs", result.status == 0 and "output" in result.tensors, result.why()):
                continue
            outputs[name] = result.tensors["output"][1]
        for name, way in aliases:
            original = self.start(study, way, ranks).tensors
            if name in outputs and "output" in original:
                self.same(f"--way {name} is {way}", outputs[name], original["output"][1])
        if {"auto", "low_latency", "gather"} <= outputs.keys():
            either = any(same_bits(outputs["auto"], outputs[name]) for name in ("low_latency", "gather"))
            self.report.check("--way auto gives one of the two sums", either)
        failures = len(self.report.failed) - failed_before
        print(f"{'other names of the ways':<74} {'ok' if not failures else f'{failures} FAILED'}", flush=True)
