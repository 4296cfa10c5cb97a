"""The CPU back end in Numba: one file a family, each with `stored_step` and `replay_step`."""
