"""The placeholders that stand for sentences: a table of the numbers that these would cite."""

from __future__ import annotations

from collections.abc import Callable

from placeholders import GIB, Placeholder
from results import NoData, Results
from rows import best_chain, fused, groups, layers, sizes, trips

Table = list[list[str]]


def _need(rows: Table, results: Results, *benchmarks: str) -> Table:
    if len(rows) < 2:
        raise NoData(results.why_not(*benchmarks))
    return rows


def round_trips(results: Results) -> Table:
    found = trips(results)
    tokens = sorted({one.tokens for one in found})
    rows = [["ranks", "way", "wire"] + [f"{size:,}" for size in tokens]]
    for group in groups(found):
        here = [one for one in found if one.group == group]
        for way, wire in dict.fromkeys((one.way, one.wire) for one in here):
            line = {one.tokens: one.total for one in here if (one.way, one.wire) == (way, wire)}
            rows.append([group.text, way, wire] + [f"{line[size]:,.1f}" if size in line else "" for size in tokens])
    return _need(rows, results, "exchange", "trips")


def layouts(results: Results) -> Table:
    rows = [["ranks", "way", "layout", "tokens a rank", "left to do, us"]]
    for result in results.prefixed("layouts"):
        rows += [[f"{result['ranks']} on {result['machine'].get('gpus')} GPUs", row["way"], row["arrived"], f"{row['tokens']:,}",
                  f"{row['layout_us']:,.2f}"] for row in result["layouts"] if "layout_us" in row]
    for result in results.prefixed("trips"):
        rows += [[f"{result['ranks']} threads", row["way"], row["arrived"], f"{row['tokens']:,}", f"{row['regroup_us']:,.2f}"]
                 for row in result["rows"]]
    return _need(rows, results, "exchange", "trips")


def three_questions(results: Results) -> Table:
    copies = results.named("copies")
    if copies is None:
        raise NoData(results.why_not("copies"))
    eight = next(row for row in copies["rows"] if row["ranks"] == 8)
    answers = [("gather", "every_rank", "no", "all rows of all ranks"), ("normal", "needed_ranks", "yes", "exact rows"),
               ("low_latency", "every_choice", "no", "masked blocks by expert"),
               ("elastic", "needed_ranks", "only if asked", "by expert, or as they arrive"),
               ("one_sided", "needed_ranks", "no", "as they arrive, with their routing")]
    rows = [["way", "copies of a token, 8 ranks", "does the host wait?", "rows arrive as"]]
    rows += [[way, f"{eight[field]:.2f}", waits, layout] for way, field, waits, layout in answers]
    for recording in copies["recordings"]:
        for point in recording["points"]:
            if point["ranks"] == 8:
                rows.append([f"recorded: {recording['name']}", f"{point['copies']:.2f} (formula {point['formula']:.2f})",
                             f"busiest rank {point['busiest_over_mean']:.2f} x the mean",
                             f"worst layer {point['busiest_over_mean_worst_layer']:.2f} x"])
    return rows


def chain_parts(results: Results) -> Table:
    found = layers(results)
    rows = [["ranks", "way", "tokens a rank", "part", "us", "share"]]
    for group in groups(found)[:1]:
        for one in found:
            if one.group == group and one.parts and one.tokens in (1, 64, 256, 512, 8192):
                parts = {name: value for name, value in one.parts.items() if name != "experts" or "gemm1" not in one.parts}
                total = sum(parts.values())
                rows += [[group.text, one.way, f"{one.tokens:,}", name, f"{value:,.1f}", f"{100 * value / total:.0f}%"]
                         for name, value in parts.items()]
    return _need(rows, results, "mega", "layer")


def fused_ratios(results: Results) -> Table:
    found = layers(results)
    rows = [["ranks", "tokens a rank", "best chain", "us", "fused, us", "chain over fused", "fused over floor"]]
    for group in groups(found):
        for tokens in sizes(found, group):
            one, chain = fused(found, group, tokens), best_chain(found, group, tokens)
            if one and chain:
                floor = one.raw.get("times_floor")
                rows.append([group.text, f"{tokens:,}", chain.way, f"{chain.us:,.1f}", f"{one.us:,.1f}", f"{chain.us / one.us:.3f}",
                             f"{floor:.2f}" if floor else "no floor here"])
    return _need(rows, results, "mega", "layer")


def variants(results: Results) -> Table:
    rows = [["measurement", "ranks", "tokens a rank", "results", "shared expert", "weights", "us"]]
    for prefix in ("mega", "layer", "shared", "fp8", "add"):
        for one in layers(results, prefix):
            if one.way == "mega" and (prefix not in ("mega", "layer") or one.combine != "slots"):
                rows.append([prefix, one.group.text, f"{one.tokens:,}", str(one.combine), str(one.shared_place or "without"),
                             one.weights, f"{one.us:,.1f}"])
    return _need(rows, results, "mega", "layer")


def buffer_check(results: Results) -> Table:
    result = results.named("buffers")
    if result is None:
        raise NoData(results.why_not("buffers"))
    rows = [["whose", "arrived rows", "cap", "GB (2^30)"]]
    rows += [[row["whose"], row["kind"], f"{row['cap']:,}", f"{row['bytes'] / GIB:.3f}"] for row in result["rows"]
             if row["way"] == "mega"]
    for one in layers(results):
        size = one.raw.get("buffer_bytes") or one.raw.get("heap_bytes")
        if one.way == "mega" and size and one.combine == "slots":
            rows.append([f"allocated: {one.group.text}", "live ring", f"{one.tokens:,}", f"{size / GIB:.4f}"])
    return rows


