"""What ``python -m analysis`` prints: the claims that records answer, what is not run, what was left out and why."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from analysis import rules
from analysis.load import Exclusion

COLOURS = {"reproduced": "green", "supported": "green", "contradicted": "red", "partly": "yellow", "unclear": "yellow"}
WIDE = 110
"""Columns of a terminal from which on what differed, or the command, has room."""
SHOWN = 5
"""Excluded groups that are named; the table of exclusions holds all."""
NO_FAULT = ("status", "superseded")
"""Gates that refuse no measurement: an arm that failed is shown as a failure, a newer group stands for an older."""
AGAIN = "measure again: repeat=true for experiments.kernel, --repeat for experiments.reproduce"


def show(claims: pd.DataFrame, exclusions: Sequence[Exclusion], out: Path, console: Console | None = None) -> None:
    """Print everything; texts in full stand in the report."""
    console = console or Console()
    console.print(_claims(claims, console.width >= WIDE))
    for line in left_out(exclusions):
        console.print(Text(line), soft_wrap=True)
    page = out / "report" / "index.html"
    for name, place in (("commands", out / "tables" / "claims.md"), ("figures", out / "figures"), ("report", page)):
        console.print(f"{name:10}{place}", soft_wrap=True, markup=False, highlight=False)


def left_out(exclusions: Sequence[Exclusion]) -> list[str]:
    """How many groups and lines gates refused, the first reasons and how to measure again; nothing when none were."""
    found: dict[str, Exclusion] = {}
    for e in exclusions:
        if e.gate not in NO_FAULT:
            found.setdefault(e.group or e.where, e)
    if not found:
        return []
    shown = [f"  {e.where}  {e.gate}: {e.detail}" for e in list(found.values())[:SHOWN]]
    more = [f"  and {len(found) - SHOWN} more in tables/exclusions.csv"] if len(found) > SHOWN else []
    return [f"excluded: {len(found)} group{'s' * (len(found) > 1)}; {AGAIN}", *shown, *more]


def _claims(claims: pd.DataFrame, wide: bool) -> Table:
    """One row a claim; in a narrow terminal without the paper's value and command where nothing was run."""
    table = Table(title="Claims of the paper", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("claim", no_wrap=True)
    table.add_column("paper / ours", min_width=28, max_width=None if wide else 34, overflow="fold")
    table.add_column("verdict", min_width=12, max_width=None if wide else 16)
    if wide:
        table.add_column("what differed, or command", overflow="fold", ratio=1)
    for row in claims.itertuples():
        ran = row.verdict not in (rules.NOT_RUN, rules.CANNOT_RUN)
        values = Text()
        if ran or wide:
            values.append(f"{short(row.paper)} {row.unit}".strip(), "dim")
        if ran:
            values.append("\n" + "\n".join(row.ours.split("; ")))
        verdict = Text(row.verdict, COLOURS.get(row.verdict.split(" ")[0], "dim"))
        how = row.note if "not part of this version" in row.note else row.command
        last = Text(how, "dim") if row.verdict == rules.NOT_RUN else Text("\n".join(row.differed.split("; ")))
        table.add_row(Text(row.id), values, verdict, *([last] if wide else []))
    return table


def short(paper: str) -> str:
    """The paper's value without what stands in brackets or behind a semicolon."""
    return paper.split(" (")[0].split("; ")[0]
