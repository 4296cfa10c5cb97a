"""Recall tasks: facts scattered through a book, questions about them many intervals later.

    from experiments.assets import recall
    task = recall.generate(seed=1, rows=4, length=2048, pairs=16, queries=16)
    recall.accuracy(task, predicted)            # predicted: the most probable next token at every position

Multi-query associative recall in the models' own vocabulary. A fact is the line `@ KEY VALUE`, a question the line
`# KEY VALUE`, each four tokens with its newline; a model is scored on the VALUE of the questions, which it must have
kept since the fact: no fact is asked for twice, so that no question tells another's answer. Everything between is text
of one split. Facts stand in the first half of a row and questions in the second, so the distances spread from near 0 to
the whole length: with 2,048 tokens up to 128 intervals of 16. Keys and values are drawn from two disjoint lists of 64
words; guessing a word seen in the row is right once in `pairs`.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np

from experiments.assets import vocabulary

FACT, QUESTION, LINE = "@", "#", 4
WORDS = 64


@dataclass(frozen=True)
class Recall:
    """`tokens` int32 [rows, length]; for the questions, sorted by position: `positions` int64 [rows, queries], the
    place of each question's value; `distances` int64 [rows, queries], tokens from the fact's value to the question's.
    """

    tokens: np.ndarray
    positions: np.ndarray
    distances: np.ndarray

    @property
    def answers(self) -> np.ndarray:
        """The values asked for, int32 [rows, queries]."""
        return np.take_along_axis(self.tokens, self.positions, 1)

    def text(self, row: int) -> str:
        """One row as the text that the vocabulary reads back."""
        return vocabulary.load().decode(self.tokens[row].tolist(), skip_special_tokens=False)


@cache
def words() -> tuple[np.ndarray, np.ndarray]:
    """Ids of the key words and of the value words, int32 [64] each.

    Words, or beginnings of words, of four letters or more that are one token with the space before them.
    """
    entries = sorted((index, token) for token, index in vocabulary.load().get_vocab().items())
    known = [index for index, token in entries if len(token) > 4 and token[0] == "\u0120" and token[1:].isalpha()]
    if len(known) < 2 * WORDS:
        raise ValueError(f"recall: the vocabulary has {len(known)} words of four letters; {2 * WORDS} are needed")
    return np.array(known[:WORDS], np.int32), np.array(known[WORDS : 2 * WORDS], np.int32)


@cache
def _filler(split: str) -> np.ndarray:
    """A split's tokens in one array, without the markers."""
    text = np.concatenate(list(vocabulary.tokens(split).values()))
    return text[~np.isin(text, vocabulary.encode(FACT + QUESTION))]


def generate(seed: int, rows: int, length: int, pairs: int, queries: int, split: str = "train") -> Recall:
    """A batch of rows in the text of a split of the books, the same for the same arguments.

    `length` tokens a row (a multiple of 8), `pairs` facts of distinct keys (1 to 64), `queries` questions about as many
    of the facts. Raises ValueError, in one line, where they do not fit.
    """
    half = length // LINE // 2
    if length % (2 * LINE) or not 1 <= pairs <= min(WORDS, half) or not 1 <= queries <= pairs:
        raise ValueError(
            f"recall: length {length}, pairs {pairs}, queries {queries}: a row needs a length that is a multiple of "
            f"{2 * LINE}, pairs from 1 to {WORDS} and at most length / {2 * LINE}, and queries from 1 to pairs"
        )
    random = np.random.default_rng([seed, length, pairs, queries])
    keys, values = (list_[random.random((rows, WORDS)).argsort(1)[:, :pairs]] for list_ in words())
    values = np.take_along_axis(values, random.integers(0, pairs, (rows, pairs)), 1)  # values may repeat
    asked = random.random((rows, pairs)).argsort(1)[:, :queries]
    told_at = np.sort(random.random((rows, half)).argsort(1)[:, :pairs], 1)
    asked_at = np.sort(random.random((rows, half)).argsort(1)[:, :queries], 1) + half

    text = _filler(split)
    starts = random.integers(0, len(text) - length, rows)
    lines = np.stack([text[start : start + length] for start in starts]).reshape(rows, -1, LINE)
    fact, question, newline = vocabulary.encode(f"{FACT}{QUESTION}\n")
    every = np.arange(rows)[:, None]
    lines[every, told_at] = _line(fact, keys, values, newline)
    lines[every, asked_at] = _line(question, keys[every, asked], values[every, asked], newline)
    positions = asked_at * LINE + 2
    return Recall(lines.reshape(rows, length), positions, positions - (told_at[every, asked] * LINE + 2))


def _line(marker: int, key: np.ndarray, value: np.ndarray, newline: int) -> np.ndarray:
    return np.stack([np.full_like(key, marker), key, value, np.full_like(key, newline)], -1)


def accuracy(task: Recall, predicted: np.ndarray) -> float:
    """Share of questions answered; `predicted` [rows, length] holds at t the token foretold for t + 1."""
    return float((np.take_along_axis(predicted, task.positions - 1, 1) == task.answers).mean())
