"""The faults that `test_faults` plants: what is replaced in which file of the product, and what has to refuse it."""

from __future__ import annotations

from dataclasses import dataclass

from planted import SMALL

SMOKE = (*SMALL, "timing=smoke", "timing.warmup_limit_s=0.1")
STORED, REPLAY = "stored/torch", "replay/torch"
GDN = ("model=qwen3_5_4b", "model.ssm.heads=8", "model.ssm.groups=4")

KERNEL = "replayssm/kernels/torch/replay.py"
NUMBA_KERNEL = "replayssm/kernels/cpu/mamba2.py"
MAMBA2, CACHE = "replayssm/recurrence/mamba2.py", "replayssm/cache.py"
LAYERS, WORKER = "experiments/measure/layers.py", "experiments/measure/worker.py"
RUNNER, PROVENANCE = "experiments/measure/runner.py", "experiments/measure/provenance.py"


@dataclass(frozen=True)
class Fault:
    """``old`` becomes ``new`` in ``file``; ``gate`` must then refuse ``refused`` with a detail that has ``reason``."""

    file: str
    old: str
    new: str
    reason: str
    gate: str = "status"
    refused: tuple[str, ...] = (REPLAY,)
    arms: tuple[str, ...] = (STORED, REPLAY)
    options: tuple[str, ...] = ()

    @property
    def overrides(self) -> tuple[str, ...]:
        return (*SMOKE, f"arms=[{','.join(self.arms)}]", *self.options)


OF_ARMS = {
    "zero output": Fault(
        KERNEL,
        "out[rows[~due]] = y[~due].to(out.dtype)",
        "out[rows[~due]] = 0",
        "incorrect: before timing: output error 1 exceeds",
    ),
    "output not written at one step": Fault(
        KERNEL,
        "out[rows[~due]] = y[~due].to(out.dtype)",
        "out[rows[~due & (length != 1)]] = y[~due & (length != 1)].to(out.dtype)",
        "incorrect: before timing: output error inf .*output elements not written or not finite error 1.02e",
    ),
    "output of the step before": Fault(
        KERNEL,
        "        out[rows[~due]] = y[~due].to(out.dtype)\n",
        "        fresh, held = y[~due].to(out.dtype), replay_step.__dict__\n"
        "        out[rows[~due]] = held.get(str(out.data_ptr()), fresh)\n"
        "        held[str(out.data_ptr())] = fresh\n",
        "incorrect: before timing: output error",
    ),
    "wrong decay of the checkpoint": Fault(
        MAMBA2,
        "y = torch.exp(A * dts.sum(-1))[..., None] * SC",
        "y = torch.exp(A * dt)[..., None] * SC",
        "incorrect: before timing: output error",
    ),
    "wrong decay in the fold": Fault(
        MAMBA2,
        "w = ring.dt * torch.exp(after(A[:, None] * ring.dt, -1))",
        "w = ring.dt",
        "incorrect: before timing: .*state error",
    ),
    "ring position off by one": Fault(
        KERNEL,
        "position = (layer.origin[live] + layer.cursor[live]) % layer.capacity",
        "position = (layer.origin[live] + layer.cursor[live] + 1) % layer.capacity",
        "incorrect: before timing: output error",
    ),
    "flush skipped, yet counted": Fault(
        KERNEL,
        "layer.state[live] = rounded(state, layer.state.dtype, live, rounding, layer.flushes)",
        "state.sum()",
        "incorrect: before timing: .*state error",
    ),
    "flush not counted": Fault(
        KERNEL,
        "layer.flushes[live] += 1",
        "layer.flushes[live] += 0",
        "incorrect: before timing: 0 flushes counted, 16 expected",
    ),
    "flush never due": Fault(
        KERNEL,
        "due = length == layer.interval_length - 1",
        "due = length == layer.interval_length",
        "incorrect: before timing: .*0 flushes counted, 16 expected",
    ),
    "checkpoint rounded to bfloat16 at the flush": Fault(
        KERNEL,
        "layer.state[live] = rounded(state, layer.state.dtype, live, rounding, layer.flushes)",
        "layer.state[live] = state.bfloat16().float()",
        "incorrect: before timing: .*state error .* exceeds budget .*e-07",
    ),
    "corrected value rounded to bfloat16 in the ring": Fault(
        "replayssm/kernels/torch/ring.py",
        '"d": d, "g": inputs.g}',
        '"d": d.bfloat16(), "g": inputs.g}',
        "incorrect: before timing: .*state error .* exceeds budget .*e-07",
        options=GDN,
    ),
    "stored kernel run instead of replay": Fault(
        KERNEL,
        "    if not due.all():\n",
        "    if layer.window is None:\n"
        "        from replayssm.kernels.torch.stored import stored_step\n"
        "        layer.flushes[live[due]] += 1\n"
        "        return stored_step(out, layer.state, inputs, slots)\n"
        "    if not due.all():\n",
        "incorrect: before timing: .*state elements written between flushes",
    ),
    "cursor never advanced": Fault(
        CACHE,
        "self.cursor[live] = torch.where(due, after_flush, cursor + count)",
        "pass",
        "incorrect: before timing: .*0 flushes counted, 16 expected",
    ),
    "all cursors reset when one row flushes": Fault(
        CACHE,
        "return cursor == self.interval_length - 1",
        "return (cursor == self.interval_length - 1).any().expand_as(cursor)",
        "incorrect: before timing: .*cursor differs from the protocol's",
        options=("phase=staggered",),
    ),
    "every row reads its neighbour's slot": Fault(
        KERNEL,
        "return checkpoint(layer, live) if view is None else view",
        "return layer.state[live.roll(1)]",
        "incorrect: before timing: output error",
    ),
    # Rows 0, 1 and 3 are those that the two checks draw of four: only the comparison of all rows can see this one.
    "row 2 reads its neighbour's slot": Fault(
        KERNEL,
        "return checkpoint(layer, live) if view is None else view",
        "return layer.state[live.where(live != 2, 1)]",
        "incorrect: output of all rows against the first arm",
    ),
    "last row of the batch dropped": Fault(
        KERNEL,
        "rows = (slots >= 0).nonzero()[:, 0]\n"
        "    if len(rows) == 0:\n"
        "        return\n"
        "    live = slots[rows]\n"
        "    length = layer.cursor[live].long()\n"
        "    due = length == ",
        "rows = (slots >= 0).nonzero()[:-1, 0]\n"
        "    live = slots[rows]\n"
        "    length = layer.cursor[live].long()\n"
        "    due = length == ",
        "incorrect: before timing: output error inf .*output elements not written or not finite",
    ),
    "compiled replay: wrong decay of the checkpoint": Fault(
        NUMBA_KERNEL,
        "exp(splat(A * since))",
        "exp(splat(A * dt))",
        "incorrect: before timing: output error",
        refused=("replay/cpu",),
        arms=(STORED, "replay/cpu"),
    ),
    "compiled stored step: last heads of the last row dropped": Fault(
        NUMBA_KERNEL,
        "numba.prange(sizes.rows * tasks_per_row(sizes)):\n            _stored_task(",
        "numba.prange(sizes.rows * tasks_per_row(sizes) - 1):\n            _stored_task(",
        "incorrect: before timing: output error inf .*output elements not written or not finite",
        refused=("stored/cpu",),
        arms=("stored/cpu", REPLAY),
    ),
}
"""Refused by the check before timing."""

