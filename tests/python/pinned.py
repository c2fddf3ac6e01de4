"""Sources of the packages that adapters stand in for, of one version each: fetched once, without what they depend on."""

import subprocess
import sys
import unittest
import zipfile
from pathlib import Path

FOLDER = Path(__file__).parent.parent.parent / "build" / "pinned"
VERSIONS = {"sglang": "0.5.23"}
ROOMS = {"sglang": "sglang/srt/layers/moe/"}  # what is kept
WHEEL = ["--python-version", "3.11", "--platform", "manylinux_2_34_x86_64", "--only-binary", ":all:"]  # for any Python here


def package(name):
    """The folder that holds the package's files. Skips the test where they cannot be fetched."""
    wanted = f"{name}=={VERSIONS[name]}"
    unpacked = FOLDER / wanted.replace("==", "-")
    if unpacked.exists():
        return unpacked
    FOLDER.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps", *WHEEL, "-d", str(FOLDER)]
    try:
        done = subprocess.run([*command, wanted], capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        raise unittest.SkipTest(f"{wanted} was not fetched within 120 seconds") from None
    if done.returncode != 0:
        raise unittest.SkipTest(f"{wanted} could not be fetched: {(done.stderr.strip() or 'pip failed').splitlines()[-1]}")
    wheel = next(FOLDER.glob(f"{name}-{VERSIONS[name]}-*.whl"))
    begun = unpacked.with_suffix(".begun")
    with zipfile.ZipFile(wheel) as files:
        files.extractall(begun, [file for file in files.namelist() if file.startswith(ROOMS[name]) and file.endswith(".py")])
    begun.rename(unpacked)
    wheel.unlink()
    return unpacked
