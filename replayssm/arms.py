"""Names of the engine's arms: how the states are kept, and which back end steps them. Standard library only."""

ARMS = ("stored/torch", "stored/cpu", "stored/triton", "replay/torch", "replay/cpu", "replay/triton")
