"""The embedded books: what the provenance table says of them is true, and the splits share no author."""

import bz2
import hashlib
import shutil

import pytest

from experiments.assets import books


@pytest.fixture(scope="module")
def everything():
    return [book for split in books.SPLITS for book in books.load(split)]


def test_every_text_is_the_one_in_the_table():
    for row in books.provenance():
        packed = (books.FOLDER / row["file"]).read_bytes()
        raw = bz2.decompress(packed)
        assert len(packed) == int(row["compressed_bytes"])
        assert len(raw) == int(row["bytes"])
        assert len(raw.decode()) == int(row["characters"])
        assert hashlib.sha256(raw).hexdigest() == row["sha256"]
        assert row["source"]
        assert row["licence"].startswith("public domain")


def test_table_lists_exactly_the_files():
    listed = {row["file"] for row in books.provenance()} | {"provenance.csv"}
    assert listed == {path.name for path in books.FOLDER.iterdir()}


def test_sizes_keep_within_their_budget():
    assert sum(int(row["bytes"]) for row in books.provenance()) > 20e6
    assert sum(path.stat().st_size for path in books.FOLDER.iterdir()) <= 7_000_000


def test_splits_share_no_author_and_no_sentence(everything):
    authors = {split: {book.author for book in everything if book.split == split} for split in books.SPLITS}
    assert not authors["train"] & authors["held_out"]
    trained = "".join(book.text for book in everything if book.split == "train")
    for book in everything:
        sample = book.text[100_000:100_200]
        assert (sample in trained) == (book.split == "train")


def test_texts_are_clean(everything):
    for book in everything:
        assert "Project Gutenberg" not in book.text
        assert "\r" not in book.text
        assert "\n\n\n" not in book.text
        assert not set(book.text) & set("\u201c\u201d\u2018\u2019\u2014")
        assert sum(character > "\x7f" for character in book.text) < 1e-3 * len(book.text)


def test_a_corrupt_file_gives_one_clear_line(tmp_path):
    folder = shutil.copytree(books.FOLDER, tmp_path / "books")
    path = folder / "emma.txt.bz2"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"emma\.txt\.bz2 is not the file in provenance\.csv"):
        books.load("held_out", folder)
    path.unlink()
    with pytest.raises(ValueError, match=r"emma\.txt\.bz2 is missing"):
        books.load("held_out", folder)


def test_an_unknown_split_gives_one_clear_line():
    with pytest.raises(ValueError, match="split is 'test'; accepted: train, held_out"):
        books.load("test")
