"""Compile every Triton kernel for NVIDIA GPUs that need not be here; results/triton_resources.csv says what each takes.

    python -m scripts.compile_triton                                        the declared set; writes the table
    python -m scripts.compile_triton --check                                the same; compares, and writes nothing
    python -m scripts.compile_triton --architectures 90 --models kimi --states fp16 --launch rows=8,tiles=16,warps=2

The kernels' own entry points are called, with a stand-in for the driver that compiles and does not launch, so that what
is compiled is what would run: argument types, alignment, the heuristic's launch for the batch, as on a device without a
table of launches. The declared set is everything for sm_90, and one geometry a family, at the largest batch, for the
other architectures; for all, steps that compute their gates or take a window of tokens, what lies between a model's
products (`scripts.layer_calls`, whose ``state`` is the activations' dtype), and what depends on no model: commits,
cursors, bandwidth.
Fails if a kernel does not compile, keeps more than the declared bytes a thread on its stack, where spilled registers
go, or takes more shared memory than the architecture gives a block. Products on tensor cores are counted in the PTX,
each once however often it runs. Registers depend on the versions of Triton and of its assembler, which the table names;
``--check`` lists rows that differ and does not mind them. Triton 3.6 brings assemblers of CUDA 12.8 for sm_90 and below
and of 12.9 above, which know all six architectures; from sm_90 on it compiles for the variant of one architecture
(sm_103a), which runs on no other.

Longer rings and windows than the declared ones take more shared memory, in these cases more than sm_89 and sm_120 give:
at batch 256, with float32 states and intervals of 64, KDA's verify step of windows of 8 takes 106,496 bytes and of 16
131,072; attention to bf16 heads of 256 takes 102,400 for 128 rows of queries, windows of 16 with 8 heads a KV head.

Takes one to three seconds a kernel and core the first time, less with Triton's cache. Needs Triton, and no GPU.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from experiments.inputs import make_inputs
from experiments.measure.gated import raw_inputs
from experiments.measure.layers import stacked
from replayssm.cache import ReplayCache
from replayssm.formats import DTYPES, Rounding
from replayssm.geometry import Geometry
from replayssm.kernels.triton import bandwidth
from replayssm.kernels.triton.commit import commit
from replayssm.kernels.triton.families import KERNELS
from replayssm.kernels.triton.launch import Launch
from replayssm.kernels.triton.verify_commit import commit_window
from replayssm.kernels.triton.verify_families import VERIFY
from replayssm.kernels.triton.verify_snapshots import snapshots_step
from replayssm.peers.cursor import advance, advance_ring
from scripts.layer_calls import ELSEWHERE as LAYERS_ELSEWHERE
from scripts.layer_calls import LAYERS, ONE_A_KERNEL, layer_calls

TABLE = Path(__file__).resolve().parent.parent / "results" / "triton_resources.csv"
SHARED_LIMIT_KIB = {80: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}
"""The architectures, and how much shared memory a block may have there: CUDA C++ Programming Guide, compute
capabilities, memory per capability."""
ARCHITECTURES = tuple(SHARED_LIMIT_KIB)
WHOLE = 90
"""The architecture for which everything is compiled."""
DEVICE = "meta"
"""Tensors without memory: nothing runs, and a cache lays them out as for a GPU wherever that differs from a CPU."""
MODELS = {
    "nano_4b": Geometry("mamba2", 96, 8, 80, 128),
    "super_120b": Geometry("mamba2", 128, 8, 64, 128),
    "qwen_4b": Geometry("gdn", 32, 16, 128, 128),
    "kimi": Geometry("kda", 32, 32, 128, 128),
}
ELSEWHERE = ("nano_4b", "qwen_4b", "kimi")
BATCH_SIZES = (1, 8, 256)
"""One of each class of launch: a row's heads cut finely, a few, a whole head a program."""
INTERVAL_LENGTH = 16
STACK_LIMIT_BYTES = 448
"""A thread may leave so much there, most of it in the fold, which runs once in L steps. At batch 8 the
fastest launches on an NVIDIA H200 left 152 bytes for GDN and 344 for KDA; without a stack they were 7 and 21 % slower.
"""
FLUSHES = ("replay-stochastic", "replay-raw-fold")
"""Other ways to flush than the default; a thread may keep FLUSH_STACK_LIMIT_BYTES on its stack meanwhile."""
FLUSH_STACK_LIMIT_BYTES = 1024
GATES = "replay-gates"
"""The replay step that computes its gates from raw inputs."""
AHEAD = "replay-ahead"
"""The replay step in two launches."""
WINDOWS = ("verify", "snapshots", "oracle")
"""Steps of speculative decoding, with windows of WINDOW tokens, each with its default launch."""
WINDOW = 4
PLAIN = "any"
"""In the place of a model: kernels that depend on none, the commit, the cursors of other projects' replay, the
bandwidth kernels with the largest block.
"""
KEY = ("architecture", "model", "state", "batch_size", "step", "kernel")