def ring_times(results: Results) -> Table:
    rings = layers(results, "ring")
    if not rings:
        raise NoData(results.why_not("layer" if results.is_host else "mega"))
    plain = layers(results)
    rows = [["ranks", "tokens a rank", "ring", "us"]]
    for one in (one for one in rings if one.way == "mega"):
        live = None if any(other.raw.get("ring") == "live" for other in rings) else fused(plain, one.group, one.tokens)
        rows.append([one.group.text, f"{one.tokens:,}", one.raw.get("ring", "full"), f"{one.us:,.1f}"])
        if live:
            rows.append([one.group.text, f"{one.tokens:,}", "live", f"{live.us:,.1f}"])
    return rows


def fp8_combine(results: Results) -> Table:
    found = layers(results) + layers(results, "fp8-combine")
    rows = [["ranks", "tokens a rank", "slots, us", "fp8 slots, us", "ratio", "error against bf16 slots"]]
    for group in groups(found):
        for tokens in sizes(found, group):
            plain, less = fused(found, group, tokens), fused(found, group, tokens, "fp8")
            if plain and less:
                error = less.raw.get("error_of_slots")
                rows.append([group.text, f"{tokens:,}", f"{plain.us:,.1f}", f"{less.us:,.1f}", f"{less.us / plain.us:.3f}",
                             f"{error:.2e}" if error is not None else "not stated"])
    return _need(rows, results, "mega", "layer")


def skew(results: Results) -> Table:
    skewed, plain = layers(results, "skew"), layers(results)
    rows = [["ranks", "way", "tokens a rank", "uniform, us", "zipf 1.0, us", "ratio"]]
    for one in skewed:
        same = [other for other in plain if (other.group, other.way, other.tokens, other.combine) ==
                (one.group, one.way, one.tokens, one.combine)]
        if same:
            rows.append([one.group.text, one.way, f"{one.tokens:,}", f"{same[0].us:,.1f}", f"{one.us:,.1f}", f"{one.us / same[0].us:.3f}"])
    return _need(rows, results, "mega", "layer")


def step(results: Results) -> Table:
    rows = [["ranks", "layers", "way", "tokens a rank", "gap, us", "step, us", "MoE a layer, us", "share of MoE"]]
    for result in results.prefixed("step"):
        for row in result["rows"]:
            if "moe_us" in row:
                rows.append([str(result["ranks"]), str(result["layers"]), row["way"], f"{row['tokens']:,}", str(row["gap_us"]),
                             f"{row['median_us']:,.1f}", f"{row['moe_us_a_layer']:,.2f}", f"{100 * row['moe_share']:.1f}%"])
    return _need(rows, results, "step")


def method(results: Results) -> Table:
    rows = [["measurement", "arguments", "seconds", "date", "commit"]]
    rows += [[e["name"], f"{e['benchmark']} {e['arguments']}", f"{e.get('wall_seconds', 0):.1f}", e["date"], e["commit"] or "not given"]
             for e in results.entries if "result" in e]
    return rows


def power(results: Results) -> Table:
    rows = [["measurement", "SM clock, MHz", "memory clock, MHz", "power limit, W"]]
    for entry in results.entries:
        machine = entry["machine"]
        if "result" in entry and "sm_clock_mhz" in machine:
            rows.append([entry["name"], str(machine["sm_clock_mhz"]), str(machine.get("memory_clock_mhz", "")),
                         str(machine.get("power_limit_w", ""))])
    if len(rows) < 2:
        raise NoData("the host engine has no power limit to tell" if results.is_host else "the driver told no clocks")
    return rows


PROSE: list[tuple[str, str, str, Callable[[Results], Table]]] = [
    ("fig11_discussion_8", "ways", "dispatch + combine, us, by tokens a rank", round_trips),
    ("s8_summary", "ways", "the same, for the summary", round_trips),
    ("layout_discussion", "ways", "what is left to do before experts can run", layouts),
    ("summary_text", "ways", "the three questions", three_questions),
    ("fig3_reading", "fused", "where the chain's time goes", chain_parts),
    ("fig10_reading", "fused", "fused against the best chain", fused_ratios),
    ("summary_speed", "fused", "the same, for the summary", fused_ratios),
    ("sec4_variants", "fused", "variants of the fused layer", variants),
    ("buffer_check", "fused", "the buffer, computed and allocated", buffer_check),
    ("ring_timing", "fused", "what the ring costs or saves", ring_times),
    ("fp8_combine_result", "fused", "results in fp8", fp8_combine),
    ("skew_note", "fused", "skewed routing", skew),
    ("server_ab", "fused", "a step with gaps for attention, in place of a server", step),
    ("method_extra", "fused", "how everything was measured", method),
    ("power_note", "fused", "clocks and power limits", power),
]


def tables(results: Results) -> list[Placeholder]:
    """The placeholders that stand for sentences, each with its table. Two that cite the same have it once."""
    found: list[Placeholder] = []
    seen: dict[Callable[[Results], Table], str] = {}
    for name, article, what, make in PROSE:
        placeholder = Placeholder(name, article, what)
        if make in seen:
            placeholder.why_not = f"the table of {{{{{seen[make]}}}}}"
        else:
            seen[make] = name
            try:
                placeholder.table = make(results)
            except NoData as missing:
                placeholder.why_not = f"not measured here: {missing}"
        found.append(placeholder)
    return found
