"""Figures of whole layers: shares of the chain, fused against chain, floors, the roofline, steps of a model."""

from __future__ import annotations

from matplotlib.figure import Figure

from results import NoData, Results
from rows import Group, Layer, best_chain, fused, groups, layers, sizes, trips
from style import BLACK, BLUE, GREEN, GREY, ORANGE, RED, bar_legend, bars, figure, token_axis, way_line


def _measured(results: Results) -> tuple[list[Layer], Group]:
    """All layers, and the ranks that figures are drawn of."""
    found = layers(results)
    if not found:
        raise NoData(results.why_not("mega", "layer"))
    return found, groups(found)[0]


def _near(there: list[int], wanted: tuple[int, ...]) -> list[int]:
    """The sizes that come next to those wanted."""
    return sorted({min(there, key=lambda size: abs(size - one)) for one in wanted})


def chain_shares(results: Results) -> Figure:
    found, group = _measured(results)
    chosen = _near(sizes(found, group), (1, 512, 8192))
    ways = [way for way in ("low_latency", "elastic", "one_sided", "gather") if any(one.way == way for one in found)]
    names = ["dispatch", "regroup", "gemm1", "activation", "gemm2", "experts", "combine"]
    names = [name for name in names if any(name in one.parts for one in found if one.group == group)]
    if any("gemm1" in one.parts for one in found if one.group == group):
        names = [name for name in names if name != "experts"]
    drawing, panels = figure(len(chosen), width=3.2 * len(chosen), height=3.8)
    for axes, tokens in zip(panels, chosen):
        here = {one.way: one for one in found if one.group == group and one.tokens == tokens and one.way in ways}
        for place, way in enumerate(way for way in ways if way in here):
            total = sum(here[way].parts.get(name, 0.0) for name in names)
            bars(axes, place, [(name, 100 * here[way].parts.get(name, 0.0) / total) for name in names], names)
            axes.annotate(f"{total:,.0f}\nus", (place, 101), ha="center", fontsize=7)
        there = [way for way in ways if way in here]
        axes.set_xticks(range(len(there)), [way.replace("_", "\n") for way in there], fontsize=8)
        axes.set_ylim(0, 114)
        axes.set_yticks(range(0, 101, 20))
        axes.set_title(f"{tokens:,} tokens a rank", fontsize=9)
        axes.grid(axis="x", visible=False)
    panels[0].set_ylabel("share of the chain, %")
    bar_legend(panels[-1], names, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return drawing


def fused_against_chain(results: Results) -> Figure:
    found, group = _measured(results)
    drawing, (times, ratio) = figure(2, width=10, height=4.0)
    for way in dict.fromkeys(one.way for one in found if one.group == group):
        line = sorted((one.tokens, one.us) for one in found if one.group == group and one.way == way and one.combine in (None, "slots"))
        way_line(times, way, [tokens for tokens, _ in line], [us for _, us in line])
    times.set_yscale("log")
    times.set_ylabel("a layer, us")
    times.legend(fontsize=8)
    for combine, label, dashes, marker in (("slots", "results in slots", "-", "P"), ("fp8", "slots of fp8", "--", "s"),
                                         ("add", "added where they arrive", ":", "D")):
        points = []
        for tokens in sizes(found, group):
            one, chain = fused(found, group, tokens, combine), best_chain(found, group, tokens)
            if one and chain:
                points.append((tokens, chain.us / one.us))
        if points:
            ratio.plot(*zip(*points), linestyle=dashes, marker=marker, color={"-": BLUE, "--": ORANGE, ":": GREEN}[dashes],
                       label=label)
    ratio.axhline(1.0, color=BLACK, linewidth=0.8)
    ratio.set_ylabel("best chain over fused (above 1: fused is faster)")
    if len(ratio.lines) > 1:
        ratio.legend(fontsize=8)
    for axes in (times, ratio):
        token_axis(axes, sizes(found, group))
        axes.set_title(group.text, fontsize=9)
    return drawing


def floor_shares(results: Results) -> Figure:
    found = [one for one in layers(results) if one.raw.get("times_floor") and one.combine in (None, "slots")]
    # Ranks that share a GPU read each other's rows from its L2: what memory does at most is no floor of theirs.
    rows = [one for one in trips(results) if one.times_floor and one.wire == "bf16" and one.group.is_real]
    if not found and not rows:
        raise NoData("floors are of GPUs; the host engine has none" if results.is_host else results.why_not("mega", "exchange"))
    # Of each what was measured with most GPUs: line, tokens, share.
    lines = {"layers; floor: weights streamed, or operations": [
                 (one.way, one.tokens, 100 / one.raw["times_floor"]) for one in found
                 if one.group == groups(found)[0]],
             "round trips; floor: launches, words and rows": [
                 (one.way, one.tokens, 100 / (one.times_floor or 1.0)) for one in rows if one.group == groups(rows)[0]]}
    lines = {title: points for title, points in lines.items() if points}
    drawing, panels = figure(len(lines), width=5.5 * len(lines), height=3.8)
    for axes, (title, points), group in zip(panels, lines.items(), [groups(some)[0].text for some in (found, rows) if some]):
        for way in dict.fromkeys(way for way, _, _ in points):
            line = sorted((tokens, share) for other, tokens, share in points if other == way)
            way_line(axes, way, [tokens for tokens, _ in line], [share for _, share in line])
        token_axis(axes, [tokens for _, tokens, _ in points])
        axes.set_ylim(0, 100)
        axes.set_title(f"{group}: {title}", fontsize=8)
        axes.legend(fontsize=7)
    panels[0].set_ylabel("share of the floor, %")
    return drawing


def _roofs(results: Results) -> tuple[float, float, str]:
    """Bytes and operations a second that the machine does at best, and who says so."""
    for result in results.prefixed("mega"):
        memory, operations = result["stream_bytes_per_second"], result["operations_per_second"]["fp8"]
        return (memory, operations, f"roofs: weights streamed at {memory / 1e12:g} TB/s, tensor cores at {operations / 1e15:g} PFLOP/s (fp8), "
                "as measured apart")
    machine = results.named("machine")
    if machine is None:
        raise NoData(results.why_not("machine", "mega"))
    cores = machine["machine"].get("cores") or 1
    return (machine["copy_bytes_per_second"], cores * machine["operations_per_second_a_core"],
            f"roofs of this run: memcpy, and the BLAS' f32 products on {cores} cores")


def _roof_points(results: Results) -> dict[str, list[tuple[float, float]]]:
    """By what was measured: operations a byte, operations a second."""
    points: dict[str, list[tuple[float, float]]] = {}
    for entry in results.of("experts"):
        for row in entry["result"]["rows"]:
            if row.get("tflops"):
                rate = row["tflops"] * 1e12
                points.setdefault(f"{row['weights']} {row['product']}", []).append(
                    (rate * row["median_us"] * 1e-6 / row["weight_bytes"], rate))
    for entry in results.of("mega"):
        if entry["name"].startswith("mega-"):
            for row in entry["result"]["rows"]:
                if row["way"] == "mega" and row.get("combine") == "slots" and "median_us" in row:
                    points.setdefault(f"fused layer, {entry['name'][5:]} GPU", []).append(
                        (row["operations"] / row["weight_bytes"], row["operations"] / (row["median_us"] * 1e-6)))
    for entry in results.of("layer"):
        result = entry["result"]
        if entry["name"] == "layer-8":
            for row in result["rows"]:
                if row["way"] == "low_latency":
                    operations = 6.0 * result["hidden"] * result["intermediate"] * row["rows_real"]
                    points.setdefault("experts of low_latency, 8 ranks together", []).append(
                        (operations / row["expert_bytes"], operations / ((row["gemm1_us"] + row["gemm2_us"]) * 1e-6)))
    return points


def roofline(results: Results) -> Figure:
    memory, operations, source = _roofs(results)
    points = _roof_points(results)
    if not points:
        raise NoData(results.why_not("experts", "mega", "layer"))
    drawing, (axes,) = figure(width=7.5, height=4.2)
    everything = [x for line in points.values() for x, _ in line] + [operations / memory]
    left, right = min(everything) / 2, max(everything) * 2
    axes.plot([left, operations / memory, right], [left * memory, operations, operations], color=BLACK, linewidth=1.2, label="roof")
    for place, (name, line) in enumerate(points.items()):
        line.sort()
        axes.plot(*zip(*line), marker="osD^vP"[place % 6], linestyle=["-", "--", "-.", ":"][place % 4],
                  color=[BLUE, ORANGE, GREEN, RED, GREY][place % 5], label=name, linewidth=0.9)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("operations a byte of weights (host engine: of weights and rows)")
    axes.set_ylabel("operations a second")
    axes.set_title(source, fontsize=8)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return drawing


def step_shares(results: Results) -> Figure:
    found = results.prefixed("step")
    if not found:
        raise NoData(results.why_not("step"))
    result = found[0]
    rows = [row for row in result["rows"] if "moe_us" in row]
    tokens = sorted({row["tokens"] for row in rows})
    drawing, panels = figure(2, len(tokens), width=9, height=3.3 * len(tokens))
    for place, size in enumerate(tokens):
        share, layer = panels[2 * place], panels[2 * place + 1]
        for way in dict.fromkeys(row["way"] for row in rows):
            line = [row for row in rows if row["way"] == way and row["tokens"] == size]
            gaps = [row["gap_us"] for row in line]
            way_line(share, way, gaps, [100 * row["moe_share"] for row in line])
            way_line(layer, way, gaps, [row["moe_us_a_layer"] for row in line])
        share.set_ylabel("share of the step, %")
        layer.set_ylabel("MoE a layer, us")
        layer.set_ylim(bottom=0)
        for axes in (share, layer):
            axes.set_title(f"{size:,} tokens a rank, {result['layers']} layers", fontsize=9)
            axes.set_xlabel("gap a layer in place of attention, us")
        layer.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return drawing
