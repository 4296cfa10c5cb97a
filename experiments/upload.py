"""Pushes record files to Weights & Biases, one run a record; pushed again, a record is the same run.

    python -m experiments.upload                                    results/local/records to the project replayssm
    python -m experiments.upload results/records --project NAME --entity TEAM
    python -m experiments.upload --mode offline                     run folders that `wandb sync` pushes later
    python -m experiments.upload --figures results/figures          figures as images too
    python -m experiments.upload --dashboard                        save the project's dashboard, send no records

``-`` reads record lines from standard input. What is no record is named on stderr and left out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from experiments.measure.record import read_lines
from experiments.options import LineParser
from experiments.tracking.options import DEFAULT_FOLDER, DEFAULT_PROJECT, INSTALL, MODES, Tracker, installed
from experiments.tracking.runs import TrackedRun, runs

DEFAULT_RECORDS = "results/local/records"


def main() -> int:
    """Exit status: 0; 1 if the tracker failed; 2 after a refusal; 130 when interrupted."""
    asked = _options()
    tracker = Tracker(asked.mode, asked.project, asked.entity, asked.folder)
    folders = [path for path in asked.records if path != "-"]
    named = [*folders, *([asked.figures] if asked.figures is not None else [])]
    missing = next((path for path in named if not _is_dir(path)), None)
    if missing is not None:
        return _refuse(f"{missing} is no folder; accepted: folders of *.jsonl or *.jsonl.xz files, or - for stdin")
    if asked.dashboard and asked.mode != "online":
        return _refuse(f"--dashboard with --mode {asked.mode} can be saved nowhere; accepted: --mode online")
    if not installed("wandb"):
        return _refuse(f"experiments.upload needs wandb, which is not installed; accepted: {INSTALL}")
    try:
        if asked.dashboard:
            from experiments.tracking.dashboard import save

            print(save(tracker))
            return 0
        return _send(asked, tracker)
    except KeyboardInterrupt:
        print("interrupted; the same command sends the rest", file=sys.stderr)
        return 130
    except Exception as error:  # whatever wandb raises, a person gets one line
        told = " ".join(str(error).split()) or "no message"
        print(f"wandb failed: {type(error).__name__}: {told}", file=sys.stderr)
        return 1


def _send(asked: argparse.Namespace, tracker: Tracker) -> int:
    from experiments.tracking.send import send, send_figures

    found = list(runs(_lines(asked.records)))
    for fault in (run for run in found if isinstance(run, str)):
        print(f"left out: {fault}", file=sys.stderr)
    count = send((run for run in found if isinstance(run, TrackedRun)), tracker)
    images = send_figures(Path(asked.figures), tracker) if asked.figures else 0
    print(f"{count} records and {images} figures sent to {asked.project} ({asked.mode})")
    return 0


def _lines(places: list[str]) -> Iterator[str]:
    for place in places:
        if place == "-":
            yield from (line for line in sys.stdin if line.strip())
        else:
            yield from (text or "a line that is cut short" for _, _, text in read_lines(Path(place)))


def _is_dir(path: str) -> bool:
    return bool(path.strip()) and Path(path).is_dir()


def _refuse(line: str) -> int:
    print(line, file=sys.stderr)
    return 2


def _options() -> argparse.Namespace:
    summary, _, rest = __doc__.partition("\n")
    layout = argparse.RawDescriptionHelpFormatter
    parser = LineParser("python -m experiments.upload", None, summary, rest, formatter_class=layout)
    parser.add_argument("records", nargs="*", default=[DEFAULT_RECORDS], help=f"folders; default: {DEFAULT_RECORDS}")
    parser.add_argument("--mode", choices=MODES, default="online")
    parser.add_argument("--project", default=DEFAULT_PROJECT)
    parser.add_argument("--entity", help="a user or team; default: the account's own")
    parser.add_argument("--folder", default=DEFAULT_FOLDER, help="for wandb's own files, below wandb/")
    parser.add_argument("--figures", metavar="DIR", help="a folder of PNG files to send as images")
    parser.add_argument("--dashboard", action="store_true", help="save the dashboard of the project and print its URL")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
