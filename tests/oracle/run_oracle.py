#!/usr/bin/env python3
"""Runs `heddle run` on random layers and batches and compares every output with the second oracle.

Prints a line a study and way, and 'N passed, N failed'; exits 1 if anything failed, 2 if there is no command to run.
"""

import argparse
import re
import sys
import tempfile
import time
import zlib
from pathlib import Path

from one_thread import ENVIRONMENT  # first: before NumPy

import numpy as np

import contract
from cases import ALIASES, LAYERS, STUDIES
from command import Command
from study import Inputs, Runner


class Report:
    """Counts checks; prints failures where they happen."""

    def __init__(self, verbose):
        self.passed, self.failed, self.verbose = 0, [], verbose

    def check(self, what, good, detail=""):
        if good:
            self.passed += 1
        else:
            self.failed.append(what)
            print(f"    FAILED {what}: {detail}" if detail else f"    FAILED {what}", flush=True)
        return bool(good)

    def note(self, name, text):
        if self.verbose:
            print(f"    {name}: {text}", flush=True)

    def row(self, study, way, runs, error, bound, failures):
        verdict = "ok" if not failures else f"{failures} FAILED"
        print(f"{study:<32} {way:<14} {runs:>4} {error:>9.1e} {bound:>8.0e}  {verdict}", flush=True)


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", nargs="?", default="build/heddle", help="the command under test (default: build/heddle)")
    parser.add_argument(
        "--only", default="", help="a regular expression; run the studies whose name it matches ('contract' and 'aliases' count)"
    )
    parser.add_argument("--seed", type=int, default=1, help="everything random follows from it (default: 1)")
    parser.add_argument("--engine", help="passed on as --engine")
    parser.add_argument("--keep", type=Path, help="write inputs and outputs here and keep them")
    parser.add_argument("--verbose", action="store_true", help="print the lines of refusals")
    parser.add_argument("--list", action="store_true", help="print the names of the studies and exit")
    return parser.parse_args(arguments)


def generator(seed, name):
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


def run_all(options, scratch):
    for name in ("inputs", "runs"):
        (scratch / name).mkdir(parents=True)
    report = Report(options.verbose)
    command = Command(options.command, scratch / "runs", options.engine, environment=ENVIRONMENT)
    runner = Runner(command, Inputs(scratch / "inputs", LAYERS, lambda name: generator(options.seed, name)), report)
    wanted = re.compile(options.only)
    print(f"{'study':<32} {'way':<14} {'runs':>4} {'error':>9} {'bound':>8}  (seed {options.seed})")
    for study in STUDIES:
        if wanted.search(study.name):
            runner.run(study)
    if wanted.search("aliases"):
        runner.aliases(ALIASES)
    if wanted.search("contract"):
        print("contract: what must be refused")
        contract.check_refusals(report, command, generator(options.seed, "contract"), scratch / "contract")
    return report


def main(arguments=None):
    options = parse(arguments)
    if options.list:
        print("\n".join([study.name for study in STUDIES] + ["aliases", "contract"]))
        return 0
    if not Path(options.command).is_file():
        print(f"no command at {options.command}: build it first, or name it", file=sys.stderr)
        return 2
    started = time.monotonic()
    if options.keep:
        report = run_all(options, options.keep)
    else:
        with tempfile.TemporaryDirectory(prefix="heddle-oracle-") as folder:
            report = run_all(options, Path(folder))
    print(f"{report.passed} passed, {len(report.failed)} failed in {time.monotonic() - started:.0f} s")
    if report.passed + len(report.failed) == 0:
        print(f"nothing matches --only {options.only}", file=sys.stderr)
        return 2
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