@dataclass(frozen=True)
class Case:
    """One call a step: ``launch`` None is the default."""

    architecture: int
    model: str
    state: str
    batch_size: int
    interval_length: int = INTERVAL_LENGTH
    launch: Launch | None = None

    def __str__(self) -> str:
        return f"sm_{self.architecture} {self.model} {self.state} batch {self.batch_size}"


def declared() -> list[Case]:
    whole = itertools.product([WHOLE], MODELS, DTYPES, BATCH_SIZES)
    others = [architecture for architecture in ARCHITECTURES if architecture != WHOLE]
    elsewhere = itertools.product(others, ELSEWHERE, ("fp32", "fp16"), BATCH_SIZES[-1:])
    plain = itertools.product(ARCHITECTURES, [PLAIN], ["fp32"], BATCH_SIZES[-1:])
    layers = [(WHOLE, model, *sizes) for model, (_, *sizes) in LAYERS.items()]
    layers += [(architecture, LAYERS_ELSEWHERE, *LAYERS[LAYERS_ELSEWHERE][1:]) for architecture in others]
    return [Case(*c) for c in (*whole, *elsewhere, *plain, *layers)]


class _Compiler:
    """What Triton asks of a driver in order to compile for ``architecture``."""

    def __init__(self, architecture: int) -> None:
        self.target = GPUTarget("cuda", architecture, 32)
        self.utils = self

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_LIMIT_KIB[device] << 10}

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        # Triton keeps compiled kernels by device, and would hand out those of another architecture.
        return self.target.arch

    def get_current_stream(self, device: int) -> int:
        return 0


def compiled(architecture: int, call: Any) -> list[Any]:
    """The kernels that ``call()`` would launch, compiled for ``architecture``."""
    kernels: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kernels.append(run(self, *args, grid=grid, warmup=True, **kwargs))

    driver.set_active(_Compiler(architecture))
    JITFunction.run = compile_only
    try:
        call()
    finally:
        JITFunction.run = run
    if [k.metadata.target.arch for k in kernels] != [architecture] * max(1, len(kernels)):
        raise RuntimeError(f"compiled {[k.metadata.target for k in kernels]} instead of sm_{architecture}")
    return kernels


