"""How figures look: a palette that colour-blind readers can tell apart, and lines, markers and hatches for print."""

from __future__ import annotations

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

# The colours of Okabe and Ito.
BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, RED, PINK = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7")
GREY = "#999999"

# By way: colour, line, marker.
WAYS = {
    "gather": (BLACK, "-", "o"),
    "normal": (ORANGE, "--", "s"),
    "low_latency": (SKY, "-.", "^"),
    "elastic": (GREEN, ":", "D"),
    "elastic_sync": (YELLOW, "--", "d"),
    "one_sided": (RED, (0, (5, 1)), "v"),
    "mega": (PINK, "-", "P"),
    "nccl": (GREY, (0, (1, 1)), "x"),
    "gather_nccl": (GREY, "-.", "+"),
}
# Of lines alone: dots make large files.
HATCHES = ["", "///", "\\\\\\", "---", "xxx", "|||", "+++", "//", "\\\\", "xx"]
FILLS = [BLUE, ORANGE, GREEN, SKY, PINK, RED, YELLOW, GREY, BLACK, "#ffffff"]

plt.rcParams.update({
    "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#dddddd",
    "grid.linewidth": 0.6, "axes.axisbelow": True, "figure.dpi": 100, "savefig.dpi": 160, "svg.hashsalt": "heddle",
    "svg.fonttype": "path", "legend.frameon": False, "hatch.linewidth": 0.5, "lines.markersize": 5, "lines.linewidth": 1.4})


def figure(columns: int = 1, rows: int = 1, width: float = 9.0, height: float = 3.8, **keywords) -> tuple[Figure, list[Axes]]:
    """A figure and its axes in reading order."""
    drawing, axes = plt.subplots(rows, columns, figsize=(width, height), squeeze=False, constrained_layout=True, **keywords)
    return drawing, [one for row in axes for one in row]


def way_line(axes: Axes, way: str, x: list[float], y: list[float], **keywords) -> None:
    colour, line, marker = WAYS.get(way, (BLUE, "-", "*"))
    edge = {"markeredgecolor": BLACK, "markeredgewidth": 0.4} if marker not in "x+" else {}
    axes.plot(x, y, color=colour, linestyle=line, marker=marker, label=keywords.pop("label", way), **edge, **keywords)


def token_axis(axes: Axes, sizes: list[int]) -> None:
    """Sizes of batches, a tick for every one that was measured as far as there is room."""
    axes.set_xscale("log", base=2)
    ticks = sorted(set(sizes))
    if len(ticks) > 9:
        ticks = [tick for tick in ticks if tick in (1, 8, 64, 128, 512, 2048, 4096, 8192)]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks], rotation=45 if len(ticks) > 4 else 0)
    axes.minorticks_off()
    axes.set_xlabel("tokens a rank")


def bars(axes: Axes, at: float, parts: list[tuple[str, float]], names: list[str], width: float = 0.7) -> None:
    """One stacked bar; a part's colour and hatch follow from its place among `names`."""
    bottom = 0.0
    for name, value in parts:
        place = names.index(name) % len(FILLS)
        axes.bar(at, value, width, bottom=bottom, color=FILLS[place], hatch=HATCHES[place], edgecolor=BLACK, linewidth=0.5)
        bottom += value


def bar_legend(axes: Axes, names: list[str], **keywords) -> None:
    handles = [plt.Rectangle((0, 0), 1, 1, facecolor=FILLS[i % len(FILLS)], hatch=HATCHES[i % len(FILLS)], edgecolor=BLACK,
                             linewidth=0.5) for i in range(len(names))]
    axes.legend(handles, names, **keywords)
