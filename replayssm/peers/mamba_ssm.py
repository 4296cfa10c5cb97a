"""mamba-ssm's Triton decode kernel (Apache-2.0, https://github.com/state-spaces/mamba), written for 2.3.

``selective_state_update``: state ``[S,H,P,N]`` in place, slots with -1 for padding, D and dt bias required. As for
vLLM's kernel, which descends from it, bias is 0, ``dt_softplus`` off and dt, A, D broadcast with stride 0. The function
makes its output itself; here the kernel is given ours in its place, so that nothing is copied. A padding row's output
is zero. Its launch configuration is fixed, and tuned for no device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import Tensor

from replayssm.peers import Peer, broadcast
from replayssm.peers.modules import only, taken
from replayssm.recurrence import mamba2

PEER = Peer(
    name="mamba-ssm",
    package="mamba_ssm",
    distributions=("mamba-ssm",),
    written_for="2.3",
    install="MAMBA_SKIP_CUDA_BUILD=TRUE pip install --no-deps --no-build-isolation mamba-ssm==2.3.2.post1 and einops",
)

KERNEL = "_selective_scan_update_kernel"
_OUT = 9
"""Which argument of the kernel is its output."""


def unsupported(family: str) -> str | None:
    """Why mamba-ssm has no such step; None if it has."""
    if family != "mamba2":
        return f"mamba-ssm has no decode kernel for {family}"
    reason = PEER.absent()
    if reason is None:
        try:
            taken(_module(), KERNEL)
        except ImportError as error:
            return f"mamba-ssm {PEER.version()} lacks the kernel: {error}; smallest install: {PEER.install}"
    return reason


def stored_step() -> Callable[[Tensor, Tensor, mamba2.Inputs, Tensor], None]:
    """A step like ours, ``step(out, state, inputs, slots)``. Raises ``ImportError`` if the kernel is absent."""
    module = _module()
    kernel = taken(module, KERNEL)

    def step(out: Tensor, state: Tensor, inputs: mamba2.Inputs, slots: Tensor) -> None:
        dt, A, D, bias = broadcast(inputs, state.shape)
        arguments = (state, inputs.x, dt, A, inputs.B, inputs.C, D, inputs.z, bias)
        setattr(module, KERNEL, _Into(kernel, out))
        try:
            module.selective_state_update(*arguments, state_batch_indices=slots)
        finally:
            setattr(module, KERNEL, kernel)

    return step


class _Into:
    """The kernel, writing into ``out`` instead of what it is given to write into."""

    def __init__(self, kernel: Any, out: Tensor) -> None:
        self.kernel, self.out = kernel, out

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        def launch(*arguments: Any, **options: Any) -> Any:
            return self.kernel[grid](*arguments[:_OUT], self.out, *arguments[_OUT + 1 :], **options)

        return launch


@functools.cache
def _module() -> ModuleType:
    return only("mamba_ssm.ops.triton.selective_state_update", ("mamba_ssm",))
