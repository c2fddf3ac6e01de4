"""Sources of the packages that adapters stand in for, of one version each: fetched once, without what they depend on."""

import subprocess
import sys
import unittest
import zipfile
from pathlib import Path

FOLDER = Path(__file__).parent.parent.parent / "build" / "pinned"
VERSIONS = {"sglang": "0.5.23", "vllm": "0.33.0"}
ROOMS = {  # what is kept
    "sglang": ("sglang/srt/layers/moe/",),
    "vllm": ("vllm/model_executor/layers/fused_moe/", "vllm/third_party/deep_gemm/"),
}
PLATFORMS = {"sglang": "manylinux_2_34_x86_64", "vllm": "manylinux_2_28_x86_64"}
SECONDS = {"sglang": 120, "vllm": 600}  # vLLM's wheel is of 340 MB


def _for_any_python(name):
    return ["--python-version", "3.11", "--platform", PLATFORMS[name], "--only-binary", ":all:"]


def package(name):
    """The folder that holds the package's files. Skips the test where they cannot be fetched."""
    wanted = f"{name}=={VERSIONS[name]}"
    unpacked = FOLDER / wanted.replace("==", "-")
    if unpacked.exists():
        return unpacked
    FOLDER.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
    command += [*_for_any_python(name), "-d", str(FOLDER), wanted]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS[name], check=False)
    except subprocess.TimeoutExpired:
        raise unittest.SkipTest(f"{wanted} was not fetched within {SECONDS[name]} seconds") from None
    if done.returncode != 0:
        raise unittest.SkipTest(f"{wanted} could not be fetched: {(done.stderr.strip() or 'pip failed').splitlines()[-1]}")
    wheel = next(FOLDER.glob(f"{name}-{VERSIONS[name]}-*.whl"))
    begun = unpacked.with_suffix(".begun")
    with zipfile.ZipFile(wheel) as files:
        files.extractall(begun, [file for file in files.namelist() if file.startswith(ROOMS[name]) and file.endswith(".py")])
    begun.rename(unpacked)
    wheel.unlink()
    return unpacked
