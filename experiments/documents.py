"""Long documents as tokens: the embedded books, a folder of one's own, or PG-19 from the Hugging Face hub.

    load("books", 8, 131072, tokenizer)         # the held-out books, their beginnings first
    load("/data/pg19", 8, 131072, tokenizer)    # *.txt, a document a file; *.parquet, a document a row
    load("hub", 8, 131072, tokenizer)           # a parquet copy of PG-19's test split

A document has at least one token more than are asked for, since the last one is only predicted; shorter ones are passed
over. The embedded books are not PG-19, and no result on them is one on PG-19.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.options import ConfigError
from experiments.weights import document_files

BOOKS, HUB = "books", "hub"
HUB_COPIES = ("emozilla/pg19-test", "emozilla/pg19", "deepmind/pg19")
"""Tried in this order; recent `datasets` runs no dataset scripts, so only parquet copies load."""
COLUMNS = ("text", "content")
TITLES = ("short_book_title", "title", "name", "url")
LONGEST_TOKEN = 24
"""Characters that hold a token at least, so that a book's beginning is encoded without the rest."""
Texts = Iterator[tuple[str, str]]
"""Title and text."""


@dataclass(frozen=True)
class Document:
    """``tokens`` int64 ``[asked + 1]``; ``sha256`` is of these tokens; ``bytes`` of text that each stands for."""

    title: str
    tokens: np.ndarray
    bytes: np.ndarray
    sha256: str


def tokenizer_of(folder: str | Path) -> Any:
    """The fast tokenizer of a Hugging Face folder. Raises ``ConfigError`` on one that cannot be read, or that has
    tokens beyond those of the folder's model."""
    from tokenizers import Tokenizer

    from replayssm.models import config_from_folder

    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{path} is missing; accepted: a folder of weights with the tokenizer.json of their model")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # what its parser raises has no class of its own
        raise ConfigError(f"{path} cannot be read ({error}); accepted: a tokenizer.json of `tokenizers`") from None
    size, last = config_from_folder(folder).vocab_size, max(tokenizer.get_vocab().values(), default=0)
    if last >= size:
        raise ConfigError(f"{path} has token {last}; accepted: 0 to {size - 1}, which the model of its folder has")
    return tokenizer


def load(source: str, count: int, tokens: int, tokenizer: Any) -> list[Document]:
    """The first ``count`` documents of more than ``tokens`` tokens. Raises ``ConfigError``, one line, where there are
    fewer."""
    found: list[Document] = []
    sizes: dict[int, int] = {}
    passed_over = 0
    texts = _books(tokens, tokenizer) if source == BOOKS else _encoded(_texts(source), tokenizer)
    for title, ids in texts:
        if len(ids) <= tokens:
            passed_over += 1
            continue
        ids = np.asarray(ids[: tokens + 1], np.int64)
        for token in set(ids.tolist()) - sizes.keys():
            sizes[token] = _bytes_of(token, tokenizer)
        digest = hashlib.sha256(ids.tobytes()).hexdigest()
        found.append(Document(title, ids, np.array([sizes[token] for token in ids.tolist()]), digest))
        if len(found) == count:
            return found
    raise ConfigError(
        f"documents={source} has {len(found)} documents of more than {tokens:,} tokens, {passed_over} shorter ones; "
        f"accepted: {count} of them, or fewer documents, or fewer tokens"
    )


def _bytes_of(token: int, tokenizer: Any) -> int:
    """Of a byte-level tokenizer a character a byte; of another what the token decodes to."""
    if type(tokenizer.decoder).__name__ == "ByteLevel":
        return 0 if token in tokenizer.get_added_tokens_decoder() else len(tokenizer.id_to_token(token))
    return len(tokenizer.decode([token]).encode())


def _encoded(texts: Texts, tokenizer: Any) -> Iterator[tuple[str, Any]]:
    for title, text in texts:
        # The fast form leaves out where in the text a token lies, which takes as long as the rest.
        (encoded,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
        yield title, encoded.ids


def _books(tokens: int, tokenizer: Any) -> Iterator[tuple[str, Any]]:
    """Stretches of the held-out books that do not overlap, the beginnings of all books first."""
    from experiments.assets import books

    texts = [(book.title, book.text) for book in books.load("held_out")]
    beginnings = ((title, text[: LONGEST_TOKEN * (tokens + 1)]) for title, text in texts)
    for title, ids in _encoded(beginnings, tokenizer):
        yield f"{title} from token 0", ids[: tokens + 1]
    whole = list(_encoded(iter(texts), tokenizer))
    for start in range(tokens, max(len(ids) for _, ids in whole), tokens):
        for title, ids in whole:
            yield f"{title} from token {start}", ids[start : start + tokens + 1]


def _texts(source: str) -> Texts:
    return _hub() if source == HUB else _files(document_files(source))


def _files(files: list[Path]) -> Texts:
    for file in files:
        if file.suffix == ".txt":
            yield file.stem, file.read_text(encoding="utf-8", errors="replace")
        else:
            yield from _parquet(file)


def _parquet(file: Path) -> Texts:
    import pandas as pd

    try:
        table = pd.read_parquet(file)
    except ImportError:
        raise ConfigError(
            f"{file} needs pyarrow, which is not installed; accepted: pip install pyarrow, or .txt files"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} is no parquet file ({str(error).splitlines()[0]}); accepted: one that is") from None
    column = next((name for name in COLUMNS if name in table), None)
    if column is None:
        raise ConfigError(f"{file} has columns {', '.join(table)}; accepted: one that is named {' or '.join(COLUMNS)}")
    title = next((name for name in TITLES if name in table), None)
    for number, text in enumerate(table[column]):
        yield (str(table[title].iloc[number]) if title else f"{file.stem} {number}"), str(text)


def _hub() -> Texts:
    """The first copy of PG-19 that loads."""
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            "documents=hub needs the package datasets, which is not installed; accepted: pip install datasets, a "
            f"folder of .txt or .parquet files, or {BOOKS}"
        ) from None
    told = []
    for repository in HUB_COPIES:
        try:
            table = datasets.load_dataset(repository, split="test", streaming=True)
            first = next(iter(table))
        except Exception as error:  # whatever stops one repository, the next may load
            told.append(f"{repository} ({' '.join(str(error).split())[:80] or type(error).__name__})")
            continue
        column = next((name for name in COLUMNS if name in first), None)
        title = next((name for name in TITLES if name in first), None)
        if column is None:
            told.append(f"{repository} (no column {' or '.join(COLUMNS)})")
            continue
        return ((str(row[title]) if title else f"{repository} {n}", row[column]) for n, row in enumerate(table))
    raise ConfigError(
        f"documents=hub: no copy of PG-19 could be loaded: {'; '.join(told)}; accepted: a machine that reaches the "
        f"hub, a folder of .txt or .parquet files, or {BOOKS}"
    )
