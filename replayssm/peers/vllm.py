"""vLLM's Triton decode kernels (Apache-2.0, https://github.com/vllm-project/vllm), written for 0.33.

What they take, and how ours is mapped onto it:

- Mamba-2, ``selective_state_update``: state ``[S,H,P,N]`` in place, slots with a padding value of one's choice, D and
  dt bias required. Our dt has bias and softplus in it already, so bias is 0 and ``dt_softplus`` off; dt, A, D and bias
  are broadcast over P and N with stride 0, which selects its one-decay-a-head form. A padding row's output is
  undefined.
- GDN and KDA, packed decode: q, k and v in one row of a matrix, L2 norm (eps 1e-6 inside the root) and K^-1/2 in the
  kernel, gates computed there from raw projections (`replayssm.peers.raw_gates`). State ``[S,H,V,K]`` in place. Slot 0
  is vLLM's null block: slots are shifted by one and ``state`` must have a slot's space in front, as
  `replayssm.peers.null_slot_in_front` gives it. A padding row's output is zero.
- Replay, Mamba-2 only, ``selective_state_update_replayssm_output_only``: a row flushes when its flag says so, with
  L - 1 tokens in the ring, and then appends nothing, as here; the ring never wraps, so its origin is always 0. Cursor
  and flag are given a row, not a slot. The fold rounds B times its decay to the dtype of x: with bfloat16 inputs a
  float32 checkpoint is exact to about 3 digits only. vLLM 0.33 has no replay for GDN, and for KDA only with drafts.

The kernels' files are imported without the engine: what they ask of it (the device's name and capability, a constant,
a rank) is answered here, and vLLM's compiled operations are not needed. Where the whole of vLLM has been imported
already, that is used.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from replayssm.geometry import Geometry
from replayssm.peers import RAW_A_LOG, Peer, Prepared, broadcast, raw_gates, shifted, with_null_slot
from replayssm.peers.modules import folder, only, taken
from replayssm.recurrence import gdn, mamba2

PEER = Peer(
    name="vLLM",
    package="vllm",
    distributions=("vllm",),
    written_for="0.33",
    install="pip install --no-deps vllm==0.33.0 regex",
)

_OPS = "vllm.model_executor.layers.mamba.ops"
_FLA = "vllm.third_party.flash_linear_attention.ops"
_KDA = "vllm.models.kimi_k3.nvidia.ops.third_party.kda"
_EMPTY = (
    *("vllm", "vllm.model_executor", _FLA),
    *("vllm.models", "vllm.models.kimi_k3", "vllm.models.kimi_k3.nvidia", "vllm.models.kimi_k3.nvidia.ops", _KDA),
)
KERNELS = {
    "mamba2": (f"{_OPS}.mamba_ssm", "selective_state_update"),
    "gdn": (f"{_FLA}.fused_recurrent", "fused_recurrent_gated_delta_rule_packed_decode"),
    "kda": (f"{_KDA}.fused_recurrent", "fused_recurrent_kda_packed_decode"),
}
REPLAY = (f"{_OPS}.selective_state_update_replayssm_output_only", "selective_state_update_replayssm_output_only")

Step = Callable[[Tensor, Tensor, Any, Tensor], None]


class Launch(NamedTuple):
    """Rows of the state that a program takes, and its warps. The kernels have no loop whose stages could be chosen."""

    rows: int
    warps: int

    def __str__(self) -> str:
        return f"rows={self.rows} warps={self.warps}"


class ReplayLayer(NamedTuple):
    """What vLLM's replay keeps of a layer: ``state [S,H,P,N]``; ring ``x [S,H,L,P]``, ``B [S,G,L,N]``, ``dt [S,H,L]``
    float32; ``scratch [B,G,L]`` float32; ``cursor [B]`` int32 and ``flush [B]`` int8 of each row, shared by all layers.
    """

    state: Tensor
    ring: dict[str, Tensor]
    scratch: Tensor
    cursor: Tensor
    flush: Tensor


def candidates(family: str) -> list[Launch]:
    """What a tuned baseline may choose from: tiles of rows and warps whose state fits into registers, among them all
    that vLLM itself chooses on an NVIDIA GPU.
    """
    if family == "mamba2":
        return [Launch(rows, warps) for rows in (4, 8, 16, 32, 64) for warps in (1, 2, 4, 8) if rows <= 32 * warps]
    return [Launch(rows, warps) for rows in (4, 8, 16, 32, 64, 128) for warps in (1, 2, 4) if rows <= 32 * warps]


def gates_of(family: str) -> str:
    """Where the stored step's gates come from: computed ``in the kernel``, or ``ready``."""
    return "ready" if family == "mamba2" else "in the kernel"


def unsupported(family: str, *, replay: bool = False) -> str | None:
    """Why vLLM has no such step; None if it has."""
    if replay and family != "mamba2":
        return f"vLLM 0.33 has no replay kernel for {family} at one token a step, only for mamba2"
    reason = PEER.absent()
    if reason is None:
        try:
            _kernel(*(REPLAY if replay else KERNELS[family]))
        except ImportError as error:
            return f"vLLM {PEER.version()} lacks the kernel: {error}; smallest install: {PEER.install}"
    return reason


def stored_step(family: str, launch: Launch | None = None) -> Step:
    """A step like ours, ``step(out, state, inputs, slots)``, by vLLM's kernel: with the launch configuration that vLLM
    itself chooses, or with ``launch``. Raises ``ImportError`` if vLLM or its kernel is absent.
    """
    return _mamba2_step(launch) if family == "mamba2" else _delta_step(family, launch)


def replay_step(out: Tensor, layer: ReplayLayer, inputs: mamba2.Inputs, slots: Tensor) -> None:
    """One Mamba-2 token a row: rows whose flag is set fold, the others read and append at their cursor. Cursor and flag
    move elsewhere. ``slots [B]``, -1 for padding, whose output is not touched.
    """
    state, ring = layer.state, layer.ring
    dt, A, D, bias = broadcast(inputs, state.shape)
    _kernel(*REPLAY)[1](
        state,
        inputs.x,
        dt,
        A,
        inputs.B,
        inputs.C,
        D,
        bias,
        inputs.z,
        x_cache=ring["x"],
        dt_cache=ring["dt"],
        B_cache=ring["B"],
        bc_pre=layer.scratch,
        write_pos=layer.cursor,
        is_flush=layer.flush,
        max_cache_len=ring["dt"].shape[2],
        state_batch_indices=slots,
        null_block_id=-1,
        out=out,
    )


def shipped_launch(geometry: Geometry, rows: int, state_dtype: torch.dtype) -> Launch | None:
    """What vLLM chooses by itself, for Mamba-2; its delta-rule wrappers cannot be asked."""
    if geometry.family != "mamba2":
        return None
    module = _kernel(*KERNELS["mamba2"])[0]
    sizes = (geometry.head_dim, geometry.state_dim, rows, geometry.heads)
    return Launch(*module.try_get_optimal_ssm_config(*sizes, str(state_dtype).removeprefix("torch."), _is_blackwell()))


def replay_launch(geometry: Geometry, interval_length: int) -> dict[str, int]:
    """The launch configuration of vLLM's replay kernel, by its own names."""
    module = _kernel(*REPLAY)[0]
    chosen = module.get_replayssm_config("mamba2_output_only", dstate=geometry.state_dim, L=interval_length)
    names = ("BLOCK_SIZE_M", "num_warps", "NF_DSTATE_TILE", "FL_DSTATE_TILE", "num_stages")
    return dict(zip(names, chosen, strict=True))


def _mamba2_step(launch: Launch | None) -> Step:
    module, kernel = _kernel(*KERNELS["mamba2"])

    def step(out: Tensor, state: Tensor, inputs: mamba2.Inputs, slots: Tensor) -> None:
        dt, A, D, bias = broadcast(inputs, state.shape)
        pinned = module.override_ssm_config(tuple(launch)) if launch else contextlib.nullcontext()
        with pinned:
            kernel(
                state,
                inputs.x,
                dt,
                A,
                inputs.B,
                inputs.C,
                D,
                bias,
                inputs.z,
                state_batch_indices=slots,
                null_block_id=-1,
                out=out,
                is_blackwell=_is_blackwell(),
            )

    return step


def _delta_step(family: str, launch: Launch | None) -> Step:
    module, kernel = _kernel(*KERNELS[family])
    form = Prepared(_gdn_form if family == "gdn" else _kda_form)
    indices = Prepared(shifted)

    def step(out: Tensor, state: Tensor, inputs: gdn.Inputs, slots: Tensor) -> None:
        packed = form(inputs)
        rows, scale = len(slots), state.shape[-1] ** -0.5
        common = {"initial_state": with_null_slot(state), "scale": scale}
        with _launched(module, f"{kernel.__name__}_kernel", launch, state.shape[2]):
            if family == "gdn":
                out = out.view(rows, 1, *out.shape[1:])
                kernel(**packed, **common, ssm_state_indices=indices(slots), use_qk_l2norm_in_kernel=True, out=out)
            else:
                kernel(**packed, **common, state_indices=indices(slots), lower_bound=None, out=out[None])

    return step


def _gdn_form(inputs: gdn.Inputs) -> dict[str, Tensor]:
    a, b = raw_gates(inputs.g, inputs.beta)
    A_log, bias = torch.full_like(a[0], RAW_A_LOG), torch.zeros_like(a[0])
    return {"mixed_qkv": _packed(inputs), "a": a, "b": b, "A_log": A_log, "dt_bias": bias}


def _kda_form(inputs: gdn.Inputs) -> dict[str, Tensor]:
    g, beta = raw_gates(inputs.g, inputs.beta)
    A_log, bias = torch.full_like(beta[0], RAW_A_LOG), torch.zeros_like(g[0]).flatten()
    return {"mixed_qkv": _packed(inputs), "raw_g": g[None], "raw_beta": beta[None], "A_log": A_log, "dt_bias": bias}


def _packed(inputs: gdn.Inputs) -> Tensor:
    return torch.cat([part.flatten(1) for part in (inputs.q, inputs.k, inputs.v)], dim=1)


@contextlib.contextmanager
def _launched(module: ModuleType, name: str, launch: Launch | None, rows: int) -> Iterator[None]:
    """Let a wrapper of ``module`` launch its kernel ``name`` with ``launch`` instead of its own configuration."""
    if launch is None:
        yield
        return
    kernel = getattr(module, name)
    setattr(module, name, _Relaunched(kernel, launch, rows))
    try:
        yield
    finally:
        setattr(module, name, kernel)


class _Relaunched:
    """A kernel whose launches get another tile and number of warps than its wrapper asks for."""

    def __init__(self, kernel: Any, launch: Launch, rows: int) -> None:
        self.kernel, self.launch, self.rows = kernel, launch, rows

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        tile = min(self.launch.rows, 1 << (self.rows - 1).bit_length())
        grid = (-(-self.rows // tile), *grid[1:])
        chosen = {"BV": tile, "num_warps": self.launch.warps}
        return lambda **arguments: self.kernel[grid](**(arguments | chosen))


def _is_blackwell() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 10


@functools.cache
def _kernel(module: str, name: str) -> tuple[ModuleType, Callable[..., Any]]:
    """The module and its function."""
    _prepare_import()
    found = only(module, ())
    return found, taken(found, name)


@functools.cache
def _prepare_import() -> None:
    """Let vLLM's kernel files be imported without its engine, unless that is there already."""
    if "vllm" in sys.modules:
        return
    ranks, utils = (ModuleType(name) for name in ("parallel_state", "utils"))
    ranks.is_global_first_rank = ranks.is_local_first_rank = lambda: True  # type: ignore[attr-defined]
    utils.NULL_BLOCK_ID = _constant("v1/attention/backends/utils.py", "NULL_BLOCK_ID")  # type: ignore[attr-defined]
    stand_ins = {
        "vllm.distributed": ModuleType("distributed"),
        "vllm.distributed.parallel_state": ranks,
        "vllm.v1.attention.backends.utils": utils,
        "vllm._custom_ops": ModuleType("_custom_ops"),
    }
    interface = only("vllm.platforms.interface", _EMPTY, stand_ins)
    platforms = sys.modules["vllm.platforms"]
    platforms._current_platform = _platform(interface)  # type: ignore[attr-defined]


def _platform(interface: Any) -> Any:
    """What kernels ask of the platform, from torch: vLLM's own class for CUDA needs its compiled operations."""

    class _Platform(interface.Platform):
        _enum = interface.PlatformEnum.CUDA if torch.cuda.is_available() else interface.PlatformEnum.UNSPECIFIED

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return torch.cuda.get_device_name(device_id) if torch.cuda.is_available() else "cpu"

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            if not torch.cuda.is_available():
                return None
            return interface.DeviceCapability(*torch.cuda.get_device_capability(device_id))

        @classmethod
        def is_arch_support_pdl(cls) -> bool:
            return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9

        @classmethod
        def is_pin_memory_available(cls) -> bool:
            return torch.cuda.is_available()

    return _Platform()


def _constant(file: str, name: str) -> Any:
    """What a module assigns to a name at its top level, read without running it."""
    root = folder("vllm")
    source = root / file if root else None
    if source is None or not source.is_file():
        raise ModuleNotFoundError(f"No file {file} in the installed vllm", name="vllm")
    for node in ast.parse(source.read_bytes()).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            return ast.literal_eval(node.value)
    raise ImportError(f"{name} is not in {file} of the installed vllm", name="vllm")
