"""Look of all figures, the arms' colours, panels and saving. The same input gives the same bytes.

The first six colours are those of Okabe and Ito, which stay apart for readers who see colours differently, the others
Tol's of muted and dark lines; the marker says the same as the colour. Ours is filled and solid, published is open and
grey.
"""

from __future__ import annotations

import io
import math
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.textpath import text_to_path
from PIL import Image

from analysis import published
from analysis.svg import compact

INK, MUTED, GRID = "#1a1a1a", "#767676", "#e4e4e4"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
COLOURS += ("#332288", "#999933", "#882255", "#44AA99", "#AA4499", "#DDCC77", "#663333", "#117733")
MARKERS = ("o", "s", "^", "D", "v", "P", "<", "p", ">", "h", "d", "*")
HIDDEN = 0.01
"""Width up to which an interval lies behind its marker in a panel whose scale is one or two high."""
SHADES = 128
"""Of a bitmap, a third of the bytes of true colour: those furthest apart, so that a small marker keeps its own."""
FAILED = "#B22222"
WEAK = "one process, few rounds or noisy"
PUBLISHED: dict[str, Any] = {"color": MUTED, "mfc": "white", "marker": "D", "ls": "--", "lw": 1.1, "ms": 4}
WINDOWS = (2, 4, 6, 8)
"""Those that were published, which look the same in every figure."""
PANEL, MIN_WIDTH, LEGEND_COLUMN = (3.35, 2.75), 7.4, 2.45
SUBTITLE, SUBTITLE_SIZE = "subtitle", 7.5
"""What marks the line between a panel and its title, and its size in points."""
TITLE_PAD, SUBTITLE_PAD, BROKEN_PAD, HIGHER, OVERHANG = 17, 5, 4, 7.5, 6
"""Points from a panel to its title, to the line between and to the lower of two such, how much higher the others of a
row stand beside these, and how far a line may reach beyond its panel: less than the gap to the next."""
SMALL: dict[str, Any] = {"ha": "center", "fontsize": 7, "color": MUTED}
SERIES_FIELDS = ("inputs", "phase", "threads")
"""Beside the arm; each panel shows one device, model and state format."""

FAMILIES = {"mamba2": "Mamba-2", "gdn": "GDN", "kda": "KDA"}
FACET = ("device", "model", "state")
"""Columns that name a panel."""
Facet = tuple[str, ...]
STATES = ("fp32", "fp16", "bf16")

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
    "savefig.dpi": 100,
    "path.simplify": False,
    "text.parse_math": False,
}


def arm_look(arms: Sequence[str]) -> dict[str, dict[str, str]]:
    """Colour and marker by arm; the same arm looks the same wherever the same arms appear. Each has a colour of its own
    as far as there are so many; no pair of colour and marker comes twice before the 85th arm.
    """
    ordered = sorted(set(arms), key=lambda a: (not a.startswith("replay/"), a))
    return {a: {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]} for i, a in enumerate(ordered)}


def window_look(windows: Iterable[int]) -> dict[int, dict[str, str]]:
    """Colour and marker by window of drafted tokens: the same wherever one of ``WINDOWS`` is shown."""
    every = [*WINDOWS, *sorted({int(window) for window in windows} - {*WINDOWS})]
    return {w: {"color": COLOURS[i % 6], "marker": MARKERS[i % 12]} for i, w in enumerate(every)}


def panels(
    rows: Sequence[int], legend: Sequence[Artist], heights: Sequence[float] | None = None, margin: float = 0.62
) -> tuple[Figure, list[Axes]]:
    """A figure with ``rows[i]`` panels in row i, ``heights[i]`` inches high, and one legend below all of them;
    ``margin`` inches for the labels at the left."""
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
        left=margin / size[0],
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


def facets(*frames: pd.DataFrame) -> list[Facet]:
    """Device, model and state of each panel, in the order in which they are drawn."""
    columns = ["device", "model", "family", "state"]
    found = pd.concat([frame[columns] for frame in frames]).dropna(subset=[*FACET]).drop_duplicates([*FACET])

    def place(row: Any) -> tuple[Any, ...]:
        known = [
            list(names).index(x) if x in names else 9 for x, names in ((row.state, STATES), (row.family, FAMILIES))
        ]
        return (row.device, known[0], row.state, known[1], row.model)

    return [(r.device, r.model, r.state) for r in sorted(found.itertuples(index=False), key=place)]


def along(facets: Sequence[Facet], axis: str, rows: pd.DataFrame, lost: pd.DataFrame | None = None) -> list[Facet]:
    """Panels with several values of ``rows`` on their ``axis``, or with a failed cell; all of them where none has, as
    after a single run."""
    failed = rows.iloc[:0] if lost is None else lost
    return [f for f in facets if of(rows, *f)[axis].nunique() > 1 or len(of(failed, *f))] or list(facets)


def of(frame: pd.DataFrame, device: str, model: str, state: str) -> pd.DataFrame:
    """Rows of one panel."""
    return frame[(frame["device"] == device) & (frame["model"] == model) & (frame["state"] == state)]


def rows(facets: Sequence[Facet]) -> list[int]:
    """Panels by row: at most three, and each device and state begins a row."""
    counts: list[int] = []
    for index, (device, _, state) in enumerate(facets):
        if index == 0 or (device, state) != (facets[index - 1][0], facets[index - 1][2]) or counts[-1] == 3:
            counts.append(0)
        counts[-1] += 1
    return counts


def title(model: str, paper: pd.DataFrame) -> str:
    """The name that a model is published under; a folder's is shown as it is."""
    return published.display_names(paper).get(model, model.replace("_", "-").title() if "_" in model else model)


