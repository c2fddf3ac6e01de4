"""Figures of the activation step: the two grids, and what empty CTAs cost."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from results import NoData, Results
from style import BLACK, BLUE, GREEN, ORANGE, figure

GRIDS = {"padded": (ORANGE, "--", "s"), "persistent": (BLUE, "-", "o"), "fixed": (GREEN, ":", "D")}


def grid_result(results: Results) -> dict[str, Any]:
    found = results.named("activation") or results.named("grids")
    if found is None:
        raise NoData(results.why_not("activation", "grids"))
    return found


def grids(results: Results) -> Figure:
    result = grid_result(results)
    states = [state for state in ("warm", "cold") if any(row["l2"] == state for row in result["rows"])]
    drawing, panels = figure(len(states), width=4.6 * len(states) + 1, height=3.8)
    for axes, state in zip(panels, states):
        for grid, (colour, line, marker) in GRIDS.items():
            points = sorted((row["rows"], row["median_us"]) for row in result["rows"] if row["grid"] == grid and row["l2"] == state)
            if points:
                axes.plot(*zip(*points), color=colour, linestyle=line, marker=marker, label=grid)
        floors = sorted({(row["rows"], row["floor_us"]) for row in result["rows"] if row["l2"] == state and "floor_us" in row})
        if floors:
            axes.plot(*zip(*floors), color=BLACK, linewidth=0.8, label="floor: a launch, and a copy of the bytes")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("real rows")
        cap = result["cap"] * result["ranks"] * result["topk"]
        where = f"rows {state} in the L2" if "slots" in result and result.get("benchmark") == "activation" else "host engine, one thread"
        axes.set_title(f"{where}; padded grid: {cap:,} CTAs", fontsize=9)
    panels[0].set_ylabel("activation step, us")
    panels[0].legend(fontsize=8, loc="upper left")
    return drawing


def empty_ctas(results: Results) -> Figure:
    result = grid_result(results)
    points = [(row["ctas"], row["median_us"]) for row in result.get("empty_grids", [])]
    if not points:
        raise NoData("empty CTAs are of GPUs; on the host engine an empty block is a prefix sum, see the grids above"
                     if results.is_host else results.why_not("activation"))
    drawing, (axes,) = figure(width=6.5, height=3.4)
    axes.plot(*zip(*points), color=ORANGE, linestyle="--", marker="s", label="padded grid without rows")
    axes.axhline(result["nothing_us"], color=BLACK, linewidth=0.8, label="a kernel that does nothing")
    axes.set_xlabel("CTAs")
    axes.set_ylabel("us")
    axes.set_ylim(bottom=0)
    axes.set_title(f"an empty CTA: {result['empty_cta_ns']:.2f} ns of the GPU; {result['slots']} are resident at once", fontsize=9)
    axes.legend(fontsize=8)
    return drawing
