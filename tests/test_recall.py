"""The vocabulary and the recall tasks: what is committed can be rebuilt, what is asked follows from the facts alone."""

import numpy as np
import pytest

from experiments.assets import books, recall, vocabulary


@pytest.fixture(scope="module")
def task():
    return recall.generate(seed=3, rows=8, length=1024, pairs=16, queries=12)


@pytest.mark.slow
def test_the_committed_vocabulary_is_the_one_that_training_gives():
    assert vocabulary.train().to_str() == vocabulary.load().to_str()


def test_text_survives_the_vocabulary():
    text = "Emma \u2014 1,815:\n\n  \u05d7\u05df  @ # <|x|>\ttab"
    ids = vocabulary.encode(text)
    assert vocabulary.load().decode(ids.tolist()) == text
    assert vocabulary.byte_lengths()[ids].sum() == len(text.encode())
    assert vocabulary.load().get_vocab_size() == vocabulary.SIZE


def test_four_held_out_books_are_longer_than_131072_tokens():
    lengths = {title: len(ids) for title, ids in vocabulary.tokens("held_out").items()}
    assert sum(length > 131_072 for length in lengths.values()) >= 4, lengths


def test_it_loads_in_transformers_as_a_fast_tokenizer():
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(vocabulary.FOLDER)
    text = books.load("held_out")[0].text[:5000]
    assert tokenizer.is_fast
    assert tokenizer(text)["input_ids"] == vocabulary.encode(text).tolist()
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_every_answer_follows_from_a_fact_and_from_nothing_else(task):
    fact, question = vocabulary.encode("@#")
    for row, positions, answers, distances in zip(
        task.tokens, task.positions, task.answers, task.distances, strict=True
    ):
        at = np.flatnonzero(row == fact)
        facts = dict(zip(row[at + 1], row[at + 2], strict=True))
        assert len(set(row[positions - 1])) == len(positions) == 12
        assert len(facts) == len(at) == 16
        assert (np.flatnonzero(row == question) + 2 == positions).all()
        assert [facts[key] for key in row[positions - 1]] == answers.tolist()
        assert (row[positions - distances] == answers).all()
        assert (row[positions - distances - 1] == row[positions - 1]).all()


def test_distances_cross_many_intervals(task):
    assert task.distances.min() < 512
    assert task.distances.max() > 50 * 16


def test_the_text_of_a_row_asks_the_same(task):
    question = vocabulary.encode("#")[0]
    for row in range(len(task.tokens)):
        read = vocabulary.encode(task.text(row))
        assert (read[np.flatnonzero(read == question) + 2] == task.answers[row]).all()


def test_batches_are_seeded():
    first, again, other = (recall.generate(seed, 2, 256, 8, 8).tokens for seed in (1, 1, 2))
    assert (first == again).all()
    assert (first != other).any()


def test_the_score_counts_right_answers_alone(task):
    perfect = np.roll(task.tokens, -1, 1)
    assert recall.accuracy(task, perfect) == 1
    assert recall.accuracy(task, np.zeros_like(perfect)) == 0
    half = perfect.copy()
    np.put_along_axis(half, task.positions[:, ::2] - 1, 0, 1)
    assert recall.accuracy(task, half) == 0.5


def test_guessing_among_the_values_of_a_row_scores_near_one_in_pairs():
    task = recall.generate(seed=5, rows=200, length=512, pairs=16, queries=16)
    random = np.random.default_rng(0)
    guess = np.zeros_like(task.tokens)
    for row, positions, answers in zip(guess, task.positions, task.answers, strict=True):
        row[positions - 1] = random.permutation(answers)
    assert recall.accuracy(task, guess) < 0.15


@pytest.mark.parametrize("wrong", [{"length": 1020}, {"pairs": 65}, {"pairs": 0}, {"queries": 9}, {"length": 56}])
def test_what_does_not_fit_gives_one_clear_line(wrong):
    with pytest.raises(ValueError, match=r"recall: length .* a row needs a length that is a multiple of 8"):
        recall.generate(**({"seed": 1, "rows": 1, "length": 512, "pairs": 8, "queries": 8} | wrong))
