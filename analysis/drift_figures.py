"""Precisions over long documents: KL by position, the states' own error, KL against bytes, and two ablations.

They draw the rounded values of the tables and nothing else; bars are 95 % intervals over documents.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from analysis import style
from analysis.accuracy import CONTROL
from analysis.drift import FLOOR, MAIN

LOST = 30.0
"""State error at which a panel ends: such a state has nothing to do with the exact one, and its curve leaves."""
NAMES = ("kl_by_position", "state_error_by_position", "kl_by_bytes", "kl_by_interval")
PLACE = ["device", "model", "family", "inputs", "source", "documents", "tokens"]
"""Columns that name a panel."""


def draw(tables: dict[str, pd.DataFrame], paper: pd.DataFrame, folder: Path) -> list[str]:
    """Draw those for which there is something to show; returns their names."""
    kl, positions, states = (tables[name] for name in ("drift_kl", "drift_positions", "drift_states"))
    shown: list[tuple[str, pd.DataFrame, Callable[[pd.DataFrame], Figure]]] = [
        (NAMES[0], _several(positions[positions["kl"] > 0]), lambda found: kl_by_position(found, paper)),
        (NAMES[1], _several(states), state_error_by_position),
        (NAMES[2], _several(kl[kl["arm"].isin(MAIN) & (kl["kl"] > 0) & kl["step_bytes"].notna()]), kl_by_bytes),
        (NAMES[3], _at_several_lengths(kl), kl_by_interval),
    ]
    for name, rows, figure in shown:
        if len(rows):
            style.save(figure(rows), folder, name)
    return [name for name, rows, _ in shown if len(rows)]


def kl_by_position(positions: pd.DataFrame, paper: pd.DataFrame) -> Figure:
    """The paper's figure: KL to the float32 state by position, log-log; its two values across the panels."""
    looks, legend = _looks(positions)
    values = paper[paper["experiment"] == "precision_pg19_kl"]["value"].dropna()
    grey: dict[str, Any] = {"color": style.MUTED, "ls": "--", "lw": 1.1}
    legend.append(Line2D([], [], label="published: Qwen3.5-4B, PG-19, NVFP4 shared and read only", **grey))
    figure, panels = _panels(positions, legend, "KL, nats")
    for ax, part in panels:
        for value in values:
            ax.axhline(value, zorder=1, **grey)
        _lines(ax, part, "kl", looks, ("low", "high"))
        _axes(ax, part, "position")
    return figure


def state_error_by_position(states: pd.DataFrame) -> Figure:
    """Error of what is fed back, solid, and of what is read, dotted, against the float32 trajectory."""
    looks, legend = _looks(states)
    legend += [Line2D([], [], color=style.INK, ls=ls, label=told) for ls, told in (("-", "update copy"), (":", "read"))]
    figure, panels = _panels(states, legend, "state error")
    for ax, part in panels:
        _lines(ax, part[part["update"] > 0], "update", looks)
        read = part[(part["read"] != part["update"]) & (part["read"] > 0)]
        _lines(ax, read, "read", {arm: look | {"ls": ":", "marker": ""} for arm, look in looks.items()})
        _axes(ax, part, "position")
        ax.set_ylim(top=min(ax.get_ylim()[1], LOST))
    return figure


def kl_by_bytes(kl: pd.DataFrame) -> Figure:
    """What a pair of formats costs in bytes moved a step, and what it buys."""
    looks, legend = _looks(kl)
    figure, panels = _panels(kl, legend, "KL, nats")
    for ax, part in panels:
        for row in part.itertuples():
            bars = None if pd.isna(row.kl_low) else [[row.kl - row.kl_low], [row.kl_high - row.kl]]
            ax.errorbar(row.step_bytes, row.kl, yerr=bars, capsize=2.5, elinewidth=1.2, **looks[row.arm])
        _log(ax)
        ax.set_xlabel("bytes moved a step and element of the state")
        ax.set_xlim(left=0)
    return figure


def kl_by_interval(kl: pd.DataFrame) -> Figure:
    """KL by interval length of the arms that were run at several; the folds of GDN stand beside each other."""
    looks, legend = _looks(kl)
    figure, panels = _panels(kl, legend, "KL, nats")
    for ax, part in panels:
        for arm, line in part.groupby("arm"):
            line = line.sort_values("interval_length")
            where = [math.log2(length) for length in line["interval_length"]]
            bars = [line["kl"] - line["kl_low"].fillna(line["kl"]), line["kl_high"].fillna(line["kl"]) - line["kl"]]
            ax.errorbar(where, line["kl"], yerr=bars, capsize=2.5, elinewidth=1.2, **looks[str(arm)])
        _log(ax)
        style.doubling_axis(ax, [int(v) for v in part["interval_length"]], "interval length")
    return figure


