"""The ahead-of-time compilation: it compiles for the architecture asked for, and tells what changed."""

from __future__ import annotations

import ast
import csv
import importlib
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from replayssm.kernels.triton import attention
from scripts import compile_triton as script

ROOT = pathlib.Path(__file__).resolve().parent.parent


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Python from the project's root without TRITON_INTERPRET, which other tests set and which compiles nothing."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True)


def test_two_architectures_give_two_binaries() -> None:
    code = (
        "from scripts.compile_triton import *\n"
        "for architecture in (80, 120):\n"
        "    case = Case(architecture, 'nano_4b', 'fp32', 1)\n"
        "    kernels = [k for call in calls(case).values() for k in compiled(architecture, call)]\n"
        "    print(architecture, len(kernels), *{re.search(r'\\.target (\\w+)', k.asm['ptx'])[1] for k in kernels})\n"
        "    print(*(resources(k.asm['cubin'])['registers'] > 0 for k in kernels))\n"
        "    print(*(k.metadata.name for k in kernels if k.metadata.launch_pdl or 'griddepcontrol.' in k.asm['ptx']))\n"
        "    print(*(k.metadata.name for k in kernels if k.metadata.launch_pdl))\n"
    )
    done = run("-c", code)
    assert done.returncode == 0, done.stderr
    beside = "products_ahead apply_products\napply_products\n"  # launches that overlap, and that may start early
    assert re.fullmatch(rf"80 [2-9] sm_80\n(True ?)+\n\n\n120 [2-9] sm_120a\n(True ?)+\n{beside}", done.stdout)


BEYOND = """
import sys; sys.path.insert(0, "tests")
from scripts.compile_triton import *
from replayssm.kernels.triton.gates import Gates
import test_gates_triton, test_rounding_triton
new = lambda *shape, dtype=torch.bfloat16: torch.empty(*shape, dtype=dtype, device=DEVICE)
long = lambda *shape: new(*shape, dtype=torch.int64)
done = []
for model, bound in (("nano_4b", None), ("qwen_4b", None), ("kimi", None), ("kimi", -5.0)):
    g, kernels = MODELS[model], KERNELS[MODELS[model].family]
    layer = ReplayCache(g, slots=2, state_dtype=torch.float16, device=DEVICE).layer(0)
    token = make_inputs(g, 2, 1, dtype=torch.bfloat16, seed=0, device=DEVICE)[0]
    raw = {n: getattr(token, n).bfloat16() for n in ("dt", "g", "beta") if n in token._fields}
    given = new(2, g.heads, g.head_dim), layer, token._replace(**raw), long(2)
    bias = new(g.heads, g.state_dim) if g.family == "kda" else new(g.heads)
    gates = Gates(bias, None if g.family == "mamba2" else new(g.heads), bound)
    drawn = Rounding(2**63, 1, long(2), long(2))
    done += compiled(90, lambda: kernels.replay_step(*given, gates=gates))
    done += compiled(90, lambda: kernels.stored_step(given[0], layer.state, *given[2:], gates=gates, rounding=drawn))
x, wide = new(2, 3, 5, 24, dtype=torch.float32), new(64, dtype=torch.float32)
call = x.half(), long(2, 3, 5, 24), x, long(2), long(2), 3, 5, 15, 24, 4, 8
done += compiled(90, lambda: test_rounding_triton._round[(8,)](*call))
done += compiled(90, lambda: test_gates_triton._sigmoid[(1,)](wide, wide, 64))
done += compiled(90, lambda: test_gates_triton._log_decay[(1,)](wide, wide, wide, wide, 64, -5.0))
done += compiled(90, lambda: test_gates_triton._discretize[(1,)](wide, wide, wide, 0.0, 1.0, 64))
print(len(done))
"""


def test_paths_beyond_the_declared_set_compile() -> None:
    """Gates from raw inputs, stored steps that round stochastically, the kernels of tests: the interpreter takes more
    than the compiler does."""
    done = run("-c", BEYOND)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["12"]


