"""What the figures of speedups share: which interval length a panel shows, its points, its scale and its legend."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from analysis import style
from analysis.cells import weaknesses

PAPER_INTERVAL = 16
DODGE = 0.22
"""Shift of staggered phases to the right, in doublings, so that their points do not hide aligned ones."""


def lengths(measured: pd.DataFrame, failed: pd.DataFrame) -> dict[style.Facet, int]:
    """The interval length at which a panel shows its model: the paper's where it was run, else the most frequent."""
    found = {}
    for facet in style.facets(measured, failed):
        for frame in (measured, failed):
            values = style.of(frame, *facet)["interval_length"].dropna()
            if len(values) and facet not in found:
                found[facet] = PAPER_INTERVAL if (values == PAPER_INTERVAL).any() else int(values.mode().min())
    return found


def at(frame: pd.DataFrame, lengths: dict[style.Facet, int]) -> pd.DataFrame:
    """Rows of each panel's interval length."""
    places = zip(*(frame[name] for name in (*style.FACET, "interval_length")), strict=True)
    chosen = [not pd.isna(length) and lengths.get(tuple(facet)) == length for *facet, length in places]
    return frame[np.array(chosen, dtype=bool)]


def length_text(lengths: dict[style.Facet, int], *facet: str) -> str:
    """For a panel's subtitle."""
    length = lengths.get(facet, PAPER_INTERVAL)
    return f"L = {length}" if length == PAPER_INTERVAL else f"only L = {length} run"


def failed(failures: pd.DataFrame) -> pd.DataFrame:
    """Failures to draw. What an arm cannot do or what is not installed is no failure of a case: the table tells it."""
    return failures[failures["status"] != "unsupported"]


def draw_measured(
    ax: Axes, rows: pd.DataFrame, lost: pd.DataFrame, x: str, looks: dict[str, dict[str, str]], apart: bool = False
) -> list[float]:
    """Our points with their intervals, broken at failed cells, the allowed speedup and the crosses; returns values.
    ``apart``: arms differ in what they are allowed, which is shown of each, in its colour."""
    for arm, _, line, part in style.series(rows) if len(rows) else []:
        gaps = set(lost.loc[lost["arm"] == arm, x].dropna()) - set(part[x])
        gap_rows = pd.DataFrame({x: sorted(gaps), "speedup": math.nan, "low": math.nan, "high": math.nan})
        weak = [is_weak(row) for row in part.itertuples()]
        shift = DODGE if line == "--" and (rows["phase"] != "staggered").any() else 0.0
        for row in part[weak].itertuples():
            ax.plot(math.log2(getattr(row, x)) + shift, row.speedup, zorder=5, **style.hollow(**looks[arm]))
        part = (pd.concat([part[[x, "speedup", "low", "high"]], gap_rows]) if gaps else part).sort_values(x)
        where = [math.log2(v) + shift for v in part[x]]
        bars = style.bars(part["speedup"], part["low"], part["high"])
        ax.errorbar(where, part["speedup"], yerr=bars, ls=line, capsize=3, elinewidth=1.3, zorder=4, **looks[arm])
    known = rows.dropna(subset=["ideal_roof"])
    roofs = known.groupby("arm" if apart else lambda _: "", sort=True)
    for arm, part in roofs:
        allowed = part.groupby(x)["ideal_roof"].max()
        look = {"ls": ":", "lw": 1.3, "marker": "_", "ms": 9, "color": looks[arm]["color"] if apart else style.INK}
        ax.plot([math.log2(v) for v in allowed.index], allowed, zorder=3, **look)
    style.crosses(ax, lost, x, [looks[arm]["color"] for arm in lost["arm"]])
    return [*rows["low"], *rows["high"], *known["ideal_roof"]]


def not_run_alone(ax: Axes, rows: pd.DataFrame, lost: pd.DataFrame) -> None:
    """Says so of batch size 1 where it was not tried."""
    if 1 not in {*rows["batch_size"], *lost["batch_size"]}:
        place = {"xycoords": ax.get_xaxis_transform()} | style.SMALL | {"ha": "left"}
        ax.annotate("batch 1\nnot run", (-0.3, 0.03), **place)


def finish(axes: list[Axes], values: list[float], label: str) -> None:
    """One scale for all panels, so that they can be compared; the foot is left to the crosses of failed cells."""
    known = [1.0, *(v for v in values if math.isfinite(v))]
    bottom, top = max(0.0, math.floor(min(known) * 5 - 1) / 5), math.ceil(max(known) * 5 + 0.5) / 5
    for ax in axes:
        ax.axhline(1, color=style.INK, lw=0.9, zorder=2)
        ax.set_ylim(bottom, top)
    axes[0].set_ylabel(label)


def legend(
    ours: pd.DataFrame, looks: dict[str, dict[str, str]], beside: list[Line2D], any_failed: bool
) -> list[Line2D]:
    """Our series, what the machine allows, what is drawn ``beside`` them, and the marks of points."""
    handles = []
    for arm, rest, line, part in style.series(ours) if len(ours) else []:
        rest += " (shifted)" if line == "--" and len(part) < len(ours[ours["arm"] == arm]) else ""
        handles.append(Line2D([], [], ls=line, label=f"{arm} {rest}".strip(), **looks[arm]))
    if ours["ideal_roof"].notna().any():
        handles.append(
            Line2D([], [], ls=":", marker="_", ms=9, color=style.INK, label="allowed by measured bandwidths")
        )
    handles += beside + weak_legend(ours)
    if any_failed:
        handles.append(style.crosses_legend())
    return handles


def is_weak(row: Any) -> bool:
    """Whether a row of a table proves nothing."""
    return bool(weaknesses(row.processes, row.rounds, row.aa_noise))


def weak_legend(rows: pd.DataFrame) -> list[Line2D]:
    weak = any(map(is_weak, rows.itertuples()))
    return [Line2D([], [], label=style.WEAK, **style.hollow(style.INK, "o"))] if weak else []
