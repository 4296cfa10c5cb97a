"""Rules that turn records into the verdict of a claim. Each takes a ``Question`` and returns a ``Finding``.

Every rule first decides which records bear on the claim at all; with none the claim is "not run". Records of the
paper's own card and batch give reproduced, contradicted or partly; all others are analogues. An analogue contradicts a
speed only if its own roof, from its own measured bandwidths, would have allowed that speed, and if our kernel is near
that roof: neither a machine whose writes cost nothing nor a poor kernel shows that leaving out writes gains nothing.

No answer about a time rests on one process, on few rounds or on a distance that two timings of one arm also show.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pandas as pd

from analysis import accuracy_rules, drift_rules, speculative_rules
from analysis.bearing import (
    PAPER_CARDS,
    PAPER_STATE,
    Question,
    as_rows,
    best_replay,
    best_stored,
    by_model,
    differed,
    is_direct,
    missing_models,
    nearest_device,
    replay_records,
    replay_rows,
    roof_share,
    single_phases,
    speedup_table,
)
from analysis.findings import (
    AGAINST,
    CANNOT_RUN,
    CONTRADICTED,
    COUNTED,
    NO,
    NOT_RUN,
    OPEN,
    OWN_KERNELS,
    PARTLY,
    REPRODUCED,
    SUPPORTED,
    UNCLEAR,
    VERDICTS,
    YES,
    Finding,
    doubted,
    families,
    not_run,
    span,
    verdict_of,
    weak,
    with_bounds,
)
from analysis.gates import number, value
from analysis.load import describe, moved_bytes
from analysis.stats import FASTER

__all__ = ["AGAINST", "CANNOT_RUN", "CONTRADICTED", "NOT_RUN", "PARTLY", "REPRODUCED", "RULES", "SUPPORTED", "UNCLEAR"]
__all__ += ["VERDICTS"]

NEAR_ROOF = 0.75
"""Share of its roof below which a replay kernel itself, not the method, may be what is slow."""
OWN_BACKENDS = ("cpu", "torch", "triton")
FP32_BYTES = 4


def kernel_range(question: Question) -> Finding:
    """Speedup of the fastest replay arm at the paper's batch, else at the largest one measured.

    Yes needs the whole interval above the lower end. Whole above the upper end is no yes either: a baseline that is
    slower than the paper's gives such speeds.
    """
    low, high, batch = (question.parameters[name] for name in ("low", "high", "batch"))
    rows = best_replay(question, lambda r: r.batch_size == batch or r.batch_size >= question.parameters["min_batch"])
    rows = [max(same, key=lambda r: (r.batch_size == batch, r.batch_size)) for same in by_model(rows)]
    if not rows:
        return not_run(question)
    answers, notes = [], []
    for row in rows:
        obstacle = "" if is_direct(row) and row.batch_size == batch else _obstacle(question, row, low)
        if row.low > high:
            answers.append(OPEN)
            notes.append(f"{row.model}: above the range: check the baseline")
        elif row.verdict == FASTER and row.low >= low:
            answers.append(YES)
        else:
            answers.append(NO if row.high < low and not obstacle else OPEN)
            notes += [f"{row.model}: {obstacle}"] if obstacle else []
    answers, doubts = doubted(answers, rows, [r.speedup for r in rows], low)
    notes += doubts + single_phases(question, rows) + _carried_to_the_whole(question, rows, batch)
    return _speedups(rows, answers, batch, notes)


def _carried_to_the_whole(question: Question, rows: list[Any], batch: int) -> list[str]:
    """What steps at two depths or more say of models of which no whole was run; extrapolations, no answers."""
    if speedup_table(question) != "decode_speedups":
        return []
    depths, length, notes = question.tables["decode_depths"], question.parameters["interval_length"], []
    same = (depths["batch_size"] == batch) & (depths["interval_length"] == length) & (depths["state"] == PAPER_STATE)
    same &= depths["device"].isin([r.device for r in rows])
    for (model, at, blocks), steps in depths[same].groupby(["model", "depths", "blocks"]):
        ms = steps.groupby("kind")["extrapolated_ms"].min()
        if model in missing_models(rows) and {"stored", "replay"} <= set(ms.index):
            notes.append(f"{model}: {ms['stored'] / ms['replay']:.2f}x, extrapolated from {at} of {blocks} blocks")
    return notes


def batch_one(question: Question) -> Finding:
    """Speedup of the fastest replay arm at batch 1; a gain below ``gain`` counts as none."""
    gain = question.parameters["gain"]
    rows = best_replay(question, lambda r: r.batch_size == 1)
    if not rows:
        return not_run(question)
    answers = []
    for row in rows:
        if row.high < gain:
            answers.append(YES)
        else:
            answers.append(NO if row.verdict == FASTER and row.low > gain else OPEN)
    answers, doubts = doubted(answers, rows, [r.speedup for r in rows], gain)
    return _speedups(rows, answers, 1, doubts + single_phases(question, rows))


def memory_bound(question: Question) -> Finding:
    """Share of its roof that the fastest stored arm reaches. A low share may be the kernel's fault: never a no."""
    rows, share = best_stored(question), question.parameters["share"]
    if not rows:
        return not_run(question)
    answers = [YES if row.low >= share else OPEN for row in rows]
    answers, doubts = doubted(answers, rows, [r.share for r in rows], share)
    ours = "; ".join(f"{with_bounds(r, r.share)} of the roof ({r.model}, batch {r.batch_size})" for r in rows)
    intensity = [r.flops_per_byte for r in rows if not pd.isna(r.flops_per_byte)]
    notes = [f"{span(intensity)} FLOP a byte"] if intensity else []
    notes += doubts + single_phases(question, rows)
    return Finding(ours, verdict_of(answers, rows), differed(rows), "; ".join(notes), rows)


