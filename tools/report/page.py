"""The page: one HTML file that needs nothing beside it."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from html import escape

from catalogue import Entry
from compare import LEAST_CHANGE, Change
from placeholders import Placeholder
from results import Results

STYLE = """
body { font: 15px/1.5 sans-serif; color: #111; max-width: 72em; margin: 2em auto; padding: 0 1.5em; }
h1 { font-size: 1.7em; } h2 { margin-top: 2.2em; border-bottom: 1px solid #999; } h3 { margin-bottom: .2em; }
figure { margin: 1em 0 2em; break-inside: avoid; } figcaption, .note { color: #444; font-size: .92em; }
.pair { display: flex; gap: 1.5em; } .pair > * { flex: 1; min-width: 0; } img { max-width: 100%; }
table { border-collapse: collapse; margin: .6em 0 1.6em; font-size: .88em; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid #ccc; padding: .2em .7em; text-align: left; vertical-align: top; }
th { border-bottom: 2px solid #555; } code { font-size: .95em; overflow-wrap: anywhere; } td code { white-space: nowrap; }
.missing { border-left: 4px solid #999; padding: .3em .8em; color: #444; background: #f6f6f6; }
.host { border: 2px solid #E69F00; padding: .5em 1em; } .regression { font-weight: bold; border-left: 4px solid #D55E00; }
.better { border-left: 4px solid #0072B2; } summary { cursor: pointer; font-weight: bold; }
@media print { body { max-width: none; margin: 0; } details::details-content { content-visibility: visible; display: block; } }
"""

HOST_NOTE = ("These are times of the <b>host engine</b>: ranks are threads that share this machine's cores, and the layer's matrices "
             "are small. They show what depends on what, not what GPUs take.")


@dataclass
class Drawn:
    """A figure of every run: its SVG, or why there is none."""

    entry: Entry
    svgs: list[str | None]
    reasons: list[str]


def table(rows: list[list[str]], raw: bool = False) -> str:
    """The first row is the heading. `raw`: cells are HTML already."""
    text = (lambda cell: cell) if raw else escape
    head = "".join(f"<th>{text(cell)}</th>" for cell in rows[0])
    body = "".join("<tr>" + "".join(f"<td>{text(cell)}</td>" for cell in row) + "</tr>\n" for row in rows[1:])
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table>\n"


def _image(svg: str, alt: str) -> str:
    data = base64.b64encode(svg.encode()).decode()
    return f'<img alt="{escape(alt, quote=True)}" src="data:image/svg+xml;base64,{data}">'


def _figure(drawn: Drawn, labels: list[str]) -> str:
    entry = drawn.entry
    cells = []
    for svg, reason, label in zip(drawn.svgs, drawn.reasons, labels):
        shown = _image(svg, entry.title) if svg else f'<p class="missing">Not measured here: {escape(reason)}</p>'
        cells.append(f"<div>{f'<b>{escape(label)}</b><br>' if len(labels) > 1 else ''}{shown}</div>")
    names = [entry.name + ("" if place == 0 else f"-{place + 1}") for place in range(len(drawn.svgs))]
    files = ", ".join(f"figures/{name}.svg" for name, svg in zip(names, drawn.svgs) if svg)
    caption = f"{entry.caption} <span class=\"note\">({escape(entry.of)}{'; ' + files if files else ''})</span>"
    return (f'<h3 id="{entry.name}">{escape(entry.title)}</h3>\n<figure><div class="pair">{"".join(cells)}</div>'
            f"<figcaption>{caption}</figcaption></figure>\n")


def _run(results: Results, label: str) -> str:
    json = results.json
    note = f'<p class="host">{HOST_NOTE}</p>' if results.is_host else ""
    return (f"<p><b>{escape(label)}</b>: {escape(results.machine)}; commit {escape(json.get('commit') or 'not given')}; "
            f"{escape(json.get('date', ''))}; heddle {escape(json.get('heddle', ''))}<br>"
            f"<code>{escape(json.get('command', ''))}</code></p>{note}")


def _numbers(runs: list[list[Placeholder]], labels: list[str]) -> str:
    rows = [["name", "what"] + [escape(label) for label in labels]]
    for same in zip(*runs):
        cells = []
        for one in same:
            values = "<br>".join(f"<b>{escape(value.text)}</b> <span class=\"note\">{escape(value.where)}</span>"
                                 for value in one.values)
            cells.append(values or f'<span class="note">not measured here: {escape(one.why_not)}</span>')
        what = f"{escape(same[0].what)} <span class=\"note\">({same[0].article})</span>"
        rows.append([f"<code>{{{{{same[0].name}}}}}</code>", what] + cells)
    return table(rows, raw=True)


def _prose(runs: list[list[Placeholder]], labels: list[str]) -> str:
    text = ""
    for same in zip(*runs):
        text += f"<h3><code>{{{{{same[0].name}}}}}</code> <span class=\"note\">({same[0].article}): {escape(same[0].what)}</span></h3>\n"
        for one, label in zip(same, labels):
            if len(labels) > 1:
                text += f"<b>{escape(label)}</b>\n"
            if one.table is None:
                text += f'<p class="missing">{escape(one.why_not)}</p>\n'
            elif len(one.table) > 30:
                text += f"<details><summary>{len(one.table) - 1} lines</summary>{table(one.table)}</details>\n"
            else:
                text += table(one.table)
    return text


def _changes(changes: list[Change], same_machine: bool) -> str:
    worse = [one for one in changes if one.verdict == "regression"]
    better = [one for one in changes if one.verdict == "better"]
    text = (f"<p>{len(changes)} lines are in both runs: {len(worse)} became clearly slower, {len(better)} clearly faster (the middle halves "
            f"of their samples do not overlap, and medians differ by more than {LEAST_CHANGE:.0%}).</p>")
    if not same_machine:
        text += '<p class="host">The runs are of different machines: a slower line is no regression of the program.</p>'
    rows = "".join(f'<tr class="{one.verdict}"><td>{one.verdict.upper() if one.verdict == "regression" else one.verdict}</td>'
                   f"<td>{escape(one.measurement)}</td><td>{escape(one.line)}</td><td>{one.before:,.2f}</td><td>{one.after:,.2f}</td>"
                   f"<td>{one.ratio:.3f}</td></tr>\n" for one in sorted(changes, key=lambda one: (not one.is_clear, -one.ratio)))
    return (f"{text}<details{' open' if worse else ''}><summary>All lines, the clearest first</summary><table><thead><tr><th></th>"
            f"<th>measurement</th><th>line</th><th>first, us</th><th>second, us</th><th>ratio</th></tr></thead><tbody>{rows}</tbody>"
            "</table></details>")


def _article_numbers(results: Results) -> str:
    computed = results.named("buffers")
    if computed is None:
        return f'<p class="missing">{escape(results.why_not("buffers"))}</p>'
    rows = [["article", "section", "number", "stated", "here", "unit", ""]]
    rows += [[n["article"], n["section"], n["title"], n["stated"], n["ours"], n["unit"], "" if n["agrees"] else "differs"]
             for n in computed["article_numbers"]]
    return f"<details><summary>{len(rows) - 1} numbers that the articles compute, computed again</summary>{table(rows)}</details>"


def _missing(results: Results) -> str:
    rows = [["measurement", "why"]]
    rows += [[e["name"], e.get("skipped") or e.get("failed", "")] for e in results.entries if "skipped" in e or "failed" in e]
    return table(rows) if len(rows) > 1 else "<p>Nothing that was asked for is missing.</p>"


def page(runs: list[Results], labels: list[str], figures: list[Drawn], numbers: list[list[Placeholder]], prose: list[list[Placeholder]],
         waits: list[list[list[str]]], grid: list[list[list[str]]], changes: list[Change] | None) -> str:
    """The whole page. All lists but `figures` are by run."""
    same_machine = len({run.machine for run in runs}) == 1
    parts = [f"<h1>Heddle: a report of {escape(runs[0].machine)}</h1>"] + [_run(run, label) for run, label in zip(runs, labels)]
    if changes is not None:
        parts += ['<h2 id="changes">The second run against the first</h2>', _changes(changes, same_machine)]
    parts.append("<h2>Figures</h2>")
    parts.append("<p class=\"note\">" + " · ".join(f'<a href="#{one.entry.name}">{escape(one.entry.title)}</a>' for one in figures) + "</p>")
    parts += [_figure(one, labels) for one in figures]
    parts.append("<h2>What waits for what</h2>")
    parts += [table(rows) if len(rows) > 1 else f'<p class="missing">Not measured here: {escape(run.why_not("trace"))}</p>'
              for rows, run in zip(waits, runs)]
    parts += ["<h2>The articles' placeholders: numbers</h2>", _numbers(numbers, labels)]
    parts += ["<h2>The articles' placeholders: what their sentences would cite</h2>", _prose(prose, labels)]
    parts.append("<h2>The persistent-grid article: what it left open</h2>")
    parts += [table(rows) for rows in grid]
    parts += ["<h2>Numbers that the articles compute</h2>", _article_numbers(runs[0])]
    parts.append("<h2>What is missing, and why</h2>")
    parts += [_missing(run) for run in runs]
    body = "\n".join(parts)
    return (f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>Heddle report</title><style>{STYLE}</style></head>\n'
            f"<body>\n{body}\n</body></html>\n")
