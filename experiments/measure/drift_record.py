"""The record of a drift experiment: one arm over one document, sums by position bucket, one JSON object a line.

A record of ``experiments.layer_drift`` is of one layer over a sequence of random inputs, and holds output errors in
place of KL and likelihoods. It is evidence as `experiments.measure.record` is: appended once, failures too, and a
record of status ``ok`` cannot be constructed with a check that failed or a number that is missing. Records of one
``group`` were decoded as rows of one batch, so an arm of it can be compared with the group's reference, document by
document. Standard library only.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

SCHEMA = "replayssm.drift/1"
STATUSES = ("ok", "incorrect", "oom", "error")
SUMS = ("kl", "nll")
COUNTS = ("agree", "bytes")
LAYER = "layer_drift"
"""The experiment whose records are of one layer."""


@dataclass(frozen=True)
class Check:
    """Something that had to hold: ``value`` at most ``limit``."""

    name: str
    value: float
    limit: float

    @property
    def passed(self) -> bool:
        return math.isfinite(self.value) and self.value <= self.limit


@dataclass(frozen=True)
class DriftRecord:
    """Buckets are positions ``edges[i] <= p < edges[i + 1]``, p being the tokens read before. By bucket: ``kl`` and
    ``nll``, sums in nats of KL(reference || arm) and of the next token's negative log-likelihood; ``agree``, positions
    at which both find the same token likeliest; ``bytes`` of text predicted. ``state_error``: ``positions`` and, of the
    ``update`` and ``read`` copy, relative errors ``[positions][layers][heads]`` to the reference's state. Of one layer
    by bucket ``output_error``, sums of squared relative errors of the outputs, and nothing else.
    """

    # identity
    group: str
    experiment: str
    case_hash: str
    arm: str
    arm_hash: str
    arms: tuple[str, ...]
    reference: str
    documents: int
    document: dict[str, Any]
    """``number`` from 0, ``title``, ``sha256`` of the tokens."""
    status: str
    message: str
    # what was run
    case: dict[str, Any]
    precision: dict[str, Any]
    interval_length: int
    code: dict[str, Any]
    packages: dict[str, str]
    device: dict[str, Any]
    environment: dict[str, str]
    argv: tuple[str, ...]
    seeds: dict[str, int]
    started_utc: str
    ended_utc: str
    # what was measured
    edges: tuple[int, ...] = ()
    kl: tuple[float, ...] = ()
    nll: tuple[float, ...] = ()
    agree: tuple[int, ...] = ()
    bytes: tuple[int, ...] = ()
    output_error: tuple[float, ...] = ()
    state_error: dict[str, Any] = field(default_factory=dict)
    traffic: dict[str, float] = field(default_factory=dict)
    """Of one layer and row, an element of the state: ``update`` and ``read`` are bytes stored, ``step`` those moved by
    the mean step of a cycle, ring included."""
    checks: tuple[Check, ...] = ()
    elapsed_s: float = 0.0
    """Of the whole batch, the parts of an interrupted run together."""
    schema: str = SCHEMA

    def __post_init__(self) -> None:
        if self.schema != SCHEMA:
            raise ValueError(f"schema={self.schema!r} is not {SCHEMA}")
        if self.status not in STATUSES:
            raise ValueError(f"status={self.status!r} is unknown; accepted: {', '.join(STATUSES)}")
        if self.arm not in self.arms or self.reference not in self.arms:
            raise ValueError(f"arm={self.arm!r} and reference={self.reference!r} are not both among {list(self.arms)}")
        if self.status != "ok":
            if not self.message:
                raise ValueError(f"status {self.status!r} needs a message")
            if self.kl or self.output_error:
                raise ValueError(f"status {self.status!r} cannot hold numbers")
            return
        failed = [check.name for check in self.checks if not check.passed]
        if failed or not self.checks:
            raise ValueError(f"status 'ok' with failed checks: {', '.join(failed) or 'there is none'}")
        buckets = len(self.edges) - 1
        if buckets < 1 or self.edges[0] != 0 or any(a >= b for a, b in pairwise(self.edges)):
            raise ValueError(f"edges={self.edges} do not rise from 0")
        names = ("output_error",) if self.experiment == LAYER else (*SUMS, *COUNTS)
        for name in names:
            values = getattr(self, name)
            if len(values) != buckets or not all(isinstance(v, int | float) and math.isfinite(v) for v in values):
                raise ValueError(f"{name} does not hold a number a bucket")
        if any(sum_ < 0 for name in names for sum_ in getattr(self, name)):
            raise ValueError("a sum is below zero")

    @property
    def key(self) -> tuple[str, str, str, str, str, int]:
        """Resume key: schema, case, arm, sources, device, document."""
        return (self.schema, self.case_hash, self.arm, self.arm_hash, str(self.device["name"]), self.document["number"])

    def to_json(self) -> str:
        """One line without a newline. Raises ``ValueError`` on a NaN or infinity, which JSON cannot hold."""
        data = {"schema": self.schema} | dataclasses.asdict(self)
        for block, check in zip(data["checks"], self.checks, strict=True):
            block["value"] = check.value if math.isfinite(check.value) else str(check.value)
        return json.dumps(data, separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> DriftRecord:
        """Parse and re-validate one line; raises ``ValueError``, one line, that says what is wrong with it."""
        try:
            data = json.loads(line)
            checks = tuple(Check(c["name"], float(c["value"]), c["limit"]) for c in data.pop("checks"))
            for name in ("arms", "argv", "edges", "output_error", *SUMS, *COUNTS):
                data[name] = tuple(data.get(name, ()))
            for name in ("case", "device", "document", "precision", "state_error", "traffic"):
                if not isinstance(data.get(name, {}), dict):
                    raise ValueError(f"{name} is no mapping")
            if type(data["document"]["number"]) is not int:
                raise ValueError("document.number is no integer")
            return cls(**data, checks=checks)
        except (TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
            raise ValueError(f"not a {SCHEMA} object: {type(error).__name__}: {error}") from None


def is_drift(line: str) -> bool:
    """Whether a line of a record file says that it is of this schema, of any version."""
    return line.startswith('{"schema":"replayssm.drift/')
