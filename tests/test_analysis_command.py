"""``python -m analysis``: figures, report, determinism and ``--check``."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import accuracies
import numpy as np
import pandas as pd
import pytest
from drift_records import drift_group
from PIL import Image
from records import ARMS, case, decode_group, gpu_group, group, speculative_group, sweep, write
from window_records import windows

import analysis.__main__ as command
from analysis import figures, tables
from analysis.__main__ import differences, main
from analysis.captions import CAPTIONS
from analysis.load import load
from analysis.sections import SECTIONS

ROOT = Path(__file__).resolve().parent.parent


def everything():
    """What has every output."""
    models = [decode_group(fields={"context": context}) for context in (16, 8192)]
    drafts = [speculative_group(), *windows(arms={"snapshots/triton": 1.0, "oracle/triton": 0.4}, processes=1)]
    return [*sweep(), gpu_group(phased=True), *models, *drafts, drift_group(), accuracies.GRID]


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


def test_check_accepts_what_was_built(built_before, capsys):
    assert check(built_before) == 0
    assert "all outputs agree" in capsys.readouterr().out


def test_check_names_a_changed_byte(built_before, tmp_path, capsys):
    copy(built_before / "out", tmp_path, "figures/bandwidth.svg")
    assert check(built_before, tmp_path) == 1
    assert capsys.readouterr().err == "differs: figures/bandwidth.svg\n"


def repaint(path, change, level):
    """Change the pixels of a PNG file and compress it with another level."""
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB")).copy()
    change(pixels)
    Image.fromarray(pixels).save(path, compress_level=level)


def nothing(pixels):
    pass


def rounding(pixels):
    pixels[0, 0, 0] -= 7


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
    assert "and 2 more in tables/exclusions.csv" in text
    assert "repeat=true for experiments.kernel" in text
    assert "--repeat for experiments.reproduce" in text
    assert "excluded" not in printed(tmp_path / "good", monkeypatch, capsys, 80, *sweep())


@pytest.mark.parametrize("columns", [80, 120])
def test_the_claims_fit_a_terminal(tmp_path, monkeypatch, capsys, columns):
    lines = printed(tmp_path, monkeypatch, capsys, columns, *sweep()).splitlines()
    table = lines[: next(i for i, line in enumerate(lines) if line.startswith("commands"))]
    assert max(map(len, table)) <= columns
    assert any("kernel-range" in line and "1.46 to 1.80 x" in line for line in table)
    assert len(table) < (80 if columns == 80 else 160)
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
    compiled = claims.loc["tensor-core-verification"]
    assert compiled["records"] == ""
    assert "results/triton_resources.csv" in compiled["note"]
    ran = claims["verdict"].str.contains("analogue") & (claims.index != compiled.name)
    assert set(claims.loc[ran, "records"]) == {"records.jsonl"}
    assert set(claims.loc[~ran, "records"]) == {""}


def test_a_message_cannot_inject_markup(tmp_path):
    records = group(failed={"replay/cpu": "error"})
    text = '<img src="x"> | [bold]'
    records = [r if r.status == "ok" else type(r)(**{**vars(r), "message": text}) for r in records]
    assert main(["--records", str(write(tmp_path / "r", records)), "--out", str(tmp_path / "out")]) == 0
    assert '<img src="x">' not in (tmp_path / "out" / "report" / "index.html").read_text(encoding="utf-8")


def test_odd_batch_and_interval_values_of_failures_do_not_stop_the_figures(tmp_path):
    odd = group(case(batch=8), failed=dict.fromkeys(ARMS, "error"))
    odd = [type(r)(**{**vars(r), "case": {"model": 7, "batch_size": "many"}}) for r in odd]
    out = tmp_path / "out"
    assert main(["--records", str(write(tmp_path / "r", *sweep(), odd)), "--out", str(out)]) == 0
    assert len(pd.read_csv(out / "tables" / "failures.csv")) == 6