def test_the_declared_set_is_every_kernel_and_architecture() -> None:
    cases = script.declared()
    assert len(set(cases)) == len(cases)
    for architecture in (80, 89, 90, 100, 103, 120):
        chosen = [case for case in cases if case.architecture == architecture]
        named = [case for case in chosen if case.model in script.MODELS]
        assert {script.MODELS[case.model].family for case in named} == {"mamba2", "gdn", "kda"}
        steps = [(case.model, step) for case in chosen for step in script.steps(case)]
        assert {model for model, step in steps if step == "replay-gates"} == set(script.ELSEWHERE)
        plain = {step for model, step in steps if model == script.PLAIN}
        assert plain == {"commit", "commit-window", "advance", "advance_ring", "read", "scale", "copy"}
        assert {case.state for case in chosen} >= {"fp32", "fp16"}
    whole = {(c.model, c.state, c.batch_size) for c in cases if c.architecture == 90 and c.model in script.MODELS}
    assert len(whole) == len(script.MODELS) * 3 * len(script.BATCH_SIZES)


def launched() -> set[tuple[str, str]]:
    """Module and name of every ``@triton.jit`` function of the package that its module starts: ``name[grid](...)``."""
    found = set()
    for path in sorted((ROOT / "replayssm").rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        kernels = {
            node.name
            for node in nodes
            if isinstance(node, ast.FunctionDef)
            and any(ast.unparse(decorator).startswith("triton.jit") for decorator in node.decorator_list)
        }
        started = [node.func for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)]
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found |= {(module, ast.unparse(call.value)) for call in started} & {(module, name) for name in kernels}
    return found


def test_the_declared_set_launches_every_kernel_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """For every architecture, by a case of each model; nothing is compiled or run here."""
    wanted, reached = launched(), set()
    assert len(wanted) >= 22
    kinds = {type(getattr(importlib.import_module(module), name)) for module, name in wanted}

    def note(kernel: Any, *args: Any, **options: Any) -> None:
        reached.add((kernel.fn.__module__, kernel.fn.__name__))

    for kind in kinds:
        monkeypatch.setattr(kind, "run", note)
    monkeypatch.setattr(script.driver, "_active", None)
    of_model = {(case.architecture, case.model): case for case in reversed(script.declared())}
    for architecture in script.ARCHITECTURES:
        reached.clear()
        script.driver.set_active(script._Compiler(architecture))
        for case in [case for case in of_model.values() if case.architecture == architecture]:
            for call in script.calls(case).values():
                call()
        assert wanted - reached == set()


def test_the_committed_table_is_of_the_declared_set_within_the_limit() -> None:
    rows = script.read(script.TABLE)
    named = {(r["architecture"], r["model"], r["state"], r["batch_size"], r["step"]) for r in rows}
    wanted = {
        (f"sm_{c.architecture}", c.model, c.state, str(c.batch_size), step)
        for c in script.declared()
        for step in script.steps(c)
    }
    assert named == wanted
    assert script.beyond_limit(rows, script.STACK_LIMIT_BYTES) == []
    assert script.beyond_shared_memory(rows) == []


def test_products_on_tensor_cores_are_counted() -> None:
    """Of a warp, of a group of warps, in tensor memory; what only loads or waits for them does not count."""
    text = """
        mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%r1}, {%r2}, {%r3}, {%r4};
        @%p1 mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r1}, {%r2}, {%r3}, {%r4};
        wgmma.mma_async.sync.aligned.m64n8k8.f32.tf32.tf32 {%f1}, %rd1, %rd2, %p1, 1, 1;
        wgmma.wait_group.sync.aligned 0;
        @%p2 tcgen05.mma.cta_group::1.kind::tf32 [%r1], %rd1, %rd2, %r2, %p3;
        ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1, %r2, %r3, %r4}, [%r5];
        fma.rn.f32 %f1, %f2, %f3, %f4;
    """
    assert script.tensor_instructions(text) == 4
    found = {step: set() for step in ("verify", *script.WINDOWS[1:], "stored")}
    for committed in script.read(script.TABLE):
        if committed["step"] in found:
            found[committed["step"]].add(int(committed["tensor_instructions"]) > 0)
    assert found == {"verify": {True}, "snapshots": {False}, "oracle": {False}, "stored": {False}}


def row(**changed: object) -> dict[str, object]:
    first = {"architecture": "sm_90", "model": "kimi", "state": "fp32", "batch_size": 1, "step": "replay"}
    return first | {"kernel": "_replay_kernel", "registers": 64, "stack_bytes": 0} | changed


