"""Records of accuracy as the experiment writes them, their answers made up."""

from __future__ import annotations

from typing import Any

from experiments.measure.accuracy_record import AccuracyRecord, Answers

ITEMS, PASSAGES = 2000, 100


def record(
    arm: str, wrong: int, *, at: int = 0, case: str = "c0", model: str = "tiny-nemotron-h", **more: Any
) -> AccuracyRecord:
    """``wrong`` items in a row are wrong, from item ``at`` on; 20 items a passage, distances of 1 to 200 intervals."""
    correct = "1" * at + "0" * wrong + "1" * (ITEMS - at - wrong)
    answers = Answers(
        task="replayssm_recall",
        metric="acc",
        filter="none",
        version="1.0",
        digest="d0",
        correct=(correct,),
        group=tuple(n * PASSAGES // ITEMS for n in range(ITEMS)),
        distance=tuple(16 + 3200 * n // ITEMS for n in range(ITEMS)),
    )
    values: dict[str, Any] = {
        "case_hash": case,
        "arm": arm,
        "arm_hash": "a0",
        "status": "ok",
        "message": "",
        "case": {"model": model, "interval_length": 16, "task": {"name": "recall", "prefill": 0}},
        "arm_config": {"update": "fp32", "read": None, "stochastic": False, "interval_length": 16},
        "code": {},
        "packages": {},
        "device": {"name": "A CPU", "kind": "cpu", "cores": 2},
        "environment": {},
        "argv": (),
        "seeds": {},
        "started_utc": "2026-01-01T00:00:00+00:00",
        "ended_utc": "2026-01-01T00:01:00+00:00",
        "answers": (answers,),
    }
    return AccuracyRecord(**values | more)


GRID = [
    record("shared_fp32", 100),
    record("dual_fp16_sr_nvfp4", 110),
    record("shared_nvfp4", 300),
    record("damaged", 1900),
]
