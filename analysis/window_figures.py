"""Kernels that verify a window of drafted tokens: speedup over those that keep snapshots, by batch size."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis import published, speedup_panels, style
from analysis.cells import strongest

NAMES = ("verify_by_batch",)
PUBLISHED_STATE = "fp32"


def draw(speedups: pd.DataFrame, failures: pd.DataFrame, paper: pd.DataFrame, folder: Path) -> list[str]:
    """Draw it if there is something to show, from the table's rows and from failures of windows; returns its name."""
    shown = strongest(speedups[(speedups["kind"] != "snapshots") & speedups["speedup"].notna()])
    if shown.empty:
        return []
    style.save(verify_by_batch(shown, failures, paper), folder, NAMES[0])
    return [*NAMES]


def verify_by_batch(speedups: pd.DataFrame, failures: pd.DataFrame, paper: pd.DataFrame) -> Figure:
    """Speedup over the fastest arm with snapshots by batch size, a line a window, arm and phase, what the machine
    allows each of them, and the published values of the same family; crosses where an arm failed, snapshots too."""
    lengths = speedup_panels.lengths(speedups, failures)
    several = speedups.groupby("window")["accepted"].nunique().max() > 1
    failures = speedup_panels.at(failures[failures["window"].notna()], lengths)
    ours, failed = _named(speedup_panels.at(speedups, lengths), several), _named(failures, False)
    looks = _looks(ours, failed)
    facets = style.along(style.facets(ours, failed), "batch_size", ours, failed)
    known = {facet: _published(paper, facet, ours, failed) for facet in facets}
    told = [Line2D([], [], label="published, its window's colour", **style.PUBLISHED)]
    beside = told if any(map(len, known.values())) else []
    legend = speedup_panels.legend(ours, looks, beside, len(failed) > 0)
    figure, axes = style.panels(style.rows(facets), legend)
    values = [0.0]
    for ax, facet in zip(axes, facets, strict=True):
        rows, lost = style.of(ours, *facet), style.of(failed, *facet)
        values += speedup_panels.draw_measured(ax, rows, lost, "batch_size", looks, apart=True)
        speedup_panels.not_run_alone(ax, rows, lost)
        style.doubling_axis(ax, [1, *rows["batch_size"], *lost["batch_size"].dropna()], "batch size")
        values += _draw_published(ax, known[facet])
        accepted = sorted({int(count) for count in rows["accepted"].dropna()})
        last = [speedup_panels.length_text(lengths, *facet), *(f"{n} accepted" for n in accepted if len(accepted) == 1)]
        style.heading(ax, style.title(facet[1], paper), style.subtitle(rows, facet[0], ", ".join(last)))
    speedup_panels.finish(axes, values, "speedup over the fastest snapshots")
    return figure


def _named(frame: pd.DataFrame, several: bool) -> pd.DataFrame:
    """Arms by window and name, and by how many tokens are accepted where a window was run with ``several`` counts."""
    counts = [f", {n} accepted" if several else "" for n in frame.get("accepted", frame["window"])]
    names = [f"T = {w}{n}: {arm}" for w, n, arm in zip(frame["window"], counts, frame["arm"], strict=True)]
    return frame.assign(arm=names, of=frame["arm"])


def _looks(*frames: pd.DataFrame) -> dict[str, dict[str, str]]:
    """The colour is that of the window, the marker of each line its own."""
    every = pd.concat([frame[["arm", "of", "window"]] for frame in frames]).drop_duplicates()
    every = every.assign(minor=~every["of"].str.startswith("verify/")).sort_values(["minor", "of", "window", "arm"])
    colours = style.window_look(every["window"])
    return {
        row.arm: {"color": colours[int(row.window)]["color"], "marker": style.MARKERS[i % len(style.MARKERS)]}
        for i, row in enumerate(every.itertuples())
    }


def _published(paper: pd.DataFrame, facet: style.Facet, *frames: pd.DataFrame) -> pd.DataFrame:
    family = next(name for frame in frames for name in style.of(frame, *facet)["family"])
    return published.windows(paper, str(family) if facet[-1] == PUBLISHED_STATE else "")


def _draw_published(ax: Axes, known: pd.DataFrame) -> list[float]:
    """A line a window and card, named below its end; returns the values."""
    for (window, card), part in known.groupby(["window", "hardware"]):
        where, colour = [math.log2(batch) for batch in part["batch_size"]], style.window_look([window])[window]["color"]
        ax.plot(where, part["value"], zorder=2, **style.PUBLISHED | {"color": colour})
        ax.set_xlim(right=max(ax.get_xlim()[1], where[-1] + 0.5))
        spot = (where[-1], part["value"].iloc[-1])
        place = style.SMALL | {"textcoords": "offset points", "va": "top", "ha": "right"}
        ax.annotate(f"published, {card}\nmodel not named", spot, (10, -10), **place)
    return list(known["value"])
