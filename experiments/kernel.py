"""The kernel experiment: one state-space layer's decode step, stored against replay, over whole flush cycles.

    python -m experiments.kernel model=qwen3_5_4b batch_size=64 interval_length=16
    python -m experiments.kernel -m model=nemotron_3_nano_4b,qwen3_5_4b batch_size=1,8,64,256
    python -m experiments.kernel -m batch_size=1,8,64 dry_run=true
    python -m experiments.kernel -m device=cuda timing=gpu model=nemotron_3_nano_4b,qwen3_5_4b batch_size=1,8,64,256
    python -m experiments.kernel -m device=cuda timing=gpu window=4 accepted=3 model=nemotron_3_super_120b

With a window a step is that of speculative decoding: T tokens verified, some of them committed. The baseline then keeps
a state behind every token of the window (arms ``snapshots/*``); replay rolls back by its cursor (arms ``verify/*``).
An arm that runs only when named shows which part of the gain is due to writes that are left out:

    python -m experiments.kernel -m device=cuda timing=gpu window=4 accepted=3 model=qwen3_5_122b batch_size=256 \\
        'arms=[snapshots/triton,oracle/triton,verify/triton]'

A job is a case. All its arms are checked against the float64 recurrence, timed together and interleaved, and checked
again, once in each of timing.replicates fresh processes; on a GPU the cases of a sweep share them. Every arm appends
one record to the folder `records`; cases that are recorded there already are skipped, so an interrupted sweep is
started again with the same command.
"""

from __future__ import annotations

from typing import Any

from experiments import jobs
from experiments.app import run
from experiments.case import Case, WindowCase, arms_from_config, case_from_config, case_hash, without_kernels
from experiments.measure import provenance, runner
from replayssm import traffic

CORE_BYTES_PER_S, GPU_BYTES_PER_S = 10e9, 2e12
"""For the estimate of a dry run only: what a desktop CPU core and a data-centre GPU can be relied on to move."""
LAUNCH_S = 4e-6
"""Of a kernel in a CUDA graph, for the estimate only: small batches take this long however little they move."""
GPU_SETUP_S = {"case": 5.0, "arm": 1.0}
"""Imports, compilation and checks, for the estimate only."""


def main(config: dict[str, Any]) -> int:
    """Run one case, or with ``dry_run`` print it. Returns 1 if an arm was wrong, failed or ran out of time."""
    return sweep([config])


def sweep(configs: list[dict[str, Any]]) -> int:
    """As `main`, for the jobs of a sweep."""
    return jobs.sweep(EXPERIMENT, configs)


def label(case: Case) -> str:
    """The case in a few words."""
    g = case.geometry
    window = f"window {case.window}, {case.accepted} accepted, " if isinstance(case, WindowCase) else ""
    return (
        f"{case.model} ({g.family} {g.heads}x{g.head_dim}x{g.state_dim}), batch {case.batch_size}, "
        f"L {case.interval_length}, {window}{case.phase}, state {case.precision.state}, inputs {case.precision.inputs}"
    )


def outcome_lines(case: Case, replicate: int, outcome: runner.Outcome) -> str:
    """What became of each arm: median time of a layer step, or status and reason."""
    lines = [f"{label(case)}, replicate {replicate}"]
    for arm, (status, message, step_ns) in outcome.items():
        lines.append(
            f"  {arm:<14} " + (f"{step_ns / 1000:10.1f} us a layer step" if step_ns else f"{status}: {message}")
        )
    return "\n".join(lines)


def dry_run_line(case: Case, arms: tuple[str, ...]) -> str:
    """The case with its bytes, floor and estimated time, from nominal bandwidths."""
    windows: dict[str, int] = {}
    if isinstance(case, WindowCase):
        windows = {"window": case.window, "accepted": case.accepted}
    rows, state = case.batch_size, case.precision.state
    plain = traffic.stored(case.geometry, state, rows, **windows)
    ring = traffic.Ring(inputs=case.precision.inputs)
    cycle = traffic.replay(case.geometry, case.interval_length, state, ring=ring, rows=rows, **windows)
    replay = cycle.per_step()
    rate = GPU_BYTES_PER_S if case.device == "cuda" else CORE_BYTES_PER_S * case.threads
    copies = runner.copies_of(case, provenance.device(case.device).get("last_level_cache_bytes"))
    step_s = max(plain.floor_ns(rate, rate) / 1e9, LAUNCH_S if case.device == "cuda" else 0.0)
    sample_s = copies * case.steps_per_cycle * case.timing.cycles_per_sample * step_s
    # Arms in plain torch pass over the state several times, A/A and bandwidth kernels cost about two arms more, warm-up
    # and checks about five rounds.
    arms_s = sample_s * (2 + sum(4 if arm.endswith("/torch") else 1 for arm in arms))
    setup_s = GPU_SETUP_S["case"] + GPU_SETUP_S["arm"] * len(arms) if case.device == "cuda" else 0.0
    total_s = case.timing.replicates * (setup_s + (case.timing.rounds + 5) * arms_s)
    lacking = ", ".join(without_kernels(case))
    return (
        f"{case_hash(case)}  {label(case)}: {'snapshots' if windows else 'stored'} "
        f"{plain.total_bytes / 1e6:.1f} MB a step, replay "
        f"{replay.total_bytes / 1e6:.1f} MB; floor {plain.floor_ns(rate, rate) / 1e3:.0f} and "
        f"{replay.floor_ns(rate, rate) / 1e3:.0f} us at an assumed {rate / 1e9:.0f} GB/s; {copies} copies; "
        f"{len(arms)} arms x {case.timing.replicates} replicates, about {total_s:.0f} s"
        + (f"; no kernels of {case.geometry.family} have {lacking}" if lacking else "")
    )


EXPERIMENT = jobs.Experiment(case_from_config, arms_from_config, label, dry_run_line, outcome_lines)


if __name__ == "__main__":
    run("kernel", main, sweep=sweep)
