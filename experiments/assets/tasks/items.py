"""Items of the embedded tasks, generated: the same for the same numbers. lm-eval calls these from the YAML files here.

`recall`: the likeliest next word must be the value of a fact told up to `length` tokens before. `four_choices`: the
columns of GPQA, each question a passage with facts in it, the other three answers being values of other facts as far as
there are three. `word_problems`: sums in a few sentences, whose worked answer ends in `#### N`. Passages are held-out
text.
"""

from __future__ import annotations

import random
from typing import Any

import datasets

from experiments.assets import problems, vocabulary
from experiments.assets import recall as generator

Docs = dict[str, datasets.Dataset]


def recall(items: int, length: int, facts: int, seed: int, **_: Any) -> Docs:
    """`text`, `answer`, `passage`, `distance` in tokens; one item for each fact of a passage, by position."""
    return _test(list(_questions(items, length, facts, seed)))


def four_choices(items: int, length: int, facts: int, seed: int, **_: Any) -> Docs:
    """GPQA's columns, with `passage` and `distance`."""
    draw, docs = random.Random(seed), []
    for question in _questions(items, length, facts, seed):
        right, every = question["answer"], [vocabulary.load().decode([word]) for word in generator.words()[1]]
        told, untold = sorted({*question["values"]} - {right}), sorted({*every} - {*question["values"]})
        wrong = [*draw.sample(told, min(3, len(told))), *draw.sample(untold, 3)][:3]
        docs.append(
            {"Question": question["text"], "Correct Answer": right}
            | {f"Incorrect Answer {number}": answer for number, answer in enumerate(wrong, 1)}
            | {"passage": question["passage"], "distance": question["distance"]}
        )
    return _test(docs)


def shuffled(docs: datasets.Dataset) -> datasets.Dataset:
    """GPQA's columns as `choices` in an order of each item's own, and `answer`, the place of the right one."""

    def shuffle(doc: dict[str, Any], number: int) -> dict[str, Any]:
        choices = [doc["Correct Answer"], *(doc[f"Incorrect Answer {n}"] for n in (1, 2, 3))]
        order = random.Random(number).sample(range(4), 4)
        return {"choices": [choices[place] for place in order], "answer": order.index(0)}

    return docs.map(shuffle, with_indices=True)


def word_problems(items: int, seed: int, **_: Any) -> Docs:
    """GSM8K's columns, `question` and `answer`; the split `train` has eight problems for few-shot prompts."""
    drawn = problems.generate(items + 8, seed)
    train, test = drawn[:8], drawn[8:]
    return {"train": datasets.Dataset.from_list(train), "test": datasets.Dataset.from_list(test)}


def _questions(items: int, length: int, facts: int, seed: int) -> Any:
    """Every question of as many passages as are needed, `items` in all."""
    passages = -(-items // facts)
    task, tokenizer = generator.generate(seed, passages, length, facts, facts, "held_out"), vocabulary.load()

    def text(tokens: Any) -> str:
        return tokenizer.decode(tokens.tolist(), skip_special_tokens=False)

    for number in range(items):
        passage, question = divmod(number, facts)
        tokens, place = task.tokens[passage], task.positions[passage, question]
        yield {
            "text": text(tokens[:place]),
            "answer": text(tokens[place : place + 1]),
            "passage": passage,
            "distance": int(task.distances[passage, question]),
            "values": [text(value[None]) for value in task.answers[passage]],
        }


def _test(docs: list[dict[str, Any]]) -> Docs:
    return {"test": datasets.Dataset.from_list(docs)}
