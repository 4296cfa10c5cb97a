"""One case of whole models in one process: all arms with the same weights, checked, traced, timed by turns, checked
again; with speculation or without.

A sample is the difference of two generations, of L and of L + ``steps`` tokens behind the same prompt, so that what a
generation costs once cancels. In each round every arm is timed once, in a random order and in the next round its
reverse. In the same rounds are timed a flush cycle of the state-space layers' steps alone, which gives their share of a
step, and the model's matrix products alone.
"""

from __future__ import annotations

import gc
import importlib
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch

from experiments.decode_case import RANDOM, DecodeCase
from experiments.measure import devices
from experiments.measure.assemble import Group, order_seed
from experiments.measure.beside_states import bytes_between, products
from experiments.measure.decode_memory import MEMORY_SHARE, drop, predicted
from experiments.measure.failures import LostError, fail, status_of, told
from experiments.measure.record import Correctness, Record
from experiments.measure.runner import FALLBACK_CACHE_BYTES, PROBE_BYTES
from experiments.measure.session import CHUNK, Session
from experiments.measure.session_gates import Chosen, Trace, agreement, check, trace
from experiments.measure.sources import arm_file
from experiments.measure.speculation import Opened, generated_as_traced, match, speculation
from experiments.measure.timing import RaisedError, interleave, warm_up
from experiments.measure.window_session import WindowSession, window_trace
from experiments.measure.worker import AGAIN, fastest_probe
from experiments.speculative_case import SpeculativeCase
from replayssm.engine import Memory
from replayssm.models import Decoder

TRACED_CYCLES = 4
PRODUCTS = "products"
FORCED = f"random, all arms forced on one stream of tokens; keys and values beyond token {CHUNK} random"
FORCED_TOO, GREEDY = "checkpoint, all arms forced on one stream of tokens", "checkpoint, greedy"


@dataclass
class Arm:
    """An arm of the group, and what became of it."""

    name: str
    status: str = "ok"
    message: str = ""
    session: Session | None = None
    state_steps: devices.Run | None = None
    config: dict[str, Any] = field(default_factory=dict)
    correctness: list[Correctness] = field(default_factory=list)
    trace: Trace | None = None
    generations_ns: list[list[int]] = field(default_factory=list)
    """Short and long, by round."""
    host_waits: list[list[int]] = field(default_factory=list)
    """Steps of them that the device had to wait for, by round."""
    state_ns: list[int] = field(default_factory=list)
    memory_bytes: int = 0
    accepted: torch.Tensor | None = None
    """``[steps,B]`` tokens that counted in a generation as it was timed, of windows."""
    rows_unmatched: int = 0
    """Rows that accepted otherwise than with another arm, or in the trace, at near ties."""
    off: float = 0.0
    """What log-probabilities differ by between the arms of windows."""

    def fail(self, status: str, message: str) -> None:
        self.status, self.message = status, " ".join(message.split())
        self.session = self.state_steps = None


def run_group(group: Group) -> list[Record]:
    """Run all arms of a case and return one record each; failures of an arm are its record, never an exception."""
    arms = [Arm(name) for name in group.arms]
    try:
        return _run(group, arms)
    except LostError as lost:
        for arm in arms:
            if arm.status == "ok":
                arm.fail("error", str(lost))
        return [_failure(arm, group) for arm in arms]


def _run(group: Group, arms: list[Arm]) -> list[Record]:
    case, device = group.case, devices.of(group.case)
    assert isinstance(case, DecodeCase)
    gc.collect()
    if not device.works():
        raise LostError(f"PyTorch {torch.__version__} cannot use the device")
    device.begin(case)
    group.device = device.describe()
    memory, free = predicted(case, group.arms), device.free_bytes()
    if free is not None:
        drop(arms, case, memory, MEMORY_SHARE * free - _probe_bytes(group), free)
    if all(arm.status == "oom" for arm in arms):
        return [_failure(arm, group, memory[arm.name]) for arm in arms]
    try:
        opened = Opened.of(case)
    except Exception as error:
        return group.failures(status_of(error), told(error))
    model = opened.model
    for arm in arms:
        if arm.status == "ok":
            _prepare(arm, case, opened)
    routers = _routing(arms, model)
    _trace(arms, case)
    match(arms)
    timed = _time_standing(arms, group, model)
    for arm in arms:
        _checked(arm, case, "after")
    used = _used(case, device) | timed.get("used", {})
    told_once = {
        "routers": routers,
        "products_ns": timed.get("products_ns", []),
        "bytes_between": bytes_between(case, model),
    }
    return [_record(arm, group, arms, memory[arm.name], used, timed, told_once) for arm in arms]


