"""The report: static HTML that opens from a folder, with no link to another host.

``index.html`` has the claims, then a section an experiment with figures, what differed from the paper, commands,
devices, versions and tables. Everything is in the page as it is sent; its script only sorts and filters rows.

Figures are the files of ``../figures``, and tables and records are linked, which lie in the same results folder: a page
that held the figures too would be three times as large and hold everything twice. Move or send the folder, not the page
alone.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from analysis import choose
from analysis.captions import CAPTIONS
from analysis.cells import device_labels
from analysis.load import Evidence
from analysis.rules import CANNOT_RUN, NOT_RUN, VERDICTS
from analysis.sections import SECTIONS, Section
from analysis.table_text import READABLE, parts, shared_line
from analysis.tables import NOTES

ALWAYS = ("kernel_speedups", "roofs")
"""Tables that are shown without rows too."""
MINOR = ("experiment", "device_kind", "kind", "timing", "arms", "interval_over")
"""Columns that the page leaves to the files."""
LONG = 32
"""Characters from which on the cells of a column break their lines."""
SHOWN_ROWS, OPEN_ROWS = 400, 40
"""Rows up to which a table is shown, and shown open."""
ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
)


def render(
    tables: dict[str, pd.DataFrame], claims: pd.DataFrame, figures: list[str], evidence: Evidence, linked: bool
) -> str:
    """The page; ``figures`` are the names of those drawn. ``linked``: records lie in ``../records``."""
    devices = tables["devices"]
    block = ENVIRONMENT.get_template("table.html.j2")
    left_out = [_table("Failures", "failures", tables["failures"])]
    left_out += [_table("Exclusions", "exclusions", tables["exclusions"])]
    return ENVIRONMENT.get_template("report.html.j2").render(
        records=int(devices["records"].sum()),
        failures=int(devices["failures"].sum()),
        excluded=int((tables["exclusions"]["gate"] != "status").sum()),
        devices=sorted(set(devices["device"])),
        tally=[(v, n) for v in VERDICTS if (n := int((claims["verdict"] == v).sum()))],
        claims=[
            (g, [_claim(row) for row in rows.to_dict("records")]) for g, rows in claims.groupby("group", sort=False)
        ],
        linked=linked,
        sections=[_section(section, tables, claims, figures, evidence) for section in SECTIONS],
        left_out=left_out,
        device_table=_table("Devices and versions", "devices", devices),
        table_block=lambda table: Markup(block.render(table=table)),
    )


def render_choose(found: dict[str, Any]) -> str:
    """The second page, around what `choose.answers` found."""
    return ENVIRONMENT.get_template("choose.html.j2").render(
        names=list(found["models"]),
        **{name: found[name] for name in ("devices", "batches", "contexts", "states")},
        as_good=choose.AS_GOOD,
        data=Markup(choose.embedded(found)),
    )


def _claim(row: dict[str, Any]) -> dict[str, Any]:
    return row | {"records": [name for name in row["records"].split(", ") if name]}


def _section(
    section: Section, tables: dict[str, pd.DataFrame], claims: pd.DataFrame, figures: list[str], evidence: Evidence
) -> dict[str, Any]:
    """Everything that a section shows; without records it has claims that are not run, and how to run them."""
    own = claims[[_experiment(command) in section.experiments for command in claims["command"]]]
    ran = own[~own["verdict"].isin((NOT_RUN, CANNOT_RUN))]
    differed: dict[str, dict[str, None]] = defaultdict(dict)
    for what, colon, told in (part.partition(": ") for text in ran["differed"] for part in text.split("; ") if part):
        differed[f"{what}{colon}"] |= dict.fromkeys(told.split(", "))
    shown = [(title, name) for title, name in section.tables if name in ALWAYS or len(tables[name])]
    return {
        "name": section.name,
        "title": section.title,
        "about": section.about,
        "measured": _measured(section, evidence),
        "differed": [f"{what}{', '.join(told)}" for what, told in differed.items()],
        "commands": list(dict.fromkeys(re.sub(r"; in the authors' fork.*", "", c) for c in own["command"])),
        "figures": [{"name": name, "caption": CAPTIONS[name]} for name in section.figures if name in figures],
        "tables": [_table(title, name, tables[name]) for title, name in shown],
    }


def _experiment(command: str) -> str:
    """What the records of a claim's command are called: kernels with a window are an experiment of their own."""
    found = re.match(r"python -m experiments\.(\w+)", command)
    return "window" if found and " window=" in command and found[1] == "kernel" else found[1] if found else ""


def _measured(section: Section, evidence: Evidence) -> list[str]:
    """Devices and versions of the section's records, a line a set of versions."""
    labels = device_labels(evidence)
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for record in [*evidence.records, *evidence.drift, *evidence.accuracy]:
        if record.experiment in section.experiments and record.status == "ok":
            versions = ", ".join(f"{name} {version}" for name, version in sorted(record.packages.items()))
            counts[labels[str(record.device["name"])], versions] += 1
    return [f"{device}, {count} records: {versions}" for (device, versions), count in sorted(counts.items())]


def _table(title: str, name: str, frame: pd.DataFrame) -> dict[str, Any]:
    shared, columns, rows = parts(frame.drop(columns=[c for c in frame.columns if c in MINOR]))
    numbered = list(enumerate(zip(columns, *rows, strict=True), start=1))
    right = [f"r{i}" for i, (_, *cells) in numbered if all(map(_is_number, cells))]
    wide = [f"w{i}" for i, cells in numbered if max(map(len, cells)) > LONG]
    return {
        "title": title,
        "name": name,
        "note": NOTES.get(name, ""),
        "shared": shared_line(shared),
        "columns": columns,
        "rows": rows,
        "shown": len(frame) <= SHOWN_ROWS,
        "texts": len(frame) <= READABLE,
        "count": len(frame),
        "looks": " ".join([*right, *wide]),
        "open": 0 < len(frame) <= OPEN_ROWS,
    }


def _is_number(cell: str) -> bool:
    return re.fullmatch(r"-?\d+(\.\d+)?(e[+-]?\d+)?|", cell) is not None
