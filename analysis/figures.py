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
    speedup_panels,
    style,
    window_figures,
)
from analysis.bearing import PAPER_CARDS
from analysis.cells import strongest

NAMES = (
    "speedup_by_batch",
    "bandwidth",
    "speedup_by_interval",
    "decode_by_batch",
    *speculative_figures.NAMES,
    *window_figures.NAMES,
    *decode_figures.NAMES,
)
NAMES += (*gpu_figures.NAMES, *drift_figures.NAMES, *accuracy_figures.NAMES)
PAPER_STATE = "fp32"
GREY: dict[str, Any] = {"color": style.MUTED, "mfc": "white", "marker": "D", "ls": "--", "lw": 1.2}


def draw(tables: dict[str, pd.DataFrame], paper: pd.DataFrame, folder: Path) -> list[str]:
    """Draw every figure for which there is something to show; returns their names in reading order."""
    speedups, roofs = strongest(tables["kernel_speedups"]), strongest(tables["roofs"])
    speedups = speedups[(speedups["kind"] != "stored") & speedups["speedup"].notna()]
    failures = tables["failures"][tables["failures"]["experiment"] == "kernel"]
    lost_models = speedup_panels.failed(tables["failures"][tables["failures"]["experiment"] == "decode"])
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
        drafted = speedup_panels.failed(drafted[drafted["kind"] != "replay"])
        drawn += speculative_figures.draw(tables["speculative_throughput"], drafted, paper, folder)
        windows = tables["failures"][tables["failures"]["experiment"] == "window"]
        drawn += window_figures.draw(tables["window_speedups"], speedup_panels.failed(windows), paper, folder)
        drawn += drift_figures.draw(tables, paper, folder)
        drawn += accuracy_figures.draw(tables["accuracy"], tables["accuracy_by_distance"], paper, folder)
    (folder / captions.FILE).write_text(captions.markdown(drawn, paper), encoding="utf-8")
    return drawn


def speedup_by_batch(speedups: pd.DataFrame, failures: pd.DataFrame, paper: pd.DataFrame) -> Figure:
    """Speedup over the fastest stored arm by batch size, one panel a model and device, published curves beside it."""
    failed = speedup_panels.failed(failures[failures["kind"] != "stored"])
    lengths = speedup_panels.lengths(speedups, failed)
    ours, failed = speedup_panels.at(speedups, lengths), speedup_panels.at(failed, lengths)
    facets = style.along(style.facets(ours, failed), "batch_size", ours, failed)
    facets = facets or [("", key, PAPER_STATE) for key in _curve_models(paper)]
    looks = style.arm_look([*ours["arm"], *failed["arm"]])
    of_paper = any(model in PAPER_CARDS and state == PAPER_STATE for _, model, state in facets)
    legend = speedup_panels.legend(ours, looks, _published_legend() if of_paper else [], len(failed) > 0)
    figure, axes = style.panels(style.rows(facets), legend)
    values: list[float] = []
    for ax, facet in zip(axes, facets, strict=True):
        device, model, state = facet
        rows, lost = style.of(ours, *facet), style.of(failed, *facet)
        batches = {1, 256, *(int(b) for b in rows["batch_size"]), *(int(b) for b in lost["batch_size"].dropna())}
        values += _draw_published(ax, paper, model, batches, rows) if state == PAPER_STATE else []
        values += speedup_panels.draw_measured(ax, rows, lost, "batch_size", looks)
        if device:
            speedup_panels.not_run_alone(ax, rows, lost)
        style.doubling_axis(ax, sorted(batches), "batch size")
        style.heading(
            ax,
            style.title(model, paper),
            style.subtitle(rows, device, speedup_panels.length_text(lengths, *facet)) or "published only",
        )
    speedup_panels.finish(axes, values, "speedup over the fastest stored arm")
    return figure


def bandwidth(roofs: pd.DataFrame, failures: pd.DataFrame, paper: pd.DataFrame) -> Figure:
    """Achieved bandwidth of each arm beside what the roof allows it; of its flush phases the slower is shown."""
    lengths = speedup_panels.lengths(roofs, failures)
    lost = speedup_panels.at(failures, lengths).drop_duplicates(["device", "model", "batch_size", "arm"])
    shown = speedup_panels.at(roofs, lengths).sort_values("share", kind="stable")
    shown = shown.drop_duplicates(["device", "model", "batch_size", "arm", "state", "inputs", "threads"])
    rows = pd.concat([shown, lost]).dropna(subset=["batch_size"])
    facets, looks = style.facets(rows[rows["share"].notna()]), style.arm_look(list(rows["arm"]))
    arms = sorted(looks, key=lambda a: (a.split("/")[0], a))
    legend = [Line2D([], [], ls="", label=arm, **looks[arm]) for arm in arms]
    legend.append(Line2D([], [], ls="", marker="|", ms=10, mew=2, color=style.INK, label="roof of the arm"))
    legend.append(Patch(color=style.MUTED, alpha=0.25, lw=0, label="measured bandwidths, lowest to highest"))
    legend += speedup_panels.weak_legend(shown)
    if rows["share"].isna().any():
        legend.append(style.crosses_legend())
    heights = [max(1.6, 0.18 * n + 0.9) for n in _lines_by_row(rows, facets)]
    figure, axes = style.panels(style.rows(facets), legend, heights)
    for ax, facet in zip(axes, facets, strict=True):
        device, model, _ = facet
        part = style.of(rows, *facet)
        _draw_bandwidths(ax, part, looks, _rightmost(rows[rows["device"] == device]))
        style.heading(
            ax, style.title(model, paper), style.subtitle(part, device, speedup_panels.length_text(lengths, *facet))
        )
    axes[0].set_ylabel("batch size")
    return figure


