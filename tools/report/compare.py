"""Two runs side by side: every median that both have, and which of them became worse."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import quantiles
from typing import Any

from results import Results

# What tells the lines of a measurement apart.
KEYS = ("way", "wire", "combine_wire", "arrived", "hidden", "weights", "product", "shape", "counts", "by", "grid", "l2", "rows", "tokens",
        "combine", "shared_place", "ring", "gap_us", "ctas")
# A change below this share is not told, however little samples spread.
LEAST_CHANGE = 0.03


@dataclass
class Change:
    measurement: str
    line: str
    before: float
    after: float
    is_clear: bool  # the middle halves of the samples do not overlap, and the change is no trifle

    @property
    def ratio(self) -> float:
        return self.after / self.before if self.before else float("inf")

    @property
    def verdict(self) -> str:
        if not self.is_clear:
            return ""
        return "regression" if self.after > self.before else "better"


def _lines(results: Results) -> dict[tuple[str, str], dict[str, Any]]:
    lines = {}
    for entry in results.entries:
        for row in entry.get("result", {}).get("rows", []):
            if isinstance(row, dict) and "median_us" in row and "samples_us" in row:
                words = [f"{key} {row[key]}" for key in KEYS if row.get(key) is not None]
                lines[entry["name"], ", ".join(words)] = row
    return lines


def _middle_half(samples: list[float]) -> tuple[float, float]:
    if len(samples) < 4:
        return min(samples), max(samples)
    low, _, high = quantiles(samples, n=4)
    return low, high


def changes(before: Results, after: Results) -> list[Change]:
    """In the order of the first file."""
    later = _lines(after)
    found = []
    for (measurement, line), row in _lines(before).items():
        other = later.get((measurement, line))
        if other is None:
            continue
        low, high = _middle_half(row["samples_us"])
        other_low, other_high = _middle_half(other["samples_us"])
        apart = other_low > high or other_high < low
        share = abs(other["median_us"] / row["median_us"] - 1) if row["median_us"] else 0.0
        found.append(Change(measurement, line, row["median_us"], other["median_us"], apart and share > LEAST_CHANGE))
    return found
