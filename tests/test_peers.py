"""Adapters of other projects' kernels: what they say when a peer is absent or another version, and, where it can be
imported, each arm under the experiment's own gates: on a GPU where there is one, else in Triton's interpreter.

``pytest -rs tests/test_peers.py`` tells which peers are not here.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import subprocess
import sys
import weakref
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

GPU = torch.cuda.is_available()
if not GPU:
    # Read when Triton defines its own functions, so before its first import; vLLM wants no GPU to be told so.
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
pytest.importorskip("triton", reason="Triton is not installed")

import triton.language as tl  # noqa: E402

from experiments.case import Case, Precision, Timing, devices, known_arms  # noqa: E402
from experiments.measure import gates, tuning  # noqa: E402
from experiments.measure.layers import Layers, forget  # noqa: E402
from replayssm.geometry import Geometry  # noqa: E402
from replayssm.peers import (  # noqa: E402
    RAW_A_LOG,
    Peer,
    Prepared,
    fla,
    flashinfer,
    mamba_ssm,
    null_slot_in_front,
    raw_gates,
    shifted,
    vllm,
    with_null_slot,
)
from replayssm.peers.cursor import advance  # noqa: E402
from replayssm.peers.modules import only  # noqa: E402
from replayssm.recurrence import mamba2  # noqa: E402

DEVICE = "cuda" if GPU else "cpu"
STORED = ("stored/vllm", "stored/fla", "stored/mamba-ssm", "stored/flashinfer")
REPLAY = ("replay/vllm", "replay/flashinfer")
PEER_ARMS = (*STORED, "stored/vllm-tuned", *REPLAY)
HALF = "bf16" if GPU else "fp16"
"""The interpreter cannot multiply matrices of bfloat16."""
SHAPES = {"mamba2": (2, 1), "gdn": (2, 1), "kda": (2, 2)}


def case(
    family: str, state: str = "fp32", inputs: str = "bf16", phase: str = "aligned", length: int = 4, head_dim: int = 16
) -> Case:
    heads, groups = SHAPES[family]
    timing = Timing("test", 2, 1, 5.0, 0.01, 1.0, 1, 60.0)
    geometry = Geometry(family, heads, groups, head_dim, 16)
    return Case("kernel", "test", geometry, 5, length, phase, Precision(state, inputs), DEVICE, 0, 3, timing)


def case_of(name: str, family: str, state: str = "fp32", phase: str = "aligned") -> Case:
    """FlashInfer builds its kernels for heads of 64 rows only."""
    return case(family, state, phase=phase, head_dim=64 if name == "stored/flashinfer" else 16)


def arm(name: str) -> Any:
    return importlib.import_module(f"experiments.arms.{name.replace('/', '_').replace('-', '_')}")


@pytest.fixture
def interpretable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter truncates bfloat16, which doubles the error of outputs, and finds ``tl.exp`` only as such."""
    forget()
    if GPU or all(peer.PEER.absent() for peer in (vllm, fla, mamba_ssm)):
        return
    numpy = tuple(map(int, importlib.import_module("numpy").__version__.split(".")[:2]))
    if numpy >= (2, 4):
        pytest.skip("Triton's interpreter cannot run a loop of a peer's kernel with NumPy 2.4 or later")
    monkeypatch.setattr(gates, "SLACK", 4.0)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    for family in ("gdn", "kda"):
        for peer in (vllm, fla):
            if peer.PEER.absent():
                continue
            peer.unsupported(family, torch.float32) if peer is fla else peer.unsupported(family)  # imports it
            module = sys.modules[peer.KERNELS[family][0]]
            for name in ("exp", "log"):
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, lambda x, name=name: getattr(tl, name)(x))


def judged(name: str, of: Case) -> Any:
    """The arm's layers, after the gates' first check of it has passed."""
    if reason := arm(name).unsupported(of):
        pytest.skip(reason)
    layers = arm(name).prepare(of, 3)
    correctness, _ = gates.Check(of, 3, "before").run(layers, 0, None)
    assert not correctness.faults()
    return layers


