"""A file of `heddle bench all`: what was measured, and why what is missing is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class ReportError(Exception):
    """Something about the files or the machine that a person can mend."""


class NoData(Exception):
    """What a figure or a table would show was not measured; the text says why."""


def _is_entry(entry: Any) -> bool:
    texts = ("name", "benchmark", "arguments", "date", "commit")
    return (isinstance(entry, dict) and all(isinstance(entry.get(field), str) for field in texts)
            and isinstance(entry.get("machine"), dict))


class Results:
    """One file. Times in it are microseconds, sizes bytes (docs/json.md)."""

    def __init__(self, path: str):
        self.path = path
        try:
            self.json: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ReportError(f"{path}: cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise ReportError(f"{path}: no JSON: {error}") from error
        if not isinstance(self.json, dict) or self.json.get("benchmark") != "all":
            raise ReportError(f"{path}: not a file of heddle bench all")
        entries = self.json.get("measurements")
        is_whole = isinstance(self.json.get("engine"), str) and isinstance(self.json.get("machine"), dict)
        if not is_whole or not isinstance(entries, list) or not all(map(_is_entry, entries)):
            raise ReportError(f"{path}: damaged: engine, machine and measurements are not as heddle bench all writes them")
        self.entries: list[dict[str, Any]] = entries

    @property
    def engine(self) -> str:
        return self.json["engine"]

    @property
    def is_host(self) -> bool:
        return self.engine == "host"

    @property
    def machine(self) -> str:
        """In words, as a caption has it."""
        machine = self.json["machine"]
        if self.is_host:
            return f"host engine, {machine.get('processor')}, {machine.get('cores')} cores"
        return f"{machine.get('gpus')} x {machine.get('gpu')}"

    def of(self, benchmark: str) -> list[dict[str, Any]]:
        """Measurements of one benchmark that have a result, also where they ended early."""
        return [entry for entry in self.entries if entry["benchmark"] == benchmark and "result" in entry]

    def named(self, name: str) -> dict[str, Any] | None:
        """The result of one measurement."""
        for entry in self.entries:
            if entry["name"] == name and "result" in entry:
                return entry["result"]
        return None

    def prefixed(self, prefix: str) -> list[dict[str, Any]]:
        """Results of the measurements "prefix-R", those of most ranks first."""
        some = [e["result"] for e in self.entries if e["name"].startswith(prefix + "-") and "result" in e]
        return sorted(some, key=lambda result: -result.get("ranks", 0))

    def why_not(self, *benchmarks: str) -> str:
        """Why there is nothing of these benchmarks."""
        reasons = [e["skipped"] for e in self.entries if e["benchmark"] in benchmarks and "skipped" in e]
        if reasons:
            return reasons[0]
        return f"the file has no measurement of {' or '.join(benchmarks)}; heddle bench all --out {self.path} adds what is missing"
