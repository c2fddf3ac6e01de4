"""Every {{name}} that the three articles leave open: its value here, or the numbers that its sentences would cite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from figures_trace import waits
from results import NoData, Results
from rows import Group, Layer, Trip, best_chain, fused, groups, layers, sizes, trip, trips

GIB = 1024.0**3
LAYERS = {"ways": 40, "fused": 43}
STEP_MS = 12.2  # of the exchange-ways article's server, section 8.4


@dataclass
class Value:
    """A number as the article would print it, and of what it is."""

    text: str
    where: str


@dataclass
class Placeholder:
    name: str
    article: str
    what: str
    values: list[Value] = field(default_factory=list)
    table: list[list[str]] | None = None  # of prose: a heading row and rows
    why_not: str = ""


def us(value: float) -> str:
    return f"{value:,.1f} us"


def ms(value: float) -> str:
    return f"{value / 1000:,.3f} ms"


def _times(results: Results, way: str, tokens: int, what: Callable[[Trip], float | None], unit: Callable[[float], str] = us) -> list[Value]:
    """Of every group of ranks that was measured at this size."""
    found = trips(results)
    if not found:
        raise NoData(results.why_not("exchange", "trips"))
    values = []
    for group in groups(found):
        one = trip(found, group, way, tokens)
        number = what(one) if one else None
        if number is not None:
            values.append(Value(unit(number), group.text))
    if not values and any((one.way, one.tokens) == (way, tokens) for one in found):
        raise NoData("the host engine does not tell how long a thread waits for counts")
    if not values:
        raise NoData(f"way {way} was not measured with {tokens:,} tokens a rank")
    return values


def _buffer(results: Results, way: str, cap: int) -> list[Value]:
    result = results.named("buffers")
    if result is None:
        raise NoData(results.why_not("buffers"))
    texts = {"layout": "this library's workspace", "article": "as the article accounts for it"}
    return [Value(f"{row['bytes'] / GIB:.3f} GB", f"{texts[row['whose']]}, {row['ranks']} ranks, computed")
            for row in result["rows"] if row["way"] == way and row["cap"] == cap]


def _masked(results: Results) -> list[Value]:
    values = [Value(us(row["dispatch_us"] + row["combine_us"]), f"{row['arrived']} layout, {result['ranks']} ranks on "
                    f"{result['machine'].get('gpus')} GPUs")
              for result in results.prefixed("layouts") for row in result["layouts"]
              if row["way"] == "elastic" and row["tokens"] == 64 and row["arrived"] == "masked" and "dispatch_us" in row]
    return values or _times(results, "elastic", 64, lambda one: one.total)


def _synchronous(results: Results) -> list[Value]:
    try:
        return _times(results, "elastic_sync", 4096, lambda one: one.total, ms)
    except NoData:
        return [Value(value.text, value.where + "; without the host's wait") for value in
                _times(results, "elastic", 4096, lambda one: one.total, ms)]


def _best(results: Results, tokens: int) -> list[tuple[Group, Trip]]:
    found = trips(results)
    best = []
    for group in groups(found):
        here = [one for one in found if one.group == group and one.tokens == tokens and one.way not in ("nccl",)]
        if here:
            best.append((group, min(here, key=lambda one: one.total)))
    if not best:
        raise NoData(results.why_not("exchange", "trips"))
    # The article asks for 4 ranks; others stand for them only where there are none.
    return [pair for pair in best if pair[0].ranks == 4] or best


def _best_total(results: Results) -> list[Value]:
    return [Value(us(one.total), f"{one.way}, {group.text}") for group, one in _best(results, 64)]


def _best_share(results: Results) -> list[Value]:
    if results.is_host:
        raise NoData("the article's step is one of GPUs; round trips of threads are no share of it")
    return [Value(f"{100 * LAYERS['ways'] * one.total / (1000 * STEP_MS):.1f}%",
                  f"{LAYERS['ways']} x {one.total:.1f} us ({one.way}, {group.text}) of the article's {STEP_MS} ms")
            for group, one in _best(results, 64)]


def _near(there: list[int], wanted: int) -> int:
    return min(there, key=lambda size: abs(size - wanted))


def _pairs(results: Results, wanted: int = 512) -> list[tuple[Group, int, Layer, Layer]]:
    """Group, tokens, best chain, fused layer."""
    found = layers(results)
    pairs = []
    for group in groups(found):
        tokens = _near(sizes(found, group), wanted)
        chain, one = best_chain(found, group, tokens), fused(found, group, tokens)
        if chain and one:
            pairs.append((group, tokens, chain, one))
    if not pairs:
        raise NoData(results.why_not("mega", "layer"))
    return pairs


def _chain(results: Results) -> list[Value]:
    return [Value(us(chain.us), f"{chain.way}, {tokens} tokens a rank, {group.text}") for group, tokens, chain, _ in _pairs(results)]


def _fused(results: Results) -> list[Value]:
    return [Value(us(one.us), f"{tokens} tokens a rank, {group.text}") for group, tokens, _, one in _pairs(results)]


def _saved(results: Results) -> list[Value]:
    return [Value(ms(LAYERS["fused"] * (chain.us - one.us)), f"{LAYERS['fused']} x ({chain.us:.1f} - {one.us:.1f}) us, {tokens} "
                  f"tokens a rank, {group.text}") for group, tokens, chain, one in _pairs(results)]


def _launches(results: Results) -> list[Value]:
    counts = {}
    for result in results.prefixed("step"):
        for row in result["rows"]:
            if "kernels_a_layer" in row:
                counts[row["way"]] = row["kernels_a_layer"]
    if not counts:
        raise NoData("the host engine launches no kernels" if results.is_host else results.why_not("step"))
    return [Value(f"{count:g}", f"kernels a layer in the graph, way {way}") for way, count in counts.items()]


SINGLE: list[tuple[str, str, str, Callable[[Results], list[Value]]]] = [
    ("agrs_total_64_8", "ways", "gather and reduce-scatter, 64 rows a rank", lambda r: _times(r, "gather", 64, lambda t: t.total)),
    ("agrs_total_4096_8", "ways", "the same, 4,096 rows", lambda r: _times(r, "gather", 4096, lambda t: t.total, ms)),
    ("normal_dispatch_4096_8", "ways", "way normal, dispatch of 4,096 rows", lambda r: _times(r, "normal", 4096, lambda t: t.dispatch, ms)),
    ("normal_combine_4096_8", "ways", "way normal, combine of 4,096 rows", lambda r: _times(r, "normal", 4096, lambda t: t.combine, ms)),
    ("normal_dispatch_64_8", "ways", "way normal, dispatch of 64 rows", lambda r: _times(r, "normal", 64, lambda t: t.dispatch)),
    ("normal_combine_64_8", "ways", "way normal, combine of 64 rows", lambda r: _times(r, "normal", 64, lambda t: t.combine)),
    ("normal_host_64_8", "ways", "way normal, the host is blocked in dispatch", lambda r: _times(r, "normal", 64, lambda t: t.host_blocked)),
    ("ll_buffer_128", "ways", "low_latency's buffer, cap 128", lambda r: _buffer(r, "low_latency", 128)),
    ("ll_buffer_1024", "ways", "low_latency's buffer, cap 1,024", lambda r: _buffer(r, "low_latency", 1024)),
    ("ll_dispatch_64_8", "ways", "low_latency, dispatch of 64 rows", lambda r: _times(r, "low_latency", 64, lambda t: t.dispatch)),
    ("ll_combine_64_8", "ways", "low_latency, combine of 64 rows", lambda r: _times(r, "low_latency", 64, lambda t: t.combine)),
    ("v2masked_total_64_8", "ways", "elastic in the decode setting, 64 rows", _masked),
    ("v2sync_total_4096_8", "ways", "elastic in the prefill setting, 4,096 rows", _synchronous),
    ("fi_workspace_4096", "ways", "one_sided's workspace, 4,096 rows", lambda r: _buffer(r, "one_sided", 4096)),
    ("fi_total_64_8", "ways", "one_sided, 64 rows", lambda r: _times(r, "one_sided", 64, lambda t: t.total)),
    ("fi_total_4096_8", "ways", "one_sided, 4,096 rows", lambda r: _times(r, "one_sided", 4096, lambda t: t.total, ms)),
    ("best_total_64_4", "ways", "the fastest round trip, 64 rows, 4 ranks", _best_total),
    ("best_step_share", "ways", "40 of them as a share of a 12.2 ms step", _best_share),
    ("chain_us_512", "fused", "the best chain, 512 tokens a rank", _chain),
    ("fused_us_512", "fused", "the fused layer, 512 tokens a rank", _fused),
    ("step_saved_ms", "fused", "saved over 43 layers", _saved),
    ("chain_launches", "fused", "kernels a layer", _launches),
]


def _filled(results: Results, name: str, article: str, what: str, values: Callable[[Results], list[Value]]) -> Placeholder:
    placeholder = Placeholder(name, article, what)
    try:
        placeholder.values = values(results)
    except NoData as missing:
        placeholder.why_not = str(missing)
    return placeholder


def numbers(results: Results) -> list[Placeholder]:
    """The placeholders that stand for a number."""
    return [_filled(results, *one) for one in SINGLE]


def wait_table(results: Results) -> list[list[str]]:
    rows = [["layer", "role", "waits for", "in", "times", "us, all workers", "share of its time"]]
    for line in waits(results):
        if line["share"] >= 0.001:
            rows.append([line["way"], line["role"], line["what"], line["during"], f"{line['count']:,}", f"{line['us']:,.1f}",
                         f"{100 * line['share']:.1f}%"])
    return rows