@pytest.mark.gpu
@pytest.mark.parametrize("state", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.parametrize("name", STORED)
def test_stored_arms_pass_the_gates(name: str, family: str, state: str, interpretable: None) -> None:
    judged(name, case_of(name, family, state))


@pytest.mark.gpu
@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.parametrize("name", STORED)
def test_stored_arms_take_staggered_rows(name: str, family: str, interpretable: None) -> None:
    judged(name, case_of(name, family, phase="staggered"))


@pytest.mark.gpu
@pytest.mark.parametrize("phase", ["aligned", "staggered"])
@pytest.mark.parametrize(("state", "inputs"), [("fp32", "fp32"), ("fp32", HALF), ("fp16", HALF)])
@pytest.mark.parametrize("length", [1, 4, 5])
@pytest.mark.parametrize("name", REPLAY)
def test_replay_arms_pass_the_gates(
    name: str, length: int, state: str, inputs: str, phase: str, interpretable: None
) -> None:
    head_dim = 64 if name == "replay/flashinfer" else 16  # the only one that it builds
    layers = judged(name, case("mamba2", state, inputs, phase, length, head_dim))
    assert layers.flushes.unique().tolist() == [1]


class Imitation:
    """FlashInfer's ``checkpointing_ssu`` with one token a step, as its documentation has it, from our recurrence."""

    @staticmethod
    def allocate_checkpointing_ssu_scratch(*sizes: Any) -> tuple[None, None, None]:
        return None, None, None

    @staticmethod
    def checkpointing_ssu(
        state: Any, x_cache: Any, B_cache: Any, dt_cache: Any, ring_start: Any, prev_num_accepted_tokens: Any, x: Any,
        dt: Any, A: Any, B: Any, C: Any, out: Any, *, D: Any, z: Any, state_batch_indices: Any, pad_slot_id: int,
        **scratch: Any,
    ) -> None:  # fmt: skip
        entries = x_cache.shape[2]
        for row, slot in enumerate(state_batch_indices.tolist()):
            if slot == pad_slot_id:
                continue
            start, held = int(ring_start[slot]), int(prev_num_accepted_tokens[slot])
            order = (start + torch.arange(entries, device=x.device)) % entries
            ring = mamba2.Ring(*(cache[slot, :, order][None] for cache in (x_cache, B_cache, dt_cache)))
            length = torch.tensor([held], device=x.device)
            if held + 2 > entries:
                state[slot] = mamba2.fold(state[slot][None].float(), ring, length, A[:, 0, 0])[0]
                length.zero_()
            token = mamba2.Inputs(x[row], B[row], C[row], dt[row][..., 0], A[:, 0, 0], D[:, 0], z)
            out[row] = mamba2.read(state[slot][None].float(), ring, length, token)
            behind = (start + held) % entries
            x_cache[slot, :, behind], B_cache[slot, :, behind] = x[row, 0], B[row, 0]
            dt_cache[slot, :, behind] = dt[row, 0, :, 0]


@pytest.mark.parametrize("phase", ["aligned", "staggered"])
@pytest.mark.parametrize("length", [1, 2, 5])
def test_the_layout_of_flashinfer_s_replay_passes_the_gates(
    length: int, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Around an imitation of its kernel, since the real one needs a GPU and nvcc; two cycles, checked in each."""
    monkeypatch.setattr(flashinfer, "_module", lambda: Imitation)
    forget()
    of = case("mamba2", "fp32", "bf16", phase, length)
    layers = arm("replay/flashinfer").prepare(of, 3)
    for cycles, moment in enumerate(("before", "after")):
        correctness, _ = gates.Check(of, 3, moment).run(layers, cycles, None)
        assert not correctness.faults()
    assert layers.flushes.unique().tolist() == [2]
    monkeypatch.setattr(type(layers), "folds_current", True)
    correctness, _ = gates.Check(of, 3, "after").run(layers, 2, None)
    assert any(fault.startswith("state error") for fault in correctness.faults())


@pytest.mark.gpu
def test_the_fold_of_vllm_s_replay_rounds_and_the_gates_would_see_it(interpretable: None) -> None:
    of = case("mamba2", "fp32", HALF)
    layers = judged("replay/vllm", of)
    type(layers).as_rounded, declared = Layers.as_rounded, type(layers).as_rounded
    try:
        correctness, _ = gates.Check(of, 3, "before").run(arm("replay/vllm").prepare(of, 3), 0, None)
    finally:
        type(layers).as_rounded = declared
    assert any(fault.startswith("state error") for fault in correctness.faults())


@pytest.mark.gpu
@pytest.mark.parametrize("family", SHAPES)
def test_every_launch_of_the_tuned_arm_gives_the_same_numbers(family: str, interpretable: None) -> None:
    of = case(family)
    if reason := vllm.unsupported(family):
        pytest.skip(reason)
    for launch in vllm.candidates(family):
        layers = arm("stored/vllm-tuned")._layers(of, 2, launch)
        correctness, _ = gates.Check(of, 2, "before").run(layers, 0, None)
        assert not correctness.faults(), launch


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("geometry", [Geometry("mamba2", 96, 8, 80, 128), Geometry("mamba2", 128, 8, 64, 128)], ids=str)
def test_the_tuned_arm_may_choose_what_vllm_does(geometry: Geometry, dtype: torch.dtype) -> None:
    if reason := vllm.unsupported("mamba2"):
        pytest.skip(reason)
    for rows in (1, 8, 64, 256, 512):
        assert vllm.shipped_launch(geometry, rows, dtype) in vllm.candidates("mamba2")


@pytest.mark.gpu
@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.parametrize("name", STORED)
def test_padding_rows_leave_the_state_alone(name: str, family: str, interpretable: None) -> None:
    layers = judged(name, case_of(name, family))
    before = layers.state.clone()
    layers._steps(0, torch.tensor([-1, 1, -1, 3, -1], device=layers.device))
    changed = (layers.state != before).flatten(2).any(2).tolist()
    assert changed == [[False, True, False, True, False]] * layers.copies


@pytest.mark.gpu
def test_a_wrong_launch_is_seen_by_the_gates(interpretable: None) -> None:
    of = case("gdn")
    if reason := vllm.unsupported("gdn"):
        pytest.skip(reason)
    layers = arm("stored/vllm").prepare(of, 2)
    step = layers._step
    layers._step = lambda out, state, inputs, slots: step(out, state, inputs._replace(beta=inputs.beta * 0.99), slots)
    correctness, _ = gates.Check(of, 2, "before").run(layers, 0, None)
    assert correctness.faults()


ABSENT = """
import sys
from experiments.case import Case, Precision, Timing
from replayssm.geometry import Geometry
import importlib
from replayssm import peers
from replayssm.peers import modules
peers.folder = lambda package: None
for name, family in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
    geometry = Geometry(family, 2, 2, 64, 128)
    case = Case("kernel", "test", geometry, 1, 16, "aligned", Precision("fp32", "bf16"), "cuda", 0, 0,
                Timing("test", 2, 1, 5.0, 0.01, 1.0, 1, 60.0))
    arm = importlib.import_module("experiments.arms." + name.replace("/", "_").replace("-", "_"))
    told = arm.describe(case)
    assert told["version"] is None, told
    assert not [name for name in sys.modules if name.partition(".")[0] in ("vllm", "fla", "flashinfer", "mamba_ssm")]
    print(name, arm.unsupported(case), sep=": ")
"""
SAID = {
    "stored/vllm": ("gdn", "vLLM is not installed; smallest install: pip install --no-deps vllm==0.33.0 regex"),
    "stored/vllm-tuned": ("kda", "vLLM is not installed; smallest install: pip install --no-deps vllm==0.33.0 regex"),
    "replay/vllm": ("mamba2", "vLLM is not installed; smallest install: pip install --no-deps vllm==0.33.0 regex"),
    "stored/mamba-ssm": (
        "mamba2",
        "mamba-ssm is not installed; smallest install: MAMBA_SKIP_CUDA_BUILD=TRUE pip install --no-deps"
        " --no-build-isolation mamba-ssm==2.3.2.post1 and einops",
    ),
    "stored/flashinfer": (
        "mamba2",
        "FlashInfer is not installed; smallest install: pip install flashinfer-python==0.7.2.post1, with nvcc of CUDA"
        " 12.8 or later",
    ),
    "replay/flashinfer": (
        "mamba2",
        "FlashInfer is not installed; smallest install: pip install flashinfer-python==0.7.2.post1, with nvcc of CUDA"
        " 12.8 or later",
    ),
    "stored/fla": (
        "kda",
        "flash-linear-attention is not installed; smallest install: pip install --no-deps fla-core==0.6.0",
    ),
}


def test_an_absent_peer_is_unsupported_and_says_how_to_install_it() -> None:
    asked = [word for name, (family, _) in SAID.items() for word in (name, family)]
    root = Path(__file__).parents[1]
    ran = subprocess.run([sys.executable, "-c", ABSENT, *asked], capture_output=True, text=True, cwd=root)
    assert (ran.stdout.splitlines(), ran.stderr) == ([f"{name}: {said}" for name, (_, said) in SAID.items()], "")


def test_a_replay_that_the_peer_does_not_have_is_unsupported() -> None:
    for family in ("gdn", "kda"):
        told = f"vLLM 0.33 has no replay kernel for {family} at one token a step, only for mamba2"
        assert vllm.unsupported(family, replay=True) == told


def test_what_flashinfer_cannot_do_is_unsupported() -> None:
    told = "FlashInfer builds its kernel for head_dim=64 only; the case has head_dim=80"
    assert flashinfer.unsupported(Geometry("mamba2", 2, 1, 80, 128)) == told
    told = "FlashInfer's replay holds at most 16 tokens; the case has interval_length=17"
    assert flashinfer.unsupported(Geometry("mamba2", 2, 1, 64, 128), 17) == told
    told = "FlashInfer's GDN decode takes gate projections in 16 bits only; the case's gates are float32"
    assert flashinfer.unsupported(Geometry("gdn", 2, 1, 128, 128)) == told


def test_another_version_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "peerpackage").mkdir()
    (tmp_path / "peerpackage" / "__init__.py").write_text("raise RuntimeError('must not run')")
    info = tmp_path / "peer_dist-1.2.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: peer-dist\nVersion: 1.2.3\n")
    monkeypatch.syspath_prepend(tmp_path)

    def told(written_for: str, distribution: str = "peer-dist") -> Any:
        return Peer("A peer", "peerpackage", (distribution,), written_for, "pip install peer-dist").told()

    assert told("1.2") == {"peer": "A peer", "version": "1.2.3", "written_for": "1.2"}
    assert told("1.20")["warning"] == "the adapter was written for A peer 1.20, not 1.2.3"
    assert told("1.2", "other")["warning"] == "the adapter was written for A peer 1.2, not unknown"


def test_a_module_is_imported_without_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The packages named do not run, the others do; a stand-in takes a module's place; a failure leaves nothing."""
    monkeypatch.syspath_prepend(tmp_path)
    for folder in ("big", "big/ops", "big/tools"):
        (tmp_path / folder).mkdir()
        text = "ran = True" if folder == "big/tools" else "raise RuntimeError('must not run')"
        (tmp_path / folder / "__init__.py").write_text(text)
    (tmp_path / "big/ops/kernel.py").write_text("from big.engine import RANK\nfrom big import tools\nran = tools.ran\n")
    (tmp_path / "big/ops/broken.py").write_text("import big.tools, big.absent\n")
    engine = ModuleType("engine")
    engine.RANK = 3  # type: ignore[attr-defined]
    with pytest.raises(ImportError, match=r"big\.absent"):
        only("big.ops.broken", ("big", "big.ops"))
    assert not [name for name in sys.modules if name.partition(".")[0] == "big"]
    kernel = only("big.ops.kernel", ("big", "big.ops"), {"big.engine": engine})
    assert (kernel.RANK, kernel.ran) == (3, True)
    for name in [name for name in sys.modules if name.partition(".")[0] == "big"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match=r"No module named 'big\.none'"):
        only("big.none.kernel", ("big", "big.none"))


PEERS = {
    "vllm": "from replayssm.peers.vllm import unsupported; print(unsupported('mamba2'))",
    "fla": "import torch; from replayssm.peers.fla import unsupported; print(unsupported('gdn', torch.float32))",
    "mamba_ssm": "from replayssm.peers.mamba_ssm import unsupported; print(unsupported('mamba2'))",
    "flashinfer": "from replayssm.geometry import Geometry; from replayssm.peers.flashinfer import unsupported;"
    "print(unsupported(Geometry('mamba2', 2, 1, 64, 128)))",
}
KERNEL_FILES = {
    "mamba_ssm": "ops/triton/selective_state_update.py",
    "fla": "ops/gated_delta_rule/fused_recurrent.py",
    "flashinfer": "mamba.py",
}


@pytest.mark.parametrize("renamed", [False, True], ids=["no file", "no such name"])
def test_a_peer_without_the_kernel_is_unsupported(renamed: bool, tmp_path: Path) -> None:
    """As another version may be: the kernel's file is not where it was, or holds it under another name."""
    for package in PEERS:
        file = tmp_path / package / KERNEL_FILES.get(package, "other.py")
        file.parent.mkdir(parents=True)
        (tmp_path / package / "__init__.py").touch()
        (tmp_path / package / "ops" / "kda").mkdir(parents=True, exist_ok=True)
        if renamed:
            file.touch()
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[1])])
    env = os.environ | {"PYTHONPATH": path}
    code = "\n".join(PEERS.values())
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    for package, told in zip(PEERS, ran.stdout.splitlines(), strict=True):
        assert "lacks the kernel: " in told
        assert ("cannot import name" in told) == (renamed and package in KERNEL_FILES), told


def test_peer_arms_run_on_a_gpu_only() -> None:
    assert set(known_arms()) >= set(PEER_ARMS)
    assert {devices(name) for name in PEER_ARMS} == {("cuda",)}


def test_raw_gates_give_the_gates_back() -> None:
    g = -torch.logspace(-6, 2, 200)
    beta = torch.linspace(0, 1, 200)
    a, b = (t.double() for t in raw_gates(g, beta))
    again = -math.exp(RAW_A_LOG) * torch.nn.functional.softplus(a, threshold=20.0)
    assert (torch.exp(again) - torch.exp(g.double())).abs().max() < 1e-7
    assert (torch.sigmoid(b) - beta).abs().max() < 1e-7
    assert raw_gates(torch.zeros(1), torch.zeros(1))[0].item() == -math.inf


def test_what_a_peer_needs_is_prepared_once() -> None:
    made = []
    prepared = Prepared(lambda tensor: made.append(tensor) or tensor + 1)
    first, second = torch.zeros(1), torch.zeros(1)
    assert prepared(first) is prepared(first)
    prepared(second)
    assert len(made) == 2


def test_what_a_peer_needs_of_a_size_is_prepared_once() -> None:
    made = []
    prepared = Prepared(lambda tensor, size: made.append(size) or size)
    slots = torch.zeros(1)
    for size in (1000, int("1000"), 1001):  # equal numbers of two objects
        assert prepared(slots, size) == size
    assert made == [1000, 1001]