def test_what_changed_is_named() -> None:
    assert script.differences([row()], [row(registers="64", batch_size="1")]) == []
    assert script.differences([row(), row(batch_size=8)], [row(registers=66), row(batch_size=256)]) == [
        "sm_90 kimi fp32 8 replay _replay_kernel: not in the table",
        "sm_90 kimi fp32 256 replay _replay_kernel: only in the table",
        "sm_90 kimi fp32 1 replay _replay_kernel: registers 66 -> 64",
    ]


def test_spills_beyond_the_limit_are_named() -> None:
    assert script.beyond_limit([row(), row(stack_bytes=40, step="stored")], 32) == [
        "sm_90 kimi fp32 1 stored _replay_kernel: 40 bytes of stack; accepted: 32"
    ]


def test_more_shared_memory_than_an_architecture_has_is_named() -> None:
    most = {80: 166912, 89: 101376, 90: 232448, 100: 232448, 103: 232448, 120: 101376}
    assert {architecture: kib * 1024 for architecture, kib in script.SHARED_LIMIT_KIB.items()} == most
    fits = [row(architecture=f"sm_{number}", shared_bytes=limit) for number, limit in most.items()]
    assert script.beyond_shared_memory([*fits, row(architecture="sm_89", shared_bytes=101377)]) == [
        "sm_89 kimi fp32 1 replay _replay_kernel: 101377 bytes of shared memory; accepted: 101376"
    ]


def test_attention_reads_as_many_positions_at_a_time_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its forecast is what the compiler took, and what fits an NVIDIA H200 reads 64 there."""
    monkeypatch.setattr(script.driver, "_active", None)
    bf16, fp32 = torch.bfloat16, torch.float32
    queries = {(bf16, 256): 16, (bf16, 128): 32, (fp32, 64): 16}
    rows = [r for r in script.read(script.TABLE) if (r["step"], r["kernel"]) == ("attend_window", "_attend_kernel")]
    chosen = {}
    for committed in rows:
        (layers, *_), name, _ = script.LAYERS[committed["model"]]
        size, dtype = layers.head_dim, script.DTYPES[name]
        script.driver.set_active(script._Compiler(int(committed["architecture"][3:])))
        like = torch.empty(0, dtype=dtype, device="meta")
        positions = attention._positions(queries[dtype, size], size, like)
        assert attention.shared_bytes(queries[dtype, size], size, positions, dtype) == int(committed["shared_bytes"])
        chosen[committed["architecture"], size] = positions
    assert [chosen[f"sm_{number}", 256] for number in script.ARCHITECTURES] == [64, 32, 64, 64, 64, 32]
    script.driver.set_active(script._Compiler(90))
    wide, half = (torch.empty(0, dtype=dtype, device="meta") for dtype in (fp32, bf16))
    assert [attention._positions(queries, 256, half) for queries in (32, 64, 128)] == [64, 64, 32]
    assert attention._positions(16, 256, wide) == 32


def test_the_table_survives_writing(tmp_path: pathlib.Path) -> None:
    script.write([row(), row(step="stored")], tmp_path / "table.csv")
    assert script.differences([row(), row(step="stored")], script.read(tmp_path / "table.csv")) == []
    assert next(csv.reader((tmp_path / "table.csv").read_text().splitlines())) == list(row())
    assert script.read(tmp_path / "none.csv") == []


def test_a_kernel_that_does_not_compile_fails_the_run() -> None:
    choice = [
        "--architectures",
        "79",
        "--models",
        "nano_4b",
        "--states",
        "fp32",
        "--batch-sizes",
        "1",
        "--workers",
        "1",
    ]
    done = run("-m", "scripts.compile_triton", *choice)
    assert done.returncode == 1
    assert "sm_79 nano_4b fp32 batch 1 does not compile: " in done.stderr


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ([], "TRITON_INTERPRET is set; accepted: unset"),
        (["--launch", "rows=3,tiles=1,warps=1"], "rows=3 is impossible"),
        (["--launch", "8,1,1"], "accepted: rows=8,tiles=10,warps=1"),
        (["--models", "gpt"], "invalid choice: 'gpt'"),
        (["--workers", "0"], "--workers 0 is impossible; accepted: at least 1"),
        (["--batch-sizes", "8", "0"], "--batch-sizes 0 is impossible; accepted: at least 1"),
    ],
)
def test_bad_options_are_refused(
    options: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(sys, "argv", ["compile_triton", *options])
    with pytest.raises(SystemExit) as stopped:
        script.main()
    assert stopped.value.code == 2
    assert told in capsys.readouterr().err
