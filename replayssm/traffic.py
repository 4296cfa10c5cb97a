"""Bytes and FLOPs that one state-space layer must move and do per decoding step: the ReplaySSM traffic model.

Derived from the method; per layer and per row (request). ``S`` is the state's bytes, ``r`` the bytes of one ring token.

**Standard decoding.** The stored recurrence reads and writes the state at every step: ``2 S``. Replay with interval
length L is at position p = 0 .. L-1. Below L-1 it reads the state and p ring tokens and appends one. At L-1 it flushes:
reads and writes the state, reads L-1 ring tokens, appends nothing. The mean over the cycle is::

    M = S (1 + 1/L) + r [(L-1)/2 + (L-1)/L]          ideal speedup = 2 S / M

    dM/dL = 0   <=>   L = sqrt(2 (S - r) / r)   ~   sqrt(2 S / r)

**Two copies.** A read copy of R bytes is read at every step but the flush. The flush reads the update copy (U bytes),
writes it, and writes the read copy, so M = R + 2 U / L + the same ring terms, and the best L is about sqrt(4 U / r).

**Speculative decoding**, window T = 1 + drafts. The stored recurrence reads one state and writes T, so that any of them
can be taken back: ``(1 + T) S``. Replay holds p committed tokens and flushes at the step that begins with p > L - T
(at every step when L < T). Either kind of step reads p ring tokens and appends T; then a of them are committed:
p becomes p + a, or a after a flush. The expected visits of each p in a cycle give its length in steps and its bytes.

What is counted: the state and the ring. A step's own inputs and output are the same few bytes in either method and are
left out, as are parameters. FLOPs are those of ``replayssm.flops``.

The floor of a step's time charges the bytes of flush steps, which update in place, to the read-modify-write bandwidth,
all others to the read bandwidth; the stored recurrence is read-modify-write throughout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from replayssm import flops
from replayssm.geometry import Geometry
from replayssm.layout import FORMATS, PUBLISHED_RING, Format, Ring, format_of

__all__ = [
    "FORMATS",
    "PUBLISHED_RING",
    "Format",
    "Ring",
    "Traffic",
    "best_interval_length",
    "closed_form_interval_length",
    "ideal_speedup",
    "replay",
    "stored",
]


@dataclass(frozen=True)
class Traffic:
    """Bytes and FLOPs of one layer, all rows; of a cycle (``steps`` steps) or, after ``per_step``, of the mean step.

    ``rmw_bytes`` is the part of the four byte counts that belongs to read-modify-write bandwidth. ``tokens`` counts a
    row's committed tokens. Means over a distribution of accepted tokens make all of them fractional.
    """

    steps: float = 0
    tokens: float = 0
    state_bytes_read: float = 0
    state_bytes_written: float = 0
    ring_bytes_read: float = 0
    ring_bytes_written: float = 0
    rmw_bytes: float = 0
    flops: float = 0

    @property
    def total_bytes(self) -> float:
        return self.state_bytes_read + self.state_bytes_written + self.ring_bytes_read + self.ring_bytes_written

    @property
    def read_bytes(self) -> float:
        """Bytes that belong to read bandwidth."""
        return self.total_bytes - self.rmw_bytes

    @property
    def intensity(self) -> float:
        """FLOPs a byte."""
        return self.flops / self.total_bytes

    def record(self, read_bytes_per_s: float, rmw_bytes_per_s: float) -> dict[str, float]:
        """What a record stores: the byte and FLOP counts and the floor at the measured bandwidths."""
        names = [f.name for f in fields(self) if f.name not in ("steps", "tokens")]
        counts = {name: getattr(self, name) for name in names}
        return counts | {"read_bytes": self.read_bytes, "floor_ns": self.floor_ns(read_bytes_per_s, rmw_bytes_per_s)}

    def scaled(self, factor: float) -> Traffic:
        return Traffic(*(getattr(self, f.name) * factor for f in fields(self)))

    def per_step(self) -> Traffic:
        return self.scaled(1 / self.steps)

    def plus(self, other: Traffic) -> Traffic:
        return Traffic(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def floor_ns(self, read_bytes_per_s: float, rmw_bytes_per_s: float) -> float:
        """Least time in nanoseconds at the measured bandwidths, both counting read plus written bytes a second."""
        return 1e9 * (self.read_bytes / read_bytes_per_s + self.rmw_bytes / rmw_bytes_per_s)


def stored(
    geometry: Geometry, state: str | Format = "fp32", rows: int = 1, window: int | None = None, accepted: float = 1
) -> Traffic:
    """One step of the stored recurrence, ``rows`` rows; with ``window`` T it verifies T tokens and keeps T states."""
    accepted = _checked(window, accepted)
    size, tokens = format_of(state).state_bytes(geometry), window or 1
    step = Traffic(1, accepted, size, size * tokens, 0, 0, size * (1 + tokens), tokens * flops.stored(geometry))
    return replace(step.scaled(rows), steps=1, tokens=accepted)


def replay(
    geometry: Geometry,
    interval_length: int,
    state: str | Format = "fp32",
    read_copy: str | Format | None = None,
    ring: Ring | None = None,
    rows: int = 1,
    window: int | None = None,
    accepted: float = 1,
) -> Traffic:
    """One flush cycle of replay, ``rows`` rows; ``.per_step()`` is the mean step, whatever phase each row is in.

    ``state`` is the format of the update copy, ``read_copy`` that of a separate read copy. With ``window`` T,
    ``accepted`` is the mean number of tokens committed a step, from 1 to T: that integer, or the two integers around it
    drawn independently. Raises ``ValueError`` on an impossible interval length, window or acceptance.
    """
    accepted = _checked(window, accepted)
    if interval_length < 1:
        raise ValueError(f"interval_length={interval_length} is impossible; accepted: at least 1")
    total = Traffic()
    for weight, position, flush in _cycle(interval_length, window, accepted):
        total = total.plus(_step(geometry, position, flush, state, read_copy, ring or Ring(), window).scaled(weight))
    # Every flush cycle commits what its steps accepted; standard decoding commits one token a step.
    return replace(total.scaled(rows), steps=total.steps, tokens=total.steps * accepted)


def ideal_speedup(
    geometry: Geometry,
    interval_length: int,
    state: str | Format = "fp32",
    read_copy: str | Format | None = None,
    ring: Ring | None = None,
    window: int | None = None,
    accepted: float = 1,
    baseline: str | Format | None = None,
) -> float:
    """Bytes of the stored recurrence at ``baseline`` (default: the update copy's format) over replay's, mean step."""
    cycle = replay(geometry, interval_length, state, read_copy, ring, 1, window, accepted)
    return stored(geometry, baseline or state, 1, window, accepted).total_bytes * cycle.steps / cycle.total_bytes


def best_interval_length(
    geometry: Geometry,
    state: str | Format = "fp32",
    read_copy: str | Format | None = None,
    ring: Ring | None = None,
    window: int | None = None,
    accepted: float = 1,
    longest: int = 64,
) -> int:
    """The L from 1 to ``longest`` of fewest bytes a step, the smaller of equals; exact, by trying all."""
    return max(
        range(1, longest + 1),
        key=lambda length: (ideal_speedup(geometry, length, state, read_copy, ring, window, accepted), -length),
    )


def closed_form_interval_length(
    geometry: Geometry, state: str | Format = "fp32", read_copy: str | Format | None = None, ring: Ring | None = None
) -> float:
    """Best L of standard decoding: sqrt(2 S / r), with a read copy sqrt(4 U / r). It ignores raw inputs."""
    saved = format_of(state).state_bytes(geometry) * (4 if read_copy else 2)
    return math.sqrt(saved / (ring or Ring()).token_bytes(geometry)[1])


def _checked(window: int | None, accepted: float) -> float:
    if window is not None and window < 1:
        raise ValueError(f"window={window} is impossible; accepted: at least 1, or none for standard decoding")
    if not 1 <= accepted <= (window or 1):
        raise ValueError(f"accepted={accepted} is impossible; accepted: from 1 to the window's {window or 1}")
    return accepted


def _cycle(interval_length: int, window: int | None, accepted: float) -> Iterator[tuple[float, int, bool]]:
    """Expected visits of each position in one flush cycle: ``(visits, position, whether it flushes)``."""
    if window is None:
        yield from ((1.0, p, p == interval_length - 1) for p in range(interval_length))
        return
    low = math.floor(accepted)
    chances = [(low, 1 - (accepted - low)), (low + 1, accepted - low)]
    last = interval_length - window  # the last position that does not flush
    visits = {0: 1.0}  # the flush that begins the cycle leaves nothing of the ring: a step from 0
    for p in range(max(0, last) + low + 2):
        if p in visits and (p == 0 or p <= last):
            for tokens, chance in chances:
                if chance:
                    visits[p + tokens] = visits.get(p + tokens, 0.0) + visits[p] * chance
    yield from ((visits[p], p, p > last) for p in sorted(visits) if p)


def _step(
    geometry: Geometry,
    position: int,
    flush: bool,
    state: str | Format,
    read_copy: str | Format | None,
    ring: Ring,
    window: int | None,
) -> Traffic:
    """One step of one row at ``position``."""
    update = format_of(state).state_bytes(geometry)
    copy = format_of(read_copy).state_bytes(geometry) if read_copy else 0
    append, to_read, to_fold = ring.token_bytes(geometry)
    appended = append * (window or (0 if flush else 1))
    if not flush:
        work = flops.read(geometry, position, window or 1)
        return Traffic(1, 0, copy or update, 0, position * to_read, appended, 0, work)
    written, ring_read = update + copy, position * to_fold
    rmw = update + written + ring_read + appended
    work = flops.flush(geometry, position, window, ring.raw)
    return Traffic(1, 0, update, written, ring_read, appended, rmw, work)
