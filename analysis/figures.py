"""The figures, one function each: speedup by batch size, bandwidth, speedup by interval length; a GPU's own are in
`gpu_figures`.

They draw the rounded values of the tables and nothing else. Every measured point carries its 95 % interval, failed
cells are crosses at the foot of their panel, and batch size 1 is always on the axis.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from analysis import (
    accuracy_figures,
    captions,
    decode_figures,
    drift_figures,
    gpu_figures,
    published,
    speculative_figures,
    style,
)
from analysis.bearing import PAPER_CARDS
from analysis.cells import strongest, weaknesses

NAMES = (
    "speedup_by_batch",
    "bandwidth",
    "speedup_by_interval",
    "decode_by_batch",
    *speculative_figures.NAMES,
    *decode_figures.NAMES,
)
NAMES += (*gpu_figures.NAMES, *drift_figures.NAMES, *accuracy_figures.NAMES)
PAPER_INTERVAL, PAPER_STATE = 16, "fp32"
GREY: dict[str, Any] = {"color": style.MUTED, "mfc": "white", "marker": "D", "ls": "--", "lw": 1.2}
DODGE = 0.22
"""Shift of staggered phases to the right, in doublings, so that their points do not hide aligned ones."""


def draw(tables: dict[str, pd.DataFrame], paper: pd.DataFrame, folder: Path) -> list[str]:
    """Draw every figure for which there is something to show; returns their names in reading order."""
    speedups, roofs = strongest(tables["kernel_speedups"]), strongest(tables["roofs"])
    speedups = speedups[(speedups["kind"] != "stored") & speedups["speedup"].notna()]
    failures = tables["failures"][tables["failures"]["experiment"] == "kernel"]
    lost_models = _failed(tables["failures"][tables["failures"]["experiment"] == "decode"])
    lost_models = lost_models[(lost_models["kind"] != "stored") & lost_models["blocks"].isna()]
    models = strongest(tables["decode_speedups"])
    models = models[(models["kind"] != "stored") & models["speedup"].notna() & models["blocks"].isna()]
    drawn = []
    with plt.rc_context(style.RC):
        style.save(speedup_by_batch(speedups, failures, paper), folder, "speedup_by_batch")
        drawn.append("speedup_by_batch")
        if len(of_cpus := roofs[roofs["device_kind"] == "cpu"]):
            lost = failures[failures["device_kind"] == "cpu"]
            style.save(bandwidth(of_cpus, lost, paper), folder, "bandwidth")
            drawn.append("bandwidth")
        if len(speedups):
            style.save(speedup_by_interval(speedups, failures, paper), folder, "speedup_by_interval")
            drawn.append("speedup_by_interval")
        if len(models):
            style.save(decode_by_batch(models, lost_models, paper), folder, "decode_by_batch")
            drawn.append("decode_by_batch")
        drawn += decode_figures.draw(models, lost_models, paper, folder)
        drawn += gpu_figures.draw(roofs, tables["kernel_phases"], paper, folder)
        drafted = tables["failures"][tables["failures"]["experiment"] == "speculative"]
        drafted = _failed(drafted[drafted["kind"] != "replay"])
        drawn += speculative_figures.draw(tables["speculative_throughput"], drafted, paper, folder)
        drawn += drift_figures.draw(tables, paper, folder)
        drawn += accuracy_figures.draw(tables["accuracy"], tables["accuracy_by_distance"], paper, folder)
    (folder / captions.FILE).write_text(captions.markdown(drawn, paper), encoding="utf-8")
    return drawn


def speedup_by_batch(speedups: pd.DataFrame, failures: pd.DataFrame, paper: pd.DataFrame) -> Figure:
    """Speedup over the fastest stored arm by batch size, one panel a model and device, published curves beside it."""
    failed = _failed(failures[failures["kind"] != "stored"])
    lengths = _lengths(speedups, failed)
    ours, failed = _at(speedups, lengths), _at(failed, lengths)
    facets = style.along(style.facets(ours, failed), "batch_size", ours, failed)
    facets = facets or [("", key, PAPER_STATE) for key in _curve_models(paper)]
    looks = style.arm_look([*ours["arm"], *failed["arm"]])
    of_paper = any(model in PAPER_CARDS and state == PAPER_STATE for _, model, state in facets)
    legend = _legend(ours, looks, _published_legend() if of_paper else [], failed=len(failed) > 0)
    figure, axes = style.panels(style.rows(facets), legend)
    values: list[float] = []
    for ax, facet in zip(axes, facets, strict=True):
        device, model, state = facet
        rows, lost = style.of(ours, *facet), style.of(failed, *facet)
        batches = {1, 256, *(int(b) for b in rows["batch_size"]), *(int(b) for b in lost["batch_size"].dropna())}
        values += _draw_published(ax, paper, model, batches, rows) if state == PAPER_STATE else []
        values += _draw_measured(ax, rows, lost, "batch_size", looks)
        if device and 1 not in {*rows["batch_size"], *lost["batch_size"]}:
            place = {"xycoords": ax.get_xaxis_transform()} | style.SMALL | {"ha": "left"}
            ax.annotate("batch 1\nnot run", (-0.3, 0.03), **place)
        style.doubling_axis(ax, sorted(batches), "batch size")
        style.heading(
            ax,
            style.title(model, paper),
            style.subtitle(rows, device, _length_text(lengths, *facet)) or "published only",
        )
    _finish_speedups(axes, values)
    return figure


def bandwidth(roofs: pd.DataFrame, failures: pd.DataFrame, paper: pd.DataFrame) -> Figure:
    """Achieved bandwidth of each arm beside what the roof allows it; of its flush phases the slower is shown."""
    lengths = _lengths(roofs, failures)
    lost = _at(failures, lengths).drop_duplicates(["device", "model", "batch_size", "arm"])
    shown = _at(roofs, lengths).sort_values("share", kind="stable")
    shown = shown.drop_duplicates(["device", "model", "batch_size", "arm", "state", "inputs", "threads"])
    rows = pd.concat([shown, lost]).dropna(subset=["batch_size"])
    facets, looks = style.facets(rows[rows["share"].notna()]), style.arm_look(list(rows["arm"]))
    arms = sorted(looks, key=lambda a: (a.split("/")[0], a))
    legend = [Line2D([], [], ls="", label=arm, **looks[arm]) for arm in arms]
    legend.append(Line2D([], [], ls="", marker="|", ms=10, mew=2, color=style.INK, label="roof of the arm"))
    legend.append(Patch(color=style.MUTED, alpha=0.25, lw=0, label="measured bandwidths, lowest to highest"))
    legend += _weak_legend(shown)
    if rows["share"].isna().any():
        legend.append(style.crosses_legend())
    heights = [max(1.6, 0.18 * n + 0.9) for n in _lines_by_row(rows, facets)]
    figure, axes = style.panels(style.rows(facets), legend, heights)
    for ax, facet in zip(axes, facets, strict=True):
        device, model, _ = facet
        part = style.of(rows, *facet)
        _draw_bandwidths(ax, part, looks, _rightmost(rows[rows["device"] == device]))
        style.heading(ax, style.title(model, paper), style.subtitle(part, device, _length_text(lengths, *facet)))
    axes[0].set_ylabel("batch size")
    return figure


def speedup_by_interval(speedups: pd.DataFrame, failures: pd.DataFrame, paper: pd.DataFrame) -> Figure:
    """Speedup by interval length at the batch size with most lengths, with the curve that bytes alone would give."""
    looks = style.arm_look(list(speedups["arm"]))
    failed = _failed(failures[failures["arm"].isin(list(looks))])
    batches = {facet: _fullest(style.of(speedups, *facet)) for facet in style.facets(speedups)}
    places = [zip(*(of[name] for name in (*style.FACET, "batch_size")), strict=True) for of in (speedups, failed)]
    here = [np.array([batches.get(tuple(f)) == batch for *f, batch in of], dtype=bool) for of in places]
    shown, failed = speedups[here[0]], failed[here[1]]
    facets = style.along(style.facets(shown), "interval_length", shown, failed)
    bytes_alone = Line2D([], [], label="traffic model (bytes alone)", **GREY | {"marker": ".", "mfc": style.MUTED})
    legend = _legend(shown, looks, [bytes_alone], failed=len(failed) > 0)
    figure, axes = style.panels(style.rows(facets), legend)
    values: list[float] = []
    for ax, facet in zip(axes, facets, strict=True):
        device, model, _ = facet
        rows, lost = style.of(shown, *facet), style.of(failed, *facet).dropna(subset=["interval_length"])
        lengths = {1, 16, 64, *(int(v) for v in rows["interval_length"]), *(int(v) for v in lost["interval_length"])}
        values += _draw_traffic(ax, rows, max(lengths))
        values += _draw_measured(ax, rows, lost, "interval_length", looks)
        style.doubling_axis(ax, sorted(lengths), "interval length L")
        style.heading(ax, style.title(model, paper), style.subtitle(rows, device, f"batch {batches[facet]}"))
    _finish_speedups(axes, values)
    return figure


def decode_by_batch(models: pd.DataFrame, failures: pd.DataFrame, paper: pd.DataFrame) -> Figure:
    """Speedup of whole models' decode steps by batch size at the shortest context, the published curves beside it."""
    ours = _at(models, _lengths(models, models.iloc[:0]))
    shortest = ours.groupby([*style.FACET])["context"].min()
    ours = ours[ours["context"] == ours.groupby([*style.FACET])["context"].transform("min")]
    facets = style.facets(ours)
    places = zip(*(failures[name] for name in (*style.FACET, "context")), strict=True)
    failed = failures[np.array([shortest.get(tuple(facet)) == context for *facet, context in places], dtype=bool)]
    looks = style.arm_look([*ours["arm"], *failed["arm"]])
    of_paper = any(model in PAPER_CARDS and state == PAPER_STATE for _, model, state in facets)
    legend = _legend(ours, looks, _published_legend() if of_paper else [], failed=len(failed) > 0)
    figure, axes = style.panels(style.rows(facets), legend)
    values: list[float] = []
    for ax, facet in zip(axes, facets, strict=True):
        device, model, state = facet
        rows, lost = style.of(ours, *facet), style.of(failed, *facet)
        batches = {1, *(int(b) for b in rows["batch_size"]), *(int(b) for b in lost["batch_size"].dropna())}
        if state == PAPER_STATE:
            values += _draw_published(ax, paper, model, batches, rows, published.MODELS)
        values += _draw_measured(ax, rows, lost, "batch_size", looks)
        style.doubling_axis(ax, sorted(batches), "batch size")
        told = f"{rows['weights'].iloc[0]} weights, context {rows['context'].iloc[0]}"
        style.heading(ax, style.title(model, paper), style.subtitle(rows, device, told))
    _finish_speedups(axes, values)
    return figure


