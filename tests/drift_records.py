"""One factory for synthetic drift records: KL that follows a power law of the position, by arm."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from experiments.measure.drift_record import Check, DriftRecord

REFERENCE, AGAIN, CONTROL = "shared_fp32@1", "shared_fp32@1/again", "shared_fp32"
LAWS = {"shared_nvfp4": (1e-3, 0.4), "dual_fp32_nvfp4": (1e-3, 0.0), "dual_fp32_nvfp4@4": (1e-3, 0.0)}
"""Arm -> (KL at the first position, power of the position)."""
PRECISIONS: dict[str, dict[str, Any]] = {
    "shared_nvfp4": {"update": "nvfp4", "read": None},
    "dual_fp32_nvfp4": {"update": "fp32", "read": "nvfp4"},
}


def drift_group(
    laws: Mapping[str, tuple[float, float]] = LAWS,
    *,
    group: str = "d1",
    documents: int = 4,
    tokens: int = 16384,
    noise: float = 1e-12,
    started: str = "2026-11-30T04:00:00+00:00",
    **case: Any,
) -> list[DriftRecord]:
    """All records of a group. Document i is off by i %, all arms alike; layers and heads too."""
    case = {
        **{"experiment": "pg19", "model": "tiny-qwen3.5", "weights": "models/tiny-qwen3.5", "weights_digest": "0" * 16},
        **{"family": "gdn", "documents": "books", "count": documents, "tokens": tokens, "interval_length": 16},
        **{"inputs": "fp32", "device": "cuda", "threads": 0, "seed": 0},
    } | case
    identity = {name: value for name, value in case.items() if name != "weights"}
    canonical = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    every = {REFERENCE: (0.0, 0.0), AGAIN: (0.0, 0.0), CONTROL: (noise, 0.0), **laws}
    edges = sorted({0, *(round(2 ** (i / 4)) for i in range(4 * tokens.bit_length())), tokens})
    edges = [edge for edge in edges if edge <= tokens]
    found = []
    for arm, (first, power) in every.items():
        for number in range(documents):
            size = first * (1 + number / 100)
            middles = [((a + b) / 2, b - a) for a, b in pairwise(edges)]
            found.append(
                DriftRecord(
                    group=group,
                    experiment="pg19",
                    case_hash=hashlib.sha256(canonical.encode()).hexdigest()[:16],
                    arm=arm,
                    arm_hash="a" * 16,
                    arms=tuple(every),
                    reference=REFERENCE,
                    documents=documents,
                    document={"number": number, "title": f"book {number}", "sha256": f"{number}" * 64},
                    status="ok",
                    message="",
                    case=case,
                    precision={"update": "fp32", "read": None, "stochastic": False, "ring": None, "fold": "d"}
                    | PRECISIONS.get(arm.split("@")[0], {}),
                    interval_length=int(arm.split("@")[1].split("/")[0]) if "@" in arm else 16,
                    code={"git_sha": "0" * 40, "dirty": False},
                    packages={"torch": "2.11.0"},
                    device={"name": "NVIDIA H200", "kind": "gpu"},
                    environment={},
                    argv=("experiments/pg19.py",),
                    seeds={"rounding": 0},
                    started_utc=started,
                    ended_utc=started,
                    edges=tuple(edges),
                    kl=tuple(size * middle**power * width for middle, width in middles),
                    nll=tuple(2.0 * width for _, width in middles),
                    agree=tuple(width for _, width in middles),
                    bytes=tuple(3 * width for _, width in middles),
                    state_error={"positions": [16, tokens]}
                    | {copy: [[[first, 2 * first]], [[3 * first, 4 * first]]] for copy in ("update", "read")},
                    traffic={"update": 4.0, "read": 0.0, "step": 4.5},
                    checks=(Check("noise", 0.0, 1.0),),
                    elapsed_s=1.0,
                )
            )
    return found
