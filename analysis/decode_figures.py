"""Whole models: time in a step by part, and the layers' share of a step and the speedup by context."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from analysis import style
from analysis.cells import weaknesses

NAMES = ("step_by_part", "decode_by_context")
PARTS = (
    ("state", "state-space layers' steps", style.COLOURS[0]),
    ("products", "matrix products, as far as timed alone", style.COLOURS[4]),
    ("other", "all other", "#b9bec5"),
)
BAR = 0.38
LARGEST = 0.5
"""Share from which on a part is the largest for certain."""
UP_TO = 100_000
"""Tokens up to which the paper says that the state-space layers dominate."""


def draw(models: pd.DataFrame, failures: pd.DataFrame, paper: pd.DataFrame, folder: Path) -> list[str]:
    """Draw those for which there is something to show, from rows and failures of whole models' replay arms; returns
    their names."""
    drawn = []
    parted = models[models["state_share"].notna() & models["baseline_state_share"].notna()]
    if len(parted):
        style.save(step_by_part(parted, paper), folder, NAMES[0])
        drawn.append(NAMES[0])
    if len(several := several_contexts(parted)):
        style.save(decode_by_context(several, failures, paper), folder, NAMES[1])
        drawn.append(NAMES[1])
    return drawn


def step_by_part(models: pd.DataFrame, paper: pd.DataFrame) -> Figure:
    """Milliseconds of a step by part, stored beside replay, by batch size at each model's shortest context."""
    shown = models[models["context"] == models.groupby([*style.FACET])["context"].transform("min")]
    shown = shown.sort_values("speedup", ascending=False, kind="stable").drop_duplicates([*style.FACET, "batch_size"])
    facets = style.facets(shown)
    legend = [Patch(color=colour, label=label) for _, label, colour in PARTS]
    legend.append(Patch(facecolor="white", edgecolor=style.INK, hatch="////", lw=0.6, label="left, hatched: stored"))
    legend.append(Patch(facecolor="white", edgecolor=style.INK, lw=0.6, label="right: replay"))
    weak = [bool(weaknesses(row.processes, row.rounds, row.aa_noise)) for row in shown.itertuples()]
    legend += [Line2D([], [], label=style.WEAK, **style.hollow(style.INK, "o"))] if any(weak) else []
    shown = shown.assign(weak=weak)
    figure, axes = style.panels(style.rows(facets), legend)
    for ax, facet in zip(axes, facets, strict=True):
        part = style.of(shown, *facet).sort_values("batch_size")
        for place, row in enumerate(part.itertuples()):
            _bars(ax, place - BAR / 2 - 0.01, row, row.baseline_ms, row.baseline_state_share, hatch="////")
            _bars(ax, place + BAR / 2 + 0.01, row, row.step_ms, row.state_share)
            bounds = [[row.step_ms - row.baseline_ms / row.high], [row.baseline_ms / row.low - row.step_ms]]
            bars = [[max(0.0, value) for value in bound] for bound in bounds]
            spot = (place + BAR / 2 + 0.01, row.step_ms)
            ax.errorbar(*spot, yerr=bars, color=style.INK, capsize=2.5, elinewidth=1.1, ls="")
            if row.weak:
                ax.plot(*spot, zorder=5, **style.hollow(style.INK, "o") | {"ms": 3.5, "mew": 0.9})
        ax.set_xticks(range(len(part)), [f"{batch}" for batch in part["batch_size"]])
        ax.set_xlim(-0.6, len(part) - 0.4)
        ax.set_xlabel("batch size")
        told = f"{part['weights'].iloc[0]} weights, context {part['context'].iloc[0]:,}"
        style.heading(ax, style.title(facet[1], paper), style.subtitle(part, facet[0], told))
    axes[0].set_ylabel("milliseconds a step")
    return figure


def _bars(ax: Axes, place: float, row: Any, step: float, share: float, **look: Any) -> None:
    """The parts of one arm's step: what its layers take, of the rest what products alone take, and what remains."""
    state, rest = step * share, step * (1 - share)
    products = 0.0 if pd.isna(row.products_ms) else min(row.products_ms, rest)
    bottom = 0.0
    for (_, _, colour), height in zip(PARTS, (state, products, rest - products), strict=True):
        ax.bar(place, height, BAR, bottom, color=colour, edgecolor="white", lw=0.4, **look)
        bottom += height


