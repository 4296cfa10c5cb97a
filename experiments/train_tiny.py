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
import math
import os
import shutil
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

os.environ.setdefault(
    "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
)  # read by cuBLAS at its start; makes its products repeatable

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from experiments import hybrids
from experiments.assets import recall, vocabulary

WINDOW = 64
LEVELS = [(128, 4), (256, 8), (512, 16), (1024, 16), (2048, 16), (4096, 16)]
"""Recall tasks by difficulty: tokens a row, and facts, each of which is asked for once."""
UNSEEN = [(2048, 32), (8192, 16), (16384, 16), (131072, 16)]
"""Recall tasks that no step trains on: more facts, or longer."""
LOGGED = ("loss", "recall_loss", "bits_per_byte", "mtp_bits_per_byte", "recall", "norm")


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
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


Asked = tuple[Tensor, Tensor, Tensor]
"""A recall task on the device: tokens [rows, length], places before the answers and the answers [rows, facts]."""


def ask(seed: int, rows: int, length: int, facts: int, device: str) -> Asked:
    task = recall.generate(seed, rows, length, facts, facts)
    parts = (task.tokens, task.positions - 1, task.answers)
    return tuple(torch.from_numpy(part).long().to(device) for part in parts)


def answers(model: hybrids.Hybrid, task: Asked, window: int | None, halves: str = "whole") -> Tensor:
    """Logits at the questions, [rows, facts, vocabulary].

    `halves`: `whole` rows at once; `carried`: the second half from the first half's states; `shuffled`: from the states
    of another row.
    """
    tokens, at, _ = task
    if halves == "whole":
        hidden, _ = model.trunk(tokens, None, window)
    else:
        middle = tokens.shape[1] // 2
        _, states = model.trunk(tokens[:, :middle], None, window)
        if halves == "shuffled":
            states = [None if state is None else tuple(part.roll(1, 0) for part in state) for state in states]
        hidden, _ = model.trunk(tokens[:, middle:], states, window)
        at = at - middle
    rows = torch.arange(len(at), device=at.device)[:, None]
    return model.logits(hidden[rows, at]).float()


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
    """What goes from step to step beside the weights: the recall level, its running share of right answers, states."""

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
    lengths = {"length": tokens.shape[1] - 2, "window": window, "asked": LEVELS[drawn][0], "asked_window": task_window}
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
    first, progress, lines = 0, Progress(), []
    if saved:
        if saved["identity"] != identity(run):
            raise SystemExit(f"{checkpoint} is of another run: {saved['identity']}; choose another --out or remove it")
        model.load_state_dict(saved["model"])
        adam.load_state_dict(saved["adam"])
        first, progress = saved["step"], Progress(**saved["progress"])
        lines = log.read_text().splitlines()[:first]
    log.write_text("".join(line + "\n" for line in lines))
    with log.open("a") as file:
        for step in range(first, run.steps):
            line = advance(model, adam, data, run, step, progress)
            file.write(json.dumps(line | {"seconds": round(time.monotonic() - started, 3)}) + "\n")
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


