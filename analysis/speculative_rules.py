"""Rules of the claims about speculative decoding, from kernels' windows and from whole models with drafts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pandas as pd

from analysis.bearing import (
    PAPER_CARDS,
    PAPER_STATE,
    PROFILES,
    Question,
    as_rows,
    by_model,
    differed,
    is_direct,
    nearest_device,
    rows_of,
)
from analysis.findings import (
    AGAINST,
    COUNTED,
    NO,
    OPEN,
    OWN_KERNELS,
    SUPPORTED,
    UNCLEAR,
    YES,
    Finding,
    doubted,
    families,
    not_run,
    span,
    verdict_of,
    with_bounds,
)
from analysis.gates import number, steps_of_cycle, value
from analysis.stats import FASTER
from experiments.measure.record import Correctness, Record

AGAINST_LOG = "states behind rejected tokens against float64, cursors and flushes against the log of accepted tokens"
SIZES = "state, ring and convolution of a request, from the tensors' sizes; keys and values left out"
TABLE = "speculative_throughput"
UNCHANGED = "state elements written between flushes"
"""What a check of an arm that replays compares bit for bit."""
SNAPSHOTS, ORACLE, VERIFY = "snapshots/triton", "oracle/triton", "verify/triton"
COMPILED = "triton_resources"
"""Table of what every Triton kernel was compiled to."""


def drafted_range(question: Question) -> Finding:
    """Throughput of replay with drafts over that of snapshots, a row a model: at the paper's batch, else at the largest
    one measured; of several windows the worse counts. As in `rules.kernel_range`, above the range is no yes."""
    low, high, batch = (question.parameters[name] for name in ("low", "high", "batch"))
    windows, least = question.parameters["windows"], question.parameters["min_batch"]

    def wanted(row: Any) -> bool:
        return row.window in windows and row.batch_size >= least and pd.isna(row.blocks)

    table = question.tables[TABLE]
    compared = question.tables | {TABLE: table[table["low"].notna()]}  # arms may have been run in pairs
    rows = nearest_device(rows_of(replace(question, tables=compared), TABLE, "verify", wanted))
    rows = [min(_of_largest(same, batch), key=lambda r: r.over_snapshots) for same in by_model(rows)]
    if not rows:
        return not_run(question)
    answers = []
    for row in rows:
        missed = NO if row.high < low and is_direct(row) and row.batch_size == batch else OPEN
        answers.append(YES if low <= row.low <= high else missed)
    ours = "; ".join(
        f"{with_bounds(row, row.over_snapshots)} ({row.model}, batch {row.batch_size}, "
        f"T = {row.window}, {row.drafter} drafts, {row.tokens_per_step:.3g} tokens a step)"
        for row in rows
    )
    notes = [f"{r.model}: above the range: check the baseline" for r in rows if r.low > high]
    answers, doubts = doubted(answers, rows, [r.over_snapshots for r in rows], low)
    difference = "; ".join(part for part in (differed(rows, batch), OWN_KERNELS, "engine: this project's") if part)
    return Finding(ours, verdict_of(answers, rows, batch), difference, "; ".join([*notes, *doubts]), rows)


def rolled_back(question: Question) -> Finding:
    """Tokens that replay took back, with states, cursors and flushes right behind them; any that were wrong: a no."""
    right, wrong = _replayed(question, ("window", "speculative"))
    taken = {r.id: count for r in right if (count := _taken_back(r)) is not None}
    right = [r for r in right if r.id in taken]
    rows = as_rows([*right, *wrong])
    if not rows:
        return not_run(question)
    total = sum(taken.values())
    ours = f"{total:,} tokens taken back in {len(right)} records ({families(rows)})"
    ours += f"; {len(wrong)} records found wrong" if wrong else ""
    answers = [NO if wrong else YES if total else OPEN]
    return Finding(ours, verdict_of(answers, rows), differed(rows), AGAINST_LOG, rows)


def requests_fit(question: Question) -> Finding:
    """Requests whose states fit in 100 GB, with replay over with snapshots, and states that a step of a kernel writes:
    sizes, which no card changes."""
    least = question.parameters["at_least"]
    rows, ratios = _requests(question)
    told = [f"{x:.2f} times as many requests ({r.model}, T = {r.window})" for x, r in zip(ratios, rows, strict=True)]
    notes = [SIZES] if rows else []
    for window, (found, written, kept) in _written(question).items():
        told.append(f"{span(written)} states written a step instead of {span(kept, 'g')} (kernels, T = {window})")
        rows += found
        ratios += [most / one for one, most in zip(written, kept, strict=True)]
        notes += [COUNTED] if COUNTED not in notes else []
    if not rows:
        return not_run(question)
    answers = [YES if ratio >= least else NO for ratio in ratios]
    return Finding("; ".join(told), verdict_of(answers, rows), differed(rows), "; ".join(notes), rows)


def outputs_only(question: Question) -> Finding:
    """Checkpoints that verified windows left as they were, bit for bit, wherever no flush was due."""
    right, failed = _replayed(question, ("window",))
    right = [r for r in right if steps_of_cycle(r) > 1 and any(_unchanged(b) is not None for b in r.correctness)]
    wrong = [r for r in failed if any(_unchanged(b) is False for b in r.correctness)]
    rows = as_rows([*right, *wrong])
    if not rows:
        return not_run(question)
    compared = sum(_compared(r) * (steps_of_cycle(r) - 1) // steps_of_cycle(r) for r in right)
    ours = [f"{compared:,} checkpoints unchanged bit for bit by a window ({len(right)} records, {families(rows)})"]
    written = [share for r in right if (share := _states_written(r)) is not None]
    ours += [f"{span(written)} of the state bytes read are written, at flushes"] if written else []
    ours += [f"{len(wrong)} records whose checkpoint changed"] if wrong else []
    note = f"every window without a flush, of the rows and layers that checks draw; shares {COUNTED}"
    return Finding("; ".join(ours), verdict_of([NO if wrong else YES], rows), differed(rows), note, rows)


def tensor_cores(question: Question) -> Finding:
    """Matrix instructions of the compiled kernels of windows, and for how many heads of a group a program forms the
    products of their keys and queries, as records tell. From compilation no verdict is more than an analogue's."""
    table = question.tables.get(COMPILED, pd.DataFrame())
    if table.empty:
        return not_run(question)
    verify, others = (table.loc[table["step"] == s, "tensor_instructions"] for s in ("verify", "snapshots"))
    answers = [YES if verify.min() > 0 and others.max() == 0 else NO]
    kernels = f"{len(verify)} kernels for {table['architecture'].nunique()} architectures"
    ours = [f"verify: {span(list(verify), 'd')} tensor-core instructions ({kernels})"]
    ours.append(f"snapshots: {span(list(others), 'd') if others.max() else 'none'}")
    right, _ = _replayed(question, ("window",))
    grouped = [r for r in right if r.arm == VERIFY and _share(r) > 1 and number(r.arm_config, "heads")]
    heads = {r.id: math.gcd(int(number(r.arm_config, "heads") or 1), _share(r)) for r in grouped}
    for family in sorted({str(value(r, "geometry", "family")) for r in grouped}):
        found = [heads[r.id] for r in grouped if value(r, "geometry", "family") == family]
        ours.append(f"heads for which a program forms the key-query products: {span(found, 'd')} ({family})")
        answers.append(YES if min(found) > 1 else OPEN)
    notes = ["instructions as compiled, not as executed: results/triton_resources.csv"]
    notes += ["products formed for one head are formed anew by the program of each head"] if OPEN in answers else []
    if not grouped:
        answers.append(OPEN)
        notes.append("no record tells for how many heads the products are formed")
    verdict = SUPPORTED if set(answers) == {YES} else AGAINST if answers[0] == NO else UNCLEAR
    rows = as_rows(grouped)
    difference = "; ".join(part for part in (differed(rows) if rows else "compiled, not run", OWN_KERNELS) if part)
    return Finding("; ".join(ours), verdict, difference, "; ".join(notes), rows)


