"""Runs `heddle run` as docs/files.md describes it and reads what it leaves."""

import json
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, deserialize

NUMPY_TYPES = {"BF16": ml_dtypes.bfloat16, "F32": np.float32, "I32": np.int32}


@dataclass
class Result:
    status: int
    errors: str
    tensors: dict  # name: (dtype string, array); empty without a file at --out
    report: object  # what --json wrote, parsed
    leftovers: list  # files beside --out that should not be there

    def why(self):
        first = self.errors.strip().splitlines()
        return f"exit {self.status}" + (f": {first[0]}" if first else "")


def read_tensors(path):
    """Every tensor of a safetensors file as (dtype string, array), with types that the package's NumPy front end lacks."""
    try:
        views = deserialize(Path(path).read_bytes())
    except SafetensorError as error:
        return {"damaged file": (str(error), np.zeros(0))}
    tensors = {}
    for name, view in views:
        dtype = NUMPY_TYPES.get(view["dtype"], np.uint8)
        array = np.frombuffer(view["data"], dtype)
        tensors[name] = (view["dtype"], array.reshape(view["shape"]) if view["dtype"] in NUMPY_TYPES else array)
    return tensors


def read_json(path):
    """The parsed file; its text if that is no JSON; None without a file."""
    if not path.is_file():
        return None
    text = path.read_text()
    try:
        return json.loads(text)
    except ValueError:
        return text


class Command:
    """The command under test. Every run writes into a fresh folder, so that leftovers show."""

    def __init__(self, path, scratch, engine=None, timeout=120, environment=None):
        self.path, self.scratch, self.timeout, self.environment = str(path), Path(scratch), timeout, environment
        self.engine = ["--engine", engine] if engine else []

    def run(self, arguments, out=None, with_json=False):
        """`heddle run` with the arguments given and --out added. `out` overrides where; with_json adds --json."""
        folder = Path(tempfile.mkdtemp(dir=self.scratch))
        target = Path(out) if out else folder / "O.safetensors"
        report = folder / "J.json"
        line = [self.path, "run", *map(str, arguments), *self.engine, "--out", str(target)]
        line += ["--json", str(report)] if with_json else []
        try:
            done = subprocess.run(
                line, capture_output=True, text=True, errors="replace", timeout=self.timeout, env=self.environment, check=False
            )
            status, errors = done.returncode, done.stderr
        except subprocess.TimeoutExpired:
            status, errors = -1, f"still running after {self.timeout} s"
        tensors = read_tensors(target) if target.is_file() else {}
        expected = {target.name, report.name} if status == 0 else set()
        leftovers = sorted(entry.name for entry in folder.iterdir() if entry.name not in expected)
        return Result(status, errors, tensors, read_json(report), leftovers)
