"""Look of all figures, the arms' colours, panels and saving. The same input gives the same bytes.

Colours are those of Okabe and Ito, which stay apart for readers who see colours differently; marker and line say the
same as the colour. Ours is filled and solid, published is open and grey.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, MUTED, GRID = "#1a1a1a", "#767676", "#e4e4e4"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P")
FAILED = "#B22222"
PANEL, MIN_WIDTH, LEGEND_COLUMN = (3.35, 2.75), 7.4, 2.45
SMALL: dict[str, Any] = {"ha": "center", "fontsize": 7, "color": MUTED}
SERIES_FIELDS = ("state", "inputs", "phase", "threads")

RC = {
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.8,
    "svg.hashsalt": "replayssm",
    "svg.fonttype": "path",
    "savefig.dpi": 160,
    "path.simplify": False,
    "text.parse_math": False,
}


def arm_look(arms: Sequence[str]) -> dict[str, dict[str, str]]:
    """Colour and marker by arm; the same arm looks the same wherever the same arms appear."""
    ordered = sorted(set(arms), key=lambda a: (not a.startswith("replay/"), a))
    count = len(COLOURS)  # after a round of colours the markers move on by one, so that no pair comes twice
    return {
        a: {"color": COLOURS[i % count], "marker": MARKERS[(i + i // count) % count]} for i, a in enumerate(ordered)
    }


def panels(
    rows: Sequence[int], legend: Sequence[Artist], heights: Sequence[float] | None = None
) -> tuple[Figure, list[Axes]]:
    """A figure with ``rows[i]`` panels in row i, ``heights[i]`` inches high, and one legend below all of them."""
    heights = list(heights or [PANEL[1]] * len(rows))
    width = max(PANEL[0] * max(rows), MIN_WIDTH)
    columns = int(width // LEGEND_COLUMN)
    foot, gap = 0.62 + 0.18 * math.ceil(len(legend) / columns), 0.95
    size = (width, sum(heights) + foot)
    inner = [h - gap for h in heights]
    figure = plt.figure(figsize=size)
    grid = figure.add_gridspec(
        len(rows),
        max(rows),
        left=0.62 / size[0],
        right=1 - 0.15 / size[0],
        top=1 - 0.5 / size[1],
        bottom=foot / size[1],
        wspace=0.2,
        hspace=gap / (sum(inner) / len(inner)),
        height_ratios=inner,
    )
    axes = [figure.add_subplot(grid[i, j]) for i, count in enumerate(rows) for j in range(count)]
    figure.legend(handles=list(legend), loc="lower center", ncols=columns, fontsize=7.5, handlelength=2.4)
    return figure, axes


def heading(ax: Axes, title: str, subtitle: str) -> None:
    """A bold title with a muted line below it."""
    ax.set_title(title, pad=17)
    ax.annotate(subtitle, (0, 1), (0, 5), "axes fraction", textcoords="offset points", color=MUTED, fontsize=7.5)


def varying(frame: pd.DataFrame) -> list[str]:
    """The fields besides the arm that tell the series of a figure apart."""
    return [f for f in SERIES_FIELDS if frame[f].astype(str).nunique() > 1]


def series(frame: pd.DataFrame) -> list[tuple[str, str, str, pd.DataFrame]]:
    """(arm, what else tells it apart, line style, rows) by arm and varying field, in a fixed order."""
    fields = varying(frame)
    keys = frame[["arm", *fields]].astype(str).agg("\x1f".join, axis=1)
    found = []
    for key in sorted(keys.unique()):
        arm, *rest = key.split("\x1f")
        line = "--" if (frame.loc[keys == key, "phase"] == "staggered").all() else "-"
        found.append((arm, ", ".join(rest), line, frame[keys == key]))
    return found


def hollow(color: str, marker: str) -> dict[str, Any]:
    """Look of a measured point that proves nothing."""
    return {"ls": "", "marker": marker, "mfc": "white", "mec": color, "mew": 1.3, "color": color}


def doubling_axis(ax: Axes, values: Sequence[float], label: str) -> None:
    """Ticks at the given powers and values of a log2 axis whose positions are already logarithms."""
    ticks = sorted(set(values))
    ax.set_xticks([math.log2(v) for v in ticks], [f"{v:g}" for v in ticks])
    ax.set_xlabel(label)
    ax.set_xlim(math.log2(ticks[0]) - 0.5, math.log2(ticks[-1]) + 0.6)


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write ``name.svg`` and ``name.png`` without dates or versions, and close the figure."""
    folder.mkdir(parents=True, exist_ok=True)
    svg, png = folder / f"{name}.svg", folder / f"{name}.png"
    figure.savefig(svg, metadata={"Date": None, "Creator": None})
    figure.savefig(png, metadata={"Software": None})
    plt.close(figure)
    return [svg, png]