def subtitle(rows: pd.DataFrame, device: str, last: str) -> str:
    if rows.empty:
        return f"{device}, {last}" if device else ""
    family = FAMILIES.get(rows["family"].iloc[0], rows["family"].iloc[0])
    state = "/".join(sorted(rows["state"].astype(str).unique()))
    return f"{family}, {state} state, {last}, {device}"


def heading(ax: Axes, title: str, subtitle: str) -> None:
    """A bold title with a muted line below it, which `save` breaks in two where it is wider than the panel."""
    ax.set_title(title, pad=TITLE_PAD)
    place = {
        "textcoords": "offset points",
        "color": MUTED,
        "fontsize": SUBTITLE_SIZE,
        "gid": SUBTITLE,
        "linespacing": 1.1,
    }
    ax.annotate(subtitle, (0, 1), (0, SUBTITLE_PAD), "axes fraction", **place)


def _break_subtitles(figure: Figure) -> None:
    """Subtitles wider than their panels in two lines, broken after a comma; the headings of their whole row higher."""
    font = FontProperties(family=RC["font.family"], size=SUBTITLE_SIZE)
    headings = [(ax, note) for ax in figure.axes for note in ax.texts if note.get_gid() == SUBTITLE]
    broken: set[int] = set()
    for ax, note in headings:
        room = 72 * figure.get_figwidth() * ax.get_position().width + OVERHANG
        parts = note.get_text().split(", ")
        if len(parts) > 1 and _width(note.get_text(), font) > room:
            fit = [n for n in range(1, len(parts)) if _width(", ".join(parts[:n]) + ",", font) <= room]
            first = max(fit, default=1)
            note.set_text(", ".join(parts[:first]) + ",\n" + ", ".join(parts[first:]))
            broken.add(_row(ax))
    for ax, note in headings:
        if _row(ax) in broken:
            place = plt.rcParams["axes.titlelocation"]
            ax.set_title(ax.get_title(place), loc=place, pad=TITLE_PAD + HIGHER)
            note.xyann = (0, BROKEN_PAD if "\n" in note.get_text() else SUBTITLE_PAD + HIGHER)


def _row(ax: Axes) -> int:
    place = ax.get_subplotspec()
    return place.rowspan.start if place else 0


def _width(text: str, font: FontProperties) -> float:
    """Points, as every machine measures them: unhinted."""
    return float(text_to_path.get_text_width_height_descent(text, font, ismath=False)[0])


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


def crosses(ax: Axes, lost: pd.DataFrame, x: str, colours: Sequence[str]) -> None:
    """A cross at the foot of the panel for each failed cell, with its status, at the logarithm of its ``x``."""
    seen: dict[float, int] = {}
    lost = lost.assign(colour=colours).drop_duplicates([x, "colour", "status"]).dropna(subset=[x])
    for row in lost.itertuples():
        where = math.log2(getattr(row, x))
        level = seen[where] = seen.get(where, -1) + 1
        spot = (where, 0.05 + 0.075 * level)
        mark = {"marker": "X", "ms": 7, "mec": "white", "mew": 0.6, "color": row.colour}
        ax.plot(*spot, transform=ax.get_xaxis_transform(), ls="", clip_on=False, zorder=5, **mark)
        place = {"xycoords": ax.get_xaxis_transform(), "textcoords": "offset points", "va": "center", "fontsize": 6.5}
        ax.annotate(row.status, spot, (6, 0), color=FAILED, **place)


def crosses_legend() -> Line2D:
    return Line2D([], [], ls="", marker="X", ms=7, color=FAILED, label="failed, with status")


def curve_name(ax: Axes, name: str, where: Sequence[float], values: Sequence[float], ours: pd.DataFrame) -> None:
    """Above the left of the second point, where published curves are steep and leave room; below the end of a curve
    that lies there under our ``speedup`` by tenths."""
    second = min(1, len(where) - 1)
    here = ours[ours["batch_size"].astype(float).map(math.log2) == where[second]]["speedup"].max()
    under = here > values[second] + 0.1
    spot, offset, sides = (-1, (8, -12), ("center", "top")) if under else (second, (-5, 3), ("right", "bottom"))
    place = SMALL | dict(zip(("ha", "va"), sides, strict=True))
    ax.annotate(name, (where[spot], values[spot]), offset, textcoords="offset points", **place)


def bars(values: pd.Series, low: pd.Series, high: pd.Series) -> list[pd.Series]:
    """For ``yerr`` of a quantity near one: the intervals, but for those that its marker would hide."""
    shown = high - low > HIDDEN
    return [(values - low).where(shown), (high - values).where(shown)]


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
    """Write ``name.svg`` and ``name.png`` without dates or versions, and close the figure; too wide subtitles are
    broken."""
    _break_subtitles(figure)
    folder.mkdir(parents=True, exist_ok=True)
    svg, png = folder / f"{name}.svg", folder / f"{name}.png"
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    svg.write_text(compact(drawn.getvalue(), f"f{zlib.crc32(name.encode()):x}"[:5]), encoding="utf-8")
    bitmap = io.BytesIO()
    figure.savefig(bitmap, format="png")
    pixels, furthest_apart = Image.open(bitmap).convert("RGB"), Image.Quantize.MAXCOVERAGE
    shades = pixels.quantize(SHADES, furthest_apart, kmeans=1, dither=Image.Dither.NONE)  # means keep greys grey
    shades.save(png, optimize=True)
    plt.close(figure)
    return [svg, png]
