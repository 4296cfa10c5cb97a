"""The second page, ``choose.html``: does replay pay for a model, device, batch, context and state format?

Everything that it can say is computed here, by ``replayssm.traffic`` and from the tables, and put into the page as one
table; its script looks up and computes nothing.

Predictions count bytes. Of one layer: those of state and ring, at every batch the same. Of a whole step: the weights
once, and of every request its states, ring, keys and values. Weights are those that a record of the model holds; where
experts are routed a batch reads some of them only, and nothing is predicted.
"""

from __future__ import annotations

import functools
import json
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import OmegaConf

from analysis.cells import digits, strongest, weaknesses
from analysis.drift import DUAL
from analysis.gates import number
from analysis.load import Evidence, describe
from analysis.stats import FASTER, SLOWER
from replayssm import traffic
from replayssm.geometry import Geometry
from replayssm.layout import FORMATS, Ring

INPUTS = "bf16"
RING = Ring(inputs=INPUTS)
LENGTH = 16
"""The interval length beside the best: the paper's."""
BATCHES = tuple(2**power for power in range(11))
CONTEXTS = (1024, 4096, 16384, 32768, 65536, 131072)
STATES = ("fp32", "bf16", "fp16")
AS_GOOD = 1.1
"""Most that the error of a precision pair may be over that of a float32 update and an NVFP4 read copy."""
GAIN = 1.02
"""A gain below this counts as none."""
USE, DO_NOT, UNPROVEN, UNKNOWN = "yes", "no", "open", "not"


@dataclass(frozen=True)
class Model:
    """``layers`` of state-space; keys and values of a token take ``token_bytes`` in bf16, None where the file of the
    model does not tell; ``routed``: has experts of which a token takes some."""

    name: str
    geometry: Geometry
    layers: int
    token_bytes: int | None
    routed: bool


@dataclass(frozen=True)
class Pair:
    """Formats of two copies of the state, and what shows that they are good enough."""

    arm: str
    update: str
    read: str
    shown: str


def models(folder: Path) -> list[Model]:
    """The models of ``configs/model`` whose files tell shape and number of layers."""
    found = []
    for path in sorted(folder.glob("*.yaml")):
        config = OmegaConf.to_container(OmegaConf.load(path))
        assert isinstance(config, dict)
        ssm, counts = config.get("ssm"), config.get("counts")
        if not ssm or not counts:
            continue
        shape = {name: ssm[name] for name in ("heads", "groups", "head_dim", "state_dim")}
        token, attention = None, config.get("attention", {})
        if "attention" in counts and {"kv_heads", "head_dim"} <= set(attention):
            token = counts["attention"] * 2 * attention["kv_heads"] * attention["head_dim"] * 2
        routed = bool(counts.get("moe", 0) or config.get("moe"))
        found.append(Model(path.stem, Geometry(config["family"], **shape), counts["ssm"], token, routed))
    return found


@functools.cache
def best_length(geometry: Geometry, state: str, read: str | None = None) -> int:
    return traffic.best_interval_length(geometry, state, read, RING)


def request_bytes(model: Model, length: int, state: str, read: str | None = None) -> tuple[int, int]:
    """States that a request holds stored, and copies and ring of L - 1 tokens that it holds with replay."""
    sizes = [FORMATS[name].state_bytes(model.geometry) for name in (state, read) if name]
    ring = RING.token_bytes(model.geometry)[0] * (length - 1)
    return model.layers * sizes[0], model.layers * (sum(sizes) + ring)


def whole_step(model: Model, weights: float, length: int, state: str, batch: int, context: int) -> float:
    """Bytes of a stored step over those of a replay step, weights and context included."""
    cycle = traffic.replay(model.geometry, length, state, ring=RING, rows=batch).per_step()
    stored = traffic.stored(model.geometry, state, batch)
    beside = weights + batch * context * (model.token_bytes or 0)
    return (beside + model.layers * stored.total_bytes) / (beside + model.layers * cycle.total_bytes)


def best_pair(model: Model, tables: dict[str, pd.DataFrame]) -> Pair | None:
    """Of the pairs that a model or layer of the same family shows to be as good as `DUAL`, that of fewest bytes."""
    family = model.geometry.family
    for ratios, arms, column, what in (
        ("drift_ratios", "drift_kl", "high", "KL over documents"),
        ("layer_ratios", "layer_drift", "output_high", "output error of one layer"),
    ):
        table, known = tables[ratios], tables[arms]
        table, known = table[table["family"] == family], known[known["family"] == family]
        formats = {r.arm: (str(r.update), str(r.read)) for r in known[known["read"].notna()].itertuples()}
        good = table[(table["over"] == DUAL) & (table[column] <= AS_GOOD)]["arm"]
        pairs = [Pair(arm, *formats[arm], what) for arm in sorted({DUAL, *good} & set(formats))]
        if pairs:
            return min(pairs, key=lambda pair: _cycle_bytes(model, pair))
    return None


