"""What the tests share: layers on disk with the oracle's numbers, batches, and calls on all ranks."""

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "oracle"))

import one_thread  # before NumPy
import numpy as np

import heddle
import oracle
from layers import LayerSpec, random_batch, save_layer

SEED = int(os.environ.get("HEDDLE_SEED", "20260"))
WAYS = ("gather", "normal", "low_latency", "elastic", "one_sided", "mega")
SLOT_WAYS = ("low_latency", "mega")
BOUND = {"fp8": 6e-3, "bf16": 4e-3}  # docs/numerics.md


@dataclass
class Saved:
    """A layer on disk, as the library and as the oracle have it, and a batch."""

    path: Path
    source: heddle.Source
    layer: oracle.Layer
    batch: oracle.Batch
    activation: str

    def expected(self, way, ranks):
        """The oracle's output for all tokens."""
        options = oracle.Options(
            activation=self.activation, sums="slots" if way in SLOT_WAYS else "ranks", ranks=ranks, clamp=self.layer.clamp
        )
        return oracle.layer_output(self.layer, self.batch, options)


def save(folder, kind="bf16", tokens=20, topk=2, **spec):
    """Draws a layer and a batch and writes the layer below `folder`."""
    random = np.random.default_rng([SEED, len(kind), tokens])
    saved = save_layer(random, LayerSpec(f"{kind}-{tokens}", "hf", kind, 128, 128, 8, **spec), folder)
    source = heddle.Source.open(saved.path).with_topk(topk)
    batch = random_batch(random, saved.layer, tokens, topk)
    return Saved(saved.path, source, saved.layer, batch, "bf16" if kind == "bf16" else "fp8")


def slice_of(tokens, rank, ranks):
    """Uneven on purpose: the last rank takes what is left, others may have none."""
    share = tokens // (ranks + 1)
    return slice(rank * share, (rank + 1) * share if rank + 1 < ranks else tokens)


def call(group, saved, options, calls=1):
    """One rank's outputs of its slice of the batch."""
    mine = slice_of(len(saved.batch.hidden), group.rank, group.ranks)
    layer = heddle.MoeLayer.create(group, saved.source, options)
    batch = saved.batch
    most = max(s.stop - s.start for s in (slice_of(len(batch.hidden), rank, group.ranks) for rank in range(group.ranks)))
    for _ in range(calls):
        out = layer.forward(batch.hidden[mine], batch.ids[mine], batch.weights[mine], step=heddle.Step(most))
    layer.workspace.close()
    return out


def launched(program, ranks, *arguments):
    """What a program (its file) writes under torchrun; with 0 ranks, as a program of its own."""
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"] if ranks else []
    command = [sys.executable, *launcher, str(program), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


def launch_text(text, ranks):
    """Likewise, of a program's text."""
    with tempfile.NamedTemporaryFile("w", suffix=".py") as program:
        program.write(text)
        program.flush()
        return launched(program.name, ranks)


def bits(array):
    return np.ascontiguousarray(array).view(np.uint16)


def address(array):
    """Where NumPy says that an array's memory begins."""
    return array.__array_interface__["data"][0]
