"""One layer stepped by many precision arms over the same random inputs, and how far each goes from the reference."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from experiments.inputs import make_inputs
from experiments.measure.drift import snapshot_positions, state_errors
from experiments.measure.drift_record import Check, DriftRecord
from experiments.measure.drift_result import Run, rounded, state_error, traffic
from experiments.pg19_case import CONTROL
from experiments.precisions import PrecisionArm
from replayssm.engine.aligned import AlignedArms
from replayssm.geometry import Geometry


class LayerDrift:
    """``output_error [arms,sequences,T]`` float64: squared relative errors of the outputs to the first arm's."""

    def __init__(
        self, geometry: Geometry, arms: Sequence[PrecisionArm], count: int, tokens: int, seed: int, device: str
    ) -> None:
        self.geometry, self.arms, self.count, self.tokens = geometry, list(arms), count, tokens
        self.inputs = make_inputs(geometry, count, tokens, dtype=torch.float32, seed=seed, device=device)
        pairs = [(arm.precision, arm.interval_length) for arm in arms]
        self.states = AlignedArms(geometry, pairs, layers=1, rows=count, seed=seed, device=device)
        self.output_error = torch.full((len(arms), count, tokens), torch.nan, dtype=torch.float64, device=device)
        self.wanted = snapshot_positions(tokens, self.states.period)
        self.snapshots: list[dict[str, Any]] = []
        self.elapsed_s = 0.0

    @torch.no_grad()
    def run(self) -> None:
        """All tokens of all sequences."""
        started = time.monotonic()
        out = torch.empty(
            self.states.slots, self.geometry.heads, self.geometry.head_dim, device=self.output_error.device
        )
        slots = torch.arange(self.states.slots, device=self.output_error.device)
        places = [self.states.rows_of(number) for number in range(len(self.arms))]
        for position, token in enumerate(self.inputs):
            self.states.step(0, out, repeated(token, len(self.arms)), slots)
            self.states.commit(slots)
            own = torch.stack([out[place] for place in places]).double().flatten(2)
            exact = own[:1]
            self.output_error[:, :, position] = (own - exact).square().sum(-1) / exact.square().sum(-1)
            if position + 1 in self.wanted:
                self.snapshots.append({"position": position + 1} | state_errors(self.states))
        self.elapsed_s += time.monotonic() - started

    def last_errors(self, arm: int) -> tuple[float, float]:
        """Of update and read copy at the last snapshot, means over sequences and heads."""
        update, read = (float(torch.tensor(self.snapshots[-1][copy][arm]).mean()) for copy in ("update", "read"))
        return update, read


def repeated(token: Any, times: int) -> Any:
    """Every row's inputs once an arm, arms after one another; A and D of Mamba-2 belong to the layer."""
    fields = zip(token._fields, token, strict=True)
    return type(token)(*(t if t is None or f in ("A", "D") else torch.cat([t] * times) for f, t in fields))


def records(run: Run, drift: LayerDrift, edges: list[int], noise: float) -> list[DriftRecord]:
    """One an arm and sequence; those that failed a check hold no numbers."""
    error = drift.output_error.cpu()
    control, made = run.names.index(CONTROL), []
    for number in range(drift.count):
        shared = [
            Check("error of the reference to itself", float(error[0, number].abs().max()), 0),
            Check("squared error of the reference run again", float(error[1, number].mean()), noise),
            Check("squared error of replay with a float32 state", float(error[control, number].mean()), noise),
        ]
        for place, arm in enumerate(drift.arms):
            expected = drift.tokens // arm.interval_length
            flushes = int((drift.states.flushes(place)[:, number] - expected).abs().sum())
            checks = [
                Check("positions without a finite number", int((~error[place, number].isfinite()).sum()), 0),
                Check("flushes too many or too few", flushes, 0),
                *shared,
            ]
            failed = [f"{c.name} {c.value:.3g} exceeds {c.limit:g}" for c in checks if not c.passed]
            moved = traffic(drift.geometry, arm, run.case.inputs)
            measured: dict[str, Any] = {"checks": tuple(checks), "traffic": moved}
            if not failed:
                sums = tuple(rounded(float(error[place, number, a:b].sum())) for a, b in pairwise(edges))
                measured |= {"edges": tuple(edges), "output_error": sums, "elapsed_s": round(drift.elapsed_s, 3)}
                measured["state_error"] = state_error(drift.snapshots, place, number)
            status = "incorrect" if failed else "ok"
            made.append(run.record(arm, number, status, "; ".join(failed), **measured))
    return made
