"""The decode experiment: a whole model's decode step, stored against replay in its state-space layers.

    python -m experiments.decode model=nemotron_3_nano_4b batch_size=256 device=cuda
    python -m experiments.decode -m device=cuda model=nemotron_3_nano_4b,qwen3_5_4b batch_size=1,8,64,256
    python -m experiments.decode -m device=cuda model=qwen3_5_4b batch_size=32 context=1024,8192,32768
    python -m experiments.decode weights=FOLDER batch_size=4 precision=fp32_fp32
    python -m experiments.decode -m device=cuda model=nemotron_3_super_120b blocks=11,22

A job is a case. All its arms share weights, prompt and everything but the step of the state-space layers. Decode time
is the difference of two generations of different length, so that prompts and other fixed costs cancel; arms are timed
in ABBA order in one process. Tokens of all arms are compared. With weights=random the model has the true geometry and
all arms are forced on one stream of tokens. A case that cannot fit is recorded as oom without being tried.
"""

from __future__ import annotations

from typing import Any

from experiments import jobs
from experiments.app import run
from experiments.case import case_hash
from experiments.decode_case import RANDOM, DecodeCase, case_from_config, decode_arms
from experiments.measure import runner


def main(config: dict[str, Any]) -> int:
    """Run one case, or with ``dry_run`` print it. Returns 1 if an arm was wrong, failed or ran out of time."""
    return sweep([config])


def sweep(configs: list[dict[str, Any]]) -> int:
    """As `main`, for the jobs of a sweep."""
    return jobs.sweep(EXPERIMENT, configs)


def label(case: DecodeCase) -> str:
    """The case in a few words."""
    weights = "random weights" if case.weights == RANDOM else "checkpoint"
    blocks = f", first {case.blocks} blocks" if case.blocks else ""
    return (
        f"{case.model} ({weights}{blocks}), batch {case.batch_size}, context {case.context}, L {case.interval_length}, "
        f"{case.phase}, state {case.precision.state}, weights {case.precision.inputs}"
    )


def outcome_lines(case: DecodeCase, replicate: int, outcome: runner.Outcome) -> str:
    """What became of each arm: median time of a step and tokens a second, or status and reason."""
    lines = [f"{label(case)}, replicate {replicate}"]
    for arm, (status, message, step_ns) in outcome.items():
        told = f"{status}: {message}"
        if step_ns:
            told = f"{step_ns / 1e6:10.3f} ms a step {case.batch_size / step_ns * 1e9:12.1f} tokens/s"
        lines.append(f"  {arm:<14} {told}")
    return "\n".join(lines)


def dry_run_line(case: DecodeCase, arms: tuple[str, ...]) -> str:
    """The case with the memory that it needs."""
    from experiments.measure.decode_memory import needed_bytes, predicted

    memory = predicted(case, arms)
    parts = ", ".join(f"{arm} cache {(m.keys_values + m.conv + m.states) / 2**30:.2f}" for arm, m in memory.items())
    weights = next(iter(memory.values())).weights
    return (
        f"{case_hash(case)}  {label(case)}: {needed_bytes(memory) / 2**30:.2f} GiB for all arms (weights "
        f"{weights / 2**30:.2f}, {parts}); {len(arms)} arms x {case.timing.replicates} replicates"
    )


EXPERIMENT = jobs.Experiment(case_from_config, decode_arms, label, dry_run_line, outcome_lines)


if __name__ == "__main__":
    run("decode", main, check=case_from_config, sweep=sweep)
