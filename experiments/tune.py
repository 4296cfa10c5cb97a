"""Find the fastest launch configurations of the Triton kernels on this GPU and keep them in the device's table.

    python -m experiments.tune device=cuda model=nemotron_3_nano_4b batch_size=64
    python -m experiments.tune -m model=nemotron_3_nano_4b,qwen3_5_4b precision=fp32_bf16,fp16_bf16 batch_size=1,8,64
    python -m experiments.tune -m window=4 accepted=3 model=qwen3_5_4b batch_size=1,8,64 operations=[verify]
    python -m experiments.tune model=qwen3_5_4b batch_size=8 dry_run=true

A job is a layer, a batch and an interval length; the stored and the replay step are tried with the same number of
launches. With a window, of which ``accepted`` tokens are committed at every step, the step that verifies it is tried
and the one that keeps snapshots; ``operations`` are some of them. Each launch is checked against the float64 recurrence
and timed as the kernel experiment times an arm, in turn with the others; the worse of aligned and staggered rows
counts. The best becomes a row of the table of the device, replayssm/kernels/triton/launches/<device>.csv or, with a
window, <device>_windows.csv, in place of an older row of the same measurement; the kernels use the nearest row from
then on. Of the timing group cold_factor, rounds, cycles_per_sample and the warm-up's limits count.
"""

from __future__ import annotations

import gc
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from experiments.app import run
from experiments.case import DEFAULT_ARMS, DEFAULT_RECORDS, WINDOW_OPTIONS, Case, WindowCase, case_from_config
from experiments.measure import nvidia
from experiments.options import ConfigError, choice, flag, get, only, refuse

OPTIONS = ("model", "precision", "timing", "batch_size", "interval_length", "device", "seed", "dry_run", "operations")
OPERATIONS = ("stored", "replay")
WINDOW_OPERATIONS = ("snapshots", "verify")
"""Each is the step of an arm in Triton."""


def question_from_config(config: dict[str, Any]) -> Case:
    """The case to tune for, of the kernel experiment. Raises ``ConfigError``, one line, if there is none."""
    only(config, (*OPTIONS, *WINDOW_OPTIONS))
    choice(config, "device", ["cuda"])
    choice(config, "precision.inputs", ["bf16"])
    fixed = {"experiment": "kernel", "phase": "aligned", "threads": 0, "tracker": {"name": "none"}, "repeat": False}
    arms = {"arms": [f"{name}/triton" for name in operations_from_config(config)], "records": DEFAULT_RECORDS}
    flag(config, "dry_run")
    of_case = {name: value for name, value in config.items() if name != "operations"}
    return case_from_config(of_case | fixed | arms | {"dry_run": True})  # no records are written


def operations_from_config(config: dict[str, Any]) -> list[str]:
    """What to tune, ``default`` being all operations of the case. Raises ``ConfigError``, one line."""
    known = OPERATIONS if config.get("window") is None else WINDOW_OPERATIONS
    accepted = f"{DEFAULT_ARMS}, or a list of {', '.join(OPERATIONS)}, with a window of {', '.join(WINDOW_OPERATIONS)}"
    asked = get(config, "operations", accepted)
    if asked == DEFAULT_ARMS:
        return list(known)
    if not isinstance(asked, list) or not asked or any(asked.count(name) > 1 or name not in known for name in asked):
        raise refuse("operations", asked, accepted)
    return asked


def main(config: dict[str, Any]) -> int:
    """Tune for one case, or with ``dry_run`` list the candidates. Returns 1 if no launch of a step was right."""
    case, operations = question_from_config(config), operations_from_config(config)
    if config["dry_run"]:
        print(label(case))
        for operation in operations:
            list_candidates(case, operation)
        return 0
    nvidia.refuse_without("cuda", instead="")
    if find_spec("triton") is None:
        raise ConfigError("Triton is not installed; accepted: an environment with it, pip install -e '.[gpu]'")
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # as the driver's tools number GPUs
    from experiments.measure import launches

    gc.freeze()  # what has been imported is no garbage, which a capture collects
    print(label(case))
    for operation in operations:
        entries_of(case, operation)  # a table that cannot be read is refused before anything is compiled
    launches.compile_ahead(case, operations)
    return max([tune(case, operation) for operation in operations])


def list_candidates(case: Case, operation: str) -> None:
    from experiments.measure.launch_candidates import candidates, in_words
    from replayssm.formats import DTYPES

    found = candidates(operation, case.geometry, case.batch_size, DTYPES[case.precision.state].itemsize)
    print(f"  {operation}: {len(found)} launches and the present one")
    for launch in found:
        print(f"    {in_words(launch)}")


def entries_of(case: Case, operation: str) -> tuple[str, Path, list[Any]]:
    """The device's name, the path of its table of an operation, and the rows of it. Raises ``ConfigError``, one line,
    on a table that cannot be read."""
    import torch

    from experiments.measure import devices, launches
    from replayssm.kernels.triton import launch_csv

    table, device = launches.table_of(operation), launch_csv.device_name(torch.device(devices.of(case).tensors))
    path = table.path_of(device)
    try:
        return device, path, table.read(path) if path.exists() else []
    except ValueError as error:
        raise ConfigError(str(error)) from None


def tune(case: Case, operation: str) -> int:
    """Search and put the best into the table; says what was there and what was found."""
    import torch

    from experiments.measure import launches
    from experiments.measure.launch_candidates import effective, in_words

    torch.set_grad_enabled(False)
    table, (device, path, entries) = launches.table_of(operation), entries_of(case, operation)
    now = launches.present(case, operation)
    try:
        found = launches.search(case, operation, say=print)
    except torch.OutOfMemoryError:
        raise refuse("batch_size", case.batch_size, "what fits into its memory", f"is too much for {device}") from None
    if found is None:
        print(f"  {operation}: no launch is right; the table stays as it is")
        return 1
    entry, finalists = found
    now_launch = effective(now.launch, case.geometry, launches.DTYPES[case.precision.state].itemsize)
    for name, launch, how in (("was", now_launch, now.how), ("best", entry.launch, "")):
        us = " / ".join(f"{t:.2f}" for t in finalists[launch]) + " us" if launch in finalists else "not right"
        print(f"  {operation:<9} {name:<4} {us:>18}  {in_words(launch)}{f'  ({how})' if how else ''}")
    table.write(path, device, [e for e in entries if e.key != entry.key] + [entry])
    table.forget()
    print(f"  {operation:<9} row {entry.measured_at} written to {path}")
    return 0


def label(case: Case) -> str:
    g = case.geometry
    window = f"window {case.window}, {case.accepted} accepted, " if isinstance(case, WindowCase) else ""
    return (
        f"{case.model} ({g.family} {g.heads}x{g.head_dim}x{g.state_dim}), batch {case.batch_size}, "
        f"L {case.interval_length}, {window}state {case.precision.state}"
    )


if __name__ == "__main__":
    run("tune", main, question_from_config)
