"""The card of ``experiments.traffic``: numbers laid out for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from replayssm.traffic import best_interval_length, closed_form_interval_length

if TYPE_CHECKING:
    from experiments.traffic import Question

LENGTHS = (1, 2, 4, 8, 12, 16, 20, 24, 32, 48, 64)
MB = 1e6


def card(question: Question) -> Group:
    """Header, bytes and FLOPs, ideal speedup by interval length, best length, floor."""
    return Group(_header(question), _counts(question), _lengths(question), _best(question), _floor(question))


def _header(q: Question) -> Text:
    g = q.geometry
    shape = f"{g.family}, {g.heads} heads, {g.groups} groups, state {g.head_dim} x {g.state_dim} a head"
    copies = q.state if q.read_copy is None else f"{q.state} to update, {q.read_copy} to read"
    mode = "standard decoding" if q.window is None else f"window of {q.window}, {q.accepted:g} accepted a step"
    return Text(
        f"{q.model}: {shape}\none layer, batch {q.batch_size}, L = {q.interval_length}, {mode}\n"
        f"state {copies}; inputs {q.ring.inputs}"
    )


def _counts(q: Question) -> Table:
    stored, replay = q.stored(), q.replay(q.interval_length)
    table = Table(title="per layer and step, mean over the flush cycle", title_justify="left")
    for name in ("", "stored", "replay"):
        table.add_column(name, justify="left" if not name else "right")
    rows = {
        "state read, MB": "state_bytes_read",
        "state written, MB": "state_bytes_written",
        "ring read, MB": "ring_bytes_read",
        "ring written, MB": "ring_bytes_written",
        "total, MB": "total_bytes",
        "MFLOP": "flops",
    }
    for label, field in rows.items():
        table.add_row(label, *(f"{getattr(t, field) / MB:,.3f}" for t in (stored, replay)))
    table.add_row("FLOP a byte", f"{stored.intensity:.2f}", f"{replay.intensity:.2f}")
    table.add_row("steps in a cycle", "1", f"{replay.steps:.4g}")
    return table


def _lengths(q: Question) -> Table:
    table = Table(title="ideal speedup: stored bytes / replay bytes", title_justify="left")
    baselines = [q.stored(state).total_bytes for state in dict.fromkeys((q.state, "fp32"))]
    for name in ("L", *(f"over stored {state}" for state in dict.fromkeys((q.state, "fp32")))):
        table.add_column(name, justify="right")
    for length in sorted({*LENGTHS, q.interval_length}):
        replayed = q.replay(length).total_bytes
        style = "bold" if length == q.interval_length else None
        table.add_row(str(length), *(f"{stored / replayed:.2f}" for stored in baselines), style=style)
    return table


def _best(q: Question) -> Text:
    best = best_interval_length(q.geometry, q.state, q.read_copy, q.ring, q.window, q.accepted)
    speedup = q.stored().total_bytes / q.replay(best).total_bytes
    line = f"fewest bytes at L = {best}, {speedup:.2f} times fewer than stored {q.state}"
    if q.window is None:
        closed = closed_form_interval_length(q.geometry, q.state, q.read_copy, q.ring)
        line += f" (closed form {closed:.1f})"
    return Text(line)


def _floor(q: Question) -> Text:
    if q.bandwidth_gb_s is None:
        return Text("floor: give a measured bandwidth, bandwidth_gb_s=... and read_modify_write_gb_s=...")
    rmw = q.read_modify_write_gb_s or q.bandwidth_gb_s
    note = "" if q.read_modify_write_gb_s else " (read_modify_write_gb_s not given: taken as equal)"
    steps = (q.stored(), q.replay(q.interval_length))
    stored, replay = (step.floor_ns(q.bandwidth_gb_s * 1e9, rmw * 1e9) / 1e3 for step in steps)
    return Text(
        f"floor at {q.bandwidth_gb_s:g} GB/s read, {rmw:g} GB/s read-modify-write{note}:\n"
        f"stored {stored:,.2f} us, replay {replay:,.2f} us, {stored / replay:.2f} times faster"
    )
