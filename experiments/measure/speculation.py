"""What a case of whole models has more where drafts are verified: models and prompts, and what its arms accepted."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch

from experiments.case import of_windows
from experiments.decode_case import RANDOM, DecodeCase, model_config
from experiments.inputs import DTYPES
from experiments.measure import devices
from experiments.measure.session import Session
from experiments.measure.window_session import WindowSession, WindowTrace, mismatch, noise
from experiments.prompts import prompts
from experiments.speculative_case import SpeculativeCase
from replayssm.engine import Memory
from replayssm.models import Decoder, load_model, random_model

STATE_BYTES = 100e9
"""Of which it is told how many requests' states they hold."""


@dataclass
class Opened:
    """The models of a case, and a prompt a row where tokens are not forced."""

    model: Decoder
    draft_model: Decoder | None = None
    prompts: list[list[int]] | None = None

    @classmethod
    def of(cls, case: DecodeCase) -> Opened:
        placed: dict[str, Any] = {"dtype": DTYPES[case.precision.inputs], "device": devices.of(case).tensors}
        if case.weights == RANDOM:
            return cls(random_model(model_config(case), seed=case.seed, **placed))
        model = load_model(case.weights, head=case.head, **placed)
        if not isinstance(case, SpeculativeCase) or case.forced:
            return cls(model)
        return cls(model, load_model(case.draft_weights, **placed) if case.draft_weights else None, prompts(case))

    def session(self, case: DecodeCase, arm: str, watched: set[int]) -> Session:
        if isinstance(case, SpeculativeCase) and of_windows(arm):
            return WindowSession(case, self.model, arm, watched, self.prompts, self.draft_model)
        return Session(case, self.model, arm, watched, self.prompts)


def match(arms: list[Any]) -> None:
    """The arms of windows must have accepted as many tokens in every step."""
    traced = [(arm, arm.trace) for arm in arms if isinstance(arm.trace, WindowTrace)]
    for arm, found in traced[1:]:
        first, other = traced[0]
        arm.off = first.off = noise(found, other)
        lead = torch.minimum(found.lead_of_step, other.lead_of_step)
        arm.rows_unmatched, fault = mismatch(found.accepted, other.accepted, lead, arm.off)
        if fault is not None:
            for each in (arm, first):
                each.fail("incorrect", f"acceptance of {arm.name} and {first.name}: {fault}")


def generated_as_traced(arm: Any, case: DecodeCase) -> str | None:
    """One more generation as they were timed, of windows: the fault if other numbers of tokens count than in the trace,
    or other flushes than follow from them."""
    session, trace = arm.session, arm.trace
    if not isinstance(session, WindowSession) or not isinstance(trace, WindowTrace):
        return None
    session.restart()
    session.run(case.interval_length + case.steps)
    arm.accepted = session.accepted.cpu()
    lead = torch.full_like(trace.lead_of_step, torch.inf) if case.forced else trace.lead_of_step
    rows, fault = mismatch(arm.accepted, trace.accepted, lead, arm.off)
    arm.rows_unmatched = max(arm.rows_unmatched, rows)
    return f"acceptance while timed and traced: {fault}" if fault else session.flush_fault


def speculation(arm: Any, case: SpeculativeCase, memory: Memory, step_ns: float) -> dict[str, Any]:
    """Tokens a step over what was timed, and by step; time of a row's token; bytes of a request, and how many fit."""
    fit = memory.requests_in(STATE_BYTES, case.batch_size)
    per_request = {"states": memory.states, "conv": memory.conv, "keys_values": memory.keys_values}
    found: dict[str, Any] = {
        "tokens_per_step": 1.0,
        "request_bytes": {name: total // case.batch_size for name, total in per_request.items()},
        "requests_in_100_gb_of_state": fit,
    }
    if arm.accepted is not None:
        timed = arm.accepted[case.interval_length :].double()
        found["tokens_per_step"] = float(timed.mean())
        found["tokens_by_step"] = [round(mean, 4) for mean in timed.mean(1).tolist()]
        counts = torch.bincount(arm.accepted[case.interval_length :].flatten(), minlength=case.window + 1)
        found["steps_by_tokens"] = counts[1:].tolist()
        found["accepted_digest"] = sha256(arm.accepted.to(torch.uint8).numpy().tobytes()).hexdigest()[:16]
        found["rows_unmatched"] = arm.rows_unmatched
    return found | {"token_ns": step_ns / found["tokens_per_step"]}
