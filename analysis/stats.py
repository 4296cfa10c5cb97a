"""Paired log ratios, bootstrap intervals, the A/A gate and verdicts.

A round times every arm of a case once, so the ratio of two arms is taken within a round, where slow drifts of clock
and load cancel, and on the log scale, where a gain and its inverse weigh the same. A process (replicate) is summarised
by the median over its rounds, several processes by the mean of their medians. The interval resamples processes and,
within each drawn process, rounds; a seed derived from names makes it the same on every run and machine.

With few processes a percentile interval is too narrow. Its tails are therefore taken further out, as Hesterberg (2015,
"What Teachers Should Know About the Bootstrap", expanded percentile interval) derives from Student's t. Two or three
processes still say little about the spread between processes; with one, the interval covers rounds only and the tables
say so.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr, stdtrit

from experiments.measure.record import Record

Array = npt.NDArray[np.float64]

CONFIDENCE = 0.95
RESAMPLES = 2000
MIN_ROUNDS = 5
"""Rounds a process must hold on average, or processes that there must be, before a verdict may be given: fewer cannot
show their own spread."""
FASTER, SLOWER, AMBIGUOUS = "FASTER", "SLOWER", "AMBIGUOUS"

AA_BOUND = math.log(1.03)
"""Largest bias between two timings of the same arm that a group may show, as a log ratio.

Goals are told apart in steps of 5 %, so a bias of that size must not pass; two timings of one arm on a quiet machine
with two cores agree within 1 to 2 %, so a bound below that would refuse good groups. 3 % lies between. A bias that
the rounds cannot resolve is not refused here: it widens the A/A noise that a verdict has to exceed."""


@dataclass(frozen=True)
class Interval:
    """Estimate and 95 % interval on the log scale; ``processes`` and ``rounds`` (in all) say what it rests on."""

    log_estimate: float
    log_low: float
    log_high: float
    processes: int
    rounds: int

    @property
    def estimate(self) -> float:
        return math.exp(self.log_estimate)

    @property
    def low(self) -> float:
        return math.exp(self.log_low)

    @property
    def high(self) -> float:
        return math.exp(self.log_high)

    @property
    def noise(self) -> float:
        """Largest absolute log ratio inside the interval: what an A/A comparison could not tell from zero."""
        return max(abs(self.log_low), abs(self.log_high))

    def over(self, other: Interval) -> Interval:
        """The ratio to another one, independent of this: errors add up in squares."""
        log = self.log_estimate - other.log_estimate
        below = math.hypot(self.log_estimate - self.log_low, other.log_high - other.log_estimate)
        above = math.hypot(self.log_high - self.log_estimate, other.log_estimate - other.log_low)
        processes, rounds = min(self.processes, other.processes), min(self.rounds, other.rounds)
        return Interval(log, log - below, log + above, processes, rounds)


def log_step_ns(samples_ns: Sequence[Sequence[int]], layer_steps: int) -> Array:
    """Log of the nanoseconds of one layer step, ``[rounds]``. Samples of one round are averaged, none is dropped."""
    return np.array([math.log(sum(r) / len(r) / layer_steps) for r in samples_ns], dtype=np.float64)


def step_log_ns(record: Record) -> Array:
    """Log nanoseconds of one layer step of the record's arm, ``[rounds]``."""
    return log_step_ns(record.samples_ns, record.layer_steps_per_sample)


def median_step_ns(record: Record) -> float:
    """Median over rounds of the nanoseconds of one layer step."""
    return math.exp(float(np.median(step_log_ns(record))))


def paired_log_speedup(baseline: Record, arm: Record) -> Array:
    """``log(baseline time / arm time)`` by round, ``[rounds]``; positive where the arm is faster.

    Raises ``ValueError`` when the two were not timed together: another group or another number of rounds.
    """
    if baseline.group != arm.group:
        raise ValueError(f"{baseline.id} and {arm.id} were not timed together")
    if len(baseline.samples_ns) != len(arm.samples_ns):
        raise ValueError(f"{baseline.id} has {len(baseline.samples_ns)} rounds, {arm.id} {len(arm.samples_ns)}")
    return step_log_ns(baseline) - step_log_ns(arm)


def aa_log_ratio(record: Record) -> Array:
    """``log(second timing / first timing)`` of one arm by round, ``[rounds]``."""
    return log_step_ns(record.again_samples_ns, record.layer_steps_per_sample) - step_log_ns(record)


def bootstrap(processes: Sequence[Array], seed: str) -> Interval:
    """Interval of the mean over processes of the median over rounds; each process is an array of ``[rounds]`` logs.

    ``seed`` is any text that names the comparison. Raises ``ValueError`` when there is nothing to resample.
    """
    if not processes or any(len(p) == 0 for p in processes):
        raise ValueError("a bootstrap needs at least one process with at least one round")
    generator = np.random.default_rng(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "big"))
    count = len(processes)
    means = np.zeros(RESAMPLES)
    for _ in range(count):
        drawn = generator.integers(count, size=RESAMPLES)
        for index, rounds in enumerate(processes):
            chosen = np.flatnonzero(drawn == index)
            picks = generator.integers(len(rounds), size=(len(chosen), len(rounds)))
            means[chosen] += np.median(rounds[picks], axis=1) / count
    units = count if count > 1 else len(processes[0])
    low, high = np.quantile(means, [tail(units), 1 - tail(units)])
    estimate = float(np.mean([np.median(p) for p in processes]))
    total = sum(len(p) for p in processes)
    return Interval(estimate, min(float(low), estimate), max(float(high), estimate), count, total)


def too_few(processes: int, rounds: int) -> bool:
    """Whether ``rounds``, in all, and ``processes`` are too few to show their own spread."""
    return rounds < MIN_ROUNDS * processes and processes < MIN_ROUNDS


def verdict(speedup: Interval, aa_noise: float) -> str:
    """FASTER or SLOWER when the interval excludes 1 and the estimate exceeds the A/A noise (a log), else AMBIGUOUS."""
    if too_few(speedup.processes, speedup.rounds) or abs(speedup.log_estimate) <= aa_noise:
        return AMBIGUOUS
    if speedup.log_low > 0:
        return FASTER
    return SLOWER if speedup.log_high < 0 else AMBIGUOUS


def aa_fault(record: Record) -> str:
    """Why the A/A comparison that ``record`` carries is not compatible with zero; empty when it is."""
    interval = bootstrap([aa_log_ratio(record)], f"aa {record.group}")
    excludes_zero = interval.log_low > 0 or interval.log_high < 0
    if not excludes_zero or abs(interval.log_estimate) <= AA_BOUND:
        return ""
    logs = (interval.log_estimate, interval.log_low, interval.log_high, AA_BOUND)
    shift, low, high, bound = (100 * math.expm1(x) for x in logs)
    return f"{record.arm} timed twice differs by {shift:+.1f} % [{low:+.1f}, {high:+.1f}]; at most {bound:.0f} %"


def tail(units: int) -> float:
    """Probability left on each side: the normal tail at ``sqrt(n / (n - 1)) t``, Student's t with n - 1 degrees."""
    if units < 2:
        return (1 - CONFIDENCE) / 2
    return float(ndtr(math.sqrt(units / (units - 1)) * stdtrit(units - 1, (1 - CONFIDENCE) / 2)))
