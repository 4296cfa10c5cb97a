"""The embedded public-domain books, checked against their provenance table.

    from experiments.assets.books import load
    for book in load("held_out"):
        print(book.title, len(book.text))

Ten texts, 22.8 MB: everything that models train on is in the split `train`; `held_out` has the six novels of Jane
Austen, none of whose text is in `train`, so that the two splits share no author. `provenance.csv` says for each text
its author, source package and version, licence, bytes and sha256; `scripts/build_assets.py` rebuilds the files. These
are not PG-19, and no result on them is one on PG-19.
"""

import bz2
import csv
import hashlib
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "books"
SPLITS = ("train", "held_out")


@dataclass(frozen=True)
class Book:
    """One text; `text` is ASCII but for a few letters, paragraphs separated by an empty line."""

    title: str
    author: str
    split: str
    text: str


def provenance(folder: Path = FOLDER) -> list[dict[str, str]]:
    """The rows of `provenance.csv`, in its order."""
    path = folder / "provenance.csv"
    if not path.is_file():
        raise ValueError(f"books: {path} is missing; scripts/build_assets.py rebuilds it")
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def load(split: str, folder: Path = FOLDER) -> list[Book]:
    """The books of one split, in the table's order.

    Raises ValueError, in one line, for an unknown split and for a file that is missing or is not the one in the table.
    """
    if split not in SPLITS:
        raise ValueError(f"books: split is {split!r}; accepted: {', '.join(SPLITS)}")
    rows = [row for row in provenance(folder) if row["split"] == split]
    return [Book(row["title"], row["author"], split, _text(row, folder)) for row in rows]


def _text(row: dict[str, str], folder: Path) -> str:
    path = folder / row["file"]
    if not path.is_file():
        raise ValueError(f"books: {path} is missing; scripts/build_assets.py rebuilds it")
    packed = path.read_bytes()
    if hashlib.sha256(packed).hexdigest() != row["compressed_sha256"]:
        raise ValueError(f"books: {path} is not the file in provenance.csv (sha256 differs); restore it from git")
    return bz2.decompress(packed).decode()
