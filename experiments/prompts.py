"""Prompts of the speculative experiment as a model's tokens: embedded word problems, questions of a file or the hub."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

from experiments import chat
from experiments.assets import problems
from experiments.documents import tokenizer_of
from experiments.options import ConfigError
from experiments.speculative_case import WORD_PROBLEMS, SpeculativeCase, questions_of

FETCHED: dict[str, list[str]] = {}
"""Questions of a data set of the hub, by its name. The process that starts workers asks for them, and each worker gets
them with its job.
"""


def fetch(cases: Iterable[SpeculativeCase]) -> dict[str, list[str]]:
    """The questions of all data sets of the hub that the cases name, each asked for once. Raises ``ConfigError``."""
    names = {case.prompts for case in cases if case.prompts not in ("", WORD_PROBLEMS) and not case.prompts_digest}
    for name in sorted(names - set(FETCHED)):
        FETCHED[name] = _from_hub(name)
    return {name: FETCHED[name] for name in sorted(names)}


def questions(case: SpeculativeCase) -> list[str]:
    """One a row, in an order drawn from the case's seed; where there are fewer, from the beginning again. Raises
    ``ConfigError`` where they cannot be read."""
    if case.prompts == WORD_PROBLEMS:
        found = [problem["question"] for problem in problems.generate(case.batch_size, case.seed)]
    elif Path(case.prompts).is_file():
        found = questions_of(Path(case.prompts))
    else:
        found = fetch([case])[case.prompts]
    order = random.Random(case.seed).sample(range(len(found)), len(found))
    return [found[order[row % len(found)]] for row in range(case.batch_size)]


def _from_hub(name: str) -> list[str]:
    try:
        import datasets

        table = datasets.load_dataset(name, "main", split="test")
        return [str(question) for question in table["question"]]
    except Exception as error:  # of many kinds: no package, no network, no such set, no such column
        told = " ".join(str(error).split())[:160]
        raise ConfigError(
            f"prompts={name} cannot be read ({type(error).__name__}: {told}); accepted: a machine that reaches "
            "huggingface.co with the package datasets, or a file"
        ) from None


def prompts(case: SpeculativeCase) -> list[list[int]]:
    """The questions as the model's chat template has them, thinking off, or plainly where it has none; of longer ones
    the last ``context`` tokens. Raises ``ConfigError`` where the questions cannot be read."""
    folder = Path(case.weights)
    tokenizer, template = tokenizer_of(folder), chat.template_of(folder)
    made = []
    for question in questions(case):
        asked = [{"role": "user", "content": question}]
        text = f"Question: {question}\nAnswer:"
        if template is not None:
            text = chat.render(folder, asked, continues=False, enable_thinking=False)
        made.append(tokenizer.encode(text, add_special_tokens=False).ids[-case.context :])
    return made