def traffic_curve(rows: pd.DataFrame, lengths: np.ndarray) -> np.ndarray | None:
    """Ideal speedup from bytes, ``2 S / (S (1 + 1/L) + r (L - 1) (1/2 + 1/L))``, at any interval length.

    State bytes S and ring bytes a token r are those of the records: their ratio is solved from the ideal speedup of the
    row with the longest interval. None when no row has an interval longer than 1.
    """
    known = rows[rows["ideal_bytes"].notna() & (rows["interval_length"] > 1)]
    if known.empty:
        return None
    row = known.sort_values(["interval_length", "ideal_bytes"]).iloc[-1]
    length = float(row["interval_length"])
    ring = (2 / row["ideal_bytes"] - 1 - 1 / length) / ((length - 1) * (1 / 2 + 1 / length))
    return 2 / (1 + 1 / lengths + ring * (lengths - 1) * (1 / 2 + 1 / lengths))


def _draw_measured(
    ax: Axes, rows: pd.DataFrame, lost: pd.DataFrame, x: str, looks: dict[str, dict[str, str]]
) -> list[float]:
    """Our points with their intervals, broken at failed cells, the allowed speedup and the crosses; returns values."""
    for arm, _, line, part in style.series(rows) if len(rows) else []:
        gaps = set(lost.loc[lost["arm"] == arm, x].dropna()) - set(part[x])
        gap_rows = pd.DataFrame({x: sorted(gaps), "speedup": math.nan, "low": math.nan, "high": math.nan})
        weak = [_weak(row) for row in part.itertuples()]
        shift = DODGE if line == "--" and (rows["phase"] != "staggered").any() else 0.0
        for row in part[weak].itertuples():
            ax.plot(math.log2(getattr(row, x)) + shift, row.speedup, zorder=5, **style.hollow(**looks[arm]))
        part = (pd.concat([part[[x, "speedup", "low", "high"]], gap_rows]) if gaps else part).sort_values(x)
        where = [math.log2(v) + shift for v in part[x]]
        bars = style.bars(part["speedup"], part["low"], part["high"])
        ax.errorbar(where, part["speedup"], yerr=bars, ls=line, capsize=3, elinewidth=1.3, zorder=4, **looks[arm])
    allowed = rows.dropna(subset=["ideal_roof"]).groupby(x)["ideal_roof"].max()
    look = {"ls": ":", "lw": 1.3, "marker": "_", "ms": 9, "color": style.INK}
    ax.plot([math.log2(v) for v in allowed.index], allowed, zorder=3, **look)
    style.crosses(ax, lost, x, [looks[arm]["color"] for arm in lost["arm"]])
    return [*rows["low"], *rows["high"], *allowed]


