"""The claims table: every claim of the two published summaries, with what our records say about it.

The claims are data (``results/paper/claims.toml``); the rules that turn records into a verdict are in ``rules.py``.
The verdicts are a fixed set. Nothing that ran other weights, data or hardware than the paper is called a reproduction:
it can only support, contradict or leave unclear a claim *on an analogue*, and a column says what differed.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from analysis import rules
from analysis.bearing import Question
from analysis.load import Evidence
from analysis.speculative_rules import COMPILED

COLUMNS = ["group", "id", "statement", "paper", "unit", "ours", "verdict", "differed", "note"]
COLUMNS += ["hardware", "models", "batch", "setting", "source", "evidence", "analogue", "command", "records"]
TEXT_FIELDS = ("id", "group", "statement", "paper", "unit", "hardware", "models", "batch", "setting", "source")
TEXT_FIELDS += ("evidence", "analogue", "experiment", "command", "rule")


@dataclass(frozen=True)
class Claim:
    """One claim; ``claims.toml`` explains the fields."""

    id: str
    group: str
    statement: str
    paper: str
    unit: str
    hardware: str
    models: str
    batch: str
    setting: str
    source: str
    evidence: str
    analogue: str
    experiment: str
    command: str
    rule: str
    parameters: dict[str, Any]


def read(path: Path) -> list[Claim]:
    """The claims of a file, in its order. Raises ``ValueError``, one line, on a missing or unknown field or rule."""
    claims: list[Claim] = []
    with path.open("rb") as file:
        entries = tomllib.load(file)["claim"]
    for index, entry in enumerate(entries, start=1):
        name = f"{path.name}, claim {index} ({entry.get('id', 'without id')})"
        if set(entry) != {*TEXT_FIELDS, "parameters"}:
            raise ValueError(f"{name}: fields {sorted(set(entry) ^ {*TEXT_FIELDS, 'parameters'})} missing or unknown")
        if wrong := [f for f in TEXT_FIELDS if not isinstance(entry[f], str)]:
            raise ValueError(f"{name}: {', '.join(wrong)} must be text")
        if entry["rule"] not in rules.RULES:
            raise ValueError(f"{name}: rule={entry['rule']!r} is unknown; accepted: {', '.join(rules.RULES)}")
        if entry["id"] in {c.id for c in claims}:
            raise ValueError(f"{name}: the id is taken")
        claims.append(Claim(**entry))
    return claims


def evaluate(claims: list[Claim], tables: dict[str, pd.DataFrame], evidence: Evidence, root: Path) -> pd.DataFrame:
    """One row a claim; ``records`` are the files that hold its evidence. ``root`` is the repository, in which a claim's
    experiment exists or not."""
    rows = []
    compiled = root / "results" / f"{COMPILED}.csv"
    tables = tables | {COMPILED: pd.read_csv(compiled) if compiled.is_file() else pd.DataFrame()}
    for claim in claims:
        finding = rules.RULES[claim.rule](Question(claim.parameters, tables, evidence, claim.analogue))
        note = finding.note
        if claim.experiment and not (root / "experiments" / f"{claim.experiment}.py").exists():
            note = f"experiments.{claim.experiment} is not part of this version yet"
        if claim.rule == "outside":
            note = claim.evidence
        files = {name for row in finding.rows for group in row.groups.split() for name in evidence.files.get(group, ())}
        told = {"note": note, "records": ", ".join(sorted(files))}
        rows.append({f: getattr(claim, f) for f in COLUMNS if hasattr(claim, f)} | vars(finding) | told)
    return pd.DataFrame(rows, columns=COLUMNS)
