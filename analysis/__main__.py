"""``python -m analysis [--records DIR ...] [--out DIR] [--check]``: tables, figures, claims and report from records.

Reads every ``*.jsonl`` file of the record folders and writes ``tables/``, ``figures/`` and ``report/`` below the output
folder; of the files there it removes only those that it could have written itself. ``--check`` writes nothing: it
rebuilds in a temporary folder and exits with 1, naming the files, when an output differs from what is there, is
missing, or should not be there. PNG files are compared by their pixels, since compression differs between machines, all
others by their bytes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import matplotlib.image
import numpy as np
import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from analysis import claims, figures, published, report, rules, tables
from analysis.load import load

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
KINDS = {"tables": (".csv", ".md"), "figures": (".svg", ".png"), "report": (".html",)}
"""Folder of outputs -> the kinds of files that are written there."""
NAMES = {"tables": (*tables.NAMES, "claims"), "figures": figures.NAMES, "report": ("index",)}
OWN = {f"{folder}/{name}{kind}" for folder, names in NAMES.items() for name in names for kind in KINDS[folder]}
"""Every file that this program may write, and so may remove."""
ONE_LEVEL = 1.5 / 255
"""Most that a channel of a pixel may differ: rounding, when an image was drawn by another build of its libraries."""
COLOURS = {"reproduced": "green", "supported": "green", "contradicted": "red", "partly": "yellow", "unclear": "yellow"}


def build(records: Sequence[Path], out: Path) -> pd.DataFrame:
    """Rebuild every output below ``out``, removing its own older ones first; returns the claims table."""
    evidence = load(records)
    found = tables.build(evidence)
    paper = RESULTS / "paper"
    table = claims.evaluate(claims.read(paper / "claims.toml"), found, evidence, ROOT)
    for name in OWN:
        (out / name).unlink(missing_ok=True)
    tables.write(found | {"claims": table}, out / "tables")
    drawn = figures.draw(found, published.read(paper / "published.csv"), out / "figures")
    page = report.render(found, table, drawn, out / "figures")
    (out / "report").mkdir(parents=True, exist_ok=True)
    (out / "report" / "index.html").write_text(page, encoding="utf-8")
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
        images = [matplotlib.image.imread(path) for path in (one, two)]
    except (OSError, SyntaxError, ValueError):  # what Pillow raises for a file that is no image, or a broken one
        return False
    return images[0].shape == images[1].shape and bool(np.abs(images[0] - images[1]).max() <= ONE_LEVEL)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 1 when ``--check`` finds a difference; 2 on bad input."""
    options = _options(argv)
    if missing := [f for f in options.records or [] if not f.is_dir()]:
        print(f"--records={missing[0]} is no folder; accepted: folders of *.jsonl files", file=sys.stderr)
        return 2
    records = options.records or [RESULTS / "records"]
    if options.check:
        with tempfile.TemporaryDirectory() as folder:
            build(records, Path(folder))
            lines = differences(Path(folder), options.out)
        for line in lines:
            print(line, file=sys.stderr)
        print(f"{len(lines)} outputs differ from their records" if lines else "all outputs agree with their records")
        return 1 if lines else 0
    table = build(records, options.out)
    _show(table, options.out)
    return 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m analysis", description="Rebuild all results from records.")
    parser.add_argument("--records", nargs="+", type=Path, metavar="DIR", help="default: results/records")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="default: results")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if an output differs")
    return parser.parse_args(argv)


def _show(claims_table: pd.DataFrame, out: Path) -> None:
    console = Console()
    wide = console.width >= 120
    shown = Table(title="Claims of the paper", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("claim", "paper", "ours", "verdict", *(["what differed, or command"] if wide else [])):
        shown.add_column(name, no_wrap=name == "claim", overflow="fold", min_width=12)
    for row in claims_table.itertuples():
        verdict = Text(row.verdict, COLOURS.get(row.verdict.split(" ")[0], "dim"))
        last = Text(row.command, "dim") if row.verdict == rules.NOT_RUN else Text(row.differed)
        cells = [Text(row.id), Text(f"{row.paper} {row.unit}".strip()), Text(row.ours), verdict]
        shown.add_row(*cells, *([last] if wide else []))
    console.print(shown)
    page = out / "report" / "index.html"
    for name, place in (("commands", out / "tables" / "claims.md"), ("figures", out / "figures"), ("report", page)):
        console.print(f"{name:10}{place}", soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
