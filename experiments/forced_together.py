"""Teacher forcing as in `experiments.forced`, with all arms as rows of one batch: what is alike is done once.

Possible where no prompt is read at once: then all rows stand at the same token, and arms differ in nothing but the
copies of their states (`replayssm.engine.aligned`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from experiments.forced import Asked, Row, Score, Scores, Work, fed, merged, wanted_at
from experiments.precisions import PrecisionArm
from replayssm.engine.aligned import AlignedArms, aligned_decoding
from replayssm.models import Decoder


@dataclass(frozen=True)
class Saved:
    """A file of the scores so far, so that a run that was ended goes on behind its last batch. ``identity`` tells
    everything that the scores depend on; a file of another one counts as none."""

    path: Path
    identity: str

    def load(self, found: Mapping[str, Scores]) -> int:
        """Fill in the scores; returns how many rows they are of."""
        if not self.path.is_file():
            return 0
        with np.load(self.path) as data:
            if str(data["identity"]) != self.identity:
                return 0
            for name, scores in found.items():
                scores.logprobs, scores.greedy = data[f"{name} logprobs"], data[f"{name} greedy"]
            return int(data["done"])

    def save(self, done: int, found: Mapping[str, Scores]) -> None:
        """Write the scores of the first ``done`` rows, whole or not at all."""
        parts = {f"{name} logprobs": scores.logprobs for name, scores in found.items()}
        parts |= {f"{name} greedy": scores.greedy for name, scores in found.items()}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_suffix(f".{os.getpid()}.npz")
        np.savez(unfinished, identity=self.identity, done=done, **parts)
        os.replace(unfinished, self.path)


def score_together(
    model: Decoder,
    arms: Mapping[str, PrecisionArm],
    asked: Sequence[Asked],
    *,
    rows: int,
    work: Work,
    damaged: str,
    seed: int,
    saved: Saved | None = None,
) -> dict[str, list[Score]]:
    """By arm a `Score` for each of ``asked``, ``rows`` sequences of each arm at a time; the arm named ``damaged``
    forgets its states at the end of the first prompt of each sequence. ``work`` counts for one arm. With ``saved`` each
    batch is kept, and those that were are not run again."""
    every, found = merged(asked), {name: Scores(len(asked)) for name in arms}
    done = saved.load(found) if saved else 0
    for start in range(done, len(every), rows):
        batch = every[start : start + rows]
        _run(model, arms, batch, found, damaged, seed)
        if saved:
            saved.save(start + len(batch), found)
    work.decoded += sum(len(row.tokens) for row in every)
    return {name: scores.list() for name, scores in found.items()}


@torch.no_grad()
def _run(
    model: Decoder,
    arms: Mapping[str, PrecisionArm],
    rows: list[Row],
    found: Mapping[str, Scores],
    damaged: str,
    seed: int,
) -> None:
    device, length = model.embedding.device, len(rows[0].tokens)
    states = AlignedArms(
        model.geometry,
        [(arm.precision, arm.interval_length) for arm in arms.values()],
        layers=model.state_layers,
        rows=len(rows),
        input_dtype=model.embedding.dtype,
        seed=seed,
        device=device,
    )
    cache = model.new_cache(states, slots=states.slots, capacity=length)
    places = {name: states.rows_of(number) for number, name in enumerate(arms)}
    first = np.array([row.first for row in rows])
    for position in range(length):
        at = np.full(len(rows), position)
        if damaged in places and (due := np.flatnonzero(first == position)).size:
            forget(states, (places[damaged].start + due).tolist())
        tokens = torch.tensor(fed(rows, at), device=device).repeat(len(arms))
        past = aligned_decoding(cache, cache.all_slots, position + 1)
        hidden = model.hidden(tokens[:, None], past)[:, 0]
        past.finish()
        if wanted := wanted_at(rows, at):
            asking = sorted({row for row, *_ in wanted})
            place = [(asking.index(row), *pair) for row, *pair in wanted]
            for name, scores in found.items():
                scores.add(model.logits(hidden[places[name]][asking]), place)


def forget(states: AlignedArms, rows: list[int]) -> None:
    """Empty states and rings of some rows, whose arm keeps its states in float32 alone."""
    for cohort in states.cohorts:
        own = [row - cohort.rows.start for row in rows if cohort.rows.start <= row < cohort.rows.stop]
        for tensor in (cohort.cache.state, *cohort.cache.ring.values()):
            tensor[:, own] = 0