def _prepare(arm: Arm, case: DecodeCase, opened: Opened) -> None:
    """Make the session, compile and capture its step, and judge it."""
    try:
        module = importlib.import_module(f"experiments.arms.{arm_file(arm.name).stem}")
        arm.config = module.describe(case)
        if reason := module.unsupported(case):
            arm.fail("unsupported", reason)
            return
        layers = opened.model.state_layers
        watched = {n for moment in ("before", "after") for n in Chosen.of(case, layers, moment).layers}
        arm.session = opened.session(case, arm.name, watched)
        arm.memory_bytes = arm.session.memory_bytes
    except Exception as error:
        fail(arm, case, error)
        return
    _checked(arm, case, "before")
    try:
        arm.state_steps = arm.session and arm.session.state_steps()
    except Exception as error:
        fail(arm, case, error)


def _checked(arm: Arm, case: DecodeCase, moment: str) -> None:
    if arm.session is None:
        return
    try:
        if moment == "after":
            if fault := generated_as_traced(arm, case):
                arm.fail("incorrect", fault)
                return
            arm.session.restart()
            arm.session.run(case.interval_length)
        correctness = check(arm.session, moment, Chosen.of(case, arm.session.states.layers, moment))
    except Exception as error:
        fail(arm, case, error, f"{moment} timing: ")
        return
    arm.correctness.append(correctness)
    if not correctness.passed:
        arm.fail("incorrect", f"{moment} timing: " + "; ".join(correctness.faults()))


def _trace(arms: list[Arm], case: DecodeCase) -> None:
    steps = min(TRACED_CYCLES * case.interval_length, case.steps)
    for arm in arms:
        if arm.session is not None:
            try:
                if isinstance(arm.session, WindowSession):
                    all_steps = steps if case.forced else case.interval_length + case.steps
                    arm.trace = window_trace(arm.session, all_steps)
                else:
                    arm.trace = trace(arm.session, steps)
            except Exception as error:
                fail(arm, case, error)


def _routing(arms: list[Arm], model: Decoder) -> dict[str, Any]:
    """How one step spreads its rows over the experts of each layer; empty without experts."""
    session = next((arm.session for arm in arms if arm.session is not None), None)
    routers = {name: module for name, module in model.named_modules() if type(module).__name__ == "Router"}
    if session is None or not routers:
        return {}
    loads: list[torch.Tensor] = []

    def count(module: Any, inputs: Any, output: Any) -> None:
        loads.append(torch.bincount(output[0].flatten(), minlength=len(module.weight)).cpu())

    hooks = [module.register_forward_hook(count) for module in routers.values()]
    session.restart()
    session.eager_cycle(set())
    for hook in hooks:
        hook.remove()
    load = torch.stack(loads[-len(routers) :])
    return {
        "experts": load.shape[1],
        "rows": int(load[0].sum()),
        "used_by_layer": (load > 0).sum(1).tolist(),
        "most_rows_by_layer": load.max(1).values.tolist(),
        "histogram": torch.bincount(load.flatten()).tolist(),
    }


def _time_standing(arms: list[Arm], group: Group, model: Decoder) -> dict[str, Any]:
    """Time the arms that are right. One that raises is out, and the others are timed anew without it."""
    while any(arm.session for arm in arms):
        try:
            return _time([arm for arm in arms if arm.session], group, model)
        except RaisedError as raised:
            blamed = next((arm for arm in arms if arm.name == raised.name.removesuffix(AGAIN)), None)
            if blamed is None:
                raise LostError(f"{raised.name} failed: {told(raised.__cause__)}") from raised
            fail(blamed, group.case, raised.__cause__, "while timed: ")
    return {}