def _draw_published(
    ax: Axes, paper: pd.DataFrame, model: str, batches: set[int], ours: pd.DataFrame, experiment: str = published.KERNEL
) -> list[float]:
    """Published curves in grey with open markers, and the range over the paper's models in the panels of these alone;
    returns their values, adds their batch sizes.
    """
    values: list[float] = []
    if model in PAPER_CARDS:
        batch, low, high = published.four_models(paper, experiment)
        x = math.log2(batch)
        ax.plot([x, x], [low, high], color=style.MUTED, lw=5, alpha=0.35, solid_capstyle="butt", zorder=1)
        values += [low, high]
    for card, part in published.curves(paper, model, experiment).items():
        batches |= {int(b) for b in part["batch_size"]}
        where = [math.log2(b) for b in part["batch_size"]]
        ax.plot(where, part["value"], ls="--", lw=1.2, marker="D", mfc="white", color=style.MUTED, zorder=2)
        note = "\nmodel inferred" if published.model_inferred(part) else ""
        style.curve_name(ax, f"published, {card}{note}", where, list(part["value"]), ours)
        values += list(part["value"])
    return values


def _draw_traffic(ax: Axes, rows: pd.DataFrame, longest: int) -> list[float]:
    """The traffic model's curve, and the records' own ideals on it; returns its values."""
    exponents = np.arange(0, 8 * math.ceil(math.log2(longest)) + 1) / 8
    curve = traffic_curve(rows, 2.0**exponents)
    if curve is None:
        return []
    ax.plot(exponents, curve, ls="--", lw=1.2, color=style.MUTED, zorder=2)
    known = rows.dropna(subset=["ideal_bytes"]).drop_duplicates(["interval_length", "ideal_bytes"])
    where = [math.log2(v) for v in known["interval_length"]]
    ax.plot(where, known["ideal_bytes"], ls="", marker=".", color=style.MUTED, zorder=2)
    return list(curve)