def _several(frame: pd.DataFrame) -> pd.DataFrame:
    """Without rows of a single document, which has no interval, where a model has several on the same device."""
    most = frame.groupby(["device", "model"])["documents"].transform("max")
    return frame[(frame["documents"] > 1) | (most == 1)]


def _at_several_lengths(kl: pd.DataFrame) -> pd.DataFrame:
    """Arms without their @L, those at several interval lengths in one place."""
    plain = kl.assign(arm=[str(arm).split("@")[0] for arm in kl["arm"]])
    plain = plain[(plain["arm"] != FLOOR) & (plain["kl"] > 0)]
    counts = plain.groupby([*PLACE, "arm"], dropna=False)["interval_length"].transform("nunique")
    return plain[counts > 1]


def precision_look(arms: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Colour and marker by arm whose name is a precision, or the control of accuracy: the same wherever it is shown."""
    known, own = [*MAIN, FLOOR], {FLOOR: style.MUTED, CONTROL: style.INK}
    every = known + sorted(set(arms) - set(known))
    return {
        arm: {
            "color": own.get(arm, style.COLOURS[i % len(style.COLOURS)]),
            "marker": style.MARKERS[i % len(style.MARKERS)],
        }
        for i, arm in enumerate(every)
    }


def _looks(frame: pd.DataFrame) -> tuple[dict[str, dict[str, Any]], list[Any]]:
    """Look by arm, and the legend of those that are shown."""
    looks = {arm: look | {"ms": 3.2, "lw": 1.2} for arm, look in precision_look(frame["arm"]).items()}
    shown = [arm for arm in looks if arm in set(frame["arm"])]
    labels = {FLOOR: f"{FLOOR}: noise floor"}
    return looks, [Line2D([], [], label=labels.get(arm, arm), **looks[arm]) for arm in shown]


def _panels(frame: pd.DataFrame, legend: list[Any], what: str) -> tuple[Figure, list[tuple[Axes, pd.DataFrame]]]:
    """A panel a model, device, text and length, with its heading; each device begins a row."""
    parts = [part for _, part in frame.groupby(PLACE, dropna=False, sort=True)]
    counts = style.rows([(str(part["device"].iloc[0]), "", "") for part in parts])
    figure, axes = style.panels(counts, legend, margin=0.82)
    axes[0].get_gridspec().update(wspace=0.26)
    for ax, part in zip(axes, parts, strict=True):
        row = part.iloc[0]
        length = f"{row['documents']} x {row['tokens']:,} tokens"
        style.heading(ax, str(row["model"]), f"{length} of {row['source']}, {row['inputs']}, {row['device']}")
    for row, _ in enumerate(counts):
        axes[sum(counts[:row])].set_ylabel(what)
    return figure, list(zip(axes, parts, strict=True))


def _lines(
    ax: Axes, part: pd.DataFrame, name: str, looks: dict[str, Any], bounds: tuple[str, str] | None = None
) -> None:
    for arm, line in part.groupby("arm"):
        line = line.sort_values("position")
        ax.plot(line["position"], line[name], markevery=4, **looks[str(arm)])
        if bounds:
            inside = line.dropna(subset=[*bounds])
            ends = (inside[bound].astype(float) for bound in bounds)
            ax.fill_between(inside["position"], *ends, color=looks[str(arm)]["color"], alpha=0.15, lw=0)


def _axes(ax: Axes, part: pd.DataFrame, label: str) -> None:
    _log(ax)
    ax.set_xscale("log", base=2)
    low, high = part["position"].min(), part["position"].max()
    ticks = [2**power for power in range(4, 21, 1 if high < 1024 else 2) if low < 1.5 * 2**power < 1.5 * high]
    ax.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    ax.tick_params(axis="x", labelsize=7)
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set_xlim(low / 1.15, high * 1.25)
    ax.set_xlabel(label)


def _log(ax: Axes) -> None:
    """Values on a log axis as plain numbers; of a short range also those between powers of ten."""
    ax.set_yscale("log")
    low, high = ax.get_ylim()
    decades = math.log10(high / low)
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if decades < 3 else (1.0,), numticks=9))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())
