"""The mathematics, one module a family: ``mamba2``, ``gdn``, ``kda``.

Each module holds the plain recurrence ``step``, which uses nothing else of the module and is what everything is checked
against, and the replay forms ``read``, ``fold`` and ``verify`` of the same recurrence. Plain torch, any device; the
arithmetic runs in the state's dtype (float32 or float64), whatever the dtype of the inputs.

Rings are given in time order, oldest token first, as ``[B, ..., J, ...]`` with ``length [B]`` valid tokens a row; what
lies behind ``length`` is never used, not even multiplied by zero, so it may hold NaN. A ``length`` of None says
that all tokens of all rows are valid.
"""

from replayssm.recurrence import gdn, kda, mamba2

FAMILIES = {"mamba2": mamba2, "gdn": gdn, "kda": kda}