def speedup_by_interval(speedups: pd.DataFrame, failures: pd.DataFrame, paper: pd.DataFrame) -> Figure:
    """Speedup by interval length at the batch size with most lengths, with the curve that bytes alone would give."""
    looks = style.arm_look(list(speedups["arm"]))
    failed = speedup_panels.failed(failures[failures["arm"].isin(list(looks))])
    batches = {facet: _fullest(style.of(speedups, *facet)) for facet in style.facets(speedups)}
    places = [zip(*(of[name] for name in (*style.FACET, "batch_size")), strict=True) for of in (speedups, failed)]
    here = [np.array([batches.get(tuple(f)) == batch for *f, batch in of], dtype=bool) for of in places]
    shown, failed = speedups[here[0]], failed[here[1]]
    facets = style.along(style.facets(shown), "interval_length", shown, failed)
    bytes_alone = Line2D([], [], label="traffic model (bytes alone)", **GREY | {"marker": ".", "mfc": style.MUTED})
    legend = speedup_panels.legend(shown, looks, [bytes_alone], len(failed) > 0)
    figure, axes = style.panels(style.rows(facets), legend)
    values: list[float] = []
    for ax, facet in zip(axes, facets, strict=True):
        device, model, _ = facet
        rows, lost = style.of(shown, *facet), style.of(failed, *facet).dropna(subset=["interval_length"])
        lengths = {1, 16, 64, *(int(v) for v in rows["interval_length"]), *(int(v) for v in lost["interval_length"])}
        values += _draw_traffic(ax, rows, max(lengths))
        values += speedup_panels.draw_measured(ax, rows, lost, "interval_length", looks)
        style.doubling_axis(ax, sorted(lengths), "interval length L")
        style.heading(ax, style.title(model, paper), style.subtitle(rows, device, f"batch {batches[facet]}"))
    speedup_panels.finish(axes, values, "speedup over the fastest stored arm")
    return figure


def decode_by_batch(models: pd.DataFrame, failures: pd.DataFrame, paper: pd.DataFrame) -> Figure:
    """Speedup of whole models' decode steps by batch size at the shortest context, the published curves beside it."""
    ours = speedup_panels.at(models, speedup_panels.lengths(models, models.iloc[:0]))
    shortest = ours.groupby([*style.FACET])["context"].min()
    ours = ours[ours["context"] == ours.groupby([*style.FACET])["context"].transform("min")]
    facets = style.facets(ours)
    places = zip(*(failures[name] for name in (*style.FACET, "context")), strict=True)
    failed = failures[np.array([shortest.get(tuple(facet)) == context for *facet, context in places], dtype=bool)]
    looks = style.arm_look([*ours["arm"], *failed["arm"]])
    of_paper = any(model in PAPER_CARDS and state == PAPER_STATE for _, model, state in facets)
    legend = speedup_panels.legend(ours, looks, _published_legend() if of_paper else [], len(failed) > 0)
    figure, axes = style.panels(style.rows(facets), legend)
    values: list[float] = []
    for ax, facet in zip(axes, facets, strict=True):
        device, model, state = facet
        rows, lost = style.of(ours, *facet), style.of(failed, *facet)
        batches = {1, *(int(b) for b in rows["batch_size"]), *(int(b) for b in lost["batch_size"].dropna())}
        if state == PAPER_STATE:
            values += _draw_published(ax, paper, model, batches, rows, published.MODELS)
        values += speedup_panels.draw_measured(ax, rows, lost, "batch_size", looks)
        style.doubling_axis(ax, sorted(batches), "batch size")
        told = f"{rows['weights'].iloc[0]} weights, context {rows['context'].iloc[0]}"
        style.heading(ax, style.title(model, paper), style.subtitle(rows, device, told))
    speedup_panels.finish(axes, values, "speedup over the fastest stored arm")
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
            if speedup_panels.is_weak(row):
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


def _published_legend() -> list[Line2D]:
    wide = {"color": style.MUTED, "lw": 5, "alpha": 0.35}
    return [
        Line2D([], [], label="published: fp32, L = 16, tuned vLLM", **GREY),
        Line2D([], [], label="paper, range over its four models", **wide),
    ]


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
