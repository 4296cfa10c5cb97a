"""Evaluate a small hybrid of ours: held-out books by position, recall, and the model card.

    python -m experiments.evaluate_tiny experiments/assets/models/tiny-qwen3.5
    python -m experiments.evaluate_tiny experiments/assets/models/tiny-qwen3.5 --longest 8192 --documents 2
    python -m experiments.evaluate_tiny experiments/assets/models/tiny-qwen3.5 --card-only

`experiments/train_tiny.py` calls this at its end. The command reads the weights that ship, rewrites the folder's
`evaluation.json` and its card, `README.md`; `--card-only` writes the card alone, every number of which is from
`training.json`, `training.jsonl.xz`, `evaluation.json` and the weights' own sizes.
"""

from __future__ import annotations

import json
import lzma
import math
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from experiments import hybrids
from experiments.assets import recall, vocabulary
from experiments.options import LineParser

WINDOW = 64
LEVELS = [(128, 4), (256, 8), (512, 16), (1024, 16), (2048, 16), (4096, 16)]
"""Recall tasks by difficulty: tokens a row, and facts, each of which is asked for once."""
UNSEEN = [(2048, 32), (8192, 16), (16384, 16), (131072, 16)]
"""Recall tasks that no step trains on: more facts, or longer."""
WAYS = {
    "full": (None, "whole"),
    "masked": (WINDOW, "whole"),
    "carried": (WINDOW, "carried"),
    "shuffled": (WINDOW, "shuffled"),
}
"""How recall is asked: the attention's window and what becomes of a row's first half; see `answers`."""
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


@torch.no_grad()
def evaluate(model: hybrids.Hybrid, longest: int, documents: int, seed: int, device: str) -> dict[str, object]:
    """Bits per byte of `documents` held-out stretches of `longest` tokens by position, and recall; in float32."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    result = held_out(model, longest, documents, device)
    for length, facts in LEVELS + UNSEEN:
        if length > longest:
            continue
        task = ask(10**6 + seed, min(64, max(4, 4 * longest // length)), length, facts, device)
        score = {
            way: (answers(model, task, *how).argmax(-1) == task[2]).float().mean().item() for way, how in WAYS.items()
        }
        result[f"recall_{length}_{facts}"] = score | {"questions": task[2].numel()}
    torch.set_float32_matmul_precision(precision)
    return result


def held_out(model: hybrids.Hybrid, longest: int, count: int, device: str) -> dict[str, object]:
    lengths = torch.from_numpy(vocabulary.byte_lengths()).to(device)
    edges = [0, *(2**power for power in range(9, 17) if 2**power < longest), longest]
    nats, bytes_, mtp = torch.zeros(len(edges) - 1), torch.zeros(len(edges) - 1), []
    documents = stretches(longest, count)
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
    spans = [f"{low}-{high - 1}" for low, high in pairwise(edges)]
    return {
        "documents": [title for title, _ in documents],
        "longest": longest,
        "bits_per_byte": float(nats.sum() / bytes_.sum() / math.log(2)),
        "bits_per_byte_by_position": dict(zip(spans, by_position, strict=True)),
        "last_over_flat": by_position[-1] / (sum(by_position[early:-1]) / len(by_position[early:-1])),
        "flat_from": edges[early],
        "mtp_top1": sum(mtp) / len(mtp),
    }


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


def describe(folder: Path, result: dict[str, object]) -> None:
    """Write `evaluation.json` and the card into a shipped folder."""
    (folder / "evaluation.json").write_text(json.dumps(result, indent=1) + "\n")
    (folder / "README.md").write_text(card(folder))


def card(folder: Path) -> str:
    """The model card, every number of it from the folder's files."""
    run = json.loads((folder / "training.json").read_text())
    result = json.loads((folder / "evaluation.json").read_text())
    log = [json.loads(line) for line in lzma.decompress((folder / "training.jsonl.xz").read_bytes()).splitlines()]
    with safe_open(folder / "model.safetensors", "pt") as file:
        parameters = sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    done = log[-1]["step"] + 1
    stopped = "" if done == run["steps"] else f" It was stopped after {done:,} of these steps."
    last = np.mean([line["bits_per_byte"] for line in log if line["step"] >= done - 100])
    positions = "\n".join(f"| {span} | {b:.3f} |" for span, b in result["bits_per_byte_by_position"].items())
    tasks = "\n".join(
        "| {1} | {2} |".format(*name.split("_"))
        + f" {r['questions']} | "
        + " | ".join(f"{r[way]:.1%}" for way in WAYS)
        + " |"
        for name, r in result.items()
        if name.startswith("recall_")
    )
    names = ("model", "size", "steps", "tokens", "segment", "longest", "learning_rate", "seed")
    command = " ".join(f"--{name.replace('_', '-')} {run[name]}" for name in names)
    return f"""---
language: en
license: apache-2.0
---
# {folder.name}

A model of {parameters:,} parameters (its one-layer MTP head among them) to measure decoding with, not to write with.
Trained from random weights in {log[-1]["seconds"] / 60:.1f} minutes on one {run["device"]} (torch {run["torch"]}) by

    python -m experiments.train_tiny {command} --out OUT --ship FOLDER

{stopped}

- Data: {log[-1]["read"]:,} tokens, with repeats, of the training split of `experiments/assets/books`, and as many again
  of generated recall tasks (`experiments/assets/recall.py`); byte-level BPE of {vocabulary.SIZE:,} tokens. The novels
  of Jane Austen are held out, and no other text of hers is in the training split.
- Steps: {done:,}. Last 100 of them: {last:.3f} bits per byte on training text.
- Held-out books: {result["bits_per_byte"]:.3f} bits per byte over {len(result["documents"])} stretches of
  {result["longest"]:,} tokens; the last row below is {result["last_over_flat"]:.3f} times the mean of those before it
  from token {result["flat_from"]:,} on.
- The MTP head's first choice is the token after next at {result["mtp_top1"]:.1%} of held-out positions.

| position | held-out bits per byte |
| --- | --- |
{positions}

Recall: share of questions answered, each about another fact. Full attention; attention masked beyond {WINDOW} tokens;
masked, with the second half computed from the recurrent states after the first half alone; and the same from the
states of another row. Training asked over at most {max(line["asked"] for line in log):,} tokens, for at most 16 facts,
with masked attention at three steps of four.

| tokens | facts | questions | full | masked | carried | shuffled |
| --- | --- | --- | --- | --- | --- | --- |
{tasks}

Evaluated in float32 on the bfloat16 weights of this folder. `training.jsonl.xz` has the first 100 steps and every tenth
after them. The books are not PG-19.
""".replace("\n\n\n\n", "\n\n")


def main(arguments: list[str] | None = None) -> int:
    parser = LineParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--longest", type=int, default=131072, help="tokens a held-out stretch, and at most a recall row"
    )
    parser.add_argument("--documents", type=int, default=10, help="held-out stretches")
    parser.add_argument("--card-only", action="store_true", help="rewrite the card from the evaluation that is there")
    chosen = parser.parse_args(arguments)
    if not (chosen.folder / "training.json").is_file():
        parser.error(f"{chosen.folder} is no model that experiments/train_tiny.py shipped: it lacks training.json")
    if chosen.card_only:
        (chosen.folder / "README.md").write_text(card(chosen.folder))
        return 0
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, seed = hybrids.load(chosen.folder)
    result = evaluate(model.to(device), chosen.longest, chosen.documents, seed, device)
    describe(chosen.folder, result)
    print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
