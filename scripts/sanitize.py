"""Run a small case of every Triton kernel under compute-sanitizer: out-of-bounds accesses and shared-memory races.

    python -m scripts.sanitize [--tools memcheck racecheck] [--families mamba2 gdn kda] [--sanitizer PATH]

Needs an NVIDIA GPU and the `compute-sanitizer` of a CUDA toolkit. Every tensor is an allocation of its own, rows have
odd sizes, one is padding, rows flush at different steps. A write behind a tensor is planted for memcheck first, since a
tool that sees nothing proves nothing. Exit status: 0 all is clean, 1 something was found, 2 no GPU or no tool.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

TOOLS = ("memcheck", "racecheck")
FAMILIES = ("mamba2", "gdn", "kda")
FOUND = 86
"""Exit status of the sanitizer when it has found something."""
BATCH_SIZES = (2, 40)
"""Rows of 32 heads: one on either side of where launches change; the second takes whole heads a program."""
LENGTH = 3
ROOT = Path(__file__).resolve().parent.parent


def find() -> str | None:
    """The path of compute-sanitizer, or None."""
    roots = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX") if name in os.environ]
    folders = [Path(root) / name for root in (*roots, "/usr/local/cuda") for name in ("bin", "compute-sanitizer")]
    return shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path=os.pathsep.join(map(str, folders))
    )


def step_everything(family: str) -> None:
    """Whole cycles of the family's steps, one token at a time in one launch and in two, and in windows, in each state
    format and class of launch."""
    import torch

    from experiments.inputs import make_inputs
    from experiments.measure.layers import stacked
    from replayssm.cache import ReplayCache
    from replayssm.formats import DTYPES
    from replayssm.geometry import Geometry
    from replayssm.kernels.triton.families import KERNELS
    from replayssm.kernels.triton.launch import Launch
    from replayssm.kernels.triton.verify_commit import commit_window
    from replayssm.kernels.triton.verify_families import VERIFY
    from replayssm.kernels.triton.verify_snapshots import snapshots_step

    kernels = KERNELS[family]
    geometry = Geometry(family, 32, 32 if family == "kda" else 16, 24, 40)
    for rows in BATCH_SIZES:
        inputs = make_inputs(geometry, rows, LENGTH, dtype=torch.bfloat16, seed=0, device="cuda")
        for dtype in DTYPES.values():
            cache = ReplayCache(geometry, slots=rows, interval_length=LENGTH, state_dtype=dtype, device="cuda")
            batch = cache.batch([None, *cache.allocate(rows - 1)])
            layer, slots = cache.layer(0), cache.index(batch)
            # Free ring entries hold NaN, which no access depends on.
            layer.cursor.copy_(torch.arange(rows) % LENGTH)
            out = torch.empty(rows, geometry.heads, geometry.head_dim, dtype=torch.bfloat16, device="cuda")
            for launch, token in itertools.product((None, Launch(16, 1, 2, 8, ahead=True)), inputs):
                kernels.replay_step(out, layer, token, slots, launch)
                cache.commit(batch)
            kernels.stored_step(out, layer.state, inputs[0], slots)

            cache = ReplayCache(
                geometry, slots=rows, interval_length=2 * LENGTH, window=LENGTH, state_dtype=dtype, device="cuda"
            )
            batch = cache.batch([None, *cache.allocate(rows - 1)])
            layer, slots = cache.layer(0), cache.index(batch)
            layer.cursor.copy_(torch.arange(rows) % LENGTH)
            outs, window = out[:, None].repeat(1, LENGTH, 1, 1), stacked(inputs)
            counts = (torch.arange(rows, device="cuda") % LENGTH + 1).int()
            for lengths in (None, counts, None):
                VERIFY[family](outs, layer, window, slots, lengths=lengths)
                commit_window(layer.cursor, layer.origin, slots, counts, 2 * LENGTH, LENGTH, cache.capacity)
            states = layer.state[:, None].repeat(1, LENGTH, 1, 1, 1)
            snapshots_step(family, outs, states, window, slots, counts)
    torch.cuda.synchronize()


def plant() -> None:
    """A Triton kernel that writes behind its tensor."""
    import torch
    import triton
    import triton.language as tl

    @triton.jit
    def beyond(x, N: tl.constexpr):
        tl.store(x + tl.arange(0, N), 1.0)

    beyond[(1,)](torch.zeros(128, device="cuda"), 1024)
    torch.cuda.synchronize()


def run(sanitizer: str, tool: str, child: str) -> subprocess.CompletedProcess[str]:
    """This file under the tool; one allocation a tensor, since torch's own pool would hide what lies beyond."""
    command = [sanitizer, "--tool", tool, "--error-exitcode", str(FOUND), "--target-processes", "application-only"]
    command += [sys.executable, "-m", "scripts.sanitize", "--child", child]
    variables = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("--sanitizer", help="path of compute-sanitizer, where it is not found")
    parser.add_argument("--child", choices=(*FAMILIES, "planted"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        plant() if options.child == "planted" else step_everything(options.child)
        return 0
    sanitizer = options.sanitizer or find()
    if sanitizer is None or shutil.which(sanitizer) is None:
        told = "compute-sanitizer was not found; accepted: on PATH, below CUDA_HOME, or --sanitizer PATH"
        print(told, file=sys.stderr)
        return 2
    import torch

    if not torch.cuda.is_available():
        print("no NVIDIA GPU: torch.cuda.is_available() is False; accepted: a machine with one", file=sys.stderr)
        return 2
    if "memcheck" in options.tools:
        planted = run(sanitizer, "memcheck", "planted")
        if planted.returncode != FOUND:
            print("memcheck does not see a planted write out of bounds", planted.stdout, planted.stderr, sep="\n")
            return 1
    dirty = 0
    for tool in options.tools:
        for family in options.families:
            done = run(sanitizer, tool, family)
            clean = done.returncode == 0
            dirty += not clean
            print(f"{tool} {family}: {'clean' if clean else f'exit status {done.returncode}'}", flush=True)
            if not clean:
                print(done.stdout[-6000:], done.stderr[-6000:], sep="\n")
    return 1 if dirty else 0


if __name__ == "__main__":
    sys.exit(main())
