"""Records of a drift run: what was asked, where it ran, the checks it had to pass, sums by bucket."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from experiments.documents import Document
from experiments.measure import provenance
from experiments.measure.assemble import now_utc
from experiments.measure.drift import Drift
from experiments.measure.drift_record import Check, DriftRecord, is_drift
from experiments.measure.record import read_lines
from experiments.measure.sources import ROOT, hash_of, sources_from
from experiments.pg19_case import CONTROL, REFERENCE, DriftCase, case_hash
from experiments.places import recorded
from experiments.precisions import PrecisionArm
from replayssm.geometry import Geometry
from replayssm.layout import FORMATS, Ring
from replayssm.traffic import replay

DIGITS = 5
"""Significant digits of a recorded number."""


@dataclass
class Run:
    """The arms of one case in one batch; made when the run starts."""

    case: DriftCase
    arms: tuple[PrecisionArm, ...]
    group: str
    device: dict[str, Any]
    argv: tuple[str, ...]
    documents: list[Document] = field(default_factory=list)
    source: str = "experiments/measure/drift.py"
    """What runs the arms."""
    started_utc: str = field(default_factory=now_utc)

    def __post_init__(self) -> None:
        self.sources = sources_from([ROOT / self.source], str(self.device["name"]))
        self.hash = hash_of(self.sources)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(arm.name for arm in self.arms)

    @property
    def arms_hash(self) -> str:
        """8 hex digits over the arms and what they are."""
        told = json.dumps([dataclasses.asdict(arm) for arm in self.arms], sort_keys=True)
        return hashlib.sha256(told.encode()).hexdigest()[:8]

    @property
    def identity(self) -> str:
        """What a checkpoint must be of: case, arms, sources, device and the documents' tokens."""
        parts = [case_hash(self.case), self.arms_hash, self.hash, str(self.device["name"])]
        return " ".join([*parts, *(document.sha256 for document in self.documents)])

    def keys(self) -> set[tuple[str, str, str, str, str, int]]:
        """Resume keys of the records that the run will make."""
        return {
            self.record(arm, number, "error", "not run").key for arm in self.arms for number in range(self.case.count)
        }

    def failures(self, status: str, message: str) -> list[DriftRecord]:
        """The same failure of every arm over every document."""
        return [self.record(arm, number, status, message) for number in range(self.case.count) for arm in self.arms]

    def records(self, drift: Drift, edges: list[int], noise: float, prompt_nats: float) -> list[DriftRecord]:
        """One an arm and document; those that failed a check hold no numbers."""
        kl, nll, agree = (buffer.double().cpu() for buffer in (drift.kl, drift.nll, drift.agree))
        control = self.names.index(CONTROL)
        prompt = drift.prompt_difference()
        tokens = drift.tokens.cpu().numpy()
        counted = abs(int(drift.position) - drift.length) + int((drift.cache.length != drift.length).sum())
        made = []
        for number, document in enumerate(self.documents):
            shared = [
                Check("tokens that are not the document's", int((tokens[number] != document.tokens).sum()), 0),
                Check("positions that the device did not count", counted, 0),
                Check("KL of the reference to itself", float(kl[0, number].abs().max()), 0),
                Check("mean KL of the reference run again", float(kl[1, number].mean()), noise),
                Check("mean KL of replay with a float32 state", float(kl[control, number].mean()), noise),
                Check("reference against a prompt, nats a token", prompt, prompt_nats),
            ]
            sizes = document.bytes[1:]
            for place, arm in enumerate(self.arms):
                lost = int((~kl[place, number].isfinite() | ~nll[place, number].isfinite()).sum())
                expected = drift.length // arm.interval_length
                flushes = int((drift.states.flushes(place)[:, number] - expected).abs().sum())
                checks = [
                    Check("positions without a finite number", lost, 0),
                    Check("flushes too many or too few", flushes, 0),
                    *shared,
                ]
                failed = [f"{c.name} {c.value:.3g} exceeds {c.limit:g}" for c in checks if not c.passed]
                moved = traffic(drift.model.geometry, arm, self.case.inputs)
                measured: dict[str, Any] = {
                    "traffic": moved,
                    "checks": tuple(checks),
                    "elapsed_s": round(drift.elapsed_s, 3),
                }
                if not failed:
                    spans = list(pairwise(edges))
                    measured |= {
                        "edges": tuple(edges),
                        "kl": tuple(rounded(max(float(kl[place, number, a:b].sum()), 0.0)) for a, b in spans),
                        "nll": tuple(rounded(float(nll[place, number, a:b].sum())) for a, b in spans),
                        "agree": tuple(int(agree[place, number, a:b].sum()) for a, b in spans),
                        "bytes": tuple(int(sizes[a:b].sum()) for a, b in spans),
                        "state_error": state_error(drift.snapshots, place, number),
                    }
                status = "incorrect" if failed else "ok"
                made.append(self.record(arm, number, status, "; ".join(failed), **measured))
        return made

    def record(self, arm: PrecisionArm, number: int, status: str, message: str, **measured: Any) -> DriftRecord:
        """The record of an arm over a document; ``measured`` holds the fields that only a run knows."""
        document: dict[str, Any] = {"number": number}  # of a layer there is nothing else to tell
        if self.documents:
            document |= {"title": self.documents[number].title, "sha256": self.documents[number].sha256}
        return DriftRecord(
            group=self.group,
            experiment=self.case.experiment,
            case_hash=case_hash(self.case),
            arm=arm.name,
            arm_hash=self.hash,
            arms=self.names,
            reference=REFERENCE,
            documents=self.case.count,
            document=document,
            status=status,
            message=message,
            case=recorded(self.case),
            precision=dataclasses.asdict(arm.precision),
            interval_length=arm.interval_length,
            code=provenance.code() if measured else {},
            packages=provenance.packages(),
            device=self.device,
            environment=provenance.environment(),
            argv=provenance.command_line(self.argv),
            seeds={"rounding": self.case.seed},
            started_utc=self.started_utc,
            ended_utc=now_utc(),
            **measured,
        )


def traffic(geometry: Geometry, arm: PrecisionArm, inputs: str) -> dict[str, float]:
    """As `DriftRecord.traffic` says."""
    precision, elements = arm.precision, geometry.state_elements
    stored = {
        name: FORMATS[format].state_bytes(geometry) / elements if format else 0.0
        for name, format in (("update", precision.update), ("read", precision.read))
    }
    ring = Ring(precision.ring or inputs, precision.ring or "fp32", raw=precision.fold == "raw")
    cycle = replay(geometry, arm.interval_length, precision.update, precision.read, ring)
    return stored | {"step": rounded(cycle.per_step().total_bytes / elements)}


def state_error(snapshots: list[dict[str, Any]], arm: int, document: int) -> dict[str, Any]:
    """Of one arm over one document, by position, layer and head."""
    return {"positions": [snapshot["position"] for snapshot in snapshots]} | {
        copy: [[[rounded(e, 3) for e in heads] for heads in snapshot[copy][arm][document]] for snapshot in snapshots]
        for copy in ("update", "read")
    }


def rounded(number: float, digits: int = DIGITS) -> float:
    """To so many significant digits."""
    return float(f"{number:.{digits}g}")


def finished(folder: Path) -> set[tuple[str, str, str, str, str, int]]:
    """Resume keys of the records under ``folder`` that running again would not change."""
    found = set()
    for _, _, text in read_lines(folder):
        if text and is_drift(text):
            try:
                record = DriftRecord.from_json(text)
            except ValueError:
                continue
            if record.status in ("ok", "incorrect"):
                found.add(record.key)
    return found
