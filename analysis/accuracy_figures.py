"""Accuracy by arm, and by the number of intervals between a fact and its question."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis import style
from analysis.accuracy import CONTROL, REFERENCE

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
    """A panel a model and task: every arm's accuracy with its interval; dotted the reference, dashed guessing."""
    panels, looks = _panels(table), style.arm_look(list(table["arm"]))
    legend = [
        Line2D([], [], ls=":", color=style.INK, label=REFERENCE),
        Line2D([], [], ls="--", color=style.MUTED, label="chance"),
    ]
    heights = [1.2 + 0.2 * max(len(part) for _, part in row) for row in _rows(panels)]
    figure, axes = style.panels([len(row) for row in _rows(panels)], legend, heights)
    for ax, (key, part) in zip(axes, panels, strict=True):
        arms = list(part["arm"])
        for place, row in enumerate(part.itertuples()):
            bars = [[row.accuracy - row.low], [row.high - row.accuracy]]
            ax.errorbar(row.accuracy, place, xerr=bars, capsize=2.5, elinewidth=1.2, ls="", **looks[row.arm])
        for row in part[part["arm"] == REFERENCE].itertuples():
            ax.axvline(row.accuracy, color=style.INK, ls=":", lw=0.9, zorder=1)
        if part["chance"].notna().any():
            ax.axvline(part["chance"].max(), color=style.MUTED, ls="--", lw=0.9, zorder=1)
        ax.set_yticks(range(len(arms)), arms, fontsize=7)
        ax.invert_yaxis()
        ax.set_xlim(-3, 103)
        ax.grid(axis="x")
        ax.set_xlabel("items right, %")
        style.heading(
            ax, style.title(key["model"], paper), f"{key['task']}, {int(part['items'].max())} items, {key['device']}"
        )
    width, height = figure.get_size_inches()
    figure.set_size_inches(width + NAMED, height)  # room for the arms' names at the left of every panel
    axes[0].get_gridspec().update(left=NAMED / (width + NAMED), wspace=2 * NAMED / width)
    return figure


def accuracy_by_distance(table: pd.DataFrame, paper: pd.DataFrame) -> Figure:
    """A panel a model and task: accuracy by intervals from fact to question, each doubling at its upper end."""
    panels, looks = _panels(table), style.arm_look(list(table["arm"]))
    arms = sorted(looks, key=lambda arm: (arm != REFERENCE, arm == CONTROL, arm))
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
