"""The main job on the embedded default, on any machine: run the cases below, then tables, figures, claims and report.

    make reproduce          (or: python -m experiments.reproduce)

Every replicate is a fresh process that runs all pending cases; then the embedded models read a book and answer
questions at several precisions, a core each. What is recorded before is skipped, so the job can be stopped and started
again. Records go to results/local/records, everything made from them to results/local; neither is tracked by git.
Evidence that is committed comes from the same cases with ``--records results/records``.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import hydra
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from experiments import decode, decode_case, kernel, speculative, speculative_case
from experiments.app import CONFIGS, VERSION_BASE, to_plain
from experiments.case import Case, arms_from_config, case_from_config
from experiments.measure import runner
from experiments.measure.journal import alone
from experiments.measure.sources import ROOT
from experiments.options import LineParser

MODELS = ("nemotron_3_nano_4b", "qwen3_5_4b", "kimi_linear_48b")
SWEEP = (
    # Batch sizes, one case with all arms, plain torch among them; then interval length and phase.
    *((f"model={model}", f"batch_size={batch}") for batch in (64, 1) for model in MODELS),
    (f"model={MODELS[0]}", "batch_size=8", "arms=[stored/torch,stored/cpu,replay/torch,replay/cpu]"),
    *((f"model={MODELS[0]}", "batch_size=64", f"interval_length={length}") for length in (4, 32)),
    (f"model={MODELS[0]}", "batch_size=64", "phase=staggered"),
)
DEFAULTS = ("timing=reproduce", "arms=[stored/cpu,replay/cpu]")
WHOLE_MODELS = ROOT / "experiments" / "assets" / "models"
"""Every folder in it is decoded with as well."""
DECODE = ("timing=reproduce", "precision=fp32_fp32", "arms=[stored/cpu,replay/cpu]", "steps=64", "batch_size=16")
DRAFTS = ("timing=smoke", "timing.rounds=2", "precision=fp32_fp32", "drafter=mtp", "batch_size=4", "context=64")
DRAFTS += ("interval_length=8", "steps=16", "window=4", "arms=[replay/torch,snapshots/torch,verify/torch]")
"""Each of the models drafts for itself, with its own head; in torch, which need not compile windows first."""

QUESTIONS = ("task=recall", "task.generator={items: 128, length: 1024, facts: 32, seed: 1}", "batch_size=28")


def jobs() -> Iterator[tuple[Case, tuple[str, ...]]]:
    """The cases of the default, each with its arms."""
    with hydra.initialize_config_dir(str(CONFIGS), version_base=VERSION_BASE, job_name="reproduce"):
        for overrides in SWEEP:
            config = to_plain(hydra.compose("kernel", [*DEFAULTS, *overrides]))
            yield case_from_config(config), arms_from_config(config)
        folders = sorted(path.parent for path in WHOLE_MODELS.glob("*/config.json"))
        for folder in folders:
            config = to_plain(hydra.compose("decode", [*DECODE, f"weights={folder}"]))
            yield decode_case.case_from_config(config), decode_case.decode_arms(config)
        for folder in folders:
            config = to_plain(hydra.compose("speculative", [*DRAFTS, f"weights={folder}"]))
            yield speculative_case.case_from_config(config), speculative_case.speculative_arms(config)


def label_of(case: Case) -> str:
    """The case in a few words."""
    if isinstance(case, speculative_case.SpeculativeCase):
        return speculative.label(case)
    return decode.label(case) if isinstance(case, decode_case.DecodeCase) else kernel.label(case)


def main() -> int:
    """Run what is pending, then rebuild the results. Returns 1 if an arm was wrong, failed or ran out of time."""
    parser = LineParser(prog="python -m experiments.reproduce", description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=Path, default=ROOT / "results/local/records", help="folder of the records")
    parser.add_argument("--repeat", action="store_true", help="measure again what is recorded already")
    parser.add_argument("--budget-s", type=float, default=420.0, help="start no case after this many seconds")
    parser.add_argument("--out", type=Path, default=ROOT / "results/local", help="where tables, figures, report go")
    arguments = parser.parse_args()
    console = Console()
    folder, out = arguments.records.resolve(), arguments.out.resolve()
    for option, path in (("--records", folder), ("--out", out)):
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            console.print(f"{option}={path} cannot be used ({error.strerror}); accepted: a folder that can be written")
            return 2
    try:
        with alone(folder, say=console.print):
            failures = measure(folder, console, arguments.repeat, arguments.budget_s)
        given = (folder, console, arguments.repeat)
        failures += with_each_model("precisions over a document", "experiments.pg19", *given)
        failures += with_each_model("accuracy at several precisions", "experiments.accuracy", *given, *QUESTIONS)
    except KeyboardInterrupt:
        console.print("interrupted; nothing recorded is lost, the same command goes on from here")
        return 130
    rebuild = [sys.executable, "-m", "analysis", "--records", folder, "--out", out]
    return subprocess.run(rebuild, cwd=ROOT).returncode or int(failures > 0)


def measure(folder: Path, console: Console, repeat: bool, budget_s: float) -> int:
    """Run the pending cases with a progress bar, as far as the time budget goes; returns how many arms failed."""
    deadline = time.monotonic() + budget_s
    by_arms: dict[tuple[str, ...], list[Case]] = {}
    for case, arms in jobs():
        by_arms.setdefault(arms, []).append(case)
    total = sum(case.timing.replicates for cases in by_arms.values() for case in cases)
    waiting = [(arms, *left) for arms, cases in by_arms.items() for left in runner.pending(cases, arms, folder, repeat)]
    pending = sum(len(cases) for _, _, cases in waiting)
    console.print(
        f"kernels, whole models and their drafts: {total} runs, {total - pending} recorded already in {folder}"
    )
    failures = 0
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("starting", total=pending)

        def started(case: Case, replicate: int) -> None:
            progress.update(bar, description=f"{label_of(case)}, replicate {replicate}")

        def done(case: Case, replicate: int, outcome: runner.Outcome) -> None:
            nonlocal failures
            progress.advance(bar)
            for arm, (status, message, _) in outcome.items():
                if status != "ok":
                    failures += status not in ("unsupported", "oom")
                    progress.print(f"{label_of(case)}, {arm}: {status}: {message}")
            if not console.is_terminal:
                progress.print(f"done: {label_of(case)}, replicate {replicate}")

        watcher = runner.Watcher(started, done, enough=lambda: time.monotonic() > deadline)
        ran = [runner.run(n, cases, arms, folder, tuple(sys.argv), watcher) for arms, n, cases in waiting]
    if left := pending - sum(map(len, ran)):
        console.print(f"{left} runs not started within --budget-s={budget_s:g}; the same command goes on with them")
    return failures


def with_each_model(title: str, module: str, folder: Path, console: Console, repeat: bool, *options: str) -> int:
    """Run an experiment with each embedded model, all at once, since nothing is timed; returns how many failed."""
    models = sorted(path.parent for path in WHOLE_MODELS.glob("*/config.json"))
    console.print(f"{title}: {', '.join(model.name for model in models)}; about a minute")
    given = ("threads=1", f"records={folder}", f"repeat={str(repeat).lower()}", *options)
    command = (sys.executable, "-m", module, *given)
    running = [
        subprocess.Popen((*command, f"model.path={model}"), cwd=ROOT, stdout=subprocess.PIPE) for model in models
    ]
    try:
        for process in running:
            console.print(process.communicate()[0].decode().rstrip(), soft_wrap=True, highlight=False)
    finally:
        for process in running:
            process.terminate()
    return sum(process.wait() != 0 for process in running)


if __name__ == "__main__":
    sys.exit(main())
