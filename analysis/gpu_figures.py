"""Share of the roof by batch size, for GPUs, which run more of them than bars can show; time by ring length."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from analysis import style
from analysis.cells import weaknesses

NAMES = ("roof_share_by_batch", "step_by_ring_length")


def draw(roofs: pd.DataFrame, phases: pd.DataFrame, paper: pd.DataFrame, folder: Path) -> list[str]:
    """Draw those for which there is something to show; returns their names."""
    drawn = []
    if len(of_gpus := roofs[roofs["device_kind"] != "cpu"]):
        style.save(roof_share_by_batch(of_gpus, paper), folder, NAMES[0])
        drawn.append(NAMES[0])
    if len(phases):
        style.save(step_by_ring_length(phases, paper), folder, NAMES[1])
        drawn.append(NAMES[1])
    return drawn


def roof_share_by_batch(roofs: pd.DataFrame, paper: pd.DataFrame) -> Figure:
    """Share of its own roof that each arm reaches, at the interval length with most batch sizes; of its flush phases
    the slower.
    """
    lengths = roofs.groupby("interval_length")["batch_size"].nunique()
    length = int(max(lengths.index, key=lambda n: (lengths[n], n == 16, n)))
    shown = roofs[roofs["interval_length"] == length].sort_values("share", kind="stable")
    shown = shown.drop_duplicates([*style.FACET, "batch_size", "arm", "inputs"])
    shown = shown.assign(weak=[bool(weaknesses(r.processes, r.rounds, r.aa_noise)) for r in shown.itertuples()])
    facets, looks = style.along(style.facets(shown), "batch_size", shown), style.arm_look(list(shown["arm"]))
    legend = [Line2D([], [], label=arm, **looks[arm]) for arm in sorted(looks, key=lambda a: (a.split("/")[0], a))]
    if shown["weak"].any():
        legend.append(Line2D([], [], label=style.WEAK, **style.hollow(style.INK, "o")))
    figure, axes = style.panels(style.rows(facets), legend)
    top = max(1.0, float(shown["high"].max()))
    for ax, facet in zip(axes, facets, strict=True):
        part = style.of(shown, *facet)
        for (arm, _), line in part.groupby(["arm", "inputs"], sort=True):
            line = line.sort_values("batch_size")
            where = [math.log2(v) for v in line["batch_size"]]
            bars = style.bars(line["share"], line["low"], line["high"])
            ax.errorbar(where, line["share"], yerr=bars, capsize=2.5, elinewidth=1.2, **looks[arm])
            for row in line[line["weak"]].itertuples():
                ax.plot(math.log2(row.batch_size), row.share, zorder=5, **style.hollow(**looks[arm]))
        ax.axhline(1, color=style.INK, lw=0.9, zorder=2)
        ax.set_ylim(0, math.ceil(top * 10 + 0.5) / 10)
        style.doubling_axis(ax, [int(v) for v in part["batch_size"]], "batch size")
        style.heading(ax, style.title(facet[1], paper), style.subtitle(part, facet[0], f"L = {length}"))
    axes[0].set_ylabel("share of the arm's roof")
    return figure


def step_by_ring_length(phases: pd.DataFrame, paper: pd.DataFrame) -> Figure:
    """Time of a step with all rows at one ring length, the last of which flushes, at the largest batch that was timed
    so; a stored step has none and is a line across.
    """
    facets, looks = style.facets(phases), style.arm_look(list(phases["arm"]))
    legend = [Line2D([], [], label=arm, **looks[arm]) for arm in sorted(looks, key=lambda a: (a.split("/")[0], a))]
    figure, axes = style.panels(style.rows(facets), legend)
    scale, unit = (1e-3, "milliseconds") if phases["step_us"].max() > 2000 else (1.0, "microseconds")
    for ax, facet in zip(axes, facets, strict=True):
        part = style.of(phases, *facet)
        part = part[part["batch_size"] == part["batch_size"].max()]
        part = part[part["interval_length"] == part["interval_length"].max()]
        part = part.assign(step=part["step_us"] * scale)
        length, batch = int(part["interval_length"].iloc[0]), int(part["batch_size"].iloc[0])
        for arm, line in part.drop_duplicates(["arm", "ring_length"]).groupby("arm", sort=True):
            line = line.sort_values("ring_length")
            if len(line) == 1:
                ax.plot([0, length - 1], [line["step"].iloc[0]] * 2, **looks[arm])
            else:
                ax.plot(line["ring_length"], line["step"], **looks[arm])
        ax.set_ylim(0, 1.1 * float(part["step"].max()))
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.set_xlabel("tokens in the ring")
        style.heading(ax, style.title(facet[1], paper), style.subtitle(part, facet[0], f"batch {batch}, L = {length}"))
    axes[0].set_ylabel(f"{unit} a layer step")
    return figure
