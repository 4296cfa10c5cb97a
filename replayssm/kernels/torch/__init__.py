"""The torch back end: any family, any device; the readable arm, and the one that runs in float64."""

from replayssm.kernels.torch.replay import replay_step, verify_step
from replayssm.kernels.torch.snapshots import snapshots_step
from replayssm.kernels.torch.stored import stored_step

__all__ = ["replay_step", "snapshots_step", "stored_step", "verify_step"]
