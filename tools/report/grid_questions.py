"""What the persistent-grid article assumes, estimates or did not measure, and what was measured of it."""

from __future__ import annotations

from typing import Any

from figures_grid import grid_result
from results import NoData, Results


def _time(result: dict[str, Any], rows: int, grid: str) -> str:
    found = [row for row in result["rows"] if row["rows"] == rows and row["grid"] == grid]
    return "; ".join(f"{row['median_us']:,.2f} us ({row['l2']})" for row in found) or "not measured with these rows"


def grid_table(results: Results) -> list[list[str]]:
    rows = [["the article", "measured here"]]
    try:
        result = grid_result(results)
    except NoData as missing:
        return rows + [["all of it", f"not measured here: {missing}"]]
    on_gpu = result.get("benchmark") == "activation"
    sms = result.get("machine", {}).get("sms")
    slots = "the host engine has none"
    if on_gpu and sms:
        slots = f"{result['slots']} resident CTAs of the kernel, {result['slots'] / sms:g} an SM"
    empty = f"{result['empty_cta_ns']:.2f} ns of the GPU" if on_gpu else "see the two grids: an empty block is a prefix sum"
    rows += [["CTA slots: 8 CTAs an SM are assumed", slots],
             ["the time of one empty CTA is not measured", empty],
             ["padded grid, 384 real rows", _time(result, 384, "padded")],
             ["persistent grid, 384 real rows", _time(result, 384, "persistent")],
             ["384 rows, memory traffic alone: 0.5 to 0.7 us estimated",
              "; ".join(f"floor {row['floor_us']:.2f} us, launch included ({row['l2']})" for row in result["rows"]
                        if row["rows"] == 384 and row["grid"] == "persistent" and "floor_us" in row) or "no floor on the host engine"],
             ["padded grid, 6,144 real rows (b = 1,024)", _time(result, 6144, "padded")],
             ["persistent grid, 6,144 real rows", _time(result, 6144, "persistent")]]
    return rows