def _cycle_bytes(model: Model, pair: Pair) -> float:
    length = best_length(model.geometry, pair.update, pair.read)
    return traffic.replay(model.geometry, length, pair.update, pair.read, RING).per_step().total_bytes


def measured(tables: dict[str, pd.DataFrame]) -> dict[tuple[str, str, str, int], dict[str, Any]]:
    """By model, device, state and batch: the best replay arm of one layer, and of the whole model by context; of flush
    phases the slower counts, and an arm that is compared with its like goes before others.
    """
    found: dict[tuple[str, str, str, int], dict[str, Any]] = defaultdict(lambda: {"layer": None, "whole": {}})
    for row in _best(tables["kernel_speedups"], ["interval_length"]):
        entry = found[row.model, row.device, row.state, int(row.batch_size)]
        entry["layer"] = max(entry["layer"] or row, row, key=_rank)
    models_ = tables["decode_speedups"]
    for row in _best(models_[models_["blocks"].isna()], ["interval_length", "context"]):
        whole = found[row.model, row.device, row.state, int(row.batch_size)]["whole"]
        whole[int(row.context)] = max(whole.get(int(row.context), row), row, key=_rank)
    return found


def _best(table: pd.DataFrame, apart: list[str]) -> Iterable[Any]:
    rows = strongest(table)
    rows = rows[(rows["kind"] == "replay") & rows["speedup"].notna() & (rows["inputs"] == INPUTS)]
    same = ["model", "device", "state", "batch_size", "threads", "arm", *apart]
    return rows.sort_values("speedup", kind="stable").drop_duplicates(same).itertuples()


def _rank(row: Any) -> tuple[bool, float]:
    return (row.like_for_like == "yes", row.speedup)


def verdict(batch: int, context: int, entry: dict[str, Any]) -> tuple[str, str, str]:
    """A kind, what to do, and why. A whole model's step counts before a layer's; of several contexts the nearest. What
    it gains is proven at shorter contexts too, and at longer ones not: there attention takes more of the step.
    """
    layer, whole = entry["layer"], entry["whole"]
    longer = False
    if whole:
        nearest = min(whole, key=lambda other: (abs(math.log2(other / context)), other))
        row, what, longer = whole[nearest], "a step of the whole model", context > nearest
        less = " only, and a longer one gains less" if longer else " only"
        where = "" if nearest == context else f"; measured at context {nearest:,}{less}"
    else:
        row, what, where = layer, "a layer's step", "; no step of the whole model was measured"
    kind, arm = _kind(row), f"{row.arm}, L = {row.interval_length}"
    weak = "; ".join(weaknesses(row.processes, row.rounds, row.aa_noise))
    kind = UNPROVEN if kind == USE and (longer or weak) else kind
    told = {USE: f"use {arm}", DO_NOT: f"do not use: batch {batch}", UNPROVEN: f"probably {arm}"}[kind]
    if kind == USE and not whole:
        kind, told = UNPROVEN, f"promising: {arm}"
    doubt = weak or (row.remarks if row.verdict not in (FASTER, SLOWER) else "")
    doubt = f", unproven: {doubt}" if doubt else ""
    return kind, told, f"{what} is {row.speedup:.2f} times as fast{doubt}{where}"


def beyond(model: Model, weights: float | None, state: str, batch: int, context: int, memory: float | None) -> str:
    """What a batch takes with replay and a device's ``memory`` bytes, where that is too little; weights count where a
    record tells them, keys and values where the model's file does. "" where it fits, or nobody knows."""
    request = request_bytes(model, best_length(model.geometry, state), state)[1] + context * (model.token_bytes or 0)
    needed = (weights or 0) + batch * request
    return f"{needed / 1e9:,.0f} GB of {memory / 1e9:,.0f} GB" if memory and needed > memory else ""


def _kind(row: Any) -> str:
    if row.verdict == SLOWER or row.high < GAIN:
        return DO_NOT
    if row.verdict == FASTER:
        return USE
    return UNPROVEN if row.low > GAIN else DO_NOT


