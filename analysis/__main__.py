"""``python -m analysis [--records DIR ...] [--out DIR] [--check]``: tables, figures, claims and report from records.

Reads every ``*.jsonl`` and ``*.jsonl.xz`` file of the record folders and writes ``tables/``, ``figures/`` and
``report/`` below the output folder; of the files there it removes only those that it could have written itself.
``--check`` writes nothing: it rebuilds in a temporary folder and exits with 1, naming the files, when an output differs
from what is there, is missing, or should not be there. PNG files are compared by their pixels, since compression
differs between machines, all others by their bytes.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from PIL import Image

from analysis import captions, choose, claims, figures, published, report, tables, terminal
from analysis.load import Evidence, load

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
KINDS = {"tables": (".csv", ".md", ".tex"), "figures": (".svg", ".png"), "report": (".html",)}
"""Folder of outputs -> the kinds of files that are written there."""
NAMES = {"tables": (*tables.NAMES, "claims"), "figures": figures.NAMES, "report": ("index", "choose")}
OWN = {f"{folder}/{name}{kind}" for folder, names in NAMES.items() for name in names for kind in KINDS[folder]}
OWN |= {f"figures/{captions.FILE}"}
"""Every file that this program may write, and so may remove."""
LEVELS = 8
"""Most that a channel of a pixel may differ, of 255: an image that another build of its libraries drew has pixels that
are rounded otherwise, and a palette that follows them."""


def build(evidence: Evidence, out: Path, linked: bool) -> pd.DataFrame:
    """Rebuild every output below ``out``, removing its own older ones first; returns the claims table. ``linked``: the
    report may refer to the records as a folder beside its own."""
    found = tables.build(evidence)
    paper = RESULTS / "paper"
    table = claims.evaluate(claims.read(paper / "claims.toml"), found, evidence, ROOT)
    for name in OWN:
        (out / name).unlink(missing_ok=True)
    tables.write(found | {"claims": table}, out / "tables")
    drawn = figures.draw(found, published.read(paper / "published.csv"), out / "figures")
    page = report.render(found, table, drawn, evidence, linked)
    (out / "report").mkdir(parents=True, exist_ok=True)
    (out / "report" / "index.html").write_text(page, encoding="utf-8")
    answers = choose.answers(found, evidence, ROOT / "configs" / "model")
    (out / "report" / "choose.html").write_text(report.render_choose(answers), encoding="utf-8")
    return table


def differences(built: Path, committed: Path) -> list[str]:
    """One line a file that differs, is missing or is extra in ``committed``; empty when both hold the same.

    Extra are outputs that the records do not give. In the project's own ``results/`` so is every other file of an
    output's kind in an output's folder; anywhere else it may be the user's.
    """
    names = [{n for n in OWN if (folder / n).is_file()} for folder in (built, committed)]
    if committed.resolve() == RESULTS.resolve():
        found = (p for folder, kinds in KINDS.items() for p in (committed / folder).glob("*") if p.suffix in kinds)
        names[1] |= {p.relative_to(committed).as_posix() for p in found}
    lines = [f"missing: {n}" for n in names[0] - names[1]] + [f"extra: {n}" for n in names[1] - names[0]]
    lines += [f"differs: {n}" for n in names[0] & names[1] if not same(built / n, committed / n)]
    return sorted(lines)


def same(one: Path, two: Path) -> bool:
    """Whether two outputs hold the same: PNG files the same pixels, all others the same bytes."""
    if one.read_bytes() == two.read_bytes():
        return True
    if one.suffix != ".png":
        return False
    try:
        images = [np.asarray(Image.open(path).convert("RGB"), dtype=np.int16) for path in (one, two)]
    except (OSError, SyntaxError, ValueError):  # what Pillow raises for a file that is no image, or a broken one
        return False
    return images[0].shape == images[1].shape and bool(np.abs(images[0] - images[1]).max() <= LEVELS)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 1 when ``--check`` finds a difference; 2 on bad input, 130 when interrupted."""
    try:
        return _run(_options(argv))
    except KeyboardInterrupt:
        print("interrupted; the same command builds everything anew", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of a pipe has left; the outputs are written
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _run(options: argparse.Namespace) -> int:
    for folder in options.records or []:
        if not folder.strip() or not Path(folder).is_dir():
            return _refuse(f"--records={folder} is no folder; accepted: folders of *.jsonl files")
    if not options.out.strip():
        return _refuse("--out= is no folder; accepted: a folder, which is created")
    folders, out = options.records or [RESULTS / "records"], Path(options.out)
    try:
        evidence = load([Path(folder) for folder in folders])
    except OSError as error:
        return _refuse(f"--records: {error.filename} cannot be read: {error.strerror}; accepted: readable files")
    linked = [Path(folder).resolve() for folder in folders] == [(out / "records").resolve()]
    if options.check:
        return _check(evidence, out, linked)
    try:
        table = build(evidence, out, linked)
    except OSError as error:
        told = f"{error.filename}: {error.strerror}"
        return _refuse(f"--out={options.out} cannot be written ({told}); accepted: a folder that can be written")
    terminal.show(table, evidence.exclusions, out)
    return 0


def _check(evidence: Evidence, out: Path, linked: bool) -> int:
    with tempfile.TemporaryDirectory() as folder:
        build(evidence, Path(folder), linked)
        lines = differences(Path(folder), out)
    for line in lines:
        print(line, file=sys.stderr)
    print(f"{len(lines)} outputs differ from their records" if lines else "all outputs agree with their records")
    return 1 if lines else 0


def _refuse(line: str) -> int:
    print(line, file=sys.stderr)
    return 2


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m analysis", description="Rebuild all results from records.")
    parser.add_argument("--records", nargs="+", metavar="DIR", help="default: results/records")
    parser.add_argument("--out", default=str(RESULTS), metavar="DIR", help="default: results")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if an output differs")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
