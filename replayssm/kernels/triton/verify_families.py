"""The verify step of each family. Not in the package's ``__init__``, which is imported without Triton too."""

from __future__ import annotations

import functools
from collections.abc import Callable

from replayssm.kernels.triton import verify_delta, verify_mamba2

VERIFY: dict[str, Callable[..., None]] = {
    "mamba2": verify_mamba2.verify_step,
    "gdn": functools.partial(verify_delta.verify_step, "gdn"),
    "kda": functools.partial(verify_delta.verify_step, "kda"),
}
"""``verify_step(out, layer, inputs, slots, launch=None, *, lengths=None, gates=None)``."""
