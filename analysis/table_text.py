"""Data frames as text that people read: Markdown and LaTeX. What all rows share is said once, above the table.

LaTeX is a fragment for ``\\input``; it needs the packages ``booktabs`` and ``longtable``, and a wide page for most.
"""

from __future__ import annotations

import re
from typing import Any

import pandas as pd

GROUPS = "groups"
"""Column of the groups of records behind a row, for programs: in CSV files only."""
READABLE = 100
"""Rows beyond which a table is for programs: a CSV file and no text."""
FEW = 3
"""Rows below which nothing is said above the table."""
NARROW, WIDTH = 24, "3.4cm"
"""Characters from which on a column of a LaTeX table breaks its lines, and how wide it is then."""
SPECIAL = {c: f"\\{c}" for c in "&%$#_{}"} | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}"}
SPECIAL |= {"^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", "[": "{[}"}
SPECIAL |= {"\u2013": "--", "—": "---", "…": r"\dots{}", "≥": r"$\geq$", "≤": r"$\leq$", "→": r"$\to$"}


def text(cell: Any) -> str:
    """A table cell as text; empty for a missing value."""
    if cell is None or cell is pd.NA or cell != cell:
        return ""
    return f"{cell:g}" if isinstance(cell, float) and abs(cell) < 1e6 else str(cell)


def parts(frame: pd.DataFrame) -> tuple[dict[str, str], list[str], list[list[str]]]:
    """What all rows share, by column; names of the other columns that hold something; their cells, a list a row."""
    cells = {c: [text(cell) for cell in frame[c]] for c in frame.columns if c != GROUPS}
    filled = {c: column for c, column in cells.items() if any(column)}
    alike = {c: column[0] for c, column in filled.items() if len(frame) >= FEW and len(set(column)) == 1}
    names = [c for c in filled if c not in alike]
    shown = {c.replace("_", " "): told for c, told in alike.items()}
    return (
        shown,
        [c.replace("_", " ") for c in names],
        [list(row) for row in zip(*(cells[c] for c in names), strict=True)],
    )


def shared_line(shared: dict[str, str]) -> str:
    """What all rows share in one sentence; empty for nothing."""
    return f"All rows: {', '.join(f'{name} {told}' for name, told in shared.items())}." if shared else ""


def markdown(title: str, frame: pd.DataFrame, note: str = "") -> str:
    """A Markdown table under a heading and its note."""
    shared, names, rows = parts(frame)
    lines = [f"# {title.replace('_', ' ')}", ""]
    for above in (note, shared_line(shared)):
        lines += [above, ""] if above else []
    if not rows:
        return "\n".join([*lines, *([] if shared else ["No rows.", ""])])
    table = [names, ["---"] * len(names), *([c.replace("|", "\\|") for c in row] for row in rows)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in table), ""])


def latex(title: str, frame: pd.DataFrame, note: str = "") -> str:
    """A ``longtable`` with its note as caption."""
    shared, names, rows = parts(frame)
    caption = " ".join(escaped(part) for part in (f"{title.replace('_', ' ')}.", note, shared_line(shared)) if part)
    widest = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    kinds = "".join("l" if size <= NARROW else f"p{{{WIDTH}}}" for size in widest)
    head = " & ".join(map(escaped, names)) + r" \\"
    lines = [r"\begingroup\tiny\setlength{\tabcolsep}{3pt}", f"\\begin{{longtable}}{{{kinds or 'l'}}}"]
    lines += [f"\\caption{{{caption}}} \\\\", r"\toprule", head, r"\midrule", r"\endhead", r"\bottomrule", r"\endfoot"]
    lines += [" & ".join(map(escaped, row)) + r" \\" for row in rows] or ([] if shared else [r"No rows. \\"])
    return "\n".join([*lines, r"\end{longtable}", r"\endgroup", ""])


def escaped(plain: str) -> str:
    """Text as LaTeX prints it: special characters escaped, none that ends a line or a cell."""
    return "".join(SPECIAL.get(c, c) for c in re.sub(r"\s+", " ", plain))
