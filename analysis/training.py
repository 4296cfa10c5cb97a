"""``python -m analysis.training [--models DIR] [--out DIR]``: the small models' training, from what ships with them.

Reads ``training.jsonl.xz`` and ``evaluation.json`` of every folder in ``--models`` that has the first, and draws
``training.svg`` and ``training.png``: loss and recall by step, and the loss on held-out books by position.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis import style

MODELS = Path(__file__).resolve().parent.parent / "experiments" / "assets" / "models"
COLUMNS = ("step", "bits_per_byte", "recall", "asked")
SMOOTHED = 20
"""Lines of the log that a running mean takes: 200 steps where every tenth is logged."""


def read(models: Path) -> dict[str, tuple[pd.DataFrame, dict[str, Any]]]:
    """Log and evaluation by folder name. Raises ValueError, one line, where there are none or one cannot be read."""
    found = {}
    for log in sorted(models.glob("*/training.jsonl.xz")):
        try:
            lines = pd.DataFrame([json.loads(line) for line in lzma.decompress(log.read_bytes()).splitlines()])
            result = json.loads((log.parent / "evaluation.json").read_text())
        except (OSError, ValueError, lzma.LZMAError) as error:
            raise ValueError(f"{log.parent} is incomplete ({error}); accepted: a folder of train_tiny.py") from None
        if missing := [name for name in COLUMNS if name not in lines]:
            raise ValueError(f"{log} has no {', '.join(missing)}; accepted: a log of train_tiny.py")
        found[log.parent.name] = lines, result
    if not found:
        raise ValueError(f"--models={models} holds no */training.jsonl.xz; accepted: a folder of trained models")
    return found


def draw(models: dict[str, tuple[pd.DataFrame, dict[str, Any]]]) -> Figure:
    """One figure of three panels; a colour and a line style a model."""
    colors, styles = style.arm_look([*models]), ("-", "--", "-.", ":")
    looks = {name: {"color": colors[name]["color"], "ls": styles[i % len(styles)]} for i, name in enumerate(models)}
    figure, (loss, recall, held_out) = style.panels([3], [Line2D([], [], label=name, **looks[name]) for name in models])
    ends: set[int] = set()
    for name, (log, result) in models.items():
        _curve(loss, log["step"], log["bits_per_byte"], looks[name])
        _curve(recall, log["step"], 100 * log["recall"], looks[name])
        _levels(recall, log, looks[name])
        by_position = {int(span.split("-")[1]) + 1: bits for span, bits in result["bits_per_byte_by_position"].items()}
        ends |= by_position.keys()
        held_out.plot([math.log2(end) for end in by_position], [*by_position.values()], **looks[name], marker="o")
    style.heading(loss, "Books", "training text, bits per byte by step")
    style.heading(recall, "Recall", "answers right in training, %; ticks: longer tasks begin")
    style.heading(held_out, "Held-out books", "bits per byte by position, up to that token")
    for ax in (loss, recall):
        ax.set_xlabel("step")
        ax.set_xlim(left=0)
    recall.set_ylim(0, 102)
    style.doubling_axis(held_out, sorted(ends), "position in the book")
    held_out.tick_params(axis="x", labelsize=6, rotation=45)
    return figure


def _curve(ax: Axes, steps: pd.Series, values: pd.Series, look: dict[str, str]) -> None:
    """Every logged value, faint, and their running mean."""
    ax.plot(steps, values, color=look["color"], alpha=0.2, lw=0.6)
    ax.plot(steps, values.rolling(SMOOTHED, min_periods=1, center=True).mean(), **look)


def _levels(ax: Axes, log: pd.DataFrame, look: dict[str, str]) -> None:
    """A tick at the foot where a longer recall task was asked for the first time."""
    longest = log["asked"].cummax()
    for step in log["step"][longest.diff() > 0]:
        ax.plot([step, step], [0, 4], color=look["color"], lw=1.2)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 on bad input."""
    parser = argparse.ArgumentParser(prog="python -m analysis.training", description="Draw the small models' training.")
    parser.add_argument("--models", type=Path, default=MODELS, metavar="DIR", help="default: experiments/assets/models")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: --models")
    options = parser.parse_args(argv)
    out = options.out or options.models
    try:
        with plt.rc_context(style.RC):
            paths = style.save(draw(read(options.models)), out, "training")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"--out={out} cannot be written ({error.strerror}); accepted: a folder that can be", file=sys.stderr)
        return 2
    print(*paths, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
