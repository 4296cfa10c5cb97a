"""One arm of a speculative case, ready to generate: a `Session` whose step drafts, verifies, accepts and commits.

How many tokens of each window counted is logged on the device, step by step, since the last restart. From that log
follow the cursors and the flushes that the protocol asks for, and it must be the same for all arms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from experiments.measure.session import Session
from experiments.measure.session_gates import Trace
from experiments.speculative_case import CONTROLLED, DRAFT_MODEL, SpeculativeCase
from replayssm.engine import Step, WindowStep, new_drafter
from replayssm.engine.drafters import Controlled, Drafter, Drafts, acceptances, likeliest, mean_accepted
from replayssm.engine.sampling import greedy
from replayssm.models import Decoder, ReplayStates
from replayssm.models.windows import SnapshotStates


@dataclass
class WindowInputs:
    """What a layer got of a window, with a T axis, and how many tokens ``accepted [R]`` counted in the end."""

    window: Any
    accepted: Tensor


class WindowSession(Session):
    """``draft_model`` is that of the case's ``draft_weights``."""

    case: SpeculativeCase

    def __init__(
        self,
        case: SpeculativeCase,
        model: Decoder,
        arm: str,
        watched: set[int],
        prompts: list[list[int]] | None = None,
        draft_model: Decoder | None = None,
    ) -> None:
        self.window, self.draft_model = case.window, draft_model
        super().__init__(case, model, arm, watched, prompts)

    def restart(self) -> None:
        super().restart()
        for tensor, kept in zip(self.drafter.kept(), self._drafter_kept, strict=True):
            tensor.copy_(kept)
        self.at.zero_()
        self._flushes_before = super().flushes.clone()

    @property
    def accepted(self) -> Tensor:
        """``[steps,B]`` int64 since the last restart."""
        return self.log[: int(self.at)].long()

    def protocol(self) -> tuple[Tensor, Tensor]:
        """Cursor ``[B]`` and flushes ``[B]`` that the log asks for."""
        cursor = torch.zeros_like(self.rows)
        flushes = torch.zeros_like(cursor)
        room = self.case.interval_length - self.case.window
        for count in self.accepted:
            due = cursor > room
            flushes += due
            cursor = torch.where(due, 0, cursor) + count
        return cursor, flushes

    def inputs(self, number: int, rows: Tensor) -> tuple[Any, Any]:
        accepted = self.accepted[-1, rows]
        exact, honest = super().inputs(number, rows)
        return WindowInputs(exact, accepted), WindowInputs(honest, accepted)

    def through(self, state: Tensor, inputs: Any, stored: torch.dtype | None) -> tuple[Tensor, Tensor]:
        """Outputs ``[R,T,H,P]``, and the state behind the tokens that counted."""
        outputs, states, window = [], [state], inputs.window
        for t in range(self.case.window):
            fields = zip(window._fields, window, strict=True)
            token = type(window)(*(x if x is None or f in ("A", "D") else x[:, t] for f, x in fields))
            y, after = super().through(states[-1], token, stored)
            outputs.append(y)
            states.append(after)
        rows = torch.arange(len(state), device=state.device)
        return torch.stack(outputs, 1), torch.stack(states)[inputs.accepted, rows]

    def state(self, number: int, rows: Tensor) -> Tensor:
        if isinstance(self.states, SnapshotStates):
            return self.states.state[number][rows, self.states.accepted[rows] - 1].double()
        return super().state(number, rows)

    def marks(self) -> Tensor:
        if isinstance(self.states, SnapshotStates):
            return self.states.state[:, self.rows, self.states.accepted - 1, :, 0, 0]
        return super().marks()

    @property
    def flushes(self) -> Tensor:
        """``[layers,B]`` since the last restart."""
        return super().flushes.to(self.rows.device) - self._flushes_before

    @property
    def uneven_flushes(self) -> int:
        """Between the layers of a row."""
        return int((self.flushes.amax(0) - self.flushes.amin(0)).max())

    @property
    def flushes_expected(self) -> int:
        return int(self.protocol()[1].sum()) * self.states.layers if self._replays else 0

    @property
    def cursor(self) -> Tensor:
        return self.states.cache.cursor if isinstance(self.states, ReplayStates) else self.states.accepted

    @property
    def held(self) -> Tensor:
        return self.protocol()[0] if self._replays else self.accepted[-1]

    @property
    def stored(self) -> Tensor:
        return self.states.state if isinstance(self.states, SnapshotStates) else super().stored

    @property
    def flush_fault(self) -> str | None:
        """What the flushes since the last restart should have been and were not."""
        counted, expected = int(self.flushes.sum()), self.flushes_expected
        return None if counted == expected else f"{counted} flushes of a generation counted, {expected} expected"

    @property
    def _replays(self) -> bool:
        return isinstance(self.states, ReplayStates)

    @property
    def _most_ahead(self) -> int:
        return 0

    def _new_step(self) -> Step:
        case, device = self.case, self.rows.device
        steps = case.steps + 5 * case.interval_length
        self.log = torch.zeros(steps, case.batch_size, dtype=torch.int8, device=device)
        self.at = torch.zeros(1, dtype=torch.int64, device=device)
        self.drafter = self._new_drafter(steps)
        self._drafter_kept = [tensor.clone() for tensor in self.drafter.kept()]
        self._alone = torch.full_like(self.rows, round(mean_accepted(case.window, case.acceptance)))
        placed = (self.model, self.cache, self.arm, self.tokens, self.slots)
        return WindowStep(*placed, self.drafter, self._accept)

    def _new_drafter(self, steps: int) -> Drafter:
        case = self.case
        if case.drafter == CONTROLLED:
            pattern = acceptances(steps, case.batch_size, case.window, case.acceptance, case.seed)
            return Controlled(self.cache, self.stream, pattern.to(self.rows.device))
        drafts = self.draft_model if case.drafter == DRAFT_MODEL else None
        return new_drafter(case.drafter, self.model, self.cache, self.arm, drafts, case.interval_length)

    def _accept(self, logits: Tensor, drafts: Drafts) -> tuple[Tensor, Tensor]:
        if isinstance(self.drafter, Controlled):
            chosen, accepted = self.drafter.verify(logits, drafts)
        else:
            chosen, accepted = greedy(logits, drafts.tokens)
        self.log.index_copy_(0, self.at, accepted.to(torch.int8)[None])
        self.at += (self.slots >= 0).any()  # not of a step of padding, with which a graph begins
        return chosen, accepted

    def _commit(self) -> None:
        self.states.commit(self.slots, self._alone)

    def _behind_prompts(self, read: int) -> Tensor:
        if isinstance(self.states, SnapshotStates):
            return self.states.state[:, :read, 0].clone()
        return super()._behind_prompts(read)

    def _follow(self, tokens: Tensor) -> Any:
        return self.drafter.follow(tokens)

    def _begun(self, tokens: Tensor, lengths: list[int]) -> None:
        if len(lengths) == len(self.rows):
            self.drafter.start(self.rows.tolist(), tokens, lengths, self._first)
        self._drafter_kept = [tensor.clone() for tensor in self.drafter.kept()]