@torch.no_grad()
def evaluate(model: hybrids.Hybrid, run: argparse.Namespace, device: str) -> dict[str, object]:
    """Bits per byte on held-out books by position, recall as trained, masked, and with another row's state; float32."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    lengths = torch.from_numpy(vocabulary.byte_lengths()).to(device)
    edges = [0, *(2**power for power in range(9, 17) if 2**power < run.longest), run.longest]
    nats, bytes_, mtp = torch.zeros(len(edges) - 1), torch.zeros(len(edges) - 1), []
    documents = stretches(run.longest, run.documents)
    for _, tokens in documents:
        tokens = torch.from_numpy(tokens).long().to(device)[None]
        hidden, _ = model.trunk(tokens[:, :-2])
        loss = F.cross_entropy(model.logits(hidden).float()[0], tokens[0, 1:-1], reduction="none")
        size = lengths[tokens[0, 1:-1]]
        for index, (low, high) in enumerate(pairwise(edges)):
            nats[index] += loss[low:high].sum().cpu()
            bytes_[index] += size[low:high].sum().cpu()
        foretold = model.logits(model.ahead(hidden, tokens[:, 1:-1]))[0].argmax(-1)
        mtp.append((foretold == tokens[0, 2:]).float().mean().item())
    by_position = (nats / bytes_ / math.log(2)).tolist()
    early = 3 if len(edges) > 6 else 0  # from 2,048 tokens on
    result: dict[str, object] = {
        "documents": [title for title, _ in documents],
        "bits_per_byte": float(nats.sum() / bytes_.sum() / math.log(2)),
        "bits_per_byte_by_position": {
            f"{low}-{high - 1}": b for (low, high), b in zip(pairwise(edges), by_position, strict=True)
        },
        "last_over_flat": by_position[-1] / (sum(by_position[early:-1]) / len(by_position[early:-1])),
        "mtp_top1": sum(mtp) / len(mtp),
    }
    for length, facts in LEVELS + UNSEEN:
        if length > run.longest:
            continue
        task = ask(10**6 + run.seed, min(64, max(4, 16 * run.tokens // length)), length, facts, device)
        score = {}
        for name, window, halves in [
            ("full", None, "whole"),
            ("masked", WINDOW, "whole"),
            ("carried", WINDOW, "carried"),
            ("shuffled", WINDOW, "shuffled"),
        ]:
            score[name] = (answers(model, task, window, halves).argmax(-1) == task[2]).float().mean().item()
        result[f"recall_{length}_{facts}"] = score | {"questions": task[2].numel()}
    torch.set_float32_matmul_precision(precision)
    return result


def stretches(length: int, count: int) -> list[tuple[str, np.ndarray]]:
    """Up to `count` stretches of `length` + 2 tokens of the held-out books, the beginnings of all books first."""
    books = vocabulary.tokens("held_out")
    parts = [
        (f"{title} from token {start}", tokens[start : start + length + 2])
        for start in range(0, max(map(len, books.values())), length)
        for title, tokens in books.items()
        if start + length + 2 <= len(tokens)
    ]
    if not parts:
        raise SystemExit(f"--longest {length}: no held-out book has so many tokens")
    return parts[:count]


def ship(model: hybrids.Hybrid, run: argparse.Namespace, result: dict[str, object]) -> None:
    """The Hugging Face folder: weights under the checkpoint's own names, in bfloat16, tokenizer, card, log."""
    run.ship.mkdir(parents=True, exist_ok=True)
    tensors = {f"mtp.{name}": tensor for name, tensor in model.mtp.state_dict().items()}
    for name, tensor in model.model.state_dict().items():
        if model.is_nemotron:
            name = name.replace("model.", "backbone.", 1)
        if name != "lm_head.weight" or not model.model.config.tie_word_embeddings:
            tensors[name] = tensor
    tensors = {name: tensor.to(torch.bfloat16).cpu().contiguous() for name, tensor in tensors.items()}
    save_file(tensors, run.ship / "model.safetensors", metadata={"format": "pt"})
    config = model.model.config
    config.architectures, config.dtype = [type(model.model).__name__], "bfloat16"
    config.save_pretrained(run.ship)
    for path in vocabulary.FOLDER.iterdir():
        shutil.copy(path, run.ship)
    lines = (run.out / "log.jsonl").read_text().splitlines()
    thin = [line for step, line in enumerate(lines) if step < 100 or step % 10 == 9]
    (run.ship / "training.jsonl").write_text("\n".join(thin) + "\n")
    (run.ship / "evaluation.json").write_text(json.dumps(result, indent=1) + "\n")
    (run.ship / "README.md").write_text(card(run, result, [json.loads(line) for line in lines], sum_of(tensors)))


def sum_of(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors.values())


def card(run: argparse.Namespace, result: dict, log: list[dict], parameters: int) -> str:
    """The model card, every number of it from the log and the evaluation."""
    positions = "\n".join(f"| {span} | {b:.3f} |" for span, b in result["bits_per_byte_by_position"].items())
    tasks = "\n".join(
        "| {1} | {2} |".format(*name.split("_"))
        + f" {r['questions']} | "
        + " | ".join(f"{r[way]:.1%}" for way in ("full", "masked", "carried", "shuffled"))
        + " |"
        for name, r in result.items()
        if name.startswith("recall_")
    )
    done = "" if len(log) == run.steps else f" Stopped after {len(log)} of these steps."
    asked = max(line["asked"] for line in log)
    trained = sum(max(run.tokens, line["length"]) for line in log)
    return f"""---
language: en
license: apache-2.0
---
# {run.size}-{run.model}

A model of {parameters:,} parameters (its one-layer MTP head among them) to measure decoding with, not to write with.
Trained by `experiments/train_tiny.py --model {run.model} --size {run.size} --steps {run.steps} --tokens {run.tokens}
--segment {run.segment} --longest {run.longest} --learning-rate {run.learning_rate} --seed {run.seed}`.{done}

- Data: the training split of `experiments/assets/books` ({trained:,} tokens seen, with repeats) and as many again of
  generated recall tasks; byte-level BPE of {vocabulary.SIZE:,} tokens. Jane Austen's novels are held out.
- Last 100 steps: {np.mean([line["bits_per_byte"] for line in log[-100:]]):.3f} bits per byte on training text.
- Held-out books: {result["bits_per_byte"]:.3f} bits per byte over {len(result["documents"])} stretches of
  {run.longest:,} tokens; the last bucket of positions is {result["last_over_flat"]:.3f} times the mean of those before
  (from 2,048 on). The MTP head's first choice is the token after next at {result["mtp_top1"]:.1%} of positions.

| position | held-out bits per byte |
| --- | --- |
{positions}

Recall: share of questions answered. Full attention; attention masked beyond {WINDOW} tokens; masked, the second half
from the first half's recurrent states alone; and the same from the states of another row. Training asked over at most
{asked:,} tokens, and for at most 16 facts.

| tokens | facts | questions | full | masked | carried | shuffled |
| --- | --- | --- | --- | --- | --- | --- |
{tasks}

Evaluated in float32 on the bfloat16 weights. The books are not PG-19.
"""


def main(arguments: list[str] | None = None) -> int:
    started, run = time.monotonic(), options(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.use_deterministic_algorithms(True, warn_only=True)
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
    result = evaluate(model, run, device)
    (run.out / "evaluation.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    if run.ship:
        ship(model, run, result)
    return 0 if finished else 3


if __name__ == "__main__":
    sys.exit(main())
