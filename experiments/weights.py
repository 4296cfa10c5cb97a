"""Folders of weights and of documents, and what tells one from another. Standard library and OmegaConf only, but for
what `refused_by` imports.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from experiments.case import MODEL_FIELDS
from experiments.measure.sources import ROOT
from experiments.options import ConfigError, get, only, refuse, text

FOLDER = "a Hugging Face folder with config.json, tokenizer.json and safetensors"
DOCUMENTS = "books, hub, or a folder of .txt or .parquet files"
WHOLE_BYTES = 1 << 28
"""Size of weights up to which all of them are hashed: a model that was trained anew has the same shapes."""
BEGINNING = 1 << 12
"""Bytes of a document that are hashed; what is read of it is in the records with a hash of its own."""


def weights_folder(config: Mapping[str, Any]) -> Path:
    """The folder ``model.path``, from here or from the checkout. Raises ``ConfigError`` where there is none."""
    only(config, MODEL_FIELDS, "model")
    if get(config, "model.path", FOLDER) is None:
        name = get(config, "model.name", "a name")
        raise ConfigError(f"model={name} ships no weights; accepted: model.path={FOLDER}")
    asked = text(config, "model.path", FOLDER)
    folder = next((path for path in (Path(asked), ROOT / asked) if path.is_dir()), None)
    if folder is None:
        raise refuse("model.path", asked, FOLDER, "is no folder")
    return folder.resolve()


def refuse_incomplete(option: str, asked: str, folder: Path, *names: str, accepted: str = FOLDER) -> None:
    """Raises ``ConfigError`` for the option as it was typed, where ``folder`` lacks one of ``names`` or weights."""
    for name in names:
        if not (folder / name).is_file():
            raise refuse(option, asked, accepted, f"lacks {name}")
    if not any(folder.glob("*.safetensors")):
        raise refuse(option, asked, accepted, "holds no safetensors")


@contextmanager
def refused_by(option: str, asked: object) -> Iterator[None]:
    """A folder or configuration that `replayssm.models` refuses inside is refused by the option as it was typed: its
    line is a ``ConfigError``. Imports torch."""
    from replayssm.models import ModelError

    try:
        yield
    except ModelError as error:
        raise ConfigError(f"{option}={asked}: {error}") from None


def digest(folder: Path) -> str:
    """16 hex digits over configuration and weights; where these are large, over the header and size of each file."""
    files = sorted([*folder.glob("config.json"), *folder.glob("*.safetensors")])
    whole = sum(file.stat().st_size for file in files) <= WHOLE_BYTES
    found = hashlib.sha256()
    for file in files:
        if whole:
            found.update(file.name.encode() + file.read_bytes())
            continue
        with open(file, "rb") as opened:
            length = 1 << 20 if file.suffix == ".json" else min(1 << 26, 8 + int.from_bytes(opened.read(8), "little"))
            opened.seek(0)
            found.update(f"{file.name} {file.stat().st_size} ".encode() + opened.read(length))
    return found.hexdigest()[:16]


def document_files(folder: str | Path) -> list[Path]:
    """The .txt and .parquet files below ``folder``. Raises ``ConfigError`` where there are none."""
    if not Path(folder).is_dir():
        raise refuse("documents", str(folder), DOCUMENTS, "is no folder")
    files = sorted(file for ending in ("txt", "parquet") for file in Path(folder).rglob(f"*.{ending}"))
    if not files:
        raise refuse("documents", str(folder), DOCUMENTS, "holds no .txt and no .parquet file")
    return files


def digest_of_documents(folder: Path) -> str:
    """16 hex digits over name, size and beginning of each of its `document_files`; raises as that."""
    found = hashlib.sha256()
    for file in document_files(folder):
        with open(file, "rb") as opened:
            found.update(f"{file.relative_to(folder)} {file.stat().st_size} ".encode() + opened.read(BEGINNING))
    return found.hexdigest()[:16]
