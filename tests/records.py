"""One factory for synthetic records, built through the ``Record`` class so that they are what an experiment writes."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.measure.record import Comparison, Correctness, Record

ARMS = {"stored/torch": 1.4, "stored/cpu": 1.0, "replay/torch": 1.3, "replay/cpu": 0.8}
"""Time of each arm over that of ``stored/cpu``: replay/cpu is 1.25 times as fast, replay/torch slower."""
GEOMETRIES = {
    "nemotron_3_nano_4b": ("mamba2", 96, 8, 80, 128, 17792),
    "nemotron_3_super_120b": ("mamba2", 128, 8, 64, 128, 18944),
    "qwen3_5_4b": ("gdn", 32, 16, 128, 128, 12416),
    "qwen3_5_122b": ("gdn", 64, 16, 128, 128, 20736),
    "kimi_linear_48b": ("kda", 32, 32, 128, 128, 32768),
}
"""Model -> family, heads, groups, head_dim, state_dim, ring bytes of a token."""
CACHE_BYTES, COPIES, READ, RMW = 32 * 2**20, 12, 24e9, 22e9


def case(model: str = "nemotron_3_nano_4b", batch: int = 64, length: int = 16, **changes: Any) -> dict[str, Any]:
    """A resolved case as a record holds it; ``changes`` replace top-level fields."""
    family, heads, groups, head_dim, state_dim, _ = GEOMETRIES[model]
    geometry = {"family": family, "heads": heads, "groups": groups, "head_dim": head_dim, "state_dim": state_dim}
    timing = {"name": "default", "rounds": 20, "cycles_per_sample": 1, "cold_factor": 5.0, "replicates": 3}
    return {
        "experiment": "kernel",
        "model": model,
        "geometry": geometry,
        "batch_size": batch,
        "interval_length": length,
        "phase": "aligned",
        "precision": {"state": "fp32", "inputs": "bf16"},
        "device": "cpu",
        "threads": 2,
        "seed": 0,
        "timing": timing,
    } | changes


def case_hash(of: Mapping[str, Any]) -> str:
    """The hash of a case, from its canonical JSON, as ``experiments.case`` gives it."""
    left_out = ("replicates", "timeout_s", *(["phase_rounds"] if not of["timing"].get("phase_rounds") else []))
    timing = {k: v for k, v in of["timing"].items() if k not in left_out}
    canonical = json.dumps({**of, "timing": timing}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def traffic(of: Mapping[str, Any], arm: str) -> dict[str, float]:
    """Bytes and floor of a layer step, as ``replayssm.traffic`` counts them."""
    geometry, batch, length = of["geometry"], of["batch_size"], of["interval_length"]
    state = 4.0 * batch * geometry["heads"] * geometry["head_dim"] * geometry["state_dim"]
    ring = float(batch * GEOMETRIES[of["model"]][5])
    if arm.startswith("stored/"):
        moved = {"state_bytes_read": state, "state_bytes_written": state, "ring_bytes_read": 0, "ring_bytes_written": 0}
        return moved | {"flops": state, "rmw_bytes": 2 * state, "read_bytes": 0.0, "floor_ns": 2e9 * state / RMW}
    moved = {"state_bytes_read": state, "state_bytes_written": state / length}
    moved |= {"ring_bytes_read": ring * (length - 1) / 2, "ring_bytes_written": ring * (length - 1) / length}
    flush = (2 * state + ring * (length - 1)) / length
    read = sum(moved.values()) - flush
    floor = 1e9 * (read / READ + flush / RMW)
    return moved | {"flops": 2 * state, "rmw_bytes": flush, "read_bytes": read, "floor_ns": floor}


def check(moment: str, error: float = 1e-6, **changes: Any) -> Correctness:
    """A passed correctness block; ``changes`` replace its fields."""
    comparisons = tuple(Comparison(name, error, 4e-6) for name in ("outputs", "state", "ring"))
    block = Correctness(moment, comparisons, (0, 1), (0,), True, COPIES, COPIES, COPIES, COPIES)
    return dataclasses.replace(block, **changes)


def group(
    of: Mapping[str, Any] | None = None,
    *,
    arms: Mapping[str, float] = ARMS,
    replicate: int = 0,
    noise: float = 0.01,
    process_noise: float = 0.0,
    aa_bias: float = 1.0,
    aa_arm: str = "stored/cpu",
    failed: Mapping[str, str] | None = None,
    name: str = "",
    seed: int = 0,
    started: str = "2026-11-29T10:00:00Z",
    step_ns: float | None = None,
    **changes: Any,
) -> list[Record]:
    """The records of one process. ``noise`` is the log standard deviation of a sample, ``process_noise`` of an arm.

    ``failed`` maps arms to a status other than ok; ``changes`` replace fields of every record.
    """
    of = case() if of is None else of
    text = json.dumps(of, sort_keys=True)
    name = name or hashlib.sha256(f"{text}{replicate}{seed}{started}{sorted(arms)}".encode()).hexdigest()[:12]
    random = np.random.default_rng(int(hashlib.sha256(f"{name}{seed}".encode()).hexdigest()[:12], 16))
    steps = of["interval_length"] * COPIES
    base = step_ns or 1.3 * traffic(of, "stored/cpu")["floor_ns"]
    drift = random.normal(0, 0.05, of["timing"]["rounds"])  # shared by the arms of a round: pairing has to cancel it
    records = []
    for arm, factor in arms.items():
        level = math.log(base * factor * steps) + random.normal(0, process_noise)
        samples, again = ([(int(math.exp(level + d + random.normal(0, noise))),) for d in drift] for _ in range(2))
        fields = {"group": name, "arm": arm, "arms": tuple(arms), "replicate": replicate}
        fields |= {"started_utc": started, "ended_utc": started} | _what_was_run(of, arm)
        status = (failed or {}).get(arm, "ok")
        if status == "ok":
            twice = tuple((int(a * aa_bias),) for (a,) in again) if arm == aa_arm else ()
            fields |= {"samples_ns": tuple(samples), "again_samples_ns": twice, "layer_steps_per_sample": steps}
            fields |= {"status": "ok", "message": "", "correctness": (check("before"), check("after"))}
        else:
            fields |= {"status": status, "message": f"the arm ended with {status}"}
        records.append(Record(**fields | changes))
    return records


def sweep() -> list[list[Record]]:
    """Two models, three batch sizes and lengths, one failed cell, two processes."""
    groups = []
    for replicate in range(2):
        for batch, length in ((1, 16), (64, 16), (64, 4), (64, 1)):
            groups.append(group(case(batch=batch, length=length), replicate=replicate, seed=replicate))
        failed = {"replay/torch": "oom"}
        groups.append(group(case("qwen3_5_4b"), replicate=replicate, seed=replicate, failed=failed))
    return groups


GPU = {"name": "NVIDIA H200", "kind": "gpu", "memory_bytes": 140 * 2**30, "last_level_cache_bytes": CACHE_BYTES}
GPU |= {"driver": "580.1", "multiprocessors": 132, "compute_capability": "9.0", "host": {"cores": 16}}
GPU_ARMS = {
    "stored/triton": 1.05,
    "stored/vllm": 1.2,
    "stored/vllm-tuned": 1.0,
    "replay/triton": 0.5,
    "replay/vllm": 0.6,
}


def gpu_group(
    model: str = "qwen3_5_4b", batch: int = 256, state: str = "fp32", phased: bool = False, **options: Any
) -> list[Record]:
    """The records of one process on a GPU; with ``phased`` they hold times by ring length too."""
    precision = {"state": state, "inputs": "bf16"}
    of = case(model, batch, device="cuda", threads=0, precision=precision, **options.pop("fields", {}))
    told = {"aa_arm": "stored/triton", "device": dict(GPU), "device_state": {"throttled": False, "rounds": {}}}
    found = group(of, **({"arms": GPU_ARMS} | told | options))
    lengths = {r.arm: of["interval_length"] if r.arm.startswith("replay/") else 1 for r in found}
    times = {arm: tuple((COPIES * (1000 + 10 * p),) * 2 for p in range(n)) for arm, n in lengths.items()}
    return [dataclasses.replace(r, phase_samples_ns=times[r.arm]) for r in found] if phased else found


MODEL_ARMS, MODEL_STEPS = {"stored/triton": 1.0, "replay/triton": 1 / 1.4}, 64


def decode_group(model: str = "nemotron_3_nano_4b", batch: int = 256, **changes: Any) -> list[Record]:
    """The records of one process; replay takes 1 / 1.4 of the time, of which the states are half and more."""
    fields = {"weights": "random", "context": 16, "blocks": 0, "steps": MODEL_STEPS} | changes.pop("fields", {})
    of = case(model, batch, experiment="decode", device="cuda", threads=0, **fields)
    options: dict[str, Any] = {"arms": MODEL_ARMS, "aa_arm": "stored/triton", "device": dict(GPU), "step_ns": 1e7 / 48}
    made = group(of, experiment="decode", **(options | changes))
    return [_of_a_model(record) for record in made]


DRAFT_ARMS = {"replay/triton": 0.5, "snapshots/triton": 2.0, "verify/triton": 1.0}


def speculative_group(
    model: str = "nemotron_3_nano_4b", batch: int = 256, window: int = 4, **changes: Any
) -> list[Record]:
    """The records of one process; replay with drafts takes half of the time of snapshots at 3.2 tokens a step."""
    fields = {"weights": "random", "context": 16, "blocks": 0, "steps": MODEL_STEPS, "window": window}
    fields |= {"drafter": "controlled", "acceptance": 0.8528, "prompts": ""} | changes.pop("fields", {})
    of = case(model, batch, experiment="speculative", device="cuda", threads=0, **fields)
    options: dict[str, Any] = {
        "arms": DRAFT_ARMS,
        "aa_arm": "snapshots/triton",
        "device": dict(GPU),
        "step_ns": 1e7 / 48,
    }
    found = []
    for record in group(of, experiment="speculative", **(options | changes)):
        record = _of_a_model(record)
        drafts = record.arm.startswith(("snapshots/", "verify/"))
        held = {"snapshots": 40 * window, "verify": 44, "replay": 43}[record.arm.split("/")[0]] * 2**20
        told: dict[str, Any] = {"tokens_per_step": 3.2 if drafts else 1.0, "token_ns": 1.0}
        told |= {"request_bytes": {"states": held, "conv": 2**20, "keys_values": 2**20}}
        told["requests_in_100_gb_of_state"] = int(100e9 // (held + 2**20))
        if drafts:
            told |= {
                "accepted_digest": "0123456789abcdef",
                "rows_unmatched": 0,
                "steps_by_tokens": [10, 10, 10, 70][:window],
            }
        found.append(dataclasses.replace(record, decode=record.decode | told) if record.status == "ok" else record)
    return found


def _of_a_model(record: Record) -> Record:
    if record.status != "ok":
        return record
    found: dict[str, Any] = {
        "generations_ns": [[1000, 1000 + ns] for (ns,) in record.samples_ns],
        "memory": {"weights": 8 * 10**9},
        "state_share": 0.75 if record.arm.startswith("stored/") else 0.5,
    }
    if record.arm.startswith("replay/"):
        length = {"min": 5, "median": 64.0}
        drift = {"mean": 0.001, "max": 0.01}
        found["agreement"] = {"rows_that_differ": 3, "agreement_length": length, "logprob_drift": drift}
    else:
        found |= {"products_ns": [3_000_000, 2_000_000, 2_500_000], "bytes_between": 2**30}
    changes: dict[str, Any] = {"layer_steps_per_sample": MODEL_STEPS, "decode": found, "traffic": {}}
    changes["bandwidth"] = {"read": {"kernel": "torch.sum", "bytes_per_s": 2.0**42}} if "products_ns" in found else {}
    return dataclasses.replace(record, group_peak_memory_bytes=60 * 2**30, **changes)


def _what_was_run(of: Mapping[str, Any], arm: str) -> dict[str, Any]:
    """Fields that do not depend on how the process went."""
    device = {"name": "Test CPU", "kind": "cpu", "cores": 2, "memory_bytes": 24 * 2**30}
    used = {"copies": COPIES, "rotated_bytes": 6 * CACHE_BYTES, "last_level_cache_bytes": CACHE_BYTES}
    used |= {"warmup_rounds": 4, "warmup_settled": True, "cycles_per_sample": 1}
    bandwidth = {"read": {"kernel": "torch.sum", "bytes_per_s": READ}}
    return {
        "experiment": "kernel",
        "case_hash": case_hash(of),
        "arm_hash": hashlib.sha256(arm.encode()).hexdigest()[:16],
        "case": dict(of),
        "arm_config": {},
        "code": {"git_sha": "0123456789abcdef", "dirty": False},
        "packages": {"numpy": "2.4.0", "torch": "2.13.0"},
        "device": device | {"last_level_cache_bytes": CACHE_BYTES},
        "device_state": {"throttled": False, "load_average": [0.1, 0.1, 0.1]},
        "environment": {},
        "argv": ("experiments.kernel",),
        "seeds": {"case": 0},
        "timing_asked": dict(of["timing"]),
        "timing_used": used | {"interval_length": of["interval_length"]},
        "traffic": traffic(of, arm),
        "bandwidth": bandwidth | {"read_modify_write": {"kernel": "torch.add_", "bytes_per_s": RMW}},
    }


def write(folder: Path, *groups: Sequence[Any], name: str = "records") -> Path:
    """The groups as one JSONL file in ``folder``, which is created; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [record.to_json() + "\n" for records in groups for record in records]
    (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder
