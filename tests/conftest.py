"""Settings of the whole suite."""

import contextlib
import os

# Also for the processes that tests start: threads that wait leave the cores to those that work. Read by OpenMP when
# PyTorch loads it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Sums in the same order whatever was computed before, so that two runs can be compared bit for bit; read by MKL.
os.environ.setdefault("MKL_CBWR", "AUTO")

import pytest
import torch

# The tensors of tests are small: threads would spend the cores waiting for each other.
torch.set_num_threads(1)

if not torch.cuda.is_available():
    # Triton's interpreter; read when Triton defines its own functions, so before any test imports it.
    os.environ["TRITON_INTERPRET"] = "1"
    with contextlib.suppress(ModuleNotFoundError):
        import interpreted  # noqa: F401


@pytest.fixture(autouse=True)
def _gradients() -> None:
    """Experiments turn them off for their process, which here is that of other tests too."""
    torch.set_grad_enabled(True)
