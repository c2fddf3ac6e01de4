"""Figures of the round trip: times by rows, copies by ranks, layouts, buffers."""

from __future__ import annotations

from matplotlib.figure import Figure

from results import NoData, Results
from rows import groups, trips
from style import BLACK, BLUE, GREEN, GREY, ORANGE, RED, SKY, bar_legend, bars, figure, token_axis, way_line

GIB = 1024.0**3


def round_trips(results: Results) -> Figure:
    found = trips(results)
    if not found:
        raise NoData(results.why_not("exchange", "trips"))
    wire = found[0].wire  # one wire a figure; the table below has all
    found = [one for one in found if one.wire == wire]
    shown = groups(found)[:3]
    drawing, panels = figure(len(shown), width=3.4 * len(shown) + 1.5, height=4.2)
    for axes, group in zip(panels, shown):
        here = [one for one in found if one.group == group]
        for way in dict.fromkeys(one.way for one in here):
            line = sorted((one.tokens, one.total) for one in here if one.way == way)
            way_line(axes, way, [tokens for tokens, _ in line], [us for _, us in line])
        token_axis(axes, [one.tokens for one in here])
        axes.set_yscale("log")
        axes.set_title(group.text, fontsize=9)
    panels[0].set_ylabel(f"dispatch + combine, us (wire: {wire})")
    handles, labels = [], []
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels()):
            if label not in labels:
                handles.append(handle)
                labels.append(label)
    drawing.legend(handles, labels, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return drawing


def copies(results: Results) -> Figure:
    result = results.named("copies")
    if result is None:
        raise NoData(results.why_not("copies"))
    drawing, (axes,) = figure(width=7.5, height=4.0)
    ranks = [row["ranks"] for row in result["rows"]]
    for field, text, colour, line in (("every_rank", "to every rank (gather)", GREY, "-"),
                                      ("every_choice", "one an expert (low_latency, mega)", ORANGE, "--"),
                                      ("needed_ranks", "one a rank that needs it (normal, elastic, one_sided)", BLUE, "-")):
        axes.plot(ranks, [row[field] for row in result["rows"]], color=colour, linestyle=line, label=text, linewidth=2)
    for recording, marker, colour in zip(result["recordings"], "osD^v", (BLACK, RED, GREEN, SKY, ORANGE)):
        points = recording["points"]
        name = recording["name"].replace(".ids.npy", "")
        axes.plot([p["ranks"] for p in points], [p["copies"] for p in points], marker, color=colour, markerfacecolor="white",
                  label=f"recorded: {name} ({recording['experts']} experts, top-{recording['topk']})")
        axes.plot([p["ranks"] for p in points], [p["formula"] for p in points], ":", color=colour, linewidth=0.9)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [str(one) for one in ranks])
    axes.minorticks_off()
    axes.set_ylim(0, 9)
    axes.set_xlabel("ranks")
    axes.set_ylabel("copies of a token")
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0), title=f"{result['preset']}, top-{result['topk']};\n"
                "dotted: the formula for a recording's shape")
    return drawing


def _layout_rows(results: Results) -> list[tuple[str, str, int, float]]:
    """Way, layout, tokens, microseconds."""
    for result in results.prefixed("layouts"):
        rows = [(row["way"], row["arrived"], row["tokens"], row["layout_us"]) for row in result["layouts"]
                if "layout_us" in row and row["wire"] == "bf16" and (row["way"], row["arrived"]) != ("normal", "routed")]
        if rows:
            return rows
    for result in results.prefixed("trips"):
        return [(row["way"], row["arrived"], row["tokens"], row["regroup_us"]) for row in result["rows"]]
    raise NoData(results.why_not("exchange", "trips"))


def layout_costs(results: Results) -> Figure:
    rows = _layout_rows(results)
    names = sorted({f"{tokens:,} tokens a rank" for _, _, tokens, _ in rows}, key=lambda text: int(text.split()[0].replace(",", "")))
    kinds = list(dict.fromkeys((way, layout) for way, layout, _, _ in rows))
    drawing, (axes,) = figure(width=9, height=3.8)
    width = 0.8 / len(names)
    for place, (way, layout) in enumerate(kinds):
        for other_way, other_layout, tokens, us in rows:
            if (other_way, other_layout) != (way, layout):
                continue
            name = f"{tokens:,} tokens a rank"
            at = place + (names.index(name) - (len(names) - 1) / 2) * width
            bars(axes, at, [(name, max(us, 0.0))], names, width * 0.95)
    axes.set_xticks(range(len(kinds)), [f"{way}\n{layout}" for way, layout in kinds])
    axes.set_yscale("symlog", linthresh=1.0)
    axes.set_ylabel("left to do before experts can run, us")
    axes.grid(axis="x", visible=False)
    bar_legend(axes, names, loc="lower left", bbox_to_anchor=(0.0, 1.0), ncol=len(names))
    return drawing


def buffers(results: Results) -> Figure:
    result = results.named("buffers")
    if result is None:
        raise NoData(results.why_not("buffers"))
    rows = [row for row in result["rows"] if row["way"] == "mega" and row["cap"] in (1024, 4096, 8192)]
    names = list(dict.fromkeys(region["name"] for row in rows for region in row["regions"] if region["bytes"] > 0.004 * row["bytes"]))
    drawing, (axes,) = figure(width=10, height=4.4)
    labels, place, caps = [], 0.0, []
    for cap in sorted({row["cap"] for row in rows}):
        first = place
        for row in (row for row in rows if row["cap"] == cap):
            bars(axes, place, [(r["name"], r["bytes"] / GIB) for r in row["regions"] if r["name"] in names], names)
            axes.annotate(f"{row['bytes'] / GIB:.2f}", (place, row["bytes"] / GIB), ha="center", va="bottom", fontsize=8)
            labels.append((place, ("article:\n" if row["whose"] == "article" else "heddle:\n") + row["kind"]))
            place += 1
        caps.append(((first + place - 1) / 2, f"cap {cap:,}"))
        place += 0.6
    axes.set_xticks([at for at, _ in labels], [text for _, text in labels], fontsize=7)
    for at, text in caps:
        axes.annotate(text, (at, -0.17), xycoords=("data", "axes fraction"), ha="center", fontsize=10)
    axes.set_ylabel("GB (2^30) a rank, 8 ranks")
    axes.grid(axis="x", visible=False)
    bar_legend(axes, [name.replace("_", " ") for name in names], loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)
    return drawing


def way_buffers(results: Results) -> Figure:
    result = results.named("buffers")
    if result is None:
        raise NoData(results.why_not("buffers"))
    rows = [row for row in result["rows"] if row["way"] != "mega"]
    drawing, panels = figure(2, width=9, height=3.8, sharey=True)
    for axes, whose, title in zip(panels, ("layout", "article"), ("this library's layouts", "as the article accounts for them")):
        for way in dict.fromkeys(row["way"] for row in rows):
            line = [(row["cap"], row["bytes"] / GIB) for row in rows if row["way"] == way and row["whose"] == whose]
            way_line(axes, way, [cap for cap, _ in line], [size for _, size in line])
        token_axis(axes, [row["cap"] for row in rows])
        axes.set_xlabel("cap, tokens a rank")
        axes.set_yscale("log")
        axes.set_title(title, fontsize=9)
    panels[0].set_ylabel("GB (2^30) a rank, 8 ranks")
    panels[0].legend(fontsize=8)
    return drawing