def gain_cause(question: Question) -> Finding:
    """What of a window's gain on snapshots is due to T - 1 writes that are left out, and what to the rest: in the same
    rounds, by way of an arm that is told beforehand which state to write.

    The rest is no yes unless it is more than the bytes that are left out too take at the measured bandwidths: then not
    writing less, but verifying faster gives it.
    """
    runs = _ablations(question)
    if not runs:
        return not_run(question)
    batch, answers, told, notes, rows = question.parameters["batch"], [], [], [], []
    for writes, rest, whole in runs:
        known = not pd.isna(rest.ideal_roof)
        explained = rest.ideal_roof if known else 1.0
        gained = YES if writes.verdict == FASTER else NO if writes.high < 1 else OPEN
        beyond = NO if rest.high < 1 else YES if known and rest.low > explained else OPEN
        for answer, row, bound in ((gained, writes, 1.0), (beyond, rest, explained)):
            sure, doubts = doubted([answer], [row], [row.speedup], bound)
            answers += sure
            notes += [doubt for doubt in doubts if doubt not in notes]
        where = f"{whole.model}, batch {whole.batch_size}, T = {whole.window}"
        told.append(
            f"{with_bounds(writes, writes.speedup)} from the other writes left out, {with_bounds(rest, rest.speedup)} "
            f"from the rest, {with_bounds(whole, whole.speedup)} together ({where})"
        )
        allowed = [f"{r.ideal_roof:.2f}" for r in (writes, rest) if not pd.isna(r.ideal_roof)]
        notes += [f"{whole.model}: bytes alone would give {' and '.join(allowed)}"] if len(allowed) == 2 else []
        rows.append(whole)
    notes.append(
        f"{ORACLE} writes one state a window, told beforehand which; the rest is a state once an interval "
        "instead, and tensor cores"
    )
    difference = [differed(rows, batch), OWN_KERNELS, "a layer's step, no engine"]
    told_differed = "; ".join(part for part in difference if part)
    return Finding(
        "; ".join(told),
        verdict_of(answers, [r for r in rows for _ in "ab"], batch),
        told_differed,
        "; ".join(notes),
        rows,
    )


