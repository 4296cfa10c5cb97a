"""Records from what a run knows: the fields that all arms of a group share, and the record of a failure.

Standard library only, so that the process that watches a run can write its failures without importing torch.
"""

from __future__ import annotations

import dataclasses
import secrets
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from experiments.case import Case, Precision, Timing, WindowCase, case_hash
from experiments.decode_case import DecodeCase
from experiments.measure import provenance
from experiments.measure.record import Record
from experiments.measure.sources import arm_hash, arm_sources
from experiments.places import recorded
from experiments.speculative_case import SpeculativeCase
from replayssm.geometry import Geometry


def now_utc() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


@dataclass
class Group:
    """The arms of one case that are run together, in one process; made when the run starts."""

    case: Case
    arms: tuple[str, ...]
    replicate: int
    argv: tuple[str, ...]
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    started_utc: str = field(default_factory=now_utc)
    device: dict[str, Any] = field(default_factory=dict)
    """As told without torch, unless given."""
    state_before: dict[str, Any] = field(default_factory=dict)
    states: list[dict[str, Any]] = field(default_factory=list)
    """Of the device, after each timed round, where it can be asked while a case runs."""

    def __post_init__(self) -> None:
        self.device = self.device or provenance.device(self.case.device)
        self.state_before = self.state_before or provenance.state(self.case.device)

    def record(self, arm: str, status: str, message: str = "", **measured: Any) -> Record:
        """The record of ``arm``. ``measured`` holds the record's fields that only a run knows."""
        timing = dataclasses.asdict(self.case.timing)
        sources = arm_sources(arm, str(self.device["name"]), self.case.experiment)
        state = (self.case.device, self.state_before, provenance.state(self.case.device), self.states)
        return Record(
            group=self.id,
            experiment=self.case.experiment,
            case_hash=case_hash(self.case),
            arm=arm,
            arm_hash=arm_hash(arm, str(self.device["name"]), self.case.experiment),
            arms=self.arms,
            replicate=self.replicate,
            status=status,
            message=message,
            case=recorded(self.case),
            arm_config=measured.pop("arm_config", {}),
            code=provenance.code() | {"arm_sources": {path: digest[:16] for path, digest in sources.items()}},
            packages=provenance.packages(),
            device=self.device,
            device_state=provenance.state_during(*state),
            environment=provenance.environment(),
            argv=provenance.command_line(self.argv),
            seeds={"case": self.case.seed, "order": order_seed(self.case, self.replicate)},
            started_utc=self.started_utc,
            ended_utc=now_utc(),
            timing_asked=timing,
            **measured,
        )

    def failures(self, status: str, message: str) -> list[Record]:
        """The same failure for every arm."""
        return [self.record(arm, status, message) for arm in self.arms]


def case_from_dict(data: dict[str, Any]) -> Case:
    """The case of ``dataclasses.asdict``, as a job holds it, and a record but for `experiments.places`."""
    parts = {"geometry": Geometry, "precision": Precision, "timing": Timing}
    kinds = {"decode": DecodeCase, "speculative": SpeculativeCase, "window": WindowCase}
    kind = kinds.get(data["experiment"], Case)
    return kind(**{name: parts[name](**value) if name in parts else value for name, value in data.items()})


def order_seed(case: Case, replicate: int) -> int:
    """Seed of the order in which arms are timed: another for each replicate."""
    return case.seed * 1009 + replicate


def resume_keys(case: Case, arms: tuple[str, ...], replicate: int) -> set[tuple[str, str, str, str, str, int]]:
    """What `Record.key` will be for the arms of a group that has not run yet."""
    schema = next(f.default for f in dataclasses.fields(Record) if f.name == "schema")
    device = provenance.device(case.device)["name"]
    hashes = {arm: arm_hash(arm, str(device), case.experiment) for arm in arms}
    return {(schema, case_hash(case), arm, hashes[arm], device, replicate) for arm in arms}