def decode_by_context(models: pd.DataFrame, failures: pd.DataFrame, paper: pd.DataFrame) -> Figure:
    """By context, a row of panels a model: the share of a step that the state-space layers' steps take, and the speedup
    of the whole step; a line a batch size."""
    facets = style.facets(models)
    failures = failures[failures["batch_size"].isin(set(models["batch_size"]))].dropna(subset=["context"])
    batches = sorted({int(size) for size in models["batch_size"]})
    looks = {batch: {"color": style.COLOURS[i % 6], "marker": style.MARKERS[i % 12]} for i, batch in enumerate(batches)}
    legend = [Line2D([], [], label=f"batch {batch}", **looks[batch]) for batch in batches]
    legend += [Line2D([], [], color=style.INK, ls=ls, label=told) for ls, told in (("-", "stored"), ("--", "replay"))]
    weak = [bool(weaknesses(row.processes, row.rounds, row.aa_noise)) for row in models.itertuples()]
    models = models.assign(weak=weak)
    legend.append(Line2D([], [], color=style.MUTED, ls=":", label="published: largest part up to 100,000 tokens"))
    legend += [Line2D([], [], label=style.WEAK, **style.hollow(style.INK, "o"))] if any(weak) else []
    legend += [style.crosses_legend()] if len(failures) else []
    figure, axes = style.panels([2] * len(facets), legend)
    top = max(1.05, 1.03 * float(models["high"].max()))
    bottom = min(0.95, 0.97 * float(models["low"].min()))
    for (left, right), facet in zip(zip(axes[::2], axes[1::2], strict=True), facets, strict=True):
        part, lost = style.of(models, *facet), style.of(failures, *facet)
        style.crosses(right, lost, "context", [looks[int(batch)]["color"] for batch in lost["batch_size"]])
        for batch, line in part.groupby("batch_size"):
            line, look = line.sort_values("context"), looks[int(batch)]
            where = [math.log2(context) for context in line["context"]]
            left.plot(where, line["baseline_state_share"], **look)
            left.plot(where, line["state_share"], ls="--", **look)
            bars = [line["speedup"] - line["low"], line["high"] - line["speedup"]]
            right.errorbar(where, line["speedup"], yerr=bars, capsize=3, elinewidth=1.3, **look)
            for row in line[line["weak"]].itertuples():
                right.plot(math.log2(row.context), row.speedup, zorder=5, **style.hollow(**look))
        left.axvline(math.log2(UP_TO), color=style.MUTED, ls=":", lw=1.2, zorder=1)
        left.axhline(LARGEST, color=style.MUTED, lw=0.9, zorder=1)
        right.axhline(1, color=style.INK, lw=0.9, zorder=2)
        left.text(math.log2(UP_TO) - 0.1, 0.97, short(UP_TO), va="top", **style.SMALL | {"ha": "right"})
        left.set_ylim(0, 1)
        right.set_ylim(bottom, top)
        contexts = sorted({int(context) for context in (*part["context"], *lost["context"])})
        for ax, label in ((left, "layers' share of a step"), (right, "speedup of the step")):
            _context_axis(ax, contexts)
            ax.set_ylabel(label)
            told = f"{part['weights'].iloc[0]} weights"
            style.heading(ax, style.title(facet[1], paper), style.subtitle(part, facet[0], told))
    figure.axes[0].get_gridspec().update(wspace=0.27)  # room for the labels between the panels
    return figure


def _context_axis(ax: Axes, contexts: list[int]) -> None:
    """Ticks at the contexts that were run, as far as their labels have room; both panels of a row to the same end."""
    first, end = math.log2(contexts[0]) - 0.5, math.log2(max(contexts[-1], UP_TO)) + 0.5
    places: list[float] = []
    for place in (math.log2(context) for context in reversed(contexts)):
        places += [place] if not places or places[-1] - place >= (end - first) / 10 else []
    ax.set_xticks(places, [short(round(2**place)) for place in places])
    ax.set_xlim(first, end)
    ax.set_xlabel("context, tokens")


def short(tokens: int) -> str:
    """8192 -> 8K, 100000 -> 100K."""
    unit = next((unit for unit in (1024, 1000) if tokens >= unit and tokens % unit == 0), 0)
    return f"{tokens // unit}K" if unit else f"{tokens}"


def several_contexts(models: pd.DataFrame) -> pd.DataFrame:
    """Of each batch size that was run at several contexts, the best arm at each of them."""
    best = models.sort_values("speedup", ascending=False, kind="stable")
    best = best.drop_duplicates([*style.FACET, "batch_size", "context"])
    counts = best.groupby([*style.FACET, "batch_size"])["context"].transform("nunique")
    return best[counts > 1].sort_index()