def _ablations(question: Question) -> list[tuple[Any, Any, Any]]:
    """A model each, rows of one run: the oracle over snapshots, verify over the oracle, verify over snapshots."""
    steps = ((ORACLE, SNAPSHOTS), (VERIFY, ORACLE), (VERIFY, SNAPSHOTS))
    batch, least, windows = (question.parameters[name] for name in ("batch", "min_batch", "windows"))
    table = question.tables["window_pairs"]
    shown = table[table["timing"].isin(PROFILES) & table["model"].isin(PAPER_CARDS) & (table["state"] == PAPER_STATE)]
    shown = shown[shown["window"].isin(windows) & (shown["batch_size"] >= least)]
    cells: dict[str, dict[tuple[str, str], Any]] = {}
    for row in shown.itertuples():
        cells.setdefault(row.groups, {})[row.arm, row.against] = row
    runs = [tuple(cell[step] for step in steps) for cell in cells.values() if set(steps) <= set(cell)]
    near = {id(row) for row in nearest_device([run[2] for run in runs])}
    best: dict[str, tuple[Any, ...]] = {}
    for run in runs:
        if id(run[2]) in near:
            best[run[2].model] = max(best.get(run[2].model, run), run, key=lambda r: _rank(r[2], batch))
    return [(run[0], run[1], run[2]) for run in best.values()]


