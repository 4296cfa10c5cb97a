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

from experiments.assets import recall as generator
from experiments.assets import vocabulary

Docs = dict[str, datasets.Dataset]
NAMES = ("Anne", "Elinor", "Emma", "Fanny", "Frederick", "George", "Jane", "Mary", "Thomas", "William")
THINGS = ("apples", "books", "candles", "letters", "oranges", "ribbons", "shillings", "spoons")


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
    draw = random.Random(seed)
    drawn = [_problem(draw) for _ in range(2 * items + 100)]
    problems = list({problem["question"]: problem for problem in drawn}.values())
    train, test = problems[:8], problems[8 : 8 + items]
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


def _problem(draw: random.Random) -> dict[str, str]:
    name, friend = draw.sample(NAMES, 2)
    thing, first, more, each = draw.choice(THINGS), draw.randint(3, 40), draw.randint(2, 30), draw.randint(2, 6)
    total = first + more
    question = (
        f"{name} has {first} {thing}. {friend} brings {more} more. Each of them is worth {each} pence. "
        f"How many pence are all the {thing} worth together?"
    )
    worked = f"{name} then has {first} + {more} = {total} {thing}. They are worth {total} * {each} = {total * each}."
    return {"question": question, "answer": f"{worked}\n#### {total * each}"}


def _test(docs: list[dict[str, Any]]) -> Docs:
    return {"test": datasets.Dataset.from_list(docs)}
