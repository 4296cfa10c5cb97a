"""vLLM's Triton kernels of speculative decoding, which store a state behind every token of a window; see `vllm`.

Mamba-2 takes ``selective_state_update``, GDN ``fused_sigmoid_gating_delta_rule_update``, which computes its gates from
raw projections, and KDA ``fused_recurrent_kda_fwd`` with ready gates. A row's states are blocks of their own, found by
an index a token: ``states [S,T,H,P,N]`` are S T blocks, behind a null block that GDN and KDA keep for padding. The
count of tokens that were accepted of the last window chooses the block to start from. GDN's wrapper returns an output
of its own; here its kernel is given ours. A padding row's output is undefined.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from replayssm.peers import RAW_A_LOG, Prepared, broadcast, null_slot_in_front, raw_gates, vllm, with_null_slot
from replayssm.peers.vllm import PEER, Launch

KERNELS = {
    "mamba2": vllm.KERNELS["mamba2"],
    "gdn": (f"{vllm._FLA}.fused_sigmoid_gating", "fused_sigmoid_gating_delta_rule_update"),
    "kda": (f"{vllm._KDA}.fused_recurrent", "fused_recurrent_kda_fwd"),
}
Step = Callable[[str, Tensor, Tensor, Any, Tensor, Tensor], None]


def unsupported(family: str) -> str | None:
    """Why vLLM has no such step; None if it has."""
    reason = PEER.absent()
    if reason is None:
        try:
            vllm._kernel(*KERNELS[family])
        except ImportError as error:
            return f"vLLM {PEER.version()} lacks the kernel: {error}; smallest install: {PEER.install}"
    return reason


def gates_of(family: str) -> str:
    """Where the step's gates come from: computed ``in the kernel``, or ``ready``."""
    return "in the kernel" if family == "gdn" else "ready"


def null_block_in_front(states: Tensor) -> Tensor:
    """A copy of ``states [copies,S,T,H,P,N]`` with a block's space in front of each copy."""
    return null_slot_in_front(states.flatten(1, 2)).unflatten(1, states.shape[1:3])


def snapshots_step(family: str, launch: Launch | None = None) -> Step:
    """A step like ours, ``step(family, out, states, inputs, slots, accepted)``, by vLLM's kernel: with the launch
    configuration that vLLM itself chooses, or with ``launch``. ``accepted [B]`` int32; of GDN and KDA ``states`` must
    have a block's space in front, as `null_block_in_front` gives it. Raises ``ImportError`` if vLLM or its kernel is
    absent.
    """
    step = {"mamba2": _mamba2_step, "gdn": _gdn_step, "kda": _kda_step}[family](launch)

    def snapshots(family: str, out: Tensor, states: Tensor, inputs: Any, slots: Tensor, accepted: Tensor) -> None:
        step(out, states, inputs, slots, accepted)

    return snapshots


def _mamba2_step(launch: Launch | None) -> Callable[..., None]:
    module, kernel = vllm._kernel(*KERNELS["mamba2"])
    flat, indices = Prepared(_flattened), Prepared(lambda slots, window: _indices(slots, window, 0, -1))
    starts = Prepared(_starts)

    def step(out: Tensor, states: Tensor, inputs: Any, slots: Tensor, accepted: Tensor) -> None:
        tokens, blocks = flat(inputs), states.flatten(0, 1)
        dt, A, D, bias = broadcast(tokens, blocks.shape)
        with module.override_ssm_config(tuple(launch)) if launch else contextlib.nullcontext():
            kernel(
                blocks,
                tokens.x,
                dt,
                A,
                tokens.B,
                tokens.C,
                D,
                bias,
                tokens.z,
                state_batch_indices=indices(slots, states.shape[1]),
                null_block_id=-1,
                out=out.flatten(0, 1),
                num_accepted_tokens=accepted,
                cu_seqlens=starts(slots, states.shape[1]),
                is_blackwell=vllm._is_blackwell(),
            )

    return step


