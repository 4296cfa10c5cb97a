"""``python -m analysis``: figures, report, determinism and ``--check``."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import accuracies
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from drift_records import drift_group
from PIL import Image
from records import ARMS, case, decode_group, gpu_group, group, write

import analysis.__main__ as command
from analysis import figures, published, style, tables
from analysis.__main__ import differences, main
from analysis.captions import CAPTIONS
from analysis.load import load
from analysis.sections import SECTIONS

ROOT = Path(__file__).resolve().parent.parent


def sweep():
    """Two models, three batch sizes and lengths, one failed cell, two processes."""
    groups = []
    for replicate in range(2):
        for batch, length in ((1, 16), (64, 16), (64, 4), (64, 1)):
            groups.append(group(case(batch=batch, length=length), replicate=replicate, seed=replicate))
        failed = {"replay/torch": "oom"}
        groups.append(group(case("qwen3_5_4b"), replicate=replicate, seed=replicate, failed=failed))
    return groups


def everything():
    """What has every output."""
    models = [decode_group(fields={"context": context}) for context in (16, 8192)]
    return [*sweep(), gpu_group(phased=True), *models, drift_group(), accuracies.GRID]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Folder with records and the outputs built from them."""
    folder = tmp_path_factory.mktemp("built")
    write(folder / "records", *everything())
    assert main(["--records", str(folder / "records"), "--out", str(folder / "out")]) == 0
    return folder


