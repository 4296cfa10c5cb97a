"""Figures of kernels: what is drawn, how it looks, and what the legend says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
from PIL import Image
from records import ARMS, case, group, sweep, write

from analysis import captions, figures, published, style, tables
from analysis.load import load

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def closed():
    """Figures are kept by matplotlib until they are closed."""
    yield
    plt.close("all")


def axes_of(folder, *groups, figure=figures.speedup_by_batch):
    found = tables.build(load([write(folder, *groups)]))
    paper = published.read(ROOT / "results" / "paper" / "published.csv")
    speedups = found["kernel_speedups"]
    return figure(speedups[speedups["kind"] == "replay"], found["failures"], paper).axes


def labels(ax):
    return [t.get_text() for t in ax.texts]


def test_failed_cells_and_batch_one_are_visible(tmp_path):
    axes = axes_of(tmp_path, *sweep())
    assert len(axes) == 2
    assert all(0.0 in ax.get_xticks() and ax.get_xticklabels()[0].get_text() == "1" for ax in axes)
    assert "oom" in labels(axes[1])
    assert "batch 1\nnot run" in labels(axes[1])
    assert "batch 1\nnot run" not in labels(axes[0])


def test_published_curves_are_open_and_labelled_with_their_card(tmp_path):
    ax = axes_of(tmp_path, *sweep())[0]
    assert "published, H100\nmodel inferred" in labels(ax)
    open_lines = [line for line in ax.lines if line.get_markerfacecolor() == "white"]
    assert [list(line.get_ydata()) for line in open_lines] == [[0.73, 1.36, 1.69, 1.78]]


def test_every_measured_point_carries_its_interval(tmp_path):
    ax = axes_of(tmp_path, *sweep())[0]
    bars = [c for c in ax.containers if c.has_yerr]
    assert len(bars) == 2  # replay/cpu and replay/torch
    for bar in bars:
        heights = [abs(s[1][1] - s[0][1]) for s in bar.lines[2][0].get_segments()]
        assert min(heights) > 0
        assert len(heights) == 2  # batch 1 and 64


def test_a_line_is_broken_at_a_failed_cell(tmp_path):
    groups = [group(case(batch=b), failed={"replay/cpu": "timeout"} if b == 8 else None) for b in (1, 8, 64)]
    ax = axes_of(tmp_path, *groups)[0]
    assert any(np.isnan(np.asarray(line.get_ydata(), dtype=float)).any() for line in ax.lines)


def test_the_traffic_curve_passes_through_the_ideals_of_the_records(tmp_path):
    groups = [group(case(length=length)) for length in (1, 2, 8, 16, 32)]
    frame = tables.build(load([write(tmp_path, *groups)]))["kernel_speedups"]
    rows = frame[frame["arm"] == "replay/cpu"].sort_values("interval_length")
    curve = figures.traffic_curve(rows, rows["interval_length"].to_numpy(dtype=float))
    assert curve == pytest.approx(rows["ideal_bytes"].to_numpy(dtype=float), abs=2e-4)
    assert figures.traffic_curve(rows[rows["interval_length"] == 1], np.array([1.0])) is None


def test_phases_of_one_arm_are_two_series(tmp_path):
    groups = [group(case(batch=b, phase=p), arms=ARMS) for b in (1, 64) for p in ("aligned", "staggered")]
    ax = axes_of(tmp_path, *groups)[0]
    assert len([c for c in ax.containers if c.has_yerr]) == 4


def hollow(ax):
    """Points drawn as no evidence: coloured edge, white face, no line."""
    return [line for line in ax.lines if line.get_markerfacecolor() == "white" and line.get_linestyle() == "None"]


def legend(axes):
    return [text.get_text() for text in axes[0].figure.legends[0].get_texts()]


def roofs_of(folder, *groups):
    found = tables.build(load([write(folder, *groups)]))
    return figures.bandwidth(
        found["roofs"], found["failures"], published.read(ROOT / "results/paper/published.csv")
    ).axes


def test_an_interval_of_one_round_has_no_negative_bar(tmp_path):
    """Its bounds are the estimate; these rows are such that rounding once put a bound on the wrong side."""
    one_round = case(timing={**case()["timing"], "rounds": 1})
    for seed in (12, 21, 35):
        assert roofs_of(tmp_path / str(seed), group(one_round, seed=seed, noise=0.001))


def test_points_of_one_process_are_hollow_and_the_legend_says_why(tmp_path):
    of = case(batch=8)
    groups = [*(group(replicate=r, seed=r) for r in range(2)), group(of)]
    for name, draw, arms in (("speedups", axes_of, 2), ("roofs", roofs_of, 4)):
        axes = draw(tmp_path / name, *groups)
        assert len(hollow(axes[0])) == arms
        assert style.WEAK in legend(axes)
        good = draw(tmp_path / f"good-{name}", *groups[:2])
        assert hollow(good[0]) == []
        assert style.WEAK not in legend(good)


def test_a_model_that_was_run_at_another_interval_length_only_is_drawn_and_says_so(tmp_path):
    groups = [group(), group(case("qwen3_5_4b", length=4))]
    for name, draw in (("speedups", axes_of), ("roofs", roofs_of)):
        axes = draw(tmp_path / name, *groups)
        assert len(axes) == 2
        assert ["L = 16" in "".join(labels(ax)) for ax in axes] == [True, False]
        assert "only L = 4 run" in "".join(labels(axes[1]))
        assert axes[1].containers


def test_every_roof_lies_within_the_bands_of_the_measured_bandwidths(tmp_path):
    groups = []
    for batch, factor in ((1, 1.0), (8, 1.6), (64, 0.7)):
        for records in (group(case(batch=batch), replicate=r, seed=r) for r in range(2)):
            changed = []
            for r in records:
                bandwidth = {k: b | {"bytes_per_s": b["bytes_per_s"] * factor} for k, b in r.bandwidth.items()}
                changed.append(
                    replace(r, bandwidth=bandwidth, traffic=r.traffic | {"floor_ns": r.traffic["floor_ns"] / factor})
                )
            groups.append(changed)
    ax = roofs_of(tmp_path, *groups)[0]
    spans = [(p.get_x(), p.get_x() + p.get_width()) for p in ax.patches]
    assert ax.get_xlabel() == "bytes moved over time, GB/s"
    ticks = [line.get_xdata()[0] for line in ax.lines if line.get_marker() == "|" and line.get_color() == style.INK]
    assert len(spans) == 2
    assert len(ticks) == 12
    assert all(min(low for low, _ in spans) <= t <= max(high for _, high in spans) + 1e-6 for t in ticks)


def test_the_widest_legend_fits_its_figure(tmp_path):
    two = {arm: ARMS[arm] for arm in ("stored/cpu", "replay/cpu")}
    phases = [group(), group(case(phase="staggered"), arms=two)]
    others = [group(case(m)) for m in ("qwen3_5_4b", "kimi_linear_48b")]
    with plt.rc_context(style.RC):
        figure = axes_of(tmp_path, *phases, *others)[0].figure
        figure.set_dpi(style.RC["savefig.dpi"])
        figure.canvas.draw()
    box, page = figure.legends[0].get_window_extent(), figure.bbox
    assert page.x0 <= box.x0 < box.x1 <= page.x1


def test_the_legend_names_only_arms_that_are_drawn(tmp_path):
    two = {arm: ARMS[arm] for arm in ("stored/cpu", "replay/cpu")}
    groups = [group(case(batch=8)), *(group(case(length=n), arms=two) for n in (4, 16))]
    names = legend(axes_of(tmp_path, *groups, figure=figures.speedup_by_interval))
    assert any("replay/cpu" in name for name in names)
    assert not any("replay/torch" in name for name in names)


def test_captions_name_the_sources_of_published_values_and_only_of_those():
    paper = published.read(ROOT / "results/paper/published.csv")
    parts = captions.markdown(list(captions.CAPTIONS), paper).split("## ")[1:]
    named = {part.split("\n")[0]: [line for line in part.splitlines() if line.startswith("- ")] for part in parts}
    assert set(named) == set(captions.CAPTIONS)
    assert {name for name, sources in named.items() if sources} == set(captions.PUBLISHED)
    assert named["kl_by_position"] == ["- summary of the paper, second, item 10"]
    assert not any("48018 (Kernel" in source for source in named["decode_by_batch"])


WIDE = "Mamba-2, fp32 state, T = 4, 3.19 to 3.41 tokens a step, NVIDIA H200"


def test_a_subtitle_wider_than_its_panel_is_broken(tmp_path, monkeypatch):
    """Within its row headings stay level, nothing runs into another panel, a title or the edge, no word is lost."""
    kept = []
    monkeypatch.setattr(style.plt, "close", kept.append)
    with plt.rc_context(style.RC):
        figure, axes = style.panels([3, 2], [])
        for ax, told in zip(axes, (WIDE, "GDN, fp32 state, L = 16, NVIDIA H200", WIDE, "fp32", "bf16"), strict=True):
            style.heading(ax, "Nemotron-3-Super-120B", told)
        style.save(figure, tmp_path, "headings")
        figure.canvas.draw()
    assert kept == [figure]
    notes = [ax.texts[0] for ax in axes]
    assert [note.get_text().count("\n") for note in notes] == [1, 0, 1, 0, 0]
    assert notes[0].get_text().replace("\n", " ") == WIDE
    places = [note.get_window_extent() for note in notes]
    limits = [axes[1].bbox.x0, axes[2].bbox.x0, figure.bbox.x1]
    assert all(place.x1 < limit for place, limit in zip(places, limits, strict=False))
    assert {ax.get_title(loc="left") for ax in axes} == {"Nemotron-3-Super-120B"}
    titles = [ax._left_title.get_window_extent() for ax in axes]
    assert titles[0].y0 == titles[1].y0 == titles[2].y0
    assert places[1].y1 == pytest.approx(places[0].y1, abs=0.5)
    assert titles[0].y1 < figure.bbox.y1
    for ax, place, title in zip(axes, places, titles, strict=True):
        assert ax.bbox.y1 < place.y0
        assert place.y1 < title.y0
    assert titles[3].y0 - axes[3].bbox.y1 < titles[0].y0 - axes[0].bbox.y1


def test_a_small_marker_keeps_its_colour_in_the_bitmap(tmp_path):
    """Among much text a palette of the most frequent colours would give the markers one another's."""
    with plt.rc_context(style.RC):
        figure, axes = style.panels([3, 3], [])
        for ax in axes:
            style.heading(ax, "Nemotron-3-Nano-4B", "Mamba-2, fp32 state, random weights, context 16, NVIDIA H200")
            for place, colour in enumerate(style.COLOURS):
                ax.errorbar(place, place, yerr=0.3, marker="o", ms=3.2, color=colour)
        bitmap = Image.open(style.save(figure, tmp_path, "markers")[1])
    counts = sorted(bitmap.convert("RGB").getcolors(), reverse=True)
    assert max(max(colour) - min(colour) for _, colour in counts[:8]) <= 2  # paper, grid and ink stay grey
    seen = np.array([colour for _, colour in counts])
    wanted = np.array([[int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in style.COLOURS])
    assert np.abs(seen[:, None] - wanted).max(axis=2).min(axis=0).max() <= 12


def test_a_failed_cell_keeps_its_panel_and_a_single_batch_size_does_not(tmp_path):
    alone = [group(case("qwen3_5_122b"), replicate=n, seed=n) for n in range(2)]
    assert [ax.get_title() for ax in axes_of(tmp_path, *sweep(), *alone)] == ["Nemotron-3-Nano-4B", "Qwen3.5-4B"]
    assert len(axes_of(tmp_path, *alone)) == 1


@pytest.mark.parametrize(("factor", "below"), [(0.9, False), (0.3, True)])
def test_a_published_curve_is_named_where_ours_is_not(tmp_path, factor, below):
    """Nemotron 3 Nano is published at 1.36x at batch 8."""
    arms = {"stored/cpu": 1.0, "replay/cpu": factor}
    ax = axes_of(tmp_path, *(group(case(batch=b), arms=arms, replicate=n, seed=n) for b in (8, 64) for n in range(2)))[
        0
    ]
    name = next(text for text in ax.texts if text.get_text().startswith("published"))
    assert (name.xy[0] == np.log2(128)) == (name.get_va() == "top") == below
