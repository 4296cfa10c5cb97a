"""Compile every Triton kernel for NVIDIA GPUs that need not be here, and print registers, spills and shared memory.

    python scripts/compile_triton.py [--architectures 80 90 ...] [--models nano_4b kda ...] [--launch rows,tiles,warps]

The kernels' own entry points are called, with a stand-in for the driver that compiles and does not launch, so that what
is compiled is what would run: argument types, alignment, launch defaults. Fails if any kernel does not compile. Takes a
few seconds a kernel and architecture; Triton's cache makes the second time quick. Needs Triton, and no GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from experiments.inputs import make_inputs
from replayssm.cache import ReplayCache
from replayssm.geometry import Geometry
from replayssm.kernels.triton import gdn, kda, mamba2
from replayssm.kernels.triton.launch import Launch

ARCHITECTURES = (80, 89, 90, 100, 103, 120)
KERNELS: dict[str, Any] = {"mamba2": mamba2, "gdn": gdn, "kda": kda}
MODELS = {
    "nano_4b": Geometry("mamba2", 96, 8, 80, 128),
    "super_120b": Geometry("mamba2", 128, 8, 64, 128),
    "qwen_4b": Geometry("gdn", 32, 16, 128, 128),
    "kimi": Geometry("kda", 32, 32, 128, 128),
}
STATES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class _Compiler:
    """What Triton asks of a driver in order to compile for ``architecture``."""

    def __init__(self, architecture: int) -> None:
        self.target = GPUTarget("cuda", architecture, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compiled(architecture: int, call: Any) -> Any:
    """The kernel that ``call()`` would launch, compiled for ``architecture``."""
    kernels = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kernels.append(run(self, *args, grid=grid, warmup=True, **kwargs))

    driver.set_active(_Compiler(architecture))
    JITFunction.run = compile_only
    try:
        call()
    finally:
        JITFunction.run = run
    (kernel,) = kernels
    return kernel


def resources(cubin: bytes) -> dict[str, int]:
    """``registers`` a thread, ``stack`` and ``local`` bytes a thread (spills), as the assembler says."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = dict(re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", text))
    return {
        long: int(found[short])
        for short, long in zip(("REG", "STACK", "LOCAL"), ("registers", "stack", "local"), strict=True)
    }


def calls(
    geometry: Geometry, state: torch.dtype, batch_size: int, interval_length: int, launch: Launch | None
) -> dict[str, Any]:
    """One call a kernel, on small tensors of the layer's shape; sizes of the batch are in the heuristic only."""
    cache = ReplayCache(geometry, slots=1, interval_length=interval_length, state_dtype=state)
    inputs = make_inputs(geometry, 1, 1, dtype=torch.bfloat16, seed=0)[0]
    out = torch.empty(1, geometry.heads, geometry.head_dim, dtype=torch.bfloat16)
    slots, kernels, layer = torch.zeros(1, dtype=torch.int64), KERNELS[geometry.family], cache.layer(0)
    return {
        "stored": lambda: kernels.stored_step(out, layer.state, inputs, slots, launch),
        "replay": lambda: kernels.replay_step(out, layer, inputs, slots, launch),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--architectures", nargs="+", type=int, default=ARCHITECTURES)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--states", nargs="+", choices=STATES, default=["fp32", "fp16"])
    parser.add_argument("--interval-length", type=int, default=16)
    parser.add_argument("--launch", help="rows,tiles,warps[,lanes[,ahead[,eager]]] instead of the default")
    parser.add_argument("--output", type=Path, help="also write the figures to this JSON file")
    options = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET"):
        parser.error("TRITON_INTERPRET is set; accepted: unset, since the interpreter compiles nothing")
    numbers = [int(n) for n in options.launch.split(",")] if options.launch else None
    launch = Launch(*numbers[:5], eager=any(numbers[5:])) if numbers else None
    rows = []
    for model, state in itertools.product(options.models, options.states):
        for name, call in calls(MODELS[model], STATES[state], 1, options.interval_length, launch).items():
            for architecture in options.architectures:
                kernel = compiled(architecture, call)
                used = resources(kernel.asm["cubin"]) | {"shared": kernel.metadata.shared}
                rows.append({"model": model, "state": state, "kernel": name, "architecture": architecture} | used)
                print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    if options.output:
        options.output.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
