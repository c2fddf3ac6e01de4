"""What both engines measured, in one form: round trips of rows, and whole layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from results import Results


@dataclass(frozen=True)
class Group:
    """Ranks that were measured together."""

    ranks: int
    gpus: int  # 0: threads of the host engine

    @property
    def text(self) -> str:
        if self.gpus == 0:
            return f"{self.ranks} ranks, threads of the host engine"
        if self.ranks == self.gpus:
            return f"{self.ranks} GPU" + ("s" if self.ranks > 1 else "")
        return f"{self.ranks} virtual ranks on {self.gpus} GPU" + ("s" if self.gpus > 1 else "") + ", no links"

    @property
    def is_real(self) -> bool:
        return self.ranks == self.gpus


@dataclass(frozen=True)
class Trip:
    """Dispatch and combine of one way."""

    group: Group
    way: str
    wire: str
    tokens: int
    total: float
    dispatch: float
    combine: float
    host_blocked: float | None = None
    times_floor: float | None = None


@dataclass(frozen=True)
class Layer:
    """A call of a whole layer; `parts` are microseconds of a chain's steps."""

    group: Group
    way: str
    weights: str
    tokens: int
    us: float
    combine: str | None
    shared_place: str | None
    parts: dict[str, float] = field(default_factory=dict)
    raw: dict[str, Any] = field(default_factory=dict)


def group_of(result: dict[str, Any]) -> Group:
    return Group(result["ranks"], result["machine"].get("gpus", 0) if "gpu" in result["machine"] else 0)


def trips(results: Results) -> list[Trip]:
    """Round trips of rows, without experts."""
    found = []
    for entry in results.of("exchange") + results.of("trips"):
        group = group_of(entry["result"])
        for row in entry["result"]["rows"]:
            if "median_us" in row:
                found.append(Trip(group, row["way"], row["wire"], row["tokens"], row["median_us"], row["dispatch_us"],
                                  row["combine_us"], row.get("host_blocked_us"), row.get("times_floor")))
    return found


def groups(found: list[Trip] | list[Layer]) -> list[Group]:
    """Real ranks first, the most of them first; then virtual ones and threads."""
    return sorted({one.group for one in found}, key=lambda group: (not group.is_real, -group.ranks))


def trip(found: list[Trip], group: Group, way: str, tokens: int) -> Trip | None:
    for one in found:
        if (one.group, one.way, one.tokens) == (group, way, tokens):
            return one
    return None


def _parts(row: dict[str, Any]) -> dict[str, float]:
    names = ("dispatch", "regroup", "gemm1", "activation", "gemm2", "experts", "combine")
    return {name: row[name + "_us"] for name in names if name + "_us" in row}


def layers(results: Results, prefix: str | None = None) -> list[Layer]:
    """Of the plain measurements (mega-R, layer-R), or of those with another prefix."""
    found = []
    for entry in results.of("mega") + results.of("layer"):
        stem = entry["name"].rpartition("-")[0]
        if stem not in ((prefix,) if prefix else ("mega", "layer")):
            continue
        group = group_of(entry["result"])
        for row in entry["result"]["rows"]:
            if "median_us" in row and row["way"] != "stream":
                host = entry["benchmark"] == "layer"
                combine = None
                if row["way"] == "mega":
                    combine = row.get("combine") or "slots"
                    if host and combine == "slots" and row.get("combine_wire", "bf16") != "bf16":
                        combine = row["combine_wire"]
                found.append(Layer(group, row["way"], row.get("weights", entry["result"].get("weights", "")), row["tokens"],
                                   row["median_us"], combine, row.get("shared_place"),
                                   {} if row["way"] == "mega" else _parts(row), row))
    if prefix is None:  # one kind of weights, so that ways can be compared
        found = [one for one in found if one.weights == found[0].weights]
    return found


def fused(found: list[Layer], group: Group, tokens: int, combine: str = "slots") -> Layer | None:
    for one in found:
        if one.group == group and one.tokens == tokens and one.way == "mega" and one.combine == combine:
            return one
    return None


def best_chain(found: list[Layer], group: Group, tokens: int) -> Layer | None:
    chains = [one for one in found if one.group == group and one.tokens == tokens and one.way != "mega"]
    return min(chains, key=lambda one: one.us, default=None)


def sizes(found: list[Layer], group: Group) -> list[int]:
    return sorted({one.tokens for one in found if one.group == group})