@dataclass
class WindowTrace(Trace):
    """As `Trace`, of the tokens that counted, from those on that rows without speculation begin with. ``accepted
    [steps,B]``; ``lead_of_step [steps,B]``, the smallest lead of what decided it, a token of the model or a draft."""

    accepted: Tensor
    lead_of_step: Tensor


def window_trace(session: WindowSession, steps: int) -> WindowTrace:
    """Restarts the session and runs ``steps`` steps, launch by launch, since the leads of drafts are looked at."""
    session.restart()
    drafted: list[Tensor] = []
    step: Any = session.step

    def choose(logits: Tensor, ahead: int) -> tuple[Tensor, Tensor | None]:
        best = logits.float().topk(2, dim=-1).values
        drafted.append(best[:, 0] - best[:, 1])
        return likeliest(logits, ahead)

    rows: list[list[tuple[Tensor, Tensor, Tensor]]] = [[] for _ in session.rows]
    leads = []
    step.choose_draft = choose
    with session.launch_by_launch(set()):
        for _ in range(steps):
            drafted.clear()
            session.run_eagerly()
            logits, counted = step.logits.float(), step.counted.cpu()
            best = logits.topk(2, dim=-1)
            lead = best.values[..., 0] - best.values[..., 1]
            logprob = logits.gather(2, step.chosen[..., None])[..., 0] - logits.logsumexp(-1)
            parts = best.indices[..., 0].cpu(), lead.cpu(), logprob.cpu()
            counts = torch.arange(session.case.window) < counted[:, None]
            smallest = torch.where(counts, parts[1], torch.inf).amin(1)
            if drafted:  # drafts that were accepted, and the one that was not
                of_drafts = torch.stack(drafted, dim=1).cpu()
                of_drafts = torch.where(counts[:, : of_drafts.shape[1]], of_drafts, torch.inf)
                smallest = torch.minimum(smallest, of_drafts.amin(1))
            leads.append(smallest)
            for row, count in enumerate(counted.tolist()):
                rows[row].append(tuple(part[row, :count] for part in parts))  # type: ignore[arg-type]
    step.choose_draft = likeliest
    joined = [[torch.cat(part) for part in zip(*row, strict=True)] for row in rows]
    skipped = session.offsets.tolist()
    length = min(len(row[0]) - skip for row, skip in zip(joined, skipped, strict=True))
    made = [
        torch.stack([row[n][skip : skip + length] for row, skip in zip(joined, skipped, strict=True)], dim=1)
        for n in range(3)
    ]
    if not made[2].isfinite().all():
        raise RuntimeError("logits are not finite")
    return WindowTrace(*made, accepted=session.accepted.cpu(), lead_of_step=torch.stack(leads))


