"""The figure of kernels that verify a window: what is drawn is what the table says, beside what is published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from records import COPIES, write
from window_records import windows

from analysis import published, style, tables, window_figures
from analysis.load import load
from experiments.measure.record import Record

PAPER = published.read(Path(__file__).resolve().parents[1] / "results" / "paper" / "published.csv")
SIX = {"fields": {"window": 6}, "layer_steps_per_sample": 4 * COPIES, "noise": 0.05}


def built(folder: Path, *groups: list[Record]) -> dict[str, pd.DataFrame]:
    return tables.build(load([write(folder, *groups)]))


def axes_of(found: dict[str, pd.DataFrame]) -> list[Axes]:
    rows = found["window_speedups"]
    with plt.rc_context(style.RC):
        figure = window_figures.verify_by_batch(rows[rows["speedup"].notna()], found["failures"], PAPER)
    plt.close(figure)
    return figure.axes


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pd.DataFrame]:
    """Of one model two batch sizes, both windows, both phases; of the other a batch at which snapshots do not fit."""
    staggered = windows(fields={"phase": "staggered"}, processes=1, noise=0.05)
    ours = [*windows(noise=0.05), *windows(fields={"batch_size": 8}, processes=1, noise=0.05), *windows(**SIX)]
    lost = windows("nemotron_3_nano_4b", failed={"snapshots/triton": "oom"}, processes=1, aa_arm="oracle/triton")
    other = windows("nemotron_3_nano_4b", fields={"batch_size": 8}, processes=2)
    return built(tmp_path_factory.mktemp("windows"), *ours, *staggered, *lost, *other)


def test_what_is_drawn_is_what_the_table_says(several: dict[str, pd.DataFrame]) -> None:
    ax = next(ax for ax in axes_of(several) if ax.get_title(loc="left") == "Qwen3.5-122B")
    rows = several["window_speedups"]
    rows = rows[rows["model"] == "qwen3_5_122b"]
    colour = {window: look["color"] for window, look in style.window_look([4, 6]).items()}
    shown, bars = set(), set()
    for line in (container.lines for container in ax.containers):
        points = [*zip(*line[0].get_data(), strict=True)]
        shown |= {(to_hex(line[0].get_color(), False).upper(), round(2**x, 2), y) for x, y in points}
        bars |= {tuple(np.round(part[:, 1], 4)) for part in line[2][0].get_segments()}
    moved = {"aligned": 0.0, "staggered": 0.22}
    wanted = {
        (colour[r.window].upper(), round(r.batch_size * 2 ** moved[r.phase], 2), r.speedup) for r in rows.itertuples()
    }
    assert len(shown) == len(rows) == 8
    assert shown == wanted
    assert bars == {(r.low, r.high) for r in rows.itertuples()}
    dotted = {(line.get_color(), y) for line in ax.lines if line.get_linestyle() == ":" for y in line.get_ydata()}
    assert dotted == {(colour[r.window], r.ideal_roof) for r in rows.itertuples()}
    weak = [line.get_ydata()[0] for line in ax.lines if line.get_mfc() == "white" and line.get_ls() == "None"]
    assert sorted(weak) == sorted(rows.loc[rows["processes"] == 1, "speedup"])


def test_the_legend_names_every_line_once(several: dict[str, pd.DataFrame]) -> None:
    axes = axes_of(several)
    names = [text.get_text() for text in axes[0].figure.legends[0].get_texts()]
    arms = [f"T = {window}: {kind}/triton aligned" for window in (4, 6) for kind in ("oracle", "verify")]
    arms += [f"T = 4: {kind}/triton staggered (shifted)" for kind in ("oracle", "verify")]
    beside = ["allowed by measured bandwidths", "published, its window's colour", style.WEAK, "failed, with status"]
    assert sorted(names) == sorted([*arms, *beside])
    markers = {line.lines[0].get_marker() for ax in axes for line in ax.containers}
    assert len(markers) == 4


def test_a_batch_without_snapshots_is_a_cross(several: dict[str, pd.DataFrame]) -> None:
    ax, _ = axes_of(several)
    assert ax.get_title(loc="left") == "Nemotron-3-Nano-4B"
    assert [text.get_text() for text in ax.texts if text.get_text() == "oom"] == ["oom"]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["1", "8", "256"]
    assert "batch 1\nnot run" in [text.get_text() for text in ax.texts]


def test_published_values_stand_with_their_family(several: dict[str, pd.DataFrame]) -> None:
    def grey(ax: Axes) -> list[Any]:
        return [list(line.get_ydata()) for line in ax.lines if line.get_marker() == "D" and line.get_ls() == "--"]

    mamba, gdn = axes_of(several)
    assert grey(mamba) == []
    assert grey(gdn) == [[1.06, 1.09, 1.16]]
    assert "published, H200\nmodel not named" in [text.get_text() for text in gdn.texts]
    assert published.sources(PAPER, published.WINDOWS, ()) == ["https://github.com/ModelTC/LightLLM/pull/1585"]


def test_counts_of_accepted_tokens_are_never_one_line(tmp_path: Path) -> None:
    """Two accepted of four flush at every seventh window."""
    two = windows(fields={"accepted": 2}, layer_steps_per_sample=7 * COPIES, processes=1)
    (ax,) = axes_of(built(tmp_path, *windows(processes=1), *two))
    names = [text.get_text() for text in ax.figure.legends[0].get_texts()]
    assert [name for name in names if "verify" in name] == [
        "T = 4, 2 accepted: verify/triton",
        "T = 4, 3 accepted: verify/triton",
    ]
    assert "accepted" not in ax.texts[-1].get_text()


def test_without_windows_nothing_is_drawn(several: dict[str, pd.DataFrame], tmp_path: Path) -> None:
    rows, failures = several["window_speedups"], several["failures"]
    assert window_figures.draw(rows.iloc[:0], failures, PAPER, tmp_path) == []
    unmeasured = rows.assign(speedup=np.nan)
    assert window_figures.draw(unmeasured, failures, PAPER, tmp_path) == []
    assert not list(tmp_path.iterdir())
