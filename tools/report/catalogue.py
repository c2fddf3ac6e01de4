"""The figures of the report: which of the articles' they are, and what one should know to read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from matplotlib.figure import Figure

import figures_exchange
import figures_grid
import figures_layer
import figures_trace
from results import Results


@dataclass(frozen=True)
class Entry:
    name: str  # of its files
    title: str
    of: str  # the article's figure or section
    caption: str
    draw: Callable[[Results], Figure]


CATALOGUE = [
    Entry("round-trips", "Dispatch and combine by rows", "ways, Figure 11",
          "Medians, without experts. GPUs: replays of CUDA graphs; normal and elastic_sync eagerly, with their host's wait. Host engine: "
          "a rank that waits for another one may wait for a core.", figures_exchange.round_trips),
    Entry("copies", "Copies of a token by ranks", "ways, Figure 3",
          "Lines: the formulas for uniform routing. Points: recorded routing, the mean over its layers.", figures_exchange.copies),
    Entry("layouts", "What is left to do when rows have arrived", "ways, section 8.3",
          "GPUs: the receiving half when everything is there, without an empty launch. Host engine: the part of dispatch that lays rows out. "
          "Linear up to 1 us, logarithmic above.", figures_exchange.layout_costs),
    Entry("way-buffers", "Workspace of the ways by cap", "ways, sections 4.3 and 6.3", "Computed; DeepSeek-V4.1-Flash.",
          figures_exchange.way_buffers),
    Entry("chain-shares", "Where the chain's time goes", "fused, Figure 3",
          "Of calls that are not captured; each part on the rank (GPU) where it took longest.", figures_layer.chain_shares),
    Entry("fused-chain", "The fused layer against the chain", "fused, Figure 10",
          "Left: a call of the whole layer. Right: the fastest chain of the same size over the fused layer.",
          figures_layer.fused_against_chain),
    Entry("fused-buffers", "The fused layer's buffer", "fused, Figure 11", "Computed; DeepSeek-V4-Flash, without a shared expert.",
          figures_exchange.buffers),
    Entry("timelines", "Timelines of one call", "fused, Figures 2 and 9",
          "One traced call each, to one scale of time. A worker a row, by what it mostly did; the two strips below are of all workers.",
          figures_trace.timelines),
    Entry("waits", "Who waits", "fused, Figure 14", "Of the same calls; the table below says for what.", figures_trace.wait_shares),
    Entry("roofline", "Roofline", "all", "", figures_layer.roofline),
    Entry("floors", "Share of the floor", "fused, section 4", "", figures_layer.floor_shares),
    Entry("step", "A step of the whole model", "ways, section 8.4; fused, section 6.3",
          "Layers one after the other, GPUs: in one CUDA graph, with a kernel that waits in place of attention; host engine: a loop, "
          "threads that sleep.", figures_layer.step_shares),
    Entry("grids", "Padded against persistent grid", "grid", "", figures_grid.grids),
    Entry("empty-ctas", "What empty CTAs cost", "grid", "", figures_grid.empty_ctas),
]
