"""The CPU back end in Numba: one file a family, each with `stored_step` and `replay_step`; windows in `verify` and
`snapshots`, for Mamba-2 and GDN.
"""

from replayssm.kernels.cpu import gdn, kda, mamba2

KERNELS = {"mamba2": mamba2, "gdn": gdn, "kda": kda}