def contents(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def copy(source, target, changed=""):
    """Copy outputs; of the file ``changed`` one byte in its middle becomes another."""
    for path, data in contents(source).items():
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        half = len(data) // 2
        (target / path).write_bytes(
            data if path != changed else data[:half] + bytes([data[half] ^ 1]) + data[half + 1 :]
        )


@pytest.fixture
def built_before(built, monkeypatch):
    """As ``built``; building again copies it."""
    monkeypatch.setattr(command, "build", lambda evidence, out, linked: copy(built / "out", out))
    return built


def check(folder, out=None):
    return main(["--records", str(folder / "records"), "--out", str(out or folder / "out"), "--check"])


def test_everything_is_written(built):
    expected = {f"tables/{t}.{s}" for t in (*tables.build(load([])), "claims") for s in ("csv", "md", "tex")}
    expected |= {f"figures/{f}.{s}" for f in figures.NAMES for s in ("svg", "png")}
    expected |= {"figures/captions.md", "report/index.html", "report/choose.html"}
    assert set(contents(built / "out")) == expected == command.OWN


def test_the_same_records_in_another_order_give_the_same_bytes(built, tmp_path):
    groups = everything()
    write(tmp_path / "records", *groups[::-2], name="b")
    write(tmp_path / "records" / "deeper", *groups[-2::-2], name="a")
    assert main(["--records", str(tmp_path / "records"), "--out", str(tmp_path / "out")]) == 0
    one, two = contents(built / "out"), contents(tmp_path / "out")
    # where a record lay is the only thing that may differ, and is said only of exclusions and of the evidence of claims
    changed = {name for name in one if one[name] != two[name]}
    told = {f"tables/{table}.{kind}" for table in ("exclusions", "claims") for kind in ("csv", "md", "tex")}
    assert changed <= {*told, "report/index.html"}
    claims = [pd.read_csv(folder / "out/tables/claims.csv") for folder in (built, tmp_path)]
    assert claims[0].drop(columns="records").equals(claims[1].drop(columns="records"))


def test_check_accepts_what_was_built(built, capsys):
    assert check(built) == 0
    assert "all outputs agree" in capsys.readouterr().out


def test_check_names_a_changed_byte(built_before, tmp_path, capsys):
    copy(built_before / "out", tmp_path, "figures/bandwidth.svg")
    assert check(built_before, tmp_path) == 1
    assert capsys.readouterr().err == "differs: figures/bandwidth.svg\n"


def repaint(path, change, level):
    """Change the pixels of a PNG file and compress it with another level."""
    with Image.open(path) as image:
        pixels = np.asarray(image).copy()
    change(pixels)
    Image.fromarray(pixels).save(path, compress_level=level)


def nothing(pixels):
    pass


def rounding(pixels):
    pixels[0, 0, 0] ^= 1


def a_dot(pixels):
    pixels[pixels.shape[0] // 2, 3, 1] -= 40


@pytest.mark.parametrize(("change", "differs"), [(nothing, False), (rounding, False), (a_dot, True)])
def test_png_files_are_compared_by_pixels(built, tmp_path, change, differs):
    copy(built / "out", tmp_path)
    name = "figures/bandwidth.png"
    repaint(tmp_path / name, change, level=1)
    assert (tmp_path / name).read_bytes() != (built / "out" / name).read_bytes()
    assert differences(built / "out", tmp_path) == ([f"differs: {name}"] if differs else [])


@pytest.mark.parametrize("data", [b"", b"no image", b"\x89PNG\r\n\x1a\n"])
def test_a_png_file_that_is_none_differs(built, tmp_path, data):
    copy(built / "out", tmp_path)
    (tmp_path / "figures" / "bandwidth.png").write_bytes(data)
    assert differences(built / "out", tmp_path) == ["differs: figures/bandwidth.png"]


def test_a_png_file_that_is_cut_short_differs(built, tmp_path):
    copy(built / "out", tmp_path)
    path = tmp_path / "figures" / "bandwidth.png"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert differences(built / "out", tmp_path) == ["differs: figures/bandwidth.png"]


@pytest.mark.parametrize("name", ["tables/claims.csv", "tables/roofs.md", "figures/bandwidth.svg", "report/index.html"])
def test_a_changed_byte_of_any_output_is_a_difference(built, tmp_path, name):
    copy(built / "out", tmp_path, name)
    assert differences(built / "out", tmp_path) == [f"differs: {name}"]


def test_check_names_missing_and_extra_files_and_leaves_them_alone(built_before, tmp_path, capsys, monkeypatch):
    built = built_before
    copy(built / "out", tmp_path)
    (tmp_path / "tables" / "roofs.md").unlink()
    for name in ("figures/old.svg", "figures/notes.txt", "figures/mine/old.svg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("old")
    before = contents(tmp_path)
    assert check(built, tmp_path) == 1
    assert capsys.readouterr().err == "missing: tables/roofs.md\n"
    lines = differences(built / "out", tmp_path)
    monkeypatch.setattr(command, "RESULTS", tmp_path)  # the project's own results hold nothing but outputs
    assert differences(built / "out", tmp_path) == ["extra: figures/old.svg", *lines]
    assert contents(tmp_path) == before


def test_check_names_an_output_that_the_records_no_longer_give(tmp_path, capsys):
    records, out = write(tmp_path / "none"), tmp_path / "out"
    assert main(["--records", str(records), "--out", str(out)]) == 0
    (out / "figures" / "bandwidth.svg").write_text("old")
    capsys.readouterr()
    assert main(["--records", str(records), "--out", str(out), "--check"]) == 1
    assert capsys.readouterr().err == "extra: figures/bandwidth.svg\n"


def test_a_rebuild_removes_its_own_outputs_of_before_and_nothing_else(tmp_path):
    own = ("figures/bandwidth.svg", "figures/bandwidth.png", "figures/speedup_by_interval.svg")
    others = ("tables/mine.csv", "tables/deeper/claims.csv", "figures/old.svg", "figures/keep.txt", "report/mine.html")
    others += ("records/kept.jsonl", "report/figures/bandwidth.svg")
    for name in (*own, *others):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("of before")
    assert main(["--records", str(write(tmp_path / "none")), "--out", str(tmp_path)]) == 0
    left = contents(tmp_path)
    assert not set(own) & set(left)
    assert {left[name] for name in others} == {b"of before"}


def test_without_records_the_claims_are_listed(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    assert main(["--records", str(write(tmp_path / "none")), "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "kernel-range" in printed
    assert "python -m experiments.kernel" in printed
    assert str(tmp_path / "out" / "report" / "index.html") in printed
    assert (tmp_path / "out" / "figures" / "speedup_by_batch.svg").exists()


def test_a_records_folder_that_is_none_is_refused_in_one_line(tmp_path, capsys):
    assert main(["--records", str(tmp_path / "absent"), "--out", str(tmp_path)]) == 2
    assert re.fullmatch(r"--records=.*absent is no folder; accepted: .*\n", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--records", ""], r"--records= is no folder; accepted: .*"),
        (["--out", ""], r"--out= is no folder; accepted: .*"),
        (["--out", "{file}"], r"--out=.*file cannot be written \(.*\); accepted: .*"),
        (["--out", "{file}/below"], r"--out=.*below cannot be written \(.*\); accepted: .*"),
    ],
)
def test_folders_that_cannot_be_used_are_refused_in_one_line(tmp_path, capsys, monkeypatch, options, line):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    monkeypatch.setattr(command, "build", lambda evidence, out, linked: tables.write({}, out))
    assert main([o.format(file=tmp_path / "file") for o in options]) == 2
    assert re.fullmatch(line + "\n", capsys.readouterr().err)


def test_an_interrupt_ends_with_one_line(tmp_path, capsys, monkeypatch):
    def interrupt(folders):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "load", interrupt)
    assert main(["--records", str(tmp_path), "--out", str(tmp_path / "out")]) == 130
    assert re.fullmatch(r"interrupted; .*\n", capsys.readouterr().err)


def printed(folder, monkeypatch, capsys, columns, *groups):
    """What the command says, without its figures."""
    monkeypatch.setattr(figures, "draw", lambda *arguments: [])
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["--records", str(write(folder / "r", *groups)), "--out", str(folder / "out")]) == 0
    return capsys.readouterr().out


def test_a_refused_group_is_told_with_its_reason_and_how_to_measure_again(tmp_path, monkeypatch, capsys):
    loud = [group(case(batch=b), aa_bias=1.1) for b in range(1, 8)]
    text = printed(tmp_path, monkeypatch, capsys, 80, *sweep(), *loud, group(started="2026-11-28T10:00:00Z"))
    assert "excluded: 7 groups" in text
    assert "stored/cpu timed twice differs" in text
    assert "and 2 more in tables/exclusions.md" in text
    assert "repeat=true for experiments.kernel" in text
    assert "--repeat for experiments.reproduce" in text
    assert "excluded" not in printed(tmp_path / "good", monkeypatch, capsys, 80, *sweep())


@pytest.mark.parametrize("columns", [80, 120])
def test_the_claims_fit_a_terminal(tmp_path, monkeypatch, capsys, columns):
    lines = printed(tmp_path, monkeypatch, capsys, columns, *sweep()).splitlines()
    table = lines[: next(i for i, line in enumerate(lines) if line.startswith("commands"))]
    assert max(map(len, table)) <= columns
    assert any("kernel-range" in line and "1.46 to 1.80 x" in line for line in table)
    assert len(table) < (80 if columns == 80 else 130)
    assert ("card: 2-core CPU" in "".join(table)) == (columns == 120)


def test_analysis_imports_no_torch_and_of_the_library_the_traffic_model_alone():
    code = "import sys, analysis.__main__; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert not {"torch", "hydra"} & set(loaded)
    library = ["replayssm", *(f"replayssm.{name}" for name in ("flops", "geometry", "layout", "traffic"))]
    assert [m for m in loaded if m.split(".")[0] == "replayssm"] == library
    ours = ["experiments", "experiments.measure"]
    ours += [f"experiments.measure.{name}" for name in ("accuracy_record", "drift_record", "record")]
    assert [m for m in loaded if m.split(".")[0] == "experiments"] == ours


def test_the_report_needs_nothing_but_its_folder_and_shows_what_matters(built):
    page = (built / "out" / "report" / "index.html").read_text(encoding="utf-8")
    assert set(re.findall(r'<img [^>]*src="\.\./figures/(\w+)\.svg"', page)) == set(figures.NAMES)
    assert page.count("<img") == len(figures.NAMES)
    assert not re.search(r'(src|href)="(https?:)?//', page)
    assert "<script src" not in page
    sections = [section.name for section in SECTIONS]
    places = [page.index(f'id="{name}"') for name in ("claims", *sections, "left-out", "devices")]
    assert places == sorted(places)
    parts = ("supported on an analogue", "FASTER", "the arm ended with oom", "prefers-color-scheme", "torch 2.13.0")
    for part in parts:
        assert part in page


def test_every_figure_and_table_has_its_place_in_the_report():
    shown = [name for section in SECTIONS for name in section.figures]
    assert sorted(shown) == sorted(figures.NAMES) == sorted(CAPTIONS)
    shown = [name for section in SECTIONS for _, name in section.tables]
    assert sorted([*shown, "failures", "exclusions", "devices"]) == sorted(tables.NAMES)


def test_a_claim_names_the_files_of_its_evidence(built):
    claims = pd.read_csv(built / "out/tables/claims.csv", keep_default_na=False).set_index("id")
    assert claims.loc["kernel-range", "records"] == "records.jsonl"
    ran = claims["verdict"].str.contains("analogue")
    assert set(claims.loc[ran, "records"]) == {"records.jsonl"}
    assert set(claims.loc[~ran, "records"]) == {""}


def test_a_message_cannot_inject_markup(tmp_path):
    records = group(failed={"replay/cpu": "error"})
    text = '<img src="x"> | [bold]'
    records = [r if r.status == "ok" else type(r)(**{**vars(r), "message": text}) for r in records]
    assert main(["--records", str(write(tmp_path / "r", records)), "--out", str(tmp_path / "out")]) == 0
    assert '<img src="x">' not in (tmp_path / "out" / "report" / "index.html").read_text(encoding="utf-8")


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


def test_odd_batch_and_interval_values_of_failures_do_not_stop_the_figures(tmp_path):
    odd = group(case(batch=8), failed=dict.fromkeys(ARMS, "error"))
    odd = [type(r)(**{**vars(r), "case": {"model": 7, "batch_size": "many"}}) for r in odd]
    out = tmp_path / "out"
    assert main(["--records", str(write(tmp_path / "r", *sweep(), odd)), "--out", str(out)]) == 0
    assert len(pd.read_csv(out / "tables" / "failures.csv")) == 6
