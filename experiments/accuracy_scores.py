"""Teacher-forced scores of the arms of one case: all arms at once where that can be, else one after the other."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from experiments.accuracy_arms import Arm
from experiments.accuracy_case import DAMAGED
from experiments.forced import Asked, Score, Work, score

TOGETHER = "replay/torch"
"""The engine's arm whose steps `experiments.forced_together` takes."""


class Scorer:
    """``rows`` sequences at a time, of all ``arms`` together; ``prefill`` as in `experiments.forced.score`. Scores of
    all arms are kept in ``file`` batch by batch, where ``identity`` tells what they depend on besides arms and text."""

    def __init__(
        self, arms: Sequence[Arm], *, rows: int, prefill: int | None, file: Path | None = None, identity: str = ""
    ) -> None:
        self.arms, self.rows, self.prefill = {arm.name: arm for arm in arms}, rows, prefill
        self.file, self.identity = file, identity
        self._known: dict[str, tuple[dict[str, list[Score]], Work]] = {}

    def score(self, arm: Arm, asked: Sequence[Asked], work: Work) -> list[Score]:
        """A `Score` for each of ``asked``; adds to ``work`` what was decoded for the arm."""
        if self.prefill != 0 or arm.engine != TOGETHER:
            return score(
                arm.model,
                arm.engine,
                asked,
                arm.new_cache,
                rows=self.rows,
                work=work,
                prefill=self.prefill,
                damaged=arm.damaged,
            )
        key = hashlib.sha256(repr([(tuple(a.tokens), a.first) for a in asked]).encode()).hexdigest()
        if key not in self._known:
            self._known[key] = self._together(arm, asked, key)
        scores, done = self._known[key]
        work.decoded += done.decoded
        return scores[arm.name]

    def _together(self, arm: Arm, asked: Sequence[Asked], key: str) -> tuple[dict[str, list[Score]], Work]:
        from experiments.forced_together import Saved, score_together

        work, arms = Work(), {name: each.precision for name, each in self.arms.items()}
        saved = None if self.file is None else Saved(self.file, f"{self.identity} {sorted(arms)} {key}")
        rows = max(1, self.rows // len(arms))
        given = {"rows": rows, "work": work, "damaged": DAMAGED, "seed": arm.seed, "saved": saved}
        return score_together(arm.model, arms, asked, **given), work
