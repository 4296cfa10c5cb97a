"""Accuracy by arm, and by the number of intervals between a fact and its question."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis import style
from analysis.accuracy import CONTROL, POINTS, REFERENCE
from analysis.drift_figures import precision_look

NAMES = ("accuracy_by_arm", "accuracy_by_distance")
NAMED = 1.3
"""Inches for the name of an arm."""
PANEL = ["device", "model", "task", "prompt", "interval_length"]


def draw(table: pd.DataFrame, by_distance: pd.DataFrame, paper: pd.DataFrame, folder: Path) -> list[str]:
    """Draw those for which there is something to show; returns their names."""
    drawn = []
    if len(table := table[table["accuracy"].notna()]):
        style.save(accuracy_by_arm(table, paper), folder, NAMES[0])
        drawn.append(NAMES[0])
    if len(by_distance):
        style.save(accuracy_by_distance(by_distance, paper), folder, NAMES[1])
        drawn.append(NAMES[1])
    return drawn


def accuracy_by_arm(table: pd.DataFrame, paper: pd.DataFrame) -> Figure:
    """A row of panels a model and task: every arm's accuracy, and its difference to the reference on the same items,
    with their intervals."""
    panels, looks = _panels(table), precision_look(table["arm"])
    legend = [
        Line2D([], [], ls=":", color=style.INK, label=REFERENCE),
        Line2D([], [], ls="--", color=style.MUTED, label="chance"),
        Line2D([], [], ls="-.", color=style.MUTED, label=f"a loss of {POINTS:g} points"),
    ]
    heights = [1.2 + 0.2 * len(part) for _, part in panels]
    figure, axes = style.panels([2] * len(panels), legend, heights)
    for (key, part), left, right in zip(panels, axes[::2], axes[1::2], strict=True):
        arms = list(part["arm"])
        told = f"{key['task']}, {int(part['items'].max())} items, {key['device']}"
        for place, row in enumerate(part.itertuples()):
            bars = [[row.accuracy - row.low], [row.high - row.accuracy]]
            left.errorbar(row.accuracy, place, xerr=bars, capsize=2.5, elinewidth=1.2, ls="", **looks[row.arm])
        for row in part[part["arm"] == REFERENCE].itertuples():
            left.axvline(row.accuracy, color=style.INK, ls=":", lw=0.9, zorder=1)
        if part["chance"].notna().any():
            left.axvline(part["chance"].max(), color=style.MUTED, ls="--", lw=0.9, zorder=1)
        left.set_xlim(-3, 103)
        left.set_xlabel("items right, %")
        _differences(right, part, looks)
        for ax, names in ((left, arms), (right, [])):
            ax.set_yticks(range(len(arms)), names or [""] * len(arms), fontsize=7)
            ax.set_ylim(len(arms) - 0.5, -0.5)
            ax.grid(axis="x")
            style.heading(ax, style.title(key["model"], paper), told)
    width, height = figure.get_size_inches()
    figure.set_size_inches(width + NAMED, height)  # room for the arms' names at the left
    axes[0].get_gridspec().update(left=(NAMED + 0.15) / (width + NAMED), wspace=0.12)
    return figure


def _differences(ax: Axes, part: pd.DataFrame, looks: dict[str, Any]) -> None:
    """Paired differences to the reference; one that is far beyond the others is written out."""
    known = part[part["difference"].notna()]
    others = known[known["arm"] != CONTROL]
    reach = max([1.5 * POINTS, *(1.15 * others[["difference_low", "difference_high"]].abs().to_numpy().ravel())])
    for place, row in zip(part.index.get_indexer(known.index), known.itertuples(), strict=True):
        if abs(row.difference) > reach:
            told = f"{row.arm}: {row.difference:+.1f}"
            ax.text(0.97 * reach, place, told, ha="right", va="center", fontsize=7, color=style.MUTED)
            continue
        bars = [[row.difference - row.difference_low], [row.difference_high - row.difference]]
        ax.errorbar(row.difference, place, xerr=bars, capsize=2.5, elinewidth=1.2, ls="", **looks[row.arm])
    if known.empty:
        ax.text(0, 0, f"no {REFERENCE} of the same items", ha="center", va="center", fontsize=7, color=style.MUTED)
    ax.axvline(0, color=style.INK, ls=":", lw=0.9, zorder=1)
    ax.axvline(-POINTS, color=style.MUTED, ls="-.", lw=0.9, zorder=1)
    ax.set_xlim(-reach, reach)
    ax.set_xlabel(f"difference to {REFERENCE}, points")


def accuracy_by_distance(table: pd.DataFrame, paper: pd.DataFrame) -> Figure:
    """A panel a model and task: accuracy by intervals from fact to question, each doubling at its upper end."""
    panels, looks = _panels(table), precision_look(table["arm"])
    arms = sorted(set(table["arm"]), key=lambda arm: (arm != REFERENCE, arm == CONTROL, arm))
    legend = [Line2D([], [], label=arm, **looks[arm]) for arm in arms]
    figure, axes = style.panels([len(row) for row in _rows(panels)], legend)
    for ax, (key, part) in zip(axes, panels, strict=True):
        for arm, line in part.groupby("arm", sort=True):
            where = [math.log2(end) for end in line["to_interval"]]
            bars = [line["accuracy"] - line["low"], line["high"] - line["accuracy"]]
            ax.errorbar(where, line["accuracy"], yerr=bars, capsize=2, elinewidth=0.9, **looks[str(arm)])
        ax.set_ylim(-3, 103)
        style.doubling_axis(ax, [int(end) for end in part["to_interval"]], "intervals from fact to question, at most")
        style.heading(
            ax, style.title(key["model"], paper), f"{key['task']}, L = {key['interval_length']}, {key['device']}"
        )
    axes[0].set_ylabel("items right, %")
    return figure


def _panels(table: pd.DataFrame) -> list[tuple[dict[str, Any], pd.DataFrame]]:
    """What a panel shows, and its rows, by task and then model; arms of every interval length stand together."""
    own = table.assign(interval_length=table.groupby(PANEL[:-1])["interval_length"].transform("max"))
    grouped = own.groupby(["task", *[name for name in PANEL if name != "task"]], sort=True)
    return [(dict(zip(["task", *[n for n in PANEL if n != "task"]], key, strict=True)), part) for key, part in grouped]


def _rows(panels: list[tuple[dict[str, Any], pd.DataFrame]]) -> list[list[Any]]:
    """Two panels in a row."""
    return [panels[start : start + 2] for start in range(0, len(panels), 2)]