def noise(own: WindowTrace, other: WindowTrace) -> float:
    """What two arms are off by as long as they agree, in log-probabilities and in leads, of tokens and of whole steps,
    drafts included. Logits in bfloat16 lie 0.125 apart from 16 on, which leads show and a likely token's
    log-probability does not.
    """
    tokens, steps = min(len(own.likeliest), len(other.likeliest)), min(len(own.accepted), len(other.accepted))
    same = (own.likeliest[:tokens] == other.likeliest[:tokens]).int().cumprod(0).bool()
    alike = (own.accepted[:steps] == other.accepted[:steps]).int().cumprod(0).bool()
    off = [
        (own.logprob[:tokens] - other.logprob[:tokens])[same],
        (own.lead[:tokens] - other.lead[:tokens])[same],
        (own.lead_of_step[:steps] - other.lead_of_step[:steps])[alike],
    ]
    return max((float(part.abs().max()) for part in off if part.numel()), default=0.0)


def mismatch(own: Tensor, other: Tensor, lead: Tensor, off: float) -> tuple[int, str | None]:
    """In how many rows ``own`` and ``other [steps,B]`` accept otherwise, and what of it no near tie explains: in the
    first such step of a row the smallest ``lead [steps,B]`` of what decided must be at most twice what arms are
    ``off`` by."""
    steps = min(len(own), len(other), len(lead))
    differs = own[:steps] != other[:steps]
    rows = differs.any(0).nonzero()[:, 0]
    if not len(rows):
        return 0, None
    first = differs.int().argmax(0)[rows]
    leads = lead[first, rows]
    worst = int(leads.argmax())
    if float(leads[worst]) <= 2 * off:
        return len(rows), None
    row, step = int(rows[worst]), int(first[worst])
    told = f"row {row} accepts {int(own[step, row])} tokens, not {int(other[step, row])}, in step {step} at a lead of"
    return len(rows), f"{told} {float(leads[worst]):.3g}, above {2 * off:.3g}"