def answers(tables: dict[str, pd.DataFrame], evidence: Evidence, folder: Path) -> dict[str, Any]:
    """What the page looks up, as JSON takes it; ``folder`` holds the models' files."""
    known, rows, weights = models(folder), measured(tables), _weights(evidence)
    names = {model.name: model for model in known}
    batches = sorted({*BATCHES, *(batch for *_, batch in rows)})
    contexts = sorted({*CONTEXTS, *(context for entry in rows.values() for context in entry["whole"])})
    states = [*STATES, *sorted({state for _, _, state, _ in rows} - {*STATES})]
    devices = pd.concat([tables[name][["device_kind", "device"]] for name in ("kernel_speedups", "decode_speedups")])
    devices = devices.drop_duplicates().sort_values(["device_kind", "device"], ascending=[False, True])
    memory = (tables["devices"].groupby("device")["memory_gib"].max() * 2**30).to_dict()

    def room(key: tuple[str, str, str, int]) -> list[str]:
        name, device, state, batch = key
        given = names[name], weights.get(name), state, batch
        return [beyond(*given, context, memory.get(device)) for context in contexts]

    return {
        "models": {model.name: _of_model(model, tables) for model in known},
        "devices": list(devices["device"]),
        "first": _first_pick({key: entry for key, entry in rows.items() if key[0] in names}),
        "batches": batches,
        "contexts": contexts,
        "states": [state for state in states if state in FORMATS],
        "bytes": {
            model.name: {
                state: _of_state(model, state, best_pair(model, tables), weights.get(model.name), batches, contexts)
                for state in states
                if state in FORMATS
            }
            for model in known
        },
        "measured": {
            "|".join(map(str, key)): _of_rows(key[-1], entry, contexts, room(key))
            for key, entry in sorted(rows.items())
            if key[0] in names
        },
    }


def _first_pick(rows: dict[tuple[str, str, str, int], dict[str, Any]]) -> dict[str, str]:
    """What the page shows first: of what was measured, a gain that is proven before others, then the largest batch."""
    ranked = []
    for key, entry in rows.items():
        context = min(entry["whole"], default=CONTEXTS[0])
        ranked.append((verdict(key[-1], context, entry)[0] == USE, key[-1], key, context))
    if not ranked:
        return {}
    *_, (model, device, state, batch), context = max(ranked)
    return {"model": model, "device": device, "state": state, "batch": f"{batch}", "context": f"{context}"}


def _of_model(model: Model, tables: dict[str, pd.DataFrame]) -> dict[str, Any]:
    g, pair = model.geometry, best_pair(model, tables)
    return {
        "family": g.family,
        "shape": f"{model.layers} layers, {g.heads} heads of {g.head_dim} x {g.state_dim}",
        "pair": f"{pair.update} to update, {pair.read} to read ({pair.arm})" if pair else "",
        "pair_shown": pair.shown if pair else "",
    }


def _of_state(
    model: Model, state: str, pair: Pair | None, weights: float | None, batches: list[int], contexts: list[int]
) -> dict[str, Any]:
    best = best_length(model.geometry, state)
    found: dict[str, Any] = {
        "length": best,
        "ideal": digits(traffic.ideal_speedup(model.geometry, best, state, ring=RING), 3),
        "ideal_at_16": digits(traffic.ideal_speedup(model.geometry, LENGTH, state, ring=RING), 3),
        "request": [digits(size / 1e6) for size in request_bytes(model, best, state)],
    }
    if model.token_bytes is not None:
        found["context_mb"] = [digits(context * model.token_bytes / 1e6) for context in contexts]
    if pair:
        length = best_length(model.geometry, pair.update, pair.read)
        speedup = traffic.ideal_speedup(model.geometry, length, pair.update, pair.read, RING, baseline=state)
        size = request_bytes(model, length, pair.update, pair.read)[1]
        found["pair"] = [length, digits(speedup, 3), digits(size / 1e6)]
    if weights and not model.routed and model.token_bytes is not None:
        found["whole"] = [
            [digits(whole_step(model, weights, best, state, batch, context), 3) for context in contexts]
            for batch in batches
        ]
    return found


def _of_rows(batch: int, entry: dict[str, Any], contexts: list[int], room: list[str]) -> dict[str, Any]:
    """``room``: by context, what of `beyond` there is to say."""
    told = [
        (DO_NOT, f"does not fit: {lacking}", "weights, states and ring of all requests, keys and values")
        if lacking
        else verdict(batch, context, entry)
        for context, lacking in zip(contexts, room, strict=True)
    ]
    texts = list(dict.fromkeys(told))
    return {
        "layer": _shown(entry["layer"]) if entry["layer"] else None,
        "whole": {str(context): _shown(row) for context, row in sorted(entry["whole"].items())},
        "verdicts": texts,
        "verdict": [texts.index(one) for one in told],
    }


def _shown(row: Any) -> list[Any]:
    """Arm, interval length, speedup, bounds, verdict, baseline."""
    return [row.arm, int(row.interval_length), row.speedup, row.low, row.high, row.verdict, row.baseline]


def _weights(evidence: Evidence) -> dict[str, float]:
    """Bytes of the weights of whole models, as their records tell."""
    found = {}
    for record in evidence.records:
        memory = record.decode.get("memory") if record.experiment == "decode" else None
        if isinstance(memory, dict) and not record.case.get("blocks") and (size := number(memory, "weights")):
            found[str(describe(record)["model"])] = size
    return found


def embedded(found: dict[str, Any]) -> str:
    """JSON as a script element may hold it."""
    return json.dumps(found, sort_keys=True, separators=(",", ":")).replace("<", "\\u003c")