def test_the_slot_in_front_is_the_peer_s_and_no_other() -> None:
    state = torch.randn(2, 3, 2, 4, 4)
    placed = null_slot_in_front(state)
    assert torch.equal(placed, state)
    for layer in range(2):
        seen = with_null_slot(placed[layer])
        assert torch.equal(seen[shifted(torch.arange(3)).long()], state[layer])
        seen[shifted(torch.tensor([-1])).long()] = torch.nan
    assert torch.equal(placed, state)
    with pytest.raises(ValueError, match=r"^state starts where its memory does; accepted: space in front"):
        with_null_slot(state[0])


def test_cursors_of_a_replay_peer_count_flushes_and_leave_padding_alone() -> None:
    cursor = torch.tensor([0, 1, 2, 1], dtype=torch.int32, device=DEVICE)
    flush = torch.tensor([0, 0, 1, 0], dtype=torch.int8, device=DEVICE)
    flushes = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    slots = torch.tensor([0, 1, 2, -1], device=DEVICE)
    seen = []
    for _ in range(4):
        advance(cursor, flush, flushes, slots, 3)
        seen.append((cursor.tolist(), flush.tolist(), flushes.tolist()))
    assert seen == [
        ([1, 2, 0, 1], [0, 1, 0, 0], [0, 0, 1, 0]),
        ([2, 0, 1, 1], [1, 0, 0, 0], [0, 1, 1, 0]),
        ([0, 1, 2, 1], [0, 0, 1, 0], [1, 1, 1, 0]),
        ([1, 2, 0, 1], [0, 1, 0, 0], [1, 1, 2, 0]),
    ]


def test_tuning_takes_the_fastest_and_keeps_what_failed() -> None:
    alive: list[int] = []
    made: weakref.WeakSet[Any] = weakref.WeakSet()

    class Layers:
        def __init__(self, of: Case, copies: int, rounds: int) -> None:
            self.rounds = rounds
            alive.append(len(made))
            made.add(self)

        def run_steps(self) -> None:
            if not self.rounds:
                raise ValueError("no such launch\nand more")
            for _ in range(self.rounds):
                torch.ones(200_000, device=DEVICE).sum()

    best, told = tuning.fastest(case("mamba2"), [0, 50, 1], Layers)
    assert best == 1
    assert told["0"] == "ValueError: no such launch"
    assert set(told) == {"0", "1", "50"}
    assert alive == [0, 0, 0]  # no candidate's memory is taken by the one before it
    with pytest.raises(RuntimeError, match=r"^no launch configuration runs: \{'0'"):
        tuning.fastest(case("mamba2"), [0], Layers)
