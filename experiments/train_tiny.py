r"""Train one of the two small hybrids that ship with the experiments, and evaluate it.

    python -m experiments.train_tiny --model qwen3.5 --out outputs/tiny-qwen3.5 \
        --ship experiments/assets/models/tiny-qwen3.5

Every step has two batches of equal size: books, and recall tasks whose facts only the recurrent state can carry, since
attention is masked there beyond 64 tokens at three steps of four. Books come as parallel streams in segments of 2,048
tokens whose state is carried over, every other step with attention masked too; from 60 % of the steps on half of them
are single long stretches instead (up to 32,768 tokens), and the last 5 % are of 131,072. Recall grows longer whenever
nine of ten answers are right. AdamW, bfloat16 matrix products with float32 weights and recurrences, cosine learning
rate, everything seeded by step, so that a run that was stopped goes on from its checkpoint with the very losses it
would have had. `--fit SECONDS` chooses the number of steps: it times a few of each length first.

Writes OUT/log.jsonl (a line a step), OUT/checkpoint.pt and, at the end, OUT/evaluation.json; --ship writes the Hugging
Face folder with its model card, the evaluation and a thinned log, also for a run that was stopped. Everything is
evaluated on the bfloat16 weights that ship. Plain argparse and not Hydra, since this is no measurement with cases and
arms and must run where only torch, transformers and numpy are installed. `--size smoke` is a model for the tests.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault(
    "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
)  # read by cuBLAS at its start; makes its products repeatable

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from experiments import evaluate_tiny, hybrids
from experiments.assets import vocabulary
from experiments.evaluate_tiny import LEVELS, WINDOW, answers, ask
from experiments.options import LineParser

LOGGED = ("loss", "recall_loss", "bits_per_byte", "mtp_bits_per_byte", "recall", "norm")


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = LineParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=hybrids.MODELS, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of the run; a run found there goes on")
    parser.add_argument("--ship", type=Path, help="folder to write the Hugging Face model to")
    parser.add_argument("--size", choices=hybrids.SIZES, default="tiny")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--fit", type=float, help="seconds from the start; as many steps as they allow, not --steps")
    parser.add_argument("--tokens", type=int, default=32768, help="tokens a step of books, and again of recall")
    parser.add_argument("--segment", type=int, default=2048, help="tokens a segment of a book stream")
    parser.add_argument("--longest", type=int, default=131072, help="longest stretch, in training and in evaluation")
    parser.add_argument("--documents", type=int, default=10, help="held-out stretches to evaluate on")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-every", type=int, default=500)
    parser.add_argument("--stop-after", type=float, default=math.inf, help="seconds, then save a checkpoint and leave")
    chosen = parser.parse_args(arguments)
    if chosen.tokens % chosen.segment or chosen.tokens < LEVELS[0][0]:
        parser.error(
            f"--tokens {chosen.tokens}: accepted are multiples of --segment {chosen.segment} from {LEVELS[0][0]}"
        )
    return chosen


class Books:
    """Training batches: parallel streams through the books, and stretches from anywhere in them."""

    def __init__(self, run: argparse.Namespace, device: str) -> None:
        end = np.array([vocabulary.load().token_to_id(vocabulary.END_OF_TEXT)], np.int32)
        parts = [part for book in vocabulary.tokens("train").values() for part in (book, end)]
        self.text = torch.from_numpy(np.concatenate(parts)).long().to(device)
        self.bytes = torch.from_numpy(vocabulary.byte_lengths()).to(device)
        self.run = run
        self.is_stream = [self.shape(step)[1] == run.segment for step in range(run.steps)]

    def shape(self, step: int) -> tuple[int, int]:
        """Rows and tokens a row at this step."""
        run, done = self.run, step / self.run.steps
        length = run.segment
        if done >= 0.95:
            length = run.longest
        elif done >= 0.6 and step % 2:
            length = min(run.longest, run.segment * (16 if step % 4 == 1 else 4), run.tokens)
        return max(1, run.tokens // length), length

    def batch(self, step: int) -> tuple[Tensor, bool]:
        """Tokens int64 [rows, length + 2] (two more for the targets), and whether they continue the streams."""
        rows, length = self.shape(step)
        random = np.random.default_rng([self.run.seed, 1, step])
        if stream := self.is_stream[step]:
            begun = sum(self.is_stream[:step]) * length
            starts = np.arange(rows) * (len(self.text) // rows) + begun
        else:
            starts = random.integers(0, len(self.text), rows)
        index = torch.from_numpy(starts)[:, None] + torch.arange(length + 2)
        return self.text[index.to(self.text.device) % len(self.text)], stream


def bits(nats: Tensor, bytes_: Tensor) -> Tensor:
    return nats.sum() / bytes_.sum() / math.log(2)


def books_loss(model: hybrids.Hybrid, tokens: Tensor, states, window: int | None, lengths: Tensor):
    """Training loss, bits per byte of the model and of its MTP head (at two tokens' distance), the states after."""
    hidden, states = model.trunk(tokens[:, :-2], states, window)
    ahead = model.ahead(hidden, tokens[:, 1:-1], window)
    following, second = tokens[:, 1:-1].flatten(), tokens[:, 2:].flatten()
    loss = F.cross_entropy(model.logits(hidden).float().flatten(0, 1), following, reduction="none")
    mtp = F.cross_entropy(model.logits(ahead).float().flatten(0, 1), second, reduction="none")
    measured = bits(loss.detach(), lengths[following]), bits(mtp.detach(), lengths[second])
    return loss.mean() + 0.2 * mtp.mean(), measured, states


def draw_level(run: argparse.Namespace, step: int, level: int) -> tuple[int, int]:
    """Which recall task a step trains on, the highest reached at seven steps of ten, and its seed."""
    random = np.random.default_rng([run.seed, 2, step])
    drawn = level if random.random() < 0.7 else int(random.integers(0, level + 1))
    return drawn, int(random.integers(2**31))


def optimizer(model: hybrids.Hybrid, run: argparse.Namespace, device: str) -> torch.optim.AdamW:
    weights = list(model.parameters())
    groups = [
        {"params": [weight for weight in weights if weight.ndim >= 2], "weight_decay": 0.1},
        {"params": [weight for weight in weights if weight.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=run.learning_rate, betas=(0.9, 0.95), fused=device == "cuda")


def learning_rate(run: argparse.Namespace, step: int) -> float:
    warm = min(1.0, (step + 1) / max(1, min(100, run.steps // 10)))
    return run.learning_rate * warm * (0.05 + 0.95 * (1 + math.cos(math.pi * step / run.steps)) / 2)


def identity(run: argparse.Namespace) -> dict[str, object]:
    """What a checkpoint must agree on to be gone on with."""
    names = ("model", "size", "steps", "tokens", "segment", "longest", "learning_rate", "seed")
    return {name: getattr(run, name) for name in names}


@dataclass
class Progress:
    """What goes from step to step beside the weights: book tokens read, recall level, running share of its right
    answers, recurrent states of the streams."""

    read: int = 0
    level: int = 0
    mean: float = 0.0
    states: list[hybrids.State | None] | None = None


def advance(
    model: hybrids.Hybrid, adam: torch.optim.AdamW, data: Books, run: argparse.Namespace, step: int, progress: Progress
) -> dict[str, object]:
    """One step on the weights and on `progress`; its line of the log."""
    device = data.text.device.type
    for group in adam.param_groups:
        group["lr"] = learning_rate(run, step)
    adam.zero_grad(set_to_none=True)
    tokens, stream = data.batch(step)
    window = WINDOW if stream and step % 2 == 0 else None
    drawn, seed = draw_level(run, step, progress.level)
    task = ask(seed, max(1, run.tokens // LEVELS[drawn][0]), *LEVELS[drawn], device)
    task_window = None if step % 4 == 3 else WINDOW
    kept = np.random.default_rng([run.seed, 3, step]).random(len(tokens)) >= 1 / 32
    kept = torch.from_numpy(kept).to(device)  # every copy to the device stands here, before there is work to wait for

    with torch.autocast(device, torch.bfloat16):
        carried = progress.states if stream else None
        loss, measured, after = books_loss(model, tokens, carried, window, data.bytes)
    loss.backward()
    if stream:
        progress.states = [None if state is None else tuple(reset(part, kept) for part in state) for state in after]
    with torch.autocast(device, torch.bfloat16):
        logits = answers(model, task, task_window)
        asked = F.cross_entropy(logits.flatten(0, 1), task[2].flatten())
    asked.backward()
    right = (logits.detach().argmax(-1) == task[2]).float().mean()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    adam.step()
    values = torch.stack([loss.detach(), asked.detach(), *measured, right, norm]).tolist()
    if not all(map(math.isfinite, values)):
        raise SystemExit(f"step {step}: the loss is not finite: {values}")
    if drawn == progress.level and task_window:
        progress.mean = 0.9 * progress.mean + 0.1 * values[4]
        longer = progress.level + 1
        if progress.mean > 0.9 and longer < len(LEVELS) and LEVELS[longer][0] <= run.tokens:
            progress.level, progress.mean = longer, 0.0
    progress.read += tokens.shape[0] * (tokens.shape[1] - 2)
    lengths = {
        "read": progress.read,
        "length": tokens.shape[1] - 2,
        "window": window,
        "asked": LEVELS[drawn][0],
        "asked_window": task_window,
    }
    return {"step": step, **dict(zip(LOGGED, values, strict=True)), **lengths}


def steps_that_fit(run: argparse.Namespace, device: str, started: float) -> int:
    """As many steps as end `run.fit` seconds after `started`, by the time that steps of each length take here."""
    trial = argparse.Namespace(**vars(run) | {"steps": 1000})
    model, data = hybrids.build(run.model, run.size, run.seed).to(device), Books(trial, device)
    adam, progress = optimizer(model, run, device), Progress()
    lengths = [data.shape(step)[1] for step in range(trial.steps)]
    seconds = {}
    for length in set(lengths):
        step = lengths.index(length)
        for _ in range(3):
            advance(model, adam, data, trial, step, progress)
        begun = time.monotonic()
        for _ in range(5):
            advance(model, adam, data, trial, step, progress)
        seconds[length] = (time.monotonic() - begun) / 5
    left = run.fit - (time.monotonic() - started)
    steps = int(left / np.mean([seconds[length] for length in lengths]))
    if steps < 1:
        raise SystemExit(f"--fit {run.fit}: not one step fits; a step takes {seconds} seconds by its length")
    print(f"--steps {steps} fit; seconds a step by length: {seconds}", flush=True)
    return steps


def train(run: argparse.Namespace, device: str, started: float) -> tuple[hybrids.Hybrid, bool]:
    """The model, and whether the last step was reached; `started`: the monotonic clock at the command's start."""
    run.out.mkdir(parents=True, exist_ok=True)
    log, checkpoint = run.out / "log.jsonl", run.out / "checkpoint.pt"
    saved = torch.load(checkpoint, map_location=device, weights_only=True) if checkpoint.exists() else None
    if run.fit:
        run.steps = saved["identity"]["steps"] if saved else steps_that_fit(run, device, started)
    model = hybrids.build(run.model, run.size, run.seed).to(device)
    adam, data = optimizer(model, run, device), Books(run, device)
    first, progress, lines, before = 0, Progress(), [], 0.0
    if saved:
        if saved["identity"] != identity(run):
            raise SystemExit(f"{checkpoint} is of another run: {saved['identity']}; choose another --out or remove it")
        model.load_state_dict(saved["model"])
        adam.load_state_dict(saved["adam"])
        first, progress = saved["step"], Progress(**saved["progress"])
        lines = log.read_text().splitlines()[:first]
        before = json.loads(lines[-1])["seconds"]
    log.write_text("".join(line + "\n" for line in lines))
    with log.open("a") as file:
        for step in range(first, run.steps):
            line = advance(model, adam, data, run, step, progress)
            file.write(json.dumps(line | {"seconds": round(before + time.monotonic() - started, 3)}) + "\n")
            stopping = time.monotonic() - started > run.stop_after
            if (step + 1) % run.save_every == 0 or step + 1 == run.steps or stopping:
                file.flush()
                state = {"model": model.state_dict(), "adam": adam.state_dict(), "progress": vars(progress)}
                torch.save(state | {"identity": identity(run), "step": step + 1}, checkpoint.with_suffix(".new"))
                checkpoint.with_suffix(".new").replace(checkpoint)
                print(json.dumps(line | {"level": progress.level}), flush=True)
            if stopping and step + 1 < run.steps:
                return model, False
    return model, True


def reset(part: Tensor, kept: Tensor) -> Tensor:
    """States to carry on, cut off from the graph, zero in some rows: books also begin."""
    return part.detach() * kept.to(part).view(-1, *[1] * (part.ndim - 1))


def ship(model: hybrids.Hybrid, run: argparse.Namespace) -> None:
    """The Hugging Face folder without its evaluation: weights under the checkpoint's own names, tokenizer, log."""
    run.ship.mkdir(parents=True, exist_ok=True)
    hybrids.save(model, run.ship)
    for path in vocabulary.FOLDER.iterdir():
        shutil.copy(path, run.ship)
    lines = (run.out / "log.jsonl").read_text().splitlines()
    thin = [line for step, line in enumerate(lines) if step < 100 or step % 10 == 9 or step + 1 == len(lines)]
    (run.ship / "training.jsonl.xz").write_bytes(lzma.compress(("\n".join(thin) + "\n").encode()))
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    told = identity(run) | {"device": where, "torch": torch.__version__, "transformers": transformers.__version__}
    (run.ship / "training.json").write_text(json.dumps(told, indent=1) + "\n")


def main(arguments: list[str] | None = None) -> int:
    started, run = time.monotonic(), options(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.use_deterministic_algorithms(True)  # not warn_only: cuDNN's attention would then not be
    torch.utils.deterministic.fill_uninitialized_memory = False  # repeatable without it: nothing reads such memory
    torch.set_float32_matmul_precision("high")
    model, finished = train(run, device, started)
    if not finished:
        print("stopped; the same command goes on from the checkpoint", flush=True)
        if not run.ship:
            return 3
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.bfloat16())
    if run.ship:
        ship(model, run)
    result = evaluate_tiny.evaluate(model, run.longest, run.documents, run.seed, device)
    (run.out / "evaluation.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    if run.ship:
        evaluate_tiny.describe(run.ship, result)
    return 0 if finished else 3


if __name__ == "__main__":
    sys.exit(main())