def _failed(failures: pd.DataFrame) -> pd.DataFrame:
    """Failures to draw. What an arm cannot do or what is not installed is no failure of a case: the table tells it."""
    return failures[failures["status"] != "unsupported"]


def _draw_bandwidths(ax: Axes, part: pd.DataFrame, looks: dict[str, dict[str, str]], right: float) -> None:
    y, ticks = 0.0, []
    for batch in sorted(part["batch_size"].unique()):
        rows = part[part["batch_size"] == batch].sort_values(["kind", "arm", "phase"])
        ticks.append((y - (len(rows) - 1) / 2, f"{batch}"))
        for row in rows.itertuples():
            if pd.isna(row.share):
                ax.plot(0, y, ls="", marker="X", ms=7, color=looks[row.arm]["color"], clip_on=False, zorder=5)
                ax.text(0.035 * right, y, row.status, va="center", fontsize=7, color=style.FAILED)
                y -= 1
                continue
            # The ratio first: it is exactly 1 where a bound is the estimate, and a bar must not be negative.
            low, high = (row.gb_per_s * (bound / row.share) for bound in (row.low, row.high))
            ax.plot([row.gb_per_s, row.roof_gb_per_s], [y, y], color=looks[row.arm]["color"], lw=1.2, alpha=0.45)
            ax.plot(row.roof_gb_per_s, y, ls="", marker="|", ms=9, mew=2, color=style.INK, zorder=3)
            bars = [[row.gb_per_s - low], [high - row.gb_per_s]]
            ax.errorbar(row.gb_per_s, y, xerr=bars, ls="", capsize=2.5, elinewidth=1.3, zorder=4, **looks[row.arm])
            if _weak(row):
                ax.plot(row.gb_per_s, y, zorder=5, **style.hollow(**looks[row.arm]))
            ax.text(1.04 * right, y, f"{100 * row.share:.0f} %", va="center", fontsize=7, color=style.INK)
            y -= 1
        y -= 0.8
    for name, label in (("read", "reads"), ("rmw", "updates")):
        rates = part[f"{name}_gb_per_s"].dropna()
        if len(rates):  # every case measures its own, so that one line would stand for none of them
            low, high = float(rates.min()), float(rates.max())
            ax.axvspan(low, high, color=style.MUTED, alpha=0.16, lw=0, zorder=0)
            ax.axvline(low, color=style.MUTED, alpha=0.3, lw=0.8, zorder=0)
            ax.text((low + high) / 2, y + 0.62, label, va="bottom", **style.SMALL)
    ax.text(1.04 * right, 0.75, "of roof", va="bottom", **style.SMALL | {"ha": "left"})
    ax.set_yticks([t for t, _ in ticks], [label for _, label in ticks])
    ax.set_ylim(y + 0.6, 0.8)
    ax.set_xlim(0, 1.28 * right)
    ax.grid(axis="y", visible=False)
    ax.grid(axis="x", visible=True)
    ax.set_xlabel("bytes moved over time, GB/s")


