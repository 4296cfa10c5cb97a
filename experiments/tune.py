"""Find the fastest launch configurations of the Triton kernels on this GPU and keep them in the device's table.

    python -m experiments.tune device=cuda model=nemotron_3_nano_4b batch_size=64
    python -m experiments.tune -m model=nemotron_3_nano_4b,qwen3_5_4b precision=fp32_bf16,fp16_bf16 batch_size=1,8,64
    python -m experiments.tune model=qwen3_5_4b batch_size=8 dry_run=true

A job is a layer, a batch and an interval length; the stored and the replay step are tried with the same number of
launches. Each launch is checked against the float64 recurrence and timed as the kernel experiment times an arm, in
turn with the others; the worse of aligned and staggered rows counts. The best becomes a row of the table of the device,
replayssm/kernels/triton/launches/<device>.csv, in place of an older row of the same measurement; the kernels use the
nearest row from then on. Of the timing group cold_factor, rounds, cycles_per_sample and the warm-up's limits count.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

from experiments.app import run
from experiments.case import DEFAULT_RECORDS, Case, case_from_config
from experiments.measure import nvidia
from experiments.options import ConfigError, choice, flag, only, refuse

OPTIONS = ("model", "precision", "timing", "batch_size", "interval_length", "device", "seed", "dry_run")
OPERATIONS = {"stored": "stored/triton", "replay": "replay/triton"}
"""And the arms whose steps they are."""


def question_from_config(config: dict[str, Any]) -> Case:
    """The case to tune for, of the kernel experiment. Raises ``ConfigError``, one line, if there is none."""
    only(config, OPTIONS)
    choice(config, "device", ["cuda"])
    choice(config, "precision.inputs", ["bf16"])
    fixed = {"experiment": "kernel", "phase": "aligned", "threads": 0, "tracker": {"name": "none"}, "repeat": False}
    arms = {"arms": list(OPERATIONS.values()), "records": DEFAULT_RECORDS}
    flag(config, "dry_run")
    return case_from_config(config | fixed | arms | {"dry_run": True})  # no records are written


def main(config: dict[str, Any]) -> int:
    """Tune for one case, or with ``dry_run`` list the candidates. Returns 1 if no launch of a step was right."""
    case = question_from_config(config)
    if not config["dry_run"]:
        nvidia.refuse_without("cuda", instead="")
        if find_spec("triton") is None:
            raise ConfigError("Triton is not installed; accepted: an environment with it, pip install -e '.[gpu]'")
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # as the driver's tools number GPUs
    print(label(case))
    worst = 0
    for operation in OPERATIONS:
        if config["dry_run"]:
            list_candidates(case, operation)
        else:
            worst = max(worst, tune(case, operation))
    return worst


def list_candidates(case: Case, operation: str) -> None:
    from experiments.measure.launches import DTYPES, candidates, in_words

    found = candidates(operation, case.geometry, case.batch_size, DTYPES[case.precision.state].itemsize)
    print(f"  {operation}: {len(found)} launches and the present one")
    for launch in found:
        print(f"    {in_words(launch)}")


def tune(case: Case, operation: str) -> int:
    """Search and put the best into the table; says what was there and what was found."""
    import torch

    from experiments.measure import devices, launches
    from replayssm.kernels.triton import launch_table

    torch.set_grad_enabled(False)
    device = launch_table.device_name(torch.device(devices.of(case).tensors))
    path = launch_table.path_of(device)
    try:
        entries = launch_table.read(path) if path.exists() else []
    except ValueError as error:
        raise ConfigError(str(error)) from None
    now = launches.present(case, operation)
    try:
        found = launches.search(case, operation, say=print)
    except torch.OutOfMemoryError:
        raise refuse("batch_size", case.batch_size, "what fits into its memory", f"is too much for {device}") from None
    if found is None:
        print(f"  {operation}: no launch is right; the table stays as it is")
        return 1
    entry, finalists = found
    now_launch = launches.effective(now.launch, case.geometry, launches.DTYPES[case.precision.state].itemsize)
    for name, launch, how in (("was", now_launch, now.how), ("best", entry.launch, "")):
        us = " / ".join(f"{t:.2f}" for t in finalists[launch]) + " us" if launch in finalists else "not right"
        print(f"  {operation:<6} {name:<4} {us:>18}  {launches.in_words(launch)}{f'  ({how})' if how else ''}")
    launch_table.write(path, device, [e for e in entries if e.key != entry.key] + [entry])
    launch_table.forget()
    print(f"  {operation:<6} row {entry.measured_at} written to {path}")
    return 0


def label(case: Case) -> str:
    g = case.geometry
    return (
        f"{case.model} ({g.family} {g.heads}x{g.head_dim}x{g.state_dim}), batch {case.batch_size}, "
        f"L {case.interval_length}, state {case.precision.state}"
    )


if __name__ == "__main__":
    run("tune", main, question_from_config)