def largest_part(question: Question) -> Finding:
    """Share of a stored step that the state-space layers' steps take, at the longest context that each model was run
    at. Half is the largest part; a smaller share may still be, so that there is no no.
    """
    context, batch = question.parameters["context"], question.parameters["min_batch"]
    table = question.tables["decode_speedups"]
    shown = table[(table["batch_size"] >= batch) & table["baseline_state_share"].notna() & table["blocks"].isna()]
    rows = [r for r in shown.itertuples() if r.model in PAPER_CARDS and r.state == PAPER_STATE]
    rows = [max(same, key=lambda r: (r.context, r.batch_size)) for same in by_model(nearest_device(rows))]
    if not rows:
        return not_run(question)
    answers = [YES if r.context >= context and r.baseline_state_share >= 0.5 else OPEN for r in rows]
    told = [f"{r.baseline_state_share:.2f} at {r.context} tokens ({r.model}, batch {r.batch_size})" for r in rows]
    notes = [f"{r.model}: no longer context run at batch {batch} or more" for r in rows if r.context < context]
    return Finding("; ".join(told), verdict_of(answers, rows), differed(rows), "; ".join(notes), rows)


def one_write_an_interval(question: Question) -> Finding:
    """Flushes counted by the kernels against the protocol's number, in every check of every replay record."""
    records, failures = replay_records(question)
    blocks = [block for r in records for block in r.correctness]
    wrong = [r for r in failures if any(b.flushes_counted != b.flushes_expected for b in r.correctness)]
    rows = as_rows([*records, *wrong])
    if not rows:
        return not_run(question)
    ours = f"flushes as expected in {len(blocks)} checks of {len(records)} records ({families(rows)})"
    ours += f"; {len(wrong)} records with another count" if wrong else ""
    elsewhere = sorted({r.arm for r in [*records, *wrong] if "cursor" in r.arm_config})
    told = f"; for {', '.join(elsewhere)} by the launch that moves cursors" if elsewhere else ""
    return Finding(
        ours, verdict_of([NO if wrong else YES], rows), differed(rows), f"counted by the kernels{told}", rows
    )


