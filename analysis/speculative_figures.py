"""Speculative decoding with whole models: throughput with and without drafts, with replay over snapshots by window and
batch, and how many requests fit."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from analysis import published, style
from analysis.cells import strongest, weaknesses

NAMES = ("throughput_with_drafts", "throughput_by_window", "requests_that_fit")
NUMBER: dict[str, Any] = {"ha": "center", "fontsize": 7, "bbox": {"fc": "white", "ec": "none", "pad": 0.6}}
KINDS = {"replay": "replay, no drafts", "snapshots": "drafts, snapshots", "verify": "drafts, replay"}
LOOKS = {
    kind: {"color": style.COLOURS[i], "marker": style.MARKERS[i]}
    for i, kind in enumerate(("verify", "snapshots", "replay"))
}
BESIDE = 0.12
"""Doublings between points of one batch size."""
SHOWN_WINDOW = 4
"""Of the figure that compares arms; the nearest that was run."""


def draw(rows: pd.DataFrame, failures: pd.DataFrame, paper: pd.DataFrame, folder: Path) -> list[str]:
    """Draw those for which there is something to show, from the table's rows and from failures of arms with drafts;
    returns their names. Where arms were run in pairs, one of them may have failed, so that not every row has all."""
    rows, failures = (frame[frame["blocks"].isna()] for frame in (rows, failures))
    with_plain, replayed = rows["over_plain"].notna(), rows["over_snapshots"].notna() & (rows["kind"] == "verify")
    over_plain, over_snapshots = strongest(rows[with_plain]), strongest(rows[replayed])
    counted = strongest(rows[rows["request_mib"].notna()])
    makers: dict[str, tuple[pd.DataFrame, Callable[[], Figure]]] = {
        NAMES[0]: (over_plain, lambda: with_drafts(over_plain, paper)),
        NAMES[1]: (over_snapshots, lambda: by_window(over_snapshots, failures, paper)),
        NAMES[2]: (counted, lambda: requests(counted, paper)),
    }
    drawn = []
    for name, (shown, make) in makers.items():
        if len(shown):
            style.save(make(), folder, name)
            drawn.append(name)
    return drawn


def with_drafts(rows: pd.DataFrame, paper: pd.DataFrame) -> Figure:
    """Tokens a second of both arms with drafts over those of replay without any, by batch size."""
    facets = _with_published(style.facets(rows), paper, published.PLAIN)
    rows = rows.assign(weak=_weak(rows, "plain_low"))
    legend = [Line2D([], [], label=KINDS[kind], **LOOKS[kind]) for kind in ("verify", "snapshots")]
    legend += _legend(rows, f"published, replay over decoding without drafts, T = {SHOWN_WINDOW}")
    figure, axes = style.panels(style.rows(facets), legend)
    for ax, facet in zip(axes, facets, strict=True):
        part = _longest(style.of(rows, *facet))
        window = _nearest(part["window"])
        part = part[part["window"] == window]
        _lines(ax, part, "kind", ("over_plain", "plain_low", "plain_high"), LOOKS)
        known = published.drafted(paper, facet[1], published.PLAIN)
        _draw_published(ax, known[known["window"] == SHOWN_WINDOW])
        _finish(ax, part, known, facet, paper, window)
    axes[0].set_ylabel("over replay without drafts")
    return figure


def by_window(rows: pd.DataFrame, failures: pd.DataFrame, paper: pd.DataFrame) -> Figure:
    """Tokens a second of replay over those of snapshots by batch size, a line a window; crosses where one of them
    failed, as snapshots do for which there is no memory."""
    facets = _with_published(style.facets(rows), paper, published.NATIVE)
    rows = rows.assign(weak=_weak(rows, "low"))
    windows = sorted({int(w) for w in rows["window"]} | {w for f in facets for w in _published_windows(paper, f[1])})
    looks = style.window_look(windows)
    legend = [Line2D([], [], label=f"window {w}", **looks[w]) for w in windows]
    legend += _legend(rows, "published, over native speculation, its window's colour")
    failures = failures[failures["window"].isin(windows)]
    legend += [style.crosses_legend()] if len(failures) else []
    figure, axes = style.panels(style.rows(facets), legend)
    for ax, facet in zip(axes, facets, strict=True):
        part = _longest(style.of(rows, *facet))
        lost = style.of(failures, *facet)
        style.crosses(ax, lost, "batch_size", [looks[int(window)]["color"] for window in lost["window"]])
        _lines(ax, part, "window", ("over_snapshots", "low", "high"), looks)
        known = published.drafted(paper, facet[1], published.NATIVE)
        for window, of_window in known.groupby("window"):
            _draw_published(ax, of_window, looks[int(window)]["color"])
        _finish(ax, part, known, facet, paper, None, lost)
    axes[0].set_ylabel("throughput over snapshots")
    return figure


def requests(rows: pd.DataFrame, paper: pd.DataFrame) -> Figure:
    """Requests whose states, rings and convolutions fit in 100 GB, a bar an arm and window, and the bytes of one."""
    rows = rows.drop_duplicates([*style.FACET, "kind", "window", "inputs", "interval_length"])
    facets = _with_published(style.facets(rows), paper, None)
    lines = [_held(style.of(rows, *facet), published.concurrency(paper, facet[1])) for facet in facets]
    legend = [Patch(color=LOOKS[kind]["color"], label=KINDS[kind]) for kind in KINDS]
    legend.append(Patch(fc="white", ec=style.MUTED, label="published: at once on a B300"))
    counts = style.rows(facets)
    firsts = [sum(counts[:row]) for row in range(len(counts))]
    highest = [max(map(len, lines[first : first + count])) for first, count in zip(firsts, counts, strict=True)]
    figure, axes = style.panels(counts, legend, [1.3 + 0.26 * count for count in highest])
    for ax, facet, held in zip(axes, facets, lines, strict=True):
        part = style.of(rows, *facet)
        for place, (kind, _, count, told, ours) in enumerate(held):
            colour = LOOKS[kind]["color"]
            ax.barh(-place, count, 0.7, fc=colour if ours else "white", ec=colour)
            ax.annotate(told, (count, -place), (4, 0), textcoords="offset points", va="center", fontsize=7)
        ax.set_yticks([-place for place in range(len(held))], [name for _, name, *_ in held])
        ax.set_xlim(0, 2.1 * max(count for _, _, count, *_ in held))
        ax.grid(axis="y", visible=False)
        ax.grid(axis="x")
        ax.xaxis.set_major_locator(MaxNLocator(4))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda count, _: f"{count:,.0f}"))
        ax.set_xlabel("requests in 100 GB" if len(part) else "requests at once")
        told = f"L = {part['interval_length'].iloc[0]}" if len(part) else "published only"
        style.heading(ax, style.title(facet[1], paper), style.subtitle(part, facet[0], told) or told)
    return figure


def _held(part: pd.DataFrame, known: dict[str, float]) -> list[tuple[str, str, float, str, bool]]:
    """Kind, window, requests, their label and whether they are ours, from the top down: no drafts, then by window."""
    found = []
    for kind, of_arm in part.groupby("kind"):
        of_arm = of_arm.sort_values("window").drop_duplicates("window")
        for row in of_arm.iloc[:1].itertuples() if kind == "replay" else of_arm.itertuples():
            count, window = float(row.requests_in_100_gb), 1 if kind == "replay" else int(row.window)
            found.append((str(kind), window, count, f"{count:,.0f}: {row.request_mib:.4g} MiB each", True))
    found += [(kind, SHOWN_WINDOW, count, f"{count:g} at once", False) for kind, count in known.items()]
    found.sort(key=lambda line: (line[1], not line[4], line[0] != "verify"))
    return [(kind, f"T = {window}", *rest) for kind, window, *rest in found]


def _with_published(facets: list[style.Facet], paper: pd.DataFrame, baseline: str | None) -> list[style.Facet]:
    """The panels of ours, then of models that are published and that we did not run."""
    known = sorted(set(paper["key"]) - {model for _, model, _ in facets} - {""})
    if baseline is None:
        more = [key for key in known if published.concurrency(paper, key)]
    else:
        more = [key for key in known if len(published.drafted(paper, key, baseline)) > 1]
    return facets + [("", key, "fp32") for key in more]


def _published_windows(paper: pd.DataFrame, model: str) -> set[int]:
    return {int(w) for w in published.drafted(paper, model, published.NATIVE)["window"]}


def _longest(part: pd.DataFrame) -> pd.DataFrame:
    """Of rows that differ in prompts, drafter, context or inputs those of the setting with most rows."""
    if part.empty:
        return part
    setting = part[["weights", "drafter", "context", "inputs", "interval_length"]].astype(str).agg(" ".join, axis=1)
    return part[setting == setting.value_counts().sort_index().idxmax()]


def _nearest(windows: pd.Series) -> int:
    return min((int(w) for w in windows), key=lambda w: (abs(w - SHOWN_WINDOW), w), default=SHOWN_WINDOW)


def _weak(rows: pd.DataFrame, low: str) -> list[bool]:
    return [bool(weaknesses(r.processes, r.rounds, r.aa_noise)) or pd.isna(getattr(r, low)) for r in rows.itertuples()]


def _legend(rows: pd.DataFrame, told: str) -> list[Line2D]:
    weak = [Line2D([], [], label=style.WEAK, **style.hollow(style.INK, "o"))] if rows["weak"].any() else []
    return [Line2D([], [], label=told, **style.PUBLISHED), *weak]


def _lines(ax: Axes, part: pd.DataFrame, apart: str, names: tuple[str, str, str], looks: dict[Any, Any]) -> None:
    """A line a value of the column ``apart``; of a single batch size points side by side, with their numbers."""
    value, low, high = names
    alone, count = part["batch_size"].nunique() == 1, part[apart].nunique()
    for place, (key, rows) in enumerate(part.groupby(apart)):
        rows = rows.sort_values(["batch_size", "rounds"]).drop_duplicates("batch_size", keep="last")
        look, shift = looks[key], BESIDE * (place - (count - 1) / 2) if alone else 0.0
        where = [math.log2(batch) + shift for batch in rows["batch_size"]]
        bars = [rows[value] - rows[low], rows[high] - rows[value]]
        ax.errorbar(where, rows[value], yerr=bars, capsize=3, elinewidth=1.3, zorder=4, **look)
        for x, row in zip(where, rows.itertuples(), strict=True):
            if row.weak:
                ax.plot(x, getattr(row, value), zorder=5, **style.hollow(**look))
            if alone:
                number, top = f"{getattr(row, value):.2f}", max(getattr(row, value), getattr(row, high))
                ax.annotate(number, (x, top), (0, 5), textcoords="offset points", **NUMBER)


def _draw_published(ax: Axes, rows: pd.DataFrame, colour: str = style.MUTED) -> None:
    where = [math.log2(batch) for batch in rows["batch_size"]]
    ax.plot(where, rows["value"], zorder=2, **style.PUBLISHED | {"color": colour})


def _finish(
    ax: Axes,
    part: pd.DataFrame,
    known: pd.DataFrame,
    facet: style.Facet,
    paper: pd.DataFrame,
    window: int | None,
    lost: pd.DataFrame | None = None,
) -> None:
    shown = [part["batch_size"], known["batch_size"], *([] if lost is None else [lost["batch_size"].dropna()])]
    batches = {int(b) for of_batches in shown for b in of_batches}
    style.doubling_axis(ax, sorted(batches if len(batches) == 1 else {1, *batches}), "batch size")
    ax.axhline(1, color=style.INK, lw=0.9, zorder=1)
    bottom, top = min(0.5, ax.get_ylim()[0]), ax.get_ylim()[1]
    ax.set_ylim(bottom, top + 0.1 * (top - bottom))
    if part.empty:
        told = f"{', '.join(sorted(set(known['hardware'])))}, published only"
    else:
        counts = dict.fromkeys(f"{part['tokens_per_step'].agg(end):.3g}" for end in ("min", "max"))
        told = f"T = {window}, {' to '.join(counts)} tokens a step" if window else f"{part['drafter'].iloc[0]} drafts"
    style.heading(ax, style.title(facet[1], paper), style.subtitle(part, facet[0], told) or told)
