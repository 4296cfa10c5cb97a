"""The small models' vocabulary: byte-level BPE of 1,024 tokens, trained on the books' training split alone.

    python -m experiments.assets.vocabulary     # trains it anew and rewrites experiments/assets/tokenizer/

1,024 because an embedding of a small model is dear (and Nemotron-H has two): 2.68 bytes of held-out text a token, so
that every held-out book is longer than 131,072 tokens. Digits are single tokens. The folder loads in `transformers`
as a fast tokenizer; this module itself needs only `tokenizers`.
"""

import json
from functools import cache
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from experiments.assets import books

FOLDER = Path(__file__).parent / "tokenizer"
SIZE = 1024
END_OF_TEXT = "<|endoftext|>"


def train() -> Tokenizer:
    """A tokenizer trained on the training split; the same books give the same file."""
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Split(Regex(r"\d"), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    paragraphs = (paragraph for book in books.load("train") for paragraph in book.text.split("\n\n"))
    tokenizer.train_from_iterator(paragraphs, trainer)
    return tokenizer


@cache
def load() -> Tokenizer:
    """The committed tokenizer.

    Raises ValueError, in one line, if its file is missing.
    """
    path = FOLDER / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"vocabulary: {path} is missing; restore it from git")
    return Tokenizer.from_file(str(path))


@cache
def byte_lengths() -> np.ndarray:
    """Bytes of text that each token stands for, int64 [SIZE]; 0 for the end of text."""
    vocabulary = load().get_vocab()
    lengths = np.zeros(SIZE, np.int64)
    for token, index in vocabulary.items():
        lengths[index] = 0 if token == END_OF_TEXT else len(token)  # the byte-level alphabet: a character a byte
    return lengths


def encode(text: str) -> np.ndarray:
    """Token ids of a text, int32 [tokens]; nothing is added at either end."""
    # The fast form leaves out where in the text a token lies, which takes as long as the rest.
    (encoded,) = load().encode_batch_fast([text], add_special_tokens=False)
    return np.array(encoded.ids, np.int32)


@cache
def tokens(split: str) -> dict[str, np.ndarray]:
    """Every book of a split as token ids, title -> int32 [tokens], in the provenance table's order."""
    return {book.title: encode(book.text) for book in books.load(split)}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    train().save(str(FOLDER / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT, "model_max_length": 131072}
    config |= {"clean_up_tokenization_spaces": False}
    (FOLDER / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    main()
