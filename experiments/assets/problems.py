"""Word problems, generated: sums in a few sentences, whose worked answer ends in `#### N`. Standard library only."""

from __future__ import annotations

import random

NAMES = ("Anne", "Elinor", "Emma", "Fanny", "Frederick", "George", "Jane", "Mary", "Thomas", "William")
THINGS = ("apples", "books", "candles", "letters", "oranges", "ribbons", "shillings", "spoons")


def generate(count: int, seed: int) -> list[dict[str, str]]:
    """`count` different ones with GSM8K's columns, `question` and `answer`; the same for the same seed."""
    draw = random.Random(seed)
    drawn = [_problem(draw) for _ in range(2 * count + 84)]
    return list({problem["question"]: problem for problem in drawn}.values())[:count]


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