def _rank(row: Any, batch: int) -> tuple[bool, int, int, float]:
    """The paper's batch, the largest, the most rounds, the smaller gain."""
    return row.batch_size == batch, row.batch_size, row.rounds, -row.speedup


def _replayed(question: Question, experiments: tuple[str, ...]) -> tuple[list[Record], list[Record]]:
    """Records of arms that verify windows by replay: right ones, and those found incorrect."""
    everything = [*question.evidence.records, *question.evidence.failures]
    mine = [r for r in everything if r.experiment in experiments and r.arm.startswith("verify/")]
    return [r for r in mine if r.status == "ok"], [r for r in mine if r.status == "incorrect"]


def _taken_back(record: Record) -> int | None:
    """Tokens of windows that did not count: of a kernel in the checks of it, of a whole model in a generation."""
    if record.experiment == "window":
        return _compared(record) * (record.case["window"] - record.case["accepted"])
    steps = record.decode.get("steps_by_tokens")
    if not isinstance(steps, list):
        return None
    return sum(count * (len(steps) - counted) for counted, count in enumerate(steps, start=1))


def _compared(record: Record) -> int:
    """Windows of a kernel's checks, of all rows and copies that were compared."""
    return steps_of_cycle(record) * sum(len(b.rows) * len(b.copies) for b in record.correctness)


def _unchanged(block: Correctness) -> bool | None:
    """Whether checkpoints stayed as they were between flushes; None where it was not looked at."""
    found = [c.passed for c in block.comparisons if c.quantity == UNCHANGED]
    return all(found) if found else None


def _states_written(record: Record) -> float | None:
    """States that a step writes, of one that it reads."""
    read, written = (number(record.traffic, f"state_bytes_{name}") for name in ("read", "written"))
    return written / read if read and written is not None else None


def _share(record: Record) -> int:
    """Heads of a group."""
    heads, groups = (number(value(record, "geometry"), name) for name in ("heads", "groups"))
    return int(heads // groups) if heads and groups else 1


def _requests(question: Question) -> tuple[list[Any], list[float]]:
    """Rows of replay, a setting each, and how many times as many of its requests fit as with snapshots."""
    table = question.tables[TABLE]
    table = table[table["window"].isin(question.parameters["windows"]) & table["requests_in_100_gb"].notna()]
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in table.itertuples():
        setting = (row.device, row.model, row.state, row.inputs, row.window, row.interval_length)
        found.setdefault(setting, {})[row.kind] = row
    pairs = [(arms["verify"], arms["snapshots"]) for arms in found.values() if {"verify", "snapshots"} <= set(arms)]
    rows = nearest_device([verify for verify, _ in pairs])
    of = {id(verify): verify.requests_in_100_gb / snapshots.requests_in_100_gb for verify, snapshots in pairs}
    return rows, [of[id(row)] for row in rows]


def _written(question: Question) -> dict[int, tuple[list[Any], list[float], list[float]]]:
    """Window -> rows of kernels that replay, with how many states a step of theirs and one of snapshots writes."""
    groups: dict[str, dict[str, Record]] = {}
    for record in question.evidence.records:
        if record.experiment == "window" and value(record, "window") in question.parameters["windows"]:
            groups.setdefault(record.group, {})[record.arm.split("/")[0]] = record
    found: dict[int, tuple[list[Any], list[float], list[float]]] = {}
    for arms in groups.values():
        ours, kept = (_states_written(arms[kind]) if kind in arms else None for kind in ("verify", "snapshots"))
        if ours and kept:
            rows, written, most = found.setdefault(arms["verify"].case["window"], ([], [], []))
            rows += as_rows([arms["verify"]])
            written.append(ours)
            most.append(kept)
    return dict(sorted(found.items()))


def _of_largest(rows: list[Any], batch: int) -> list[Any]:
    chosen = max(rows, key=lambda r: (r.batch_size == batch, r.batch_size)).batch_size
    return [r for r in rows if r.batch_size == chosen]