def float_equality(question: Question) -> Finding:
    """Largest error over its budget in every check of every fp32 replay record. Inputs are random: an analogue.

    The budget is that of an honest version. Arms that round more than one would, and whose record says by what they
    were judged instead, can neither support nor contradict the claim; the note names them.
    """
    found = replay_records(question)
    records, failures = ([r for r in part if "budget" not in r.arm_config] for part in found)
    looser = sorted({r.arm for part in found for r in part if "budget" in r.arm_config})
    checks = [c for r in records for b in r.correctness for c in b.comparisons]
    wrong = [r for r in failures if any(not c.passed for b in r.correctness for c in b.comparisons)]
    rows = as_rows([*records, *wrong])
    if not rows:
        return not_run(question)
    parts = []
    if checks:
        worst = max(checks, key=lambda c: (c.error / c.budget if c.budget else 0.0, c.quantity))
        parts.append(f"largest error {worst.error:.1e} of a budget of {worst.budget:.1e} ({worst.quantity})")
        parts.append(f"{len(checks)} comparisons ({families(rows)})")
    parts += [f"{len(wrong)} records above their budget"] if wrong else []
    difference = f"{differed(rows)}; data: random inputs, not a model's".lstrip("; ")
    note = "against float64" + (f"; left out, judged by budgets of their own: {', '.join(looser)}" if looser else "")
    return Finding("; ".join(parts), AGAINST if wrong else SUPPORTED, difference, note, rows)


def traffic_halved(question: Question) -> Finding:
    """Bytes of replay over bytes of stored, ring included."""
    rows = [r for r in replay_rows(question) if not pd.isna(r.ideal_bytes)]
    if not rows:
        return not_run(question)
    shares = [round(1 / r.ideal_bytes, 3) for r in rows]
    answers = [YES if question.parameters["low"] <= s <= question.parameters["high"] else NO for s in shares]
    return Finding(
        f"{span(shares)} of the bytes, ring included", verdict_of(answers, rows), differed(rows), COUNTED, rows
    )


def ideal_gain(question: Question) -> Finding:
    """Ideal speedup from bytes, and whether a measured one exceeds it.

    No: the ring leaves an ideal below ``floor``, which is not near two, or a measured gain is above ``ceiling``, which
    bytes then do not bound. A measured gain between its own ideal and the ceiling leaves the claim open.
    """
    floor, ceiling = question.parameters["floor"], question.parameters["ceiling"]
    rows = [r for r in replay_rows(question) if not pd.isna(r.ideal_bytes)]
    if not rows:
        return not_run(question)
    wrong = [r.ideal_bytes < floor or (r.low > ceiling and not weak(r)) for r in rows]
    beyond = [r for r in rows if r.low > r.ideal_bytes]
    answers = [NO if no else OPEN if r in beyond else YES for r, no in zip(rows, wrong, strict=True)]
    note = "; ".join(map(_beyond_bytes, by_model(beyond)))
    ideals, measured = [r.ideal_bytes for r in rows], [r.speedup for r in rows]
    ours = f"{span(ideals)} from bytes; {span(measured)} measured"
    return Finding(ours, verdict_of(answers, rows), differed(rows), note, rows)


def _beyond_bytes(rows: list[Any]) -> str:
    """The largest gain of a model's rows."""
    row = max(rows, key=lambda r: r.speedup)
    allowed = "" if pd.isna(row.ideal_roof) else f"; the measured bandwidths allow {row.ideal_roof:.2f}x"
    most = f", the most of {len(rows)} such" if len(rows) > 1 else ""
    return f"{row.arm} gains {row.speedup:.2f}x, more than bytes explain ({row.model}, {row.phase}{allowed}){most}"


def ring_cost(question: Question) -> Finding:
    """Bytes of the ring beside the state writes that replay leaves out: a gain is paid with less than it saves."""
    shares, prices, records = [], [], []
    for record in replay_records(question)[0]:
        if moved := moved_bytes(record):
            ring = record.traffic["ring_bytes_read"] + record.traffic["ring_bytes_written"]
            saved = record.traffic["state_bytes_read"] - record.traffic["state_bytes_written"]
            shares.append(round(100 * ring / moved, 1))
            prices.append(round(ring / saved, 3) if saved > 0 else math.inf)
            records.append(record)
    rows = as_rows(records)
    if not rows:
        return not_run(question)
    answers = [YES if 0 < price < 1 else NO for price in prices]
    ours = f"ring: {span(shares, '.1f')} % of a replay step's bytes, {span(prices)} of the writes saved"
    return Finding(f"{ours} ({families(rows)})", verdict_of(answers, rows), differed(rows), COUNTED, rows)


