"""Long-document drift: how far precisions of the state move a model's predictions, by position in a document.

    python -m experiments.pg19
    python -m experiments.pg19 -m model=tiny_qwen3_5,tiny_nemotron_h
    python -m experiments.pg19 device=cuda model=tiny_qwen3_5 count=8 tokens=131072 checkpoint_tokens=65536
    python -m experiments.pg19 'arms=[shared_nvfp4@1,shared_nvfp4@4,dual_fp32_nvfp4,raw_fp32_nvfp4]'
    python -m experiments.pg19 model.path=FOLDER documents=/data/pg19 inputs=bf16

Documents are read token by token, forced on their own text, by all arms at once: rows of one batch, each with its own
states and caches. The reference is the stored float32 recurrence; it runs twice (A/A), and replay with a float32 state
runs as a control, whose divergence is the noise floor. Recorded are, by bucket of positions and document, KL(reference
|| arm) over the whole vocabulary, agreement of the likeliest token, negative log-likelihood, and the error of the
states themselves by layer and head. A run saves itself every checkpoint_tokens; the same command goes on from there,
also in the middle of a document, and ends with the same numbers bit for bit.
"""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path
from typing import Any

from experiments.app import run
from experiments.pg19_case import ROOT, DriftCase, arms_from_config, case_from_config, case_hash
from experiments.tracking.mirror import Mirror
from experiments.tracking.options import tracker_from_config

os.environ.setdefault("MKL_CBWR", "AUTO")  # read at MKL's first call: what it adds first else depends on earlier calls
NOISE = {"fp32": 1e-8, "bf16": 1e-2}
"""Most mean KL in nats that the control and the second reference may have, by the format of activations."""
PROMPT_NATS = 0.02
"""Most mean difference of the reference's log-likelihoods to those of a prompt read in chunks."""
BUCKETS_PER_OCTAVE = 8


def main(config: dict[str, Any]) -> int:
    """Run one case, or with ``dry_run`` print it. Returns 1 if an arm was wrong or failed."""
    from experiments.measure import nvidia

    case = case_from_config(config)
    arms = arms_from_config(config, case)
    if config["dry_run"]:
        print(f"{case_hash(case)}  {label(case)}: {len(arms)} arms, {needed_bytes(case, len(arms)) / 2**30:.2f} GiB")
        return 0
    nvidia.refuse_without(case.device)
    folder = Path(config["records"]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    mirror = Mirror(tracker_from_config(config), folder, sys.argv)
    return measure(case, arms, folder, config["checkpoint_tokens"], config["repeat"], mirror)


def label(case: DriftCase) -> str:
    """The case in a few words."""
    return (
        f"{case.model}, {case.count} x {case.tokens:,} tokens of {Path(case.documents).name}, "
        f"L {case.interval_length}, {case.inputs} on {case.device}"
    )


def edges(tokens: int) -> list[int]:
    """Bounds of the position buckets: eight an octave, powers of two among them."""
    found = {round(2 ** (i / BUCKETS_PER_OCTAVE)) for i in range(BUCKETS_PER_OCTAVE * tokens.bit_length())}
    return sorted({0, *(edge for edge in found if edge < tokens), tokens})


def needed_bytes(case: DriftCase, arms: int) -> int:
    """Of weights, keys and values, convolutions, states and results; what a step needs on the way is small beside."""
    from experiments.inputs import DTYPES
    from replayssm.models import config_from_folder, empty_model

    model = empty_model(config_from_folder(ROOT / case.weights), DTYPES[case.inputs], "meta")
    layers, heads, size = model.attention
    element, rows, g = DTYPES[case.inputs].itemsize, case.count * arms, model.geometry
    keys_values = 2 * layers * heads * size * case.tokens * element
    states = model.state_layers * (3 * 4 * g.state_elements + model.conv[0] * model.conv[1] * element)
    return sum(p.nbytes for p in model.parameters()) + rows * (keys_values + states + 9 * case.tokens)


def measure(
    case: DriftCase, arms: tuple[Any, ...], folder: Path, checkpoint_tokens: int, repeat: bool, mirror: Mirror
) -> int:
    """Run what ``folder`` lacks; returns 1 if an arm was wrong or failed."""
    import torch

    from experiments import documents
    from experiments.inputs import DTYPES
    from experiments.measure import devices
    from experiments.measure.drift import Drift
    from experiments.measure.drift_result import Run, finished
    from experiments.measure.failures import status_of, told
    from experiments.measure.journal import Journal
    from replayssm.models import load_model

    device = devices.DEVICES[case.device]
    device.begin(case)  # type: ignore[arg-type]
    group = Run(case, arms, secrets.token_hex(8), device.describe(), tuple(sys.argv))
    if not repeat and group.keys() <= finished(folder):
        print(f"{label(case)}: recorded already in {folder}; repeat=true measures it again")
        return 0
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    found = documents.load(case.documents, case.count, case.tokens, documents.tokenizer_of(ROOT / case.weights))
    group.documents = found
    print(f"{label(case)}: {', '.join(arm.name for arm in arms)}", flush=True)
    checkpoint = folder / f".pg19-{case_hash(case)}-{group.arms_hash}.pt"
    try:
        model = load_model(ROOT / case.weights, dtype=DTYPES[case.inputs], device=device.tensors)
        tokens = torch.tensor([document.tokens.tolist() for document in found])
        drift = Drift(model, arms, tokens, seed=case.seed)
        if not repeat and drift.load(checkpoint, group.identity):
            print(f"going on from position {drift.done:,}", flush=True)
        stream(drift, case, checkpoint, checkpoint_tokens, group.identity)
        records = group.records(drift, edges(case.tokens), NOISE[case.inputs], PROMPT_NATS)
    except (RuntimeError, MemoryError) as error:
        records = group.failures(status_of(error), " ".join(told(error).split())[:500])
    Journal(folder, "pg19").append(records)
    mirror.send([record.to_json() for record in records])
    checkpoint.unlink(missing_ok=True)
    bad = sorted({(record.arm, record.status, record.message) for record in records if record.status != "ok"})
    for arm, status, message in bad:
        print(f"  {arm}: {status}: {message}")
    return int(bool(bad))


def stream(drift: Any, case: DriftCase, checkpoint: Path, every: int, identity: str) -> None:
    """Decode to the end, saving on the way; prints mean KL of each arm where an octave of positions ends."""
    octaves = [2**power for power in range(6, 30) if 2**power < case.tokens] + [case.tokens]
    saves = set(range(every, case.tokens, every))
    for stop in sorted(at for at in {*octaves, *saves} if at > drift.done):
        drift.run(stop)
        if stop in saves:
            drift.save(checkpoint, identity)
        if stop in octaves:
            first = ([0, *octaves])[octaves.index(stop)]
            means = drift.kl[:, :, first:stop].double().mean((1, 2)).tolist()
            shown = "  ".join(f"{arm.name} {mean:.2e}" for arm, mean in zip(drift.arms[1:], means[1:], strict=True))
            print(f"  {first:>7,}-{stop - 1:>7,} {drift.elapsed_s:7.1f} s  mean KL: {shown}", flush=True)


if __name__ == "__main__":
    run("pg19", main, check=case_from_config)