def _finish_speedups(axes: list[Axes], values: list[float]) -> None:
    """One scale for all panels, so that they can be compared; the foot is left to the crosses of failed cells."""
    known = [1.0, *(v for v in values if math.isfinite(v))]
    bottom, top = max(0.0, math.floor(min(known) * 5 - 1) / 5), math.ceil(max(known) * 5 + 0.5) / 5
    for ax in axes:
        ax.axhline(1, color=style.INK, lw=0.9, zorder=2)
        ax.set_ylim(bottom, top)
    axes[0].set_ylabel("speedup over the fastest stored arm")


def _legend(ours: pd.DataFrame, looks: dict[str, dict[str, str]], beside: list[Line2D], failed: bool) -> list[Line2D]:
    """Our series, what the machine allows, what is drawn ``beside`` them, and the marks of points."""
    handles = []
    for arm, rest, line, part in style.series(ours) if len(ours) else []:
        rest += " (shifted)" if line == "--" and len(part) < len(ours[ours["arm"] == arm]) else ""
        handles.append(Line2D([], [], ls=line, label=f"{arm} {rest}".strip(), **looks[arm]))
    if ours["ideal_roof"].notna().any():
        handles.append(
            Line2D([], [], ls=":", marker="_", ms=9, color=style.INK, label="allowed by measured bandwidths")
        )
    handles += beside + _weak_legend(ours)
    if failed:
        handles.append(style.crosses_legend())
    return handles


def _published_legend() -> list[Line2D]:
    wide = {"color": style.MUTED, "lw": 5, "alpha": 0.35}
    return [
        Line2D([], [], label="published: fp32, L = 16, tuned vLLM", **GREY),
        Line2D([], [], label="paper, range over its four models", **wide),
    ]


def _weak(row: Any) -> bool:
    return bool(weaknesses(row.processes, row.rounds, row.aa_noise))


def _weak_legend(rows: pd.DataFrame) -> list[Line2D]:
    return (
        [Line2D([], [], label=style.WEAK, **style.hollow(style.INK, "o"))] if any(map(_weak, rows.itertuples())) else []
    )


def _lengths(measured: pd.DataFrame, failed: pd.DataFrame) -> dict[style.Facet, int]:
    """The interval length at which a panel shows its model: the paper's where it was run, else the most frequent."""
    found = {}
    for facet in style.facets(measured, failed):
        for frame in (measured, failed):
            values = style.of(frame, *facet)["interval_length"].dropna()
            if len(values) and facet not in found:
                found[facet] = PAPER_INTERVAL if (values == PAPER_INTERVAL).any() else int(values.mode().min())
    return found


def _at(frame: pd.DataFrame, lengths: dict[style.Facet, int]) -> pd.DataFrame:
    places = zip(*(frame[name] for name in (*style.FACET, "interval_length")), strict=True)
    chosen = [not pd.isna(length) and lengths.get(tuple(facet)) == length for *facet, length in places]
    return frame[np.array(chosen, dtype=bool)]


def _length_text(lengths: dict[style.Facet, int], *facet: str) -> str:
    length = lengths.get(facet, PAPER_INTERVAL)
    return f"L = {length}" if length == PAPER_INTERVAL else f"only L = {length} run"


def _fullest(rows: pd.DataFrame) -> int:
    """The batch size with most interval lengths, of those the largest."""
    counts = rows.groupby("batch_size")["interval_length"].nunique()
    return int(max(counts.index, key=lambda b: (counts[b], b)))


def _rightmost(rows: pd.DataFrame) -> float:
    """Largest bandwidth that the panels of one device show, so that they share a scale."""
    bars = rows["gb_per_s"] * rows["high"] / rows["share"]
    return float(pd.concat([bars, rows["roof_gb_per_s"], rows["read_gb_per_s"], rows["rmw_gb_per_s"]]).max())


def _lines_by_row(frame: pd.DataFrame, facets: list[style.Facet]) -> list[int]:
    """Lines that the fullest panel of each row has to hold, gaps between batch sizes included."""
    lines = [len(part) + part["batch_size"].nunique() for part in (style.of(frame, *facet) for facet in facets)]
    ends = np.cumsum(style.rows(facets))
    return [max(lines[end - count : end]) for end, count in zip(ends, style.rows(facets), strict=True)]


def _curve_models(paper: pd.DataFrame) -> list[str]:
    return [key for key in published.display_names(paper) if published.curves(paper, key)]
