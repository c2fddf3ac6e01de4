"""heddle report: figures and a page from files of `heddle bench all`. Usage: python3 tools/report A.json [B.json] --out FOLDER."""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path

try:
    import matplotlib  # noqa: F401
except ImportError:
    print(f"heddle: the report's figures need Matplotlib, which {sys.executable} has not; install it with apt-get install "
          "python3-matplotlib or python3 -m pip install matplotlib, or name another Python (heddle report --python)", file=sys.stderr)
    sys.exit(2)

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

import catalogue
import compare
import grid_questions
import page
import placeholders
import prose
import style  # noqa: F401  (sets how figures look)
from results import NoData, ReportError, Results


def svg_of(figure: Figure) -> str:
    """Without what changes from run to run, and without references to anything outside."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg"):]


def draw(entry: catalogue.Entry, runs: list[Results], folder: Path) -> page.Drawn:
    drawn = page.Drawn(entry, [], [])
    for place, results in enumerate(runs):
        name = entry.name + ("" if place == 0 else f"-{place + 1}")
        try:
            figure = entry.draw(results)
        except NoData as missing:
            drawn.svgs.append(None)
            drawn.reasons.append(str(missing))
            continue
        svg = svg_of(figure)
        figure.savefig(folder / f"{name}.png", bbox_inches="tight")
        plt.close(figure)
        (folder / f"{name}.svg").write_text('<?xml version="1.0" encoding="utf-8"?>\n' + svg, encoding="utf-8")
        drawn.svgs.append(svg)
        drawn.reasons.append("")
    return drawn


def wait_table(results: Results) -> list[list[str]]:
    try:
        return placeholders.wait_table(results)
    except NoData:
        return []


def report(paths: list[str], out: str) -> None:
    runs = [Results(path) for path in paths]
    folder = Path(out) / "figures"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ReportError(f"--out {out}: cannot be made: {error.strerror}") from error
    labels = ["this run"] if len(runs) == 1 else ["first", "second"]
    figures = [draw(entry, runs, folder) for entry in catalogue.CATALOGUE]
    changes = compare.changes(*runs) if len(runs) == 2 else None
    text = page.page(runs, labels, figures, [placeholders.numbers(run) for run in runs], [prose.tables(run) for run in runs],
                     [wait_table(run) for run in runs], [grid_questions.grid_table(run) for run in runs], changes)
    (Path(out) / "report.html").write_text(text, encoding="utf-8")
    shown = sum(svg is not None for one in figures for svg in one.svgs)
    print(f"{out}/report.html, and {shown} figures in {folder} as SVG and PNG")
    for one in figures:
        for svg, reason in zip(one.svgs, one.reasons):
            if svg is None:
                print(f"  no figure {one.entry.name}: {reason}")
    if changes is not None:
        worse = [one for one in changes if one.verdict == "regression"]
        print(f"  {len(changes)} lines in both runs, {len(worse)} clearly slower in the second")


def main() -> int:
    parser = argparse.ArgumentParser(prog="heddle report", description="figures and a page from files of heddle bench all")
    parser.add_argument("files", nargs="+", help="one file, or two to compare")
    parser.add_argument("--out", required=True, help="folder for report.html and figures/")
    arguments = parser.parse_args()
    if len(arguments.files) > 2:
        print("heddle: report takes one file, or two to compare", file=sys.stderr)
        return 2
    try:
        report(arguments.files, arguments.out)
    except ReportError as error:
        print(f"heddle: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"heddle: --out {arguments.out}: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