def _gdn_step(launch: Launch | None) -> Callable[..., None]:
    module, kernel = vllm._kernel(*KERNELS["gdn"])
    form, indices = Prepared(_gdn_form), Prepared(lambda slots, window: _indices(slots, window, 1, 0))
    starts = Prepared(_starts)

    def step(out: Tensor, states: Tensor, inputs: Any, slots: Tensor, accepted: Tensor) -> None:
        given = {"o": out.flatten(0, 1)[None, None]}
        with _launched(module, f"{kernel.__name__}_kernel", launch, states.shape[-2], given):
            kernel(
                **form(inputs),
                initial_state=with_null_slot(states.flatten(0, 1)),
                cu_seqlens=starts(slots, states.shape[1]),
                ssm_state_indices=indices(slots, states.shape[1]),
                num_accepted_tokens=accepted,
                use_qk_l2norm_in_kernel=True,
            )

    return step


def _kda_step(launch: Launch | None) -> Callable[..., None]:
    module, kernel = vllm._kernel(*KERNELS["kda"])
    form, indices = Prepared(_kda_form), Prepared(lambda slots, window: _indices(slots, window, 1, 0))
    starts = Prepared(_starts)

    def step(out: Tensor, states: Tensor, inputs: Any, slots: Tensor, accepted: Tensor) -> None:
        with _launched(module, "fused_recurrent_kda_fwd_kernel", launch, states.shape[-2], {}):
            kernel(
                **form(inputs),
                initial_state=with_null_slot(states.flatten(0, 1)),
                cu_seqlens=starts(slots, states.shape[1]),
                ssm_state_indices=indices(slots, states.shape[1]),
                num_accepted_tokens=accepted,
                out=out.flatten(0, 1)[None],
            )

    return step


def _flattened(inputs: Any) -> Any:
    """All rows' tokens one after the other; A and D belong to the layer."""
    names = zip(inputs._fields, inputs, strict=True)
    return type(inputs)(*(t if t is None or n in ("A", "D") else t.flatten(0, 1) for n, t in names))


def _gdn_form(inputs: Any) -> dict[str, Tensor]:
    tokens = _flattened(inputs)
    a, b = raw_gates(tokens.g, tokens.beta)
    A_log, bias = torch.full_like(a[0], RAW_A_LOG), torch.zeros_like(a[0])
    sides = {"q": tokens.q[None], "k": tokens.k[None], "v": tokens.v[None]}
    return sides | {"a": a[None], "b": b[None], "A_log": A_log, "dt_bias": bias}


def _kda_form(inputs: Any) -> dict[str, Tensor]:
    return {name: tensor[None] for name, tensor in _flattened(inputs)._asdict().items()}


def _indices(slots: Tensor, window: int, first: int, padding: int) -> Tensor:
    """``[B,T]`` int32 blocks of each row's tokens, which begin at block ``first``."""
    blocks = slots[:, None] * window + torch.arange(window, device=slots.device) + first
    return torch.where(slots[:, None] >= 0, blocks, padding).to(torch.int32).contiguous()


def _starts(slots: Tensor, window: int) -> Tensor:
    """``[B+1]`` int32: where each row's tokens begin."""
    return (torch.arange(len(slots) + 1, device=slots.device) * window).to(torch.int32)


@contextlib.contextmanager
def _launched(module: ModuleType, name: str, launch: Launch | None, rows: int, given: dict[str, Any]) -> Iterator[None]:
    """Let a wrapper of ``module`` launch its kernel ``name`` with ``launch``, where there is one, and with the
    arguments ``given``."""
    kernel = getattr(module, name)
    setattr(module, name, _Relaunched(kernel, launch, rows, given))
    try:
        yield
    finally:
        setattr(module, name, kernel)


class _Relaunched:
    """A kernel whose launches get another tile, number of warps and arguments than its wrapper asks for."""

    def __init__(self, kernel: Any, launch: Launch | None, rows: int, given: dict[str, Any]) -> None:
        self.kernel, self.launch, self.rows, self.given = kernel, launch, rows, given

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def run(**arguments: Any) -> Any:
            chosen, cut = dict(self.given), grid
            if self.launch is not None:
                tile = min(self.launch.rows, 1 << (self.rows - 1).bit_length())
                tiles, old = -(-self.rows // tile), -(-self.rows // arguments["BV"])
                # GDN counts tiles along an axis of their own, KDA with rows and heads.
                cut = (grid[0] // old * tiles,) if len(grid) == 1 else (grid[0], tiles, *grid[2:])
                chosen |= {"BV": tile, "num_warps": self.launch.warps}
            return self.kernel[cut](**(arguments | chosen))

        return run