def resources(cubin: bytes) -> dict[str, int]:
    """Registers and bytes of stack a thread, as the assembler says."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", text))
    return {"registers": int(found["REG"]), "stack_bytes": int(found["STACK"]) + int(found["LOCAL"])}


def tensor_instructions(ptx: str) -> int:
    """Matrix products in a kernel's text: of a warp, of the warp groups of sm_90, in the tensor memory of sm_100."""
    return len(re.findall(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)\.", ptx))


def calls(case: Case) -> dict[str, Any]:
    """One call a step with the batch's inputs, without memory; sizes and strides are those of a GPU's tensors."""
    if case.model == PLAIN:
        return plain_calls(case)
    if case.model in LAYERS:
        found = layer_calls(case.model, DTYPES[case.state], case.batch_size, WINDOW)
        return {step: call for step, call in found.items() if case.architecture == WHOLE or step in ONE_A_KERNEL}
    geometry, state = MODELS[case.model], DTYPES[case.state]
    cache = ReplayCache(geometry, slots=1, interval_length=case.interval_length, state_dtype=state, device=DEVICE)
    inputs = make_inputs(geometry, case.batch_size, 1, dtype=torch.bfloat16, seed=0, device=DEVICE)[0]
    out = torch.empty(case.batch_size, geometry.heads, geometry.head_dim, dtype=torch.bfloat16, device=DEVICE)
    slots = torch.empty(case.batch_size, dtype=torch.int64, device=DEVICE)
    kernels, layer = KERNELS[geometry.family], cache.layer(0)
    found = {
        "stored": lambda: kernels.stored_step(out, layer.state, inputs, slots, case.launch),
        "replay": lambda: kernels.replay_step(out, layer, inputs, slots, case.launch),
    }
    stochastic, raw_fold = FLUSHES
    if stochastic in steps(case):
        rounding = Rounding(seed=7)
        found[stochastic] = lambda: kernels.replay_step(out, layer, inputs, slots, case.launch, rounding=rounding)
    if raw_fold in steps(case):
        raw = ReplayCache(
            geometry, slots=1, interval_length=case.interval_length, state_dtype=state, raw_fold=True, device=DEVICE
        ).layer(0)
        found[raw_fold] = lambda: kernels.replay_step(out, raw, inputs, slots, case.launch)
    if GATES in steps(case):
        token, gates = raw_inputs(inputs)
        found[GATES] = lambda: kernels.replay_step(out, layer, token, slots, case.launch, gates=gates)
    if AHEAD in steps(case):
        launch = Launch(rows=16, tiles=1, warps=2, lanes=8, ahead=True)
        found[AHEAD] = lambda: kernels.replay_step(out, layer, inputs, slots, launch)
    return found | (window_calls(case) if WINDOWS[0] in steps(case) else {})


def window_calls(case: Case) -> dict[str, Any]:
    """As `calls`, for steps that take a window."""
    geometry, rows = MODELS[case.model], case.batch_size
    windowed = ReplayCache(
        geometry,
        slots=1,
        interval_length=case.interval_length,
        window=WINDOW,
        state_dtype=DTYPES[case.state],
        device=DEVICE,
    ).layer(0)
    inputs = stacked(make_inputs(geometry, rows, WINDOW, dtype=torch.bfloat16, seed=0, device=DEVICE))
    out = torch.empty(rows, WINDOW, geometry.heads, geometry.head_dim, dtype=torch.bfloat16, device=DEVICE)
    states = windowed.state[:, None].expand(-1, WINDOW, -1, -1, -1).contiguous()
    slots = torch.empty(rows, dtype=torch.int64, device=DEVICE)
    accepted = torch.empty(rows, dtype=torch.int32, device=DEVICE)
    verify, snapshots, oracle = WINDOWS
    return {
        verify: lambda: VERIFY[geometry.family](out, windowed, inputs, slots),
        snapshots: lambda: snapshots_step(geometry.family, out, states, inputs, slots, accepted),
        oracle: lambda: snapshots_step(geometry.family, out, states[:, :1], inputs, slots, accepted, known=True),
    }


def plain_calls(case: Case) -> dict[str, Any]:
    """As `calls`, for what depends on no model."""
    rows = case.batch_size
    slots, flushes = (torch.empty(rows, dtype=torch.int64, device=DEVICE) for _ in range(2))
    cursor, origin, accepted = (torch.empty(rows, dtype=torch.int32, device=DEVICE) for _ in range(3))
    flush = torch.empty(rows, dtype=torch.int8, device=DEVICE)
    length, buffer = case.interval_length, torch.empty(1 << 20, device=DEVICE)
    found: dict[str, Any] = {
        "commit": lambda: commit(cursor, origin, slots, length, length - 1),
        "commit-window": lambda: commit_window(cursor, origin, slots, accepted, length, WINDOW, length + WINDOW),
        "advance": lambda: advance(cursor, flush, flushes, slots, length),
        "advance_ring": lambda: advance_ring(cursor, origin, flushes, slots, length, length + 1),
    }
    block, warps = bandwidth.BLOCKS[-1]
    halves = buffer[: len(buffer) // 2], buffer[len(buffer) // 2 :]
    return found | {
        "read": lambda: bandwidth.read(buffer, block, warps),
        "scale": lambda: bandwidth.scale(buffer, 1.0, block, warps),
        "copy": lambda: bandwidth.copy(*halves, block, warps),
    }


def steps(case: Case) -> tuple[str, ...]:
    """What is compiled for a case: the default steps and, at the largest batch, other ways to flush, and gates."""
    if case.model == PLAIN or case.model in LAYERS:
        return tuple(calls(case))
    found: tuple[str, ...] = ("stored", "replay")
    if case.batch_size in (BATCH_SIZES[0], BATCH_SIZES[-1]):  # their launches have two classes
        found += WINDOWS
        if case.state == "fp32" and case.model in ELSEWHERE:
            found += (AHEAD,)
    if case.batch_size != BATCH_SIZES[-1]:
        return found
    if case.state == "fp16":
        found += FLUSHES[:1]
    if case.state == "fp32" and MODELS[case.model].family != "mamba2":
        found += FLUSHES[1:]
    if case.state == "fp32" and case.model in ELSEWHERE:
        found += (GATES,)
    return found


def compile_case(case: Case) -> list[dict[str, Any]]:
    """The table's rows of one case."""
    torch.set_num_threads(1)
    rows = []
    for step, call in calls(case).items():
        for kernel in compiled(case.architecture, call):
            row = {"architecture": f"sm_{case.architecture}", "model": case.model, "state": case.state}
            row |= {"batch_size": case.batch_size, "step": step, "kernel": kernel.metadata.name}
            row |= {"warps": kernel.metadata.num_warps, **resources(kernel.asm["cubin"])}
            row |= {"shared_bytes": kernel.metadata.shared}
            row |= {"tensor_instructions": tensor_instructions(kernel.asm["ptx"]), "triton": triton.__version__}
            rows.append(row | {"assembler": get_ptxas(case.architecture).version})
    return rows


def compile_all(cases: list[Case], workers: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows in the order of the cases, and a line for each case that failed; says how far it is."""
    started, found, failures = time.monotonic(), {}, []
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(compile_case, case): case for case in cases}
        for done, future in enumerate(as_completed(running), 1):
            case, error = running[future], future.exception()
            if error is not None:
                failures.append(f"{case} does not compile: {type(error).__name__}: {error}")
                told = "FAILED"
            else:
                found[case] = future.result()
                told = ", ".join(in_words(row) for row in found[case])
            print(f"[{done}/{len(cases)}, {time.monotonic() - started:.0f} s] {case}: {told}", flush=True)
    return [row for case in cases for row in found.get(case, [])], failures


def in_words(row: dict[str, Any]) -> str:
    spilled = f" STACK {row['stack_bytes']} B" if row["stack_bytes"] else ""
    return f"{row['step']} {row['registers']} registers {row['shared_bytes']} B shared{spilled}"


def beyond_limit(rows: list[dict[str, Any]], limit_bytes: int) -> list[str]:
    """A line a kernel that spills more than is allowed: ``limit_bytes``, more for those of `FLUSHES`."""
    limits = [FLUSH_STACK_LIMIT_BYTES if row["step"] in FLUSHES else limit_bytes for row in rows]
    return [
        f"{' '.join(str(row[name]) for name in KEY)}: {row['stack_bytes']} bytes of stack; accepted: {limit}"
        for row, limit in zip(rows, limits, strict=True)
        if int(row["stack_bytes"]) > limit
    ]


def beyond_shared_memory(rows: list[dict[str, Any]]) -> list[str]:
    """A line a kernel that takes more shared memory than its architecture, one of ARCHITECTURES, gives a block."""
    limits = {f"sm_{architecture}": kib << 10 for architecture, kib in SHARED_LIMIT_KIB.items()}
    return [
        f"{' '.join(str(row[name]) for name in KEY)}: {row['shared_bytes']} bytes of shared memory; accepted: {limit}"
        for row in rows
        if int(row["shared_bytes"]) > (limit := limits.get(row["architecture"], math.inf))
    ]


def differences(rows: list[dict[str, Any]], committed: list[dict[str, Any]]) -> list[str]:
    """A line for each row that is new, gone, or holds other figures."""
    new, old = _by_key(rows), _by_key(committed)
    lines = [f"{' '.join(key)}: not in the table" for key in new if key not in old]
    lines += [f"{' '.join(key)}: only in the table" for key in old if key not in new]
    for key in new:
        changed = [f"{n} {old[key].get(n)} -> {v}" for n, v in new[key].items() if old.get(key, new[key]).get(n) != v]
        lines += [f"{' '.join(key)}: {', '.join(changed)}"] if changed else []
    return lines


def _by_key(rows: list[dict[str, Any]]) -> dict[tuple[str, ...], dict[str, str]]:
    return {tuple(str(row[n]) for n in KEY): {n: str(value) for n, value in row.items()} for row in rows}


def write(rows: list[dict[str, Any]], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def parse_launch(text: str) -> Launch:
    """``rows=8,tiles=10,warps=1``: fields of `Launch`."""
    try:
        return Launch(**{name: int(value) for name, value in (field.split("=") for field in text.split(","))})
    except (TypeError, ValueError) as error:
        told = f"{text!r} is no launch ({error}); accepted: rows=8,tiles=10,warps=1"
        raise argparse.ArgumentTypeError(told) from None


def main() -> int:
    """Exit status: 0, or 1 if a kernel does not compile, or spills or takes more than it may."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the table instead of writing it")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="default: one a core")
    chosen = parser.add_argument_group("instead of the declared set; nothing is written")
    chosen.add_argument("--architectures", nargs="+", type=int)
    chosen.add_argument("--models", nargs="+", choices=(*MODELS, *LAYERS))
    chosen.add_argument("--states", nargs="+", choices=DTYPES)
    chosen.add_argument("--batch-sizes", nargs="+", type=int)
    chosen.add_argument("--interval-length", type=int)
    chosen.add_argument("--launch", type=parse_launch, help="fields of Launch, e.g. rows=8,tiles=10,warps=1")
    options = parser.parse_args()
    for name, values in (("workers", [options.workers]), ("batch-sizes", options.batch_sizes or [])):
        if min(values, default=1) < 1:
            parser.error(f"--{name} {min(values)} is impossible; accepted: at least 1")
    if os.environ.get("TRITON_INTERPRET"):
        parser.error("TRITON_INTERPRET is set; accepted: unset, since the interpreter compiles nothing")
    selected = any(vars(options)[action.dest] is not None for action in chosen._group_actions)
    cases = declared()
    if selected:
        axes = (options.architectures or (WHOLE,), options.models or MODELS, options.states or DTYPES)
        grid = itertools.product(*axes, options.batch_sizes or BATCH_SIZES)
        cases = [Case(*c, options.interval_length or INTERVAL_LENGTH, options.launch) for c in grid]
    rows, failures = compile_all(cases, options.workers)
    failures += beyond_limit(rows, STACK_LIMIT_BYTES) + beyond_shared_memory(rows)
    if options.check and not selected:
        changed = differences(rows, read(TABLE))
        print(f"{len(rows) - len(changed)} of {len(rows)} kernels as in {TABLE.name}", *changed, sep="\n")
    elif not selected and not failures:
        write(rows, TABLE)
    print(*failures, sep="\n", file=sys.stderr) if failures else print(f"all {len(rows)} kernels compiled")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
