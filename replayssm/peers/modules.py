"""Import one module of a large package without the package around it.

``import vllm`` takes half a minute, patches torch and needs a serving stack; a kernel's file needs almost none of it.
`only` imports a module while the packages on the way to it, those that are named, stay empty: their folders are known,
their ``__init__`` does not run. Files are used where they are installed; nothing is copied.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any


def only(module: str, empty: Iterable[str], stand_ins: Mapping[str, ModuleType] | None = None) -> ModuleType:
    """Import ``module`` with the packages ``empty`` left empty, outermost first, and each of ``stand_ins`` in the place
    of the module of its name. A package that is imported already is used as it is.

    Raises ``ImportError`` if a package's folder, or what the module itself imports, is absent; nothing of the package
    is then left half imported.
    """
    before = set(sys.modules)
    try:
        for name in empty:
            if name not in sys.modules:
                _register(name, _empty(name))
        for name, stand_in in (stand_ins or {}).items():
            if name not in sys.modules:
                _register(name, stand_in)
        return importlib.import_module(module)
    except BaseException:
        for name in set(sys.modules) - before:
            if name.partition(".")[0] == module.partition(".")[0]:
                del sys.modules[name]
        raise


def taken(module: ModuleType, name: str) -> Any:
    """``module``'s ``name``. Raises ``ImportError`` where it has none, as another version of a peer may."""
    try:
        return getattr(module, name)
    except AttributeError:
        raise ImportError(f"cannot import name {name!r} from {module.__name__!r}", name=module.__name__) from None


def folder(package: str) -> Path | None:
    """Where a top-level package is installed, without importing it; None if it is not, or is no package."""
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # an empty one of ours has no spec
        return Path(sys.modules[package].__path__[0])
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def _empty(name: str) -> ModuleType:
    top, *inner = name.split(".")
    root = folder(top)
    path = root and root.joinpath(*inner)
    if path is None or not path.is_dir():
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    module = ModuleType(name, f"{name}, without what its __init__ does")
    module.__path__ = [str(path)]
    return module


def _register(name: str, module: ModuleType) -> None:
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(importlib.import_module(parent), child, module)