TIMED = """        for passes in range(self.case.steps_per_cycle):
            self.run_pass(passes)
"""
OF_HARNESS = {
    "warm cache: timing steps copy 0 again and again": Fault(
        LAYERS,
        TIMED,
        "        for passes in range(self.case.steps_per_cycle):\n"
        "            if self.flushes_per_cycle:\n"
        "                self.run_pass(passes)\n"
        "                continue\n"
        "            self.passes += 1\n"
        "            for _ in range(self.copies):\n"
        "                self._step(self.out_of(passes)[0], self.state[0], self.tokens.at(passes, 0), self._slots)\n",
        "incorrect: after timing: 1 of 4 copies touched",
        refused=(STORED,),
    ),
    "warm cache: all layers share copy 0": Fault(
        LAYERS,
        "self._step(out[copy], layer, self.tokens.at(passes, copy), slots)",
        "self._step(out[copy], self._layers[0], self.tokens.at(passes, copy), slots)",
        "incorrect: before timing: output error",
    ),
    "partial cycle timed": Fault(
        LAYERS,
        TIMED,
        TIMED.replace("steps_per_cycle)", "steps_per_cycle - self.flushes_per_cycle)"),
        "incorrect: after timing: .*passes more or less than whole cycles",
    ),
    "one stored pass too many timed": Fault(
        LAYERS,
        TIMED,
        TIMED.replace("steps_per_cycle)", "steps_per_cycle + 1 - self.flushes_per_cycle)"),
        "incorrect: after timing: passes more or less than whole cycles",
        refused=(STORED,),
    ),
    "timing without a run": Fault(
        "experiments/measure/timing.py",
        "    run()\n    return time.perf_counter_ns() - start",
        "    return time.perf_counter_ns() - start or 1",
        "incorrect: 0 cycles run while timed, .* asked",
        refused=(STORED, REPLAY),
    ),
    "a round not run": Fault(
        WORKER,
        "        case.timing.rounds,\n",
        "        case.timing.rounds - 1,\n",
        r"incorrect: \d+ cycles run while timed, \d+ asked",
        refused=(STORED, REPLAY),
    ),
    "no check after timing": Fault(
        WORKER,
        "    _check_after(arms, case, copies)\n",
        "",
        "error: its process ended with exit code 1",
        refused=(STORED, REPLAY),
    ),
}
"""Refused by the check after timing, or by the record."""

OF_RECORDS = {
    "rotation within the cache": Fault(
        RUNNER,
        "max(fewest, math.ceil(case.timing.cold_factor * (cache_bytes or FALLBACK_CACHE_BYTES) / copy_bytes))",
        "1",
        "1.25 x the last-level cache rotated, 5 x needed",
        gate="cold state",
        refused=(STORED, REPLAY),
    ),
    "dropped arm": Fault(
        WORKER,
        "journal.append(records)",
        "journal.append(records[:-1])",
        "no record of replay/torch",
        gate="incomplete",
        refused=(STORED,),
    ),
    "throttled clock": Fault(
        PROVENANCE,
        "None if not throttles or None in throttles else sum(t for t in throttles if t is not None)",
        "int(100 * os.times().elapsed)",
        "reported throttling",
        gate="throttled",
        refused=(STORED, REPLAY),
    ),
    "A/A biased by 5 %": Fault(
        WORKER,
        '"again": {again: samples.elapsed_ns[f"{again}{AGAIN}"]}',
        '"again": {again: [round(1.05 * ns) for ns in samples.elapsed_ns[again]]}',
        r"stored/torch timed twice differs by \+5.0 %",
        gate="A/A",
        refused=(STORED, REPLAY),
    ),
    "A/A without a second timing": Fault(
        WORKER,
        '"again": {again: samples.elapsed_ns[f"{again}{AGAIN}"]}',
        '"again": {again: samples.elapsed_ns[again]}',
        "holds the samples of the first",
        gate="A/A",
        refused=(STORED, REPLAY),
    ),
    "last round trimmed": Fault(
        WORKER,
        '"samples": {name: samples.elapsed_ns[name] for name in standing},\n'
        '        "again": {again: samples.elapsed_ns[f"{again}{AGAIN}"]},',
        '"samples": {name: samples.elapsed_ns[name][:-1] for name in standing},\n'
        '        "again": {again: samples.elapsed_ns[f"{again}{AGAIN}"][:-1]},',
        "2 rounds of samples, 3 asked",
        gate="rounds",
        refused=(STORED, REPLAY),
    ),
    "layer steps counted twice": Fault(
        WORKER,
        'layer_steps_per_sample=used["copies"] * case.steps_per_cycle * ',
        'layer_steps_per_sample=2 * used["copies"] * case.steps_per_cycle * ',
        "32 layer steps a sample counted, 16 timed",
        gate="whole cycles",
        refused=(STORED, REPLAY),
    ),
}
"""Refused by the analysis."""

FAULTS = OF_ARMS | OF_HARNESS | OF_RECORDS

DRAFTS = {
    "every draft counts as accepted": (
        CACHE,
        "count = accepted.to(self.cursor.device)[index >= 0].to(torch.int32)",
        "count = torch.full_like(self.cursor[live], self.window or 1)",
    ),
    "a window reads a rejected draft": (
        KERNEL,
        "visible = torch.where(due, 0, length)",
        "visible = torch.where(due, 0, length + (length > 0))",
    ),
}
"""Faults of speculative decoding: file, old and new text."""