def low_precision_reads(question: Question) -> Finding:
    """State bytes that arms with a coarser state read a step, over those of the same elements in fp32."""
    shares, records = [], []
    for record in question.evidence.records:
        sizes = [number(value(record, "geometry"), name) for name in ("heads", "head_dim", "state_dim")]
        read, batch = number(record.traffic, "state_bytes_read"), number(record.case, "batch_size")
        if describe(record)["state"] != PAPER_STATE and read is not None and batch and all(sizes):
            shares.append(round(read / (FP32_BYTES * batch * math.prod(sizes)), 3))
            records.append(record)
    rows = as_rows(records)
    if not rows:
        return not_run(question)
    formats = ", ".join(sorted({str(r.state) for r in rows}))
    answers = [YES if share < 1 else NO for share in shares]
    ours = f"{span(shares)} of the state bytes that fp32 reads ({formats})"
    return Finding(ours, verdict_of(answers, rows), differed(rows), COUNTED, rows)


def small_loss(question: Question) -> Finding:
    """Arms with a read copy against float32 on the same items."""
    return _accuracy(question, *accuracy_rules.small_loss(question))


def visible_loss(question: Question) -> Finding:
    """An arm that loses somewhere, and by how much. Never a no: another model or task may keep what this one loses."""
    return _accuracy(question, *accuracy_rules.visible_loss(question))


def _accuracy(question: Question, ours: str, rows: list[Any], answers: list[str], note: str) -> Finding:
    if not rows:
        return not_run(question)
    verdict = SUPPORTED if set(answers) == {YES} else AGAINST if set(answers) == {NO} else UNCLEAR
    return Finding(ours, verdict, accuracy_rules.what_differed(rows), note, rows)


def outside(question: Question) -> Finding:
    """A statement about others that no run of this project can show."""
    return Finding(verdict=CANNOT_RUN)


RULES: dict[str, Callable[[Question], Finding]] = {
    "kernel_range": kernel_range,
    "batch_one": batch_one,
    "memory_bound": memory_bound,
    "largest_part": largest_part,
    "one_write_an_interval": one_write_an_interval,
    "float_equality": float_equality,
    "traffic_halved": traffic_halved,
    "ideal_gain": ideal_gain,
    "ring_cost": ring_cost,
    "low_precision_reads": low_precision_reads,
    "drafted_range": speculative_rules.drafted_range,
    "rolled_back": speculative_rules.rolled_back,
    "requests_fit": speculative_rules.requests_fit,
    "outputs_only": speculative_rules.outputs_only,
    "tensor_cores": speculative_rules.tensor_cores,
    "gain_cause": speculative_rules.gain_cause,
    "drift_ratio": drift_rules.drift_ratio,
    "drift_slope": drift_rules.drift_slope,
    "small_loss": small_loss,
    "visible_loss": visible_loss,
    "not_run": not_run,
    "outside": outside,
}


def _obstacle(question: Question, row: Any, speedup: float) -> str:
    """Why an analogue that misses a speedup does not contradict it; empty when it does."""
    if pd.isna(row.ideal_roof):
        return "no roof recorded"
    if row.ideal_roof < speedup:
        return f"the roof of this machine allows {row.ideal_roof:.2f}x"
    share = roof_share(question, row)
    return f"{row.arm} reaches only {share:.2f} of its own roof" if share < NEAR_ROOF else ""


def _speedups(rows: list[Any], answers: list[str], batch: int, notes: list[str]) -> Finding:
    unlike = [r for r in rows if r.like_for_like != "yes"]
    notes = notes + [f"{r.model}: {r.baseline} computes its gates, {r.arm} gets them ready" for r in unlike]
    ours = "; ".join(f"{with_bounds(r, r.speedup)} ({r.model}, batch {r.batch_size})" for r in rows)
    others = sorted({r.arm for r in rows if r.arm.split("/")[1] not in OWN_BACKENDS})
    kernels = f"kernels: {', '.join(others)}" if others else OWN_KERNELS
    difference = "; ".join(part for part in (differed(rows, batch), kernels) if part)
    return Finding(ours, verdict_of(answers, rows, batch), difference, "; ".join(notes), rows)
