"""Text from a model, streamed as it is made: the engine on any Hugging Face folder that it can load.

    python -m experiments.generate
    python -m experiments.generate experiments/assets/models/tiny-qwen3.5 --arm stored/cpu --temperature 0
    python -m experiments.generate FOLDER --device cuda --arm replay/triton --prompt "It is a truth" --tokens 200

Needs the package `tokenizers`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.measure import nvidia
from experiments.measure.sources import ROOT
from experiments.options import ConfigError, LineParser, choice, integer, number, refuse
from experiments.weights import FOLDER, refuse_incomplete, refused_by
from replayssm.arms import ARMS

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TINY = ROOT / "experiments" / "assets" / "models" / "tiny-nemotron-h"
PROMPT = "It was a dark and stormy night"


def text_of(tokens: Iterator[int], tokenizer: Tokenizer) -> Iterator[str]:
    """Pieces of text as soon as they are whole: a character may need several tokens."""
    made: list[int] = []
    shown = 0
    for token in tokens:
        made.append(token)
        text = tokenizer.decode(made)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            yield text[shown:]
            shown = len(text)
    yield tokenizer.decode(made)[shown:]


def main() -> int:
    """Returns 2, behind one line, on a folder, an arm or a number that cannot be: most before PyTorch is imported."""
    parser = LineParser(prog="python -m experiments.generate", description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=TINY, help="a Hugging Face folder")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--tokens", type=int, default=120, help="at most so many")
    parser.add_argument("--temperature", type=float, default=0.5, help="0: the likeliest token")
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--arm", default="replay/cpu", help=", ".join(ARMS))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    try:
        check(options)
        for piece in generated(options):
            print(piece, end="", flush=True)
        print()
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def check(options: argparse.Namespace) -> None:
    """Raises ``ConfigError`` on what can be seen to be wrong without PyTorch."""
    if not options.folder.is_dir():
        raise refuse("folder", str(options.folder), FOLDER, "is no folder")
    refuse_incomplete("folder", str(options.folder), options.folder, "config.json", "tokenizer.json")
    given = vars(options)
    if not options.prompt:
        raise refuse("prompt", options.prompt, "a text")
    integer(given, "tokens", 1)
    number(given, "temperature", 0, equal=True)
    number(given, "top_p", 0, 1)
    integer(given, "seed", 0, 2**63 - 1)
    choice(given, "arm", ARMS)
    nvidia.refuse_without(options.device)


def generated(options: argparse.Namespace) -> Iterator[str]:
    """The prompt and what follows, in pieces. Raises ``ConfigError``."""
    import torch

    from experiments.chat import ends_of
    from experiments.documents import tokenizer_of
    from replayssm.engine import Engine, Request, Sampling
    from replayssm.models import check_folder, load_model

    dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
    sampling = Sampling(options.temperature, options.top_p, options.seed)
    with refused_by("folder", options.folder):
        check_folder(options.folder)
        tokenizer, end = tokenizer_of(options.folder), frozenset(ends_of(options.folder))
        prompt = tokenizer.encode(options.prompt, add_special_tokens=False).ids
        model = load_model(options.folder, dtype=dtype, device=options.device)
        engine = Engine(model, options.arm, slots=1, capacity=len(prompt) + options.tokens)
        tokens = engine.generate([Request(prompt, options.tokens, sampling, stop=end)])
    yield options.prompt
    yield from text_of((token.token for token in tokens if token.token not in end), tokenizer)


if __name__ == "__main__":
    sys.exit(main())