def _time(arms: list[Arm], group: Group, model: Decoder) -> dict[str, Any]:
    case, device = group.case, devices.of(group.case)
    assert isinstance(case, DecodeCase)
    short, long = case.interval_length, case.interval_length + case.steps
    kept: dict[str, list[tuple[list[int], list[int], int]]] = {}

    def elapsed_ns(participant: Any) -> int:
        """Of the products; or the difference of an arm's two generations, its other times being kept."""
        if not isinstance(participant, tuple):
            return device.elapsed_ns(participant)
        name, arm = participant
        lengths = (short, long) if len(kept.get(name, ())) % 2 else (long, short)
        found = {n: device.launches_ns(arm.session.restart, lambda: arm.session.run(1), n) for n in lengths}
        elapsed, waits = ([found[n][part] for n in (short, long)] for part in (0, 1))
        kept.setdefault(name, []).append((elapsed, waits, device.elapsed_ns(arm.state_steps)))
        if elapsed[1] <= elapsed[0]:
            raise RuntimeError(f"{long} tokens took no longer than {short}: steps={case.steps} is too few to be timed")
        return elapsed[1] - elapsed[0]

    participants: dict[str, Any] = {arm.name: (arm.name, arm) for arm in arms}
    rows = case.batch_size * (case.window if isinstance(case, SpeculativeCase) else 1)
    participants[PRODUCTS] = device.repeated(products(model, rows))
    buffer = torch.ones(_probe_bytes(group) // 8 * 2, device=device.tensors)
    probes = {name: run for name, (kind, run, _) in device.bandwidth_candidates().items() if kind == "read"}
    participants |= {f"probe {name}": (lambda run=run: run(buffer)) for name, run in probes.items()}
    moved = {name: run(buffer) for name, run in probes.items()}
    warmed = warm_up(participants, case.timing.warmup_limit_s, case.timing.warmup_tolerance, elapsed_ns)
    stored = [arm for arm in arms if arm.name.startswith(("stored/", "snapshots/"))] or arms
    again = min(stored, key=lambda arm: warmed.last_ns[arm.name])
    participants[again.name + AGAIN] = (again.name + AGAIN, again)
    kept.clear()
    states: list[Any] = []
    samples = interleave(
        participants,
        case.timing.rounds,
        order_seed(case, group.replicate),
        elapsed_ns,
        after_round=lambda: states.append(device.state()),
    )
    group.states = [state for state in states if state]
    for arm in arms:
        arm.generations_ns = [elapsed for elapsed, *_ in kept[arm.name]]
        arm.host_waits = [waits for _, waits, _ in kept[arm.name]]
        arm.state_ns = [ns for *_, ns in kept[arm.name]]
    return {
        "samples": samples.elapsed_ns,
        "again": again.name,
        "products_ns": samples.elapsed_ns[PRODUCTS],
        "bandwidth": {"read": fastest_probe(moved, samples), "buffer_bytes": buffer.nbytes},
        "used": {
            "warmup_rounds": warmed.rounds,
            "warmup_s": round(warmed.elapsed_s, 3),
            "warmup_settled": warmed.settled,
            "participants": list(participants),
            "order": [[list(participants).index(name) for name in order] for order in samples.order],
        },
    }


def _probe_bytes(group: Group) -> int:
    cache = group.device.get("last_level_cache_bytes") or FALLBACK_CACHE_BYTES
    return PROBE_BYTES if group.case.device == "cuda" else int(group.case.timing.cold_factor * cache)


def _used(case: DecodeCase, device: devices.Cpu) -> dict[str, Any]:
    matmul, cudnn = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    return {
        "tokens": [case.interval_length, case.interval_length + case.steps],
        "interval_length": case.interval_length,
        "tf32": {"matmul": matmul, "cudnn": cudnn},
        "timer": device.timer,
    }


def _record(
    arm: Arm,
    group: Group,
    arms: list[Arm],
    memory: Memory,
    used: dict[str, Any],
    timed: dict[str, Any],
    told_once: dict[str, Any],
) -> Record:
    """The arm's record; one that failed keeps what was found about its correctness, and no samples."""
    if arm.status != "ok":
        return _failure(arm, group, memory)
    case, first = group.case, next(a for a in arms if a.trace is not None and a.status == "ok")
    assert isinstance(case, DecodeCase)
    step_ns = median(timed["samples"][arm.name]) / case.steps
    state_step_ns = median(arm.state_ns) / case.interval_length
    found: dict[str, Any] = {
        "weights": FORCED if case.weights == RANDOM else FORCED_TOO if case.forced else GREEDY,
        "step_ns": step_ns,
        "state_step_ns": state_step_ns,
        "state_share": state_step_ns / step_ns,
        "generations_ns": arm.generations_ns,
        "host_waits": arm.host_waits,
        "state_cycles_ns": arm.state_ns,
        "memory": asdict(memory),
    }
    if isinstance(case, SpeculativeCase):
        found |= speculation(arm, case, memory, step_ns)
    if arm is not first and arm.trace is not None and first.trace is not None:
        steps = min(len(arm.trace.logprob), len(first.trace.logprob))
        common = arm.trace.first(steps), first.trace.first(steps)
        found["agreement"] = {"with": first.name} | agreement(*common, case.forced)
    is_again = arm.name == timed["again"]
    again = timed["samples"][arm.name + AGAIN] if is_again else []
    used = used if is_again else {k: v for k, v in used.items() if k not in ("participants", "order")}
    return group.record(
        arm.name,
        "ok",
        correctness=tuple(arm.correctness),
        arm_config=arm.config,
        timing_used=used,
        samples_ns=tuple((ns,) for ns in timed["samples"][arm.name]),
        again_samples_ns=tuple((ns,) for ns in again),
        layer_steps_per_sample=case.steps,
        layers_memory_bytes=arm.memory_bytes,
        group_peak_memory_bytes=devices.of(case).peak_memory_bytes(),
        bandwidth=timed["bandwidth"] if is_again else {},
        decode=found | (told_once if is_again else {}),
    )


def _failure(arm: Arm, group: Group, memory: Memory | None = None) -> Record:
    found = {"correctness": tuple(arm.correctness), "arm_config": arm.config}
    status = arm.status if arm.status != "ok" else "error"
    decode = {} if memory is None else {"memory": asdict(memory)}
    return group.record(arm.name, status, arm.message or "nothing was timed", decode=decode, **found)
