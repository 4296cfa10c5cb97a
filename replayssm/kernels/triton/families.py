"""The kernels of each family. Not in the package's ``__init__``, which is imported without Triton too."""

from __future__ import annotations

from types import ModuleType

from replayssm.kernels.triton import gdn, kda, mamba2

KERNELS: dict[str, ModuleType] = {"mamba2": mamba2, "gdn": gdn, "kda": kda}
