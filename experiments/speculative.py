"""The speculative experiment: a whole model's tokens a second without drafts, with snapshots, and with replay.

    python -m experiments.speculative model=nemotron_3_nano_4b batch_size=256 window=4 device=cuda
    python -m experiments.speculative -m device=cuda model=qwen3_5_4b batch_size=1,8,64,256,512 window=2,4,5,6,8
    python -m experiments.speculative weights=FOLDER drafter=mtp batch_size=8 precision=fp32_fp32
    python -m experiments.speculative weights=FOLDER drafter=ngram prompts=FILE.jsonl context=256
    python -m experiments.speculative weights=FOLDER drafter=draft_model draft_weights=FOLDER

A job is a case, its arms share weights, prompts, drafts and everything but the step of the state-space layers:
`replay/*` takes a token a step, `snapshots/*` keeps a state behind every token of a window, `verify/*` replays and
rejects by moving a cursor. How many drafts are accepted must be the same with both arms of windows, step by step. Time
is the difference of two generations of different length, so that prompts cancel; a sample is so many steps, and tokens
a second follow from how many of them counted. With drafter=controlled drafts cost nothing, are accepted by chance and
all arms are forced on one stream of tokens. An arm that cannot fit beside the others is recorded as oom, untried.
"""

from __future__ import annotations

from typing import Any

from experiments import decode, jobs, prompts
from experiments.app import run
from experiments.case import case_hash
from experiments.measure import runner
from experiments.speculative_case import SpeculativeCase, case_from_config, in_words, speculative_arms


def main(config: dict[str, Any]) -> int:
    """Run one case, or with ``dry_run`` print it. Returns 1 if an arm was wrong, failed or ran out of time."""
    return sweep([config])


def sweep(configs: list[dict[str, Any]]) -> int:
    """As `main`, for the jobs of a sweep."""
    return jobs.sweep(EXPERIMENT, configs)


def label(case: SpeculativeCase) -> str:
    """The case in a few words."""
    return f"{decode.label(case)}, {in_words(case)}"


def outcome_lines(case: SpeculativeCase, replicate: int, outcome: runner.Outcome) -> str:
    """What became of each arm: median time of a row's token and tokens a second, or status and reason."""
    lines = [f"{label(case)}, replicate {replicate}"]
    for arm, (status, message, token_ns) in outcome.items():
        told = f"{status}: {message}"
        if token_ns:
            told = f"{token_ns / 1e6:10.3f} ms a token of a row {case.batch_size / token_ns * 1e9:12.1f} tokens/s"
        lines.append(f"  {arm:<16} {told}")
    return "\n".join(lines)


def dry_run_line(case: SpeculativeCase, arms: tuple[str, ...]) -> str:
    """The case with the memory that it needs, and how many requests' states fit in 100 GB."""
    from experiments.measure.decode_memory import needed_bytes, predicted
    from experiments.measure.speculation import STATE_BYTES

    memory = predicted(case, arms)
    fit = {arm: m.requests_in(STATE_BYTES, case.batch_size) for arm, m in memory.items()}
    held = {arm: (m.keys_values + m.conv + m.states) / 2**30 for arm, m in memory.items()}
    parts = "; ".join(f"{arm} cache {held[arm]:.2f}, {fit[arm]} requests' states in 100 GB" for arm in arms)
    return (
        f"{case_hash(case)}  {label(case)}: {needed_bytes(memory) / 2**30:.2f} GiB for all arms ({parts}); {len(arms)} "
        f"arms x {case.timing.replicates} replicates"
    )


EXPERIMENT = jobs.Experiment(case_from_config, speculative_arms, label, dry_run_line, outcome_lines, prompts.fetch)


if __name__ == "__main__":
    run("speculative", main, check=case_from_config, sweep=sweep)
