"""Names of the engine's arms: how the states are kept, and which back end steps them. Standard library only."""

WINDOW_ARMS = tuple(f"{kind}/{backend}" for kind in ("snapshots", "verify") for backend in ("torch", "cpu", "triton"))
"""Those of speculative decoding, which take a window of tokens a step."""
MAX_WINDOW = 16
"""Most tokens of a window: kernels hold all of them at once."""

ARMS = ("stored/torch", "stored/cpu", "stored/triton", "replay/torch", "replay/cpu", "replay/triton")
