"""flash-linear-attention's fused recurrent kernels (MIT, https://github.com/fla-org/flash-linear-attention), written
for 0.6: one token is a sequence of length one.

What they take, and how ours is mapped onto it: q, k before their norm (eps 1e-6 inside the root, in the kernel), scale
K^-1/2, g and beta as they are; state ``[S,H,V,K]`` with ``state_v_first``.

- GDN: the public function returns a new float32 state and knows no slots. Its kernel is launched here as that function
  launches it, with the new state in the place of the old: no copy, and the most favourable form. Rows in the order of
  the slots cost nothing; others, and padding, are gathered and scattered around it, which only happens before timing.
- KDA: ``fused_recurrent_kda_fwd`` works in place on slots. A padding row steps a slot of its own, in front of ``state``
  (`replayssm.peers.null_slot_in_front`); its output is undefined.

Installed FlashKDA, which flash-linear-attention would dispatch to, is not used: these are its Triton kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from replayssm.peers import Peer, Prepared, shifted, with_null_slot
from replayssm.peers.modules import only, taken
from replayssm.recurrence import gdn

PEER = Peer(
    name="flash-linear-attention",
    package="fla",
    distributions=("fla-core", "flash-linear-attention"),
    written_for="0.6",
    install="pip install --no-deps fla-core==0.6.0",
)

KERNELS = {
    "gdn": ("fla.ops.gated_delta_rule.fused_recurrent", "fused_recurrent_gated_delta_rule_fwd_kernel"),
    "kda": ("fla.ops.kda.fused_recurrent", "fused_recurrent_kda_fwd"),
}
_EMPTY = ("fla", "fla.ops", "fla.ops.gated_delta_rule", "fla.ops.kda")

Step = Callable[[Tensor, Tensor, Any, Tensor], None]


def unsupported(family: str, state_dtype: torch.dtype) -> str | None:
    """Why flash-linear-attention has no such step; None if it has."""
    if family == "mamba2":
        return "flash-linear-attention has no Mamba-2 decode kernel of its own"
    if family == "gdn" and state_dtype != torch.float32:
        return "flash-linear-attention keeps the state of GDN in float32 only"
    reason = PEER.absent()
    if reason is None:
        try:
            _kernel(family)
        except ImportError as error:
            return f"flash-linear-attention {PEER.version()} lacks the kernel: {error}"
    return reason


def stored_step(family: str) -> Step:
    """A step like ours, ``step(out, state, inputs, slots)``. Raises ``ImportError`` if the kernel is absent."""
    return _kda_step() if family == "kda" else _gdn_step()


def _gdn_step() -> Step:
    kernel = _kernel("gdn")
    in_order = Prepared(lambda slots: bool((slots == torch.arange(len(slots), device=slots.device)).all()))

    def launch(out: Tensor, state: Tensor, inputs: gdn.Inputs) -> None:
        rows, heads, V, K = len(out), *state.shape[1:]
        tile = min(8, 1 << (V - 1).bit_length())
        kernel[(rows * heads * -(-V // tile),)](
            q=inputs.q,
            k=inputs.k,
            v=inputs.v,
            g=inputs.g,
            gk=None,
            gv=None,
            beta=inputs.beta,
            A_log=None,
            dt_bias=None,
            o=out,
            h0=state,
            ht=state,
            cu_seqlens=None,
            scale=K**-0.5,
            T=1,
            H=inputs.k.shape[1],
            HV=heads,
            K=K,
            V=V,
            BK=1 << (K - 1).bit_length(),
            BV=tile,
            IS_BETA_HEADWISE=True,
            USE_QK_L2NORM_IN_KERNEL=True,
            APPLY_BETA_SIGMOID=False,
            ALLOW_NEG_EIGVAL=False,
            STATE_V_FIRST=True,
            num_warps=1,
            num_stages=3,
        )

    def step(out: Tensor, state: Tensor, inputs: gdn.Inputs, slots: Tensor) -> None:
        if in_order(slots):
            launch(out, state, inputs)
            return
        live = slots >= 0
        gathered, outputs = state[slots[live]], out[live]
        launch(outputs, gathered, inputs.rows(live))
        state[slots[live]], out[live] = gathered, outputs

    return step


def _kda_step() -> Step:
    kernel = _kernel("kda")
    indices = Prepared(shifted)

    def step(out: Tensor, state: Tensor, inputs: gdn.Inputs, slots: Tensor) -> None:
        q, k, v, g, beta = (tensor[:, None] for tensor in inputs)
        kernel(
            q=q,
            k=k,
            v=v,
            g=g,
            beta=beta,
            scale=state.shape[-1] ** -0.5,
            initial_state=with_null_slot(state),
            inplace_final_state=True,
            state_v_first=True,
            ssm_state_indices=indices(slots),
            use_qk_l2norm_in_kernel=True,
            out=out[:, None],
        )

    return step


@functools.cache
def _kernel(family: str) -> Any:
    module, name = KERNELS[family]
    package = only("fla", _EMPTY)
    if not hasattr(package, "__version__"):  # its modules ask for it
        package.__version__ = PEER.version()  # type: ignore[attr-defined]
    return taken(only(module, _EMPTY), name)
