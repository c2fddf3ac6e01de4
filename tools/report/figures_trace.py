"""Timelines of one call, and what its workers waited for."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from results import NoData, Results
from style import BLACK, BLUE, GREEN, ORANGE, PINK, RED, SKY, YELLOW, figure

# By what a worker does: colour and hatch.
PAINTS = {
    "waits": ("#e4e4e4", ""),
    "GEMM 1": (BLUE, ""),
    "GEMM 2": ("#00324f", ""),
    "shared expert": (GREEN, "///"),
    "activation, epilogue": (ORANGE, ""),
    "loads of weights and rows": (PINK, "|||"),
    "rows move": (SKY, "///"),
    "combine, sum": (RED, "\\\\\\"),
    "announce, count, regroup": (YELLOW, "xxx"),
}
MOST_ROWS = 14


def trace_result(results: Results) -> dict[str, Any]:
    found = results.of("trace")
    if not found:
        raise NoData(results.why_not("trace"))
    result: dict[str, Any] = found[0]["result"]
    return result


def _shown(way: dict[str, Any]) -> list[dict[str, Any]]:
    """As many workers as there is room for: of rank 0 first, the first of every role before the second of any."""
    turns: dict[str, int] = {}
    ordered = []
    for place, row in enumerate(way.get("rows", [])):
        role = row["label"].rstrip("0123456789 ")
        turns[role] = turns.get(role, -1) + 1
        ordered.append((not row["label"].startswith("rank 0 "), turns[role], place))
    shown = sorted(place for _, _, place in sorted(ordered)[:MOST_ROWS])
    return [way["rows"][place] for place in shown]


def _strip(axes: Axes, values: list[float], scale: float, at: float, colour: str, hatch: str) -> None:
    x = [place * scale for place in range(len(values))]
    axes.fill_between(x, [at - 0.4] * len(x), [at - 0.4 + 0.8 * min(1.0, value) for value in values], step="post", color=colour,
                      hatch=hatch, linewidth=0, alpha=0.9)


def timelines(results: Results) -> Figure:
    result = trace_result(results)
    scale = result["all_us"] / result["cells"]
    ways = result["ways"]
    heights = [len(_shown(way)) + 3 for way in ways]
    drawing, panels = figure(1, len(ways), width=10, height=0.24 * sum(heights) + 1.4, gridspec_kw={"height_ratios": heights},
                             sharex=True)
    for axes, way in zip(panels, ways):
        rows = _shown(way)
        for place, row in enumerate(rows):
            for paint, (colour, hatch) in PAINTS.items():
                runs = [(begin * scale, (end - begin) * scale) for begin, end, what in row["runs"] if what == paint]
                axes.broken_barh(runs, (-place - 0.4, 0.8), facecolor=colour, hatch=hatch, edgecolor=BLACK, linewidth=0.0)
        products, movers = -len(rows) - 0.6, -len(rows) - 1.8
        _strip(axes, way["products"], scale, products, BLUE, "")
        _strip(axes, way["movers"], scale, movers, SKY, "///")
        axes.set_yticks([-place for place in range(len(rows))] + [products, movers],
                        [row["label"] for row in rows] + ["multiply, all workers", "move rows, all workers"], fontsize=7)
        axes.set_title(f"{way['title']}: {1e6 * way['seconds']:,.1f} us", fontsize=9, loc="left")
        axes.grid(axis="y", visible=False)
        axes.set_xlim(0, result["all_us"])
    panels[-1].set_xlabel("us from the call's begin")
    handles = [Patch(facecolor=colour, hatch=hatch, edgecolor=BLACK, linewidth=0.4, label=name) for name, (colour, hatch) in PAINTS.items()]
    drawing.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncol=5, fontsize=8)
    return drawing


def waits(results: Results) -> list[dict[str, Any]]:
    """Of every way and role the waits: title, role, what for, during, count, us, share of the role's time."""
    found = []
    for way in trace_result(results)["ways"]:
        for role in way["roles"]:
            for line in role["lines"]:
                if line["wait"]:
                    found.append({"way": way["title"], "role": role["role"], "what": line["what"], "during": line["during"] or "",
                                  "count": line["count"], "us": 1e6 * line["seconds"],
                                  "share": line["seconds"] / role["seconds"] if role["seconds"] else 0.0})
    return found


def wait_shares(results: Results) -> Figure:
    result = trace_result(results)
    entries = []
    for way in result["ways"]:
        for role in way["roles"]:
            if role["seconds"] > 0 and role["lines"]:
                waited = sum(line["seconds"] for line in role["lines"] if line["wait"])
                entries.append((f"{way['title']}: {role['role']} ({role['lanes']})", waited / role["seconds"],
                                role["idle_seconds"] / role["seconds"]))
    if not entries:
        raise NoData("the trace has no spans")
    drawing, (axes,) = figure(width=8, height=0.35 * len(entries) + 1.2)
    names = [name for name, _, _ in entries]
    waited = [100 * share for _, share, _ in entries]
    idle = [100 * share for _, _, share in entries]
    worked = [100 - a - b for a, b in zip(waited, idle)]
    places = list(range(len(entries)))
    axes.barh(places, worked, color=BLUE, edgecolor=BLACK, linewidth=0.4, label="does something")
    axes.barh(places, waited, left=worked, color="#e4e4e4", hatch="///", edgecolor=BLACK, linewidth=0.4, label="waits for a word")
    axes.barh(places, idle, left=[a + b for a, b in zip(worked, waited)], color="#ffffff", edgecolor=BLACK, linewidth=0.4,
              label="nothing recorded")
    axes.set_yticks(places, names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("share of the time that a role's workers were there, %")
    axes.grid(axis="y", visible=False)
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.35 if len(entries) < 4 else -0.2), ncol=3)
    return drawing
