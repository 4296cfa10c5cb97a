"""Folders that records are written to, and where those of a case lie, as its record tells it. Standard library only.

A record travels, and where somebody keeps folders is another place on every machine: it holds a path within the
checkout, or only the last part of one outside of it, and digests beside them say what was there. A case is hashed as it
is recorded, so that the analysis can hash it again.
"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

from experiments.measure.sources import ROOT
from experiments.options import refuse

FIELDS = ("weights", "draft_weights", "path", "prompts", "documents")
"""Fields of cases, and of the model in them, that may hold a path; other values of these are no absolute paths."""
IF_SET = ("documents_digest",)
"""Fields that older records lack; left out where they are empty."""


def told(path: str) -> str:
    """The path relative to the checkout, or outside of it as ``.../`` and its last part."""
    place = Path(path)
    return str(place.relative_to(ROOT)) if place.is_relative_to(ROOT) else f".../{place.name}"


def recorded(case: Any) -> dict[str, Any]:
    """The fields of a case, a dataclass, as its record holds them."""
    fields: dict[str, Any] = _without_places(dataclasses.asdict(case))
    return {name: value for name, value in fields.items() if value or name not in IF_SET}


def _without_places(fields: dict[str, Any]) -> dict[str, Any]:
    made = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            value = _without_places(value)
        elif name in FIELDS and isinstance(value, str) and Path(value).is_absolute():
            value = told(value)
        made[name] = value
    return made


def refuse_unwritable(records: str) -> None:
    """Refuse a folder that cannot be written, or made; nothing is left behind, since other options may yet be wrong."""
    accepted = "a folder that can be written, or a path where one can be made"
    folder = Path(records).absolute()
    try:
        while not _exists(folder):
            folder = folder.parent
        if not folder.is_dir():
            raise refuse("records", records, accepted, f"cannot be used: {folder} is not a folder")
        tempfile.TemporaryFile(dir=folder).close()  # unlike the permission bits, this tells the truth to root too
    except OSError as error:
        why = f"cannot be used: {folder} cannot be written ({error.strerror})"
        raise refuse("records", records, accepted, why) from None


def _exists(path: Path) -> bool:
    """Like ``Path.exists``, but true for a link to nowhere, where no folder can be made; raises ``OSError``."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True
