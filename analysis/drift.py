"""The tables of KL, its ratios and positions, and of the states' errors, from drift records.

A mean over documents has a bootstrap interval over documents, which were decoded by all arms alike; with one document
there is none, and no claim rests on it. Ratios and slopes are computed anew in every resample.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from analysis.cells import digits
from analysis.stats import RESAMPLES, tail
from experiments.measure.drift_record import LAYER, DriftRecord

SHARED, DUAL = "shared_nvfp4", "dual_fp32_nvfp4"
MAIN = (SHARED, "shared_fp8", "shared_fp8_sr", "shared_int8", "shared_bf16", "shared_fp16", "shared_fp16_sr")
MAIN += (DUAL, "raw_fp32_nvfp4", "dual_fp32_fp8", "dual_fp16_sr_nvfp4", "dual_fp8_sr_nvfp4", "raw_fp8_sr_nvfp4")
FLOOR = "shared_fp32"
"""Arms that are followed by position, and the noise floor."""
FIRST_SHOWN = 16
"""Position from which on positions are shown: the first interval holds no rounded state."""
SOURCES = ("books", "hub", "random inputs")
DECADE = 10
SETTING = ["device", "device_kind", "model", "family", "inputs", "source", "documents", "tokens"]
ARM = ["arm", "update", "read", "stochastic", "ring", "fold", "interval_length"]
KL = [*SETTING, *ARM, "update_bytes", "read_bytes", "step_bytes", "kl", "kl_low", "kl_high", "kl_everywhere"]
KL += ["slope", "slope_low", "slope_high", "agreement", "perplexity_ratio", "state_error", "read_error"]
KL += ["bits_per_byte", "last_over_flat"]
RATIOS = [*SETTING, "arm", "over", "ratio", "low", "high"]
POSITIONS = [*SETTING, "arm", "position", "kl", "low", "high"]
STATES = [*SETTING, "arm", "position", "update", "update_worst", "read", "read_worst"]
HEADS = [*SETTING, "arm", "position", "layer", "head", "update", "read"]
LAYERS = [*SETTING, *ARM, "output_error", "output_low", "output_high", "state_error", "state_low", "state_high"]
LAYERS += ["read_error"]
LAYER_RATIOS = [*SETTING, "arm", "over", "output_ratio", "output_low", "output_high"]
LAYER_RATIOS += ["state_ratio", "state_low", "state_high"]
PAIRS = (
    (SHARED, DUAL),
    ("shared_nvfp4@1", DUAL),
    ("dual_fp16_sr_nvfp4", DUAL),
    ("dual_fp8_sr_nvfp4", DUAL),
    (DUAL, "raw_fp32_nvfp4"),
    ("dual_fp8_sr_nvfp4", "raw_fp8_sr_nvfp4"),
    ("dual_fp16_sr_nvfp4", "raw_fp16_sr_nvfp4"),
    (f"{DUAL}@4", "raw_fp32_nvfp4@4"),
    ("shared_fp8", "shared_fp8_sr"),
    ("shared_fp16", "shared_fp16_sr"),
    ("dual_fp32_mxfp4", DUAL),
    (f"{DUAL}_t16", DUAL),
    (f"{SHARED}_t16", SHARED),
    (f"{DUAL}_ring_bf16", DUAL),
    (f"{DUAL}_ring_fp8", DUAL),
)
"""Arms whose KL is compared: an arm, and that over which it stands."""
Arms = dict[str, list[DriftRecord]]
"""By arm, its records in the order of documents."""
Statistic = Callable[[np.ndarray], np.ndarray]
"""Of resamples of documents, ``[resamples,documents]`` of their numbers, ``[resamples]``."""


def rows(records: list[DriftRecord], labels: dict[str, str]) -> dict[str, list[dict[str, Any]]]:
    """Rows of each of the tables in `COLUMNS`; ``labels`` are the devices' names in tables."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in COLUMNS}
    for arms in _settings([r for r in records if r.experiment == LAYER]):
        setting = _setting(arms, labels)
        for _, own in sorted(arms.items()):
            found["layer_drift"].append(_rounded(setting | _arm(own[0]) | _layer_row(own)))
        found["layer_ratios"] += [
            _rounded(setting | {"arm": one, "over": other} | _layer_ratio(arms[one], arms[other]))
            for one, other in PAIRS
            if one in arms and other in arms
        ]
    for arms in _settings([r for r in records if r.experiment != LAYER]):
        setting = _setting(arms, labels)
        for name, own in sorted(arms.items()):
            found["drift_kl"].append(_rounded(setting | _arm(own[0]) | _kl_row(own, arms)))
            if name not in (*MAIN, FLOOR):
                continue
            for row in _positions(own):
                found["drift_positions"].append(_rounded(setting | {"arm": name} | row))
            states, heads = _states(own)
            found["drift_states"] += [_rounded(setting | {"arm": name} | row) for row in states]
            if name in (SHARED, DUAL):
                found["drift_heads"] += [_rounded(setting | {"arm": name} | row) for row in heads]
        for one, other in PAIRS:
            if one in arms and other in arms:
                estimate, low, high = _ratio(arms[one], arms[other])
                row = {"arm": one, "over": other, "ratio": estimate, "low": low, "high": high}
                found["drift_ratios"].append(_rounded(setting | row))
    return {name: _once(table) for name, table in found.items()}


def _once(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without rows that say the same of another run: the arms that all runs share give the same numbers again."""
    told = {str({name: value for name, value in row.items() if name != "groups"}): row for row in reversed(rows)}
    return list(told.values())[::-1]


COLUMNS = {"drift_kl": KL, "drift_ratios": RATIOS, "drift_positions": POSITIONS, "drift_states": STATES}
COLUMNS |= {"drift_heads": HEADS, "layer_drift": LAYERS, "layer_ratios": LAYER_RATIOS}


def _settings(records: list[DriftRecord]) -> Iterator[Arms]:
    """The arms of each case on each device, groups of different arms together; of an arm in several the newest."""
    by_case: dict[tuple[str, str], dict[str, Arms]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for record in records:
        by_case[(record.case_hash, str(record.device["name"]))][record.group][record.arm].append(record)
    for key in sorted(by_case, key=lambda k: (str(_any(by_case[k]).case["model"]), k)):
        arms: Arms = {}
        for group in sorted(by_case[key].values(), key=lambda g: _first(g).started_utc):
            arms |= {name: sorted(found, key=lambda r: r.document["number"]) for name, found in group.items()}
        yield arms


def _first(arms: Arms) -> DriftRecord:
    return next(iter(arms.values()))[0]


def _any(groups: dict[str, Arms]) -> DriftRecord:
    return _first(next(iter(groups.values())))


def _setting(arms: Arms, labels: dict[str, str]) -> dict[str, Any]:
    record = _first(arms)
    case = record.case
    source = case["documents"] if case["documents"] in SOURCES else "a folder"
    return {
        "groups": " ".join(sorted({r.group for records in arms.values() for r in records})),
        "device": labels[str(record.device["name"])],
        "device_kind": record.device.get("kind"),
        "model": case["model"],
        "family": case["family"],
        "inputs": case["inputs"],
        "source": source,
        "documents": len(next(iter(arms.values()))),
        "tokens": case["tokens"],
    }


def _arm(record: DriftRecord) -> dict[str, Any]:
    p = record.precision
    return {
        "arm": record.arm,
        "update": p["update"],
        "read": p["read"],
        "stochastic": "yes" if p["stochastic"] else None,
        "ring": p["ring"],
        "fold": p["fold"] if record.case["family"] != "mamba2" else None,
        "interval_length": record.interval_length,
        "update_bytes": record.traffic.get("update"),
        "read_bytes": record.traffic.get("read") or None,
        "step_bytes": record.traffic.get("step"),
    }


def _sums(records: list[DriftRecord], name: str, first: int = 0) -> np.ndarray:
    """``[documents,buckets]`` from the bucket on that begins at ``first`` or later."""
    start = next(i for i, edge in enumerate(records[0].edges) if edge >= first)
    return np.array([getattr(r, name)[start:] for r in records], dtype=np.float64)


def _widths(record: DriftRecord, first: int = 0) -> np.ndarray:
    edges = np.array([edge for edge in record.edges if edge >= first], dtype=np.float64)
    return np.diff(edges)


def _kl_row(records: list[DriftRecord], arms: Arms) -> dict[str, Any]:
    """KL over the second half of the positions, slope over their last decade, and what else an arm differs in."""
    tokens, half = records[0].edges[-1], records[0].edges[-1] // 2
    kl, count = _sums(records, "kl", half).sum(1), _widths(records[0], half).sum()
    mean, low, high = _interval(lambda rows: kl[rows].mean(1) / count, len(records), f"kl {records[0].arm}")
    by_bucket, widths = _sums(records, "kl", tokens // DECADE), _widths(records[0], tokens // DECADE)
    edges = np.array([edge for edge in records[0].edges if edge >= tokens // DECADE], dtype=np.float64)
    place = np.log((edges[:-1] + edges[1:]) / 2)

    weights = (place - place.mean()) / ((place - place.mean()) ** 2).sum()

    def slope(rows: np.ndarray) -> np.ndarray:
        """The least-squares line's, through the logs of the buckets' means."""
        return np.log(by_bucket[rows].mean(1) / widths) @ weights

    fits = len(place) > 1 and bool((by_bucket > 0).all())
    slopes = _interval(slope, len(records), f"slope {records[0].arm}") if fits else (None, None, None)
    reference = arms[records[0].reference]
    nll, exact = (_sums(found, "nll", half).sum() for found in (records, reference))
    bits, flat = _bits(records)
    states = records[0].state_error.get("positions")
    return {
        "kl": mean,
        "kl_low": low,
        "kl_high": high,
        "kl_everywhere": _sums(records, "kl").sum() / tokens / len(records),
        **dict(zip(("slope", "slope_low", "slope_high"), slopes, strict=True)),
        "agreement": _sums(records, "agree", half).sum() / count / len(records),
        "perplexity_ratio": float(np.exp((nll - exact) / count / len(records))),
        "state_error": _state(records, "update", -1).mean() if states else None,
        "read_error": _state(records, "read", -1).mean() if states else None,
        "bits_per_byte": bits,
        "last_over_flat": flat,
    }


FLAT_FROM = 2048


def _bits(records: list[DriftRecord]) -> tuple[float, float | None]:
    """Bits a byte over everything; and those of the last octave over the mean of the octaves from 2,048 tokens on."""
    nll, size = _sums(records, "nll"), _sums(records, "bytes")
    starts, end = np.array(records[0].edges[:-1]), records[0].edges[-1]
    octaves = []
    while end // 2 >= FLAT_FROM:
        inside = (starts >= end // 2) & (starts < end)
        octaves.append(nll[:, inside].sum() / size[:, inside].sum() / np.log(2))
        end //= 2
    flat = float(octaves[0] / np.mean(octaves[1:])) if len(octaves) > 1 else None
    return float(nll.sum() / size.sum() / np.log(2)), flat


def _ratio(one: list[DriftRecord], other: list[DriftRecord]) -> tuple[float, float | None, float | None]:
    """Mean KL over the second half of the positions over that of another arm, documents paired."""
    half = one[0].edges[-1] // 2
    above, below = (_sums(found, "kl", half).sum(1) for found in (one, other))
    name = f"ratio {one[0].arm} {other[0].arm}"
    return _interval(lambda rows: above[rows].sum(1) / below[rows].sum(1), len(one), name)


def _interval(statistic: Statistic, documents: int, seed: str) -> tuple[float, float | None, float | None]:
    """Estimate and 95 % bounds from resampled documents; without bounds where there is one document."""
    estimate = float(statistic(np.arange(documents)[None])[0])
    if documents < 2:
        return estimate, None, None
    generator = np.random.default_rng(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "big"))
    drawn = generator.integers(documents, size=(RESAMPLES, documents))
    low, high = np.quantile(statistic(drawn), [tail(documents), 1 - tail(documents)])
    return estimate, min(float(low), estimate), max(float(high), estimate)


def _positions(records: list[DriftRecord]) -> Iterator[dict[str, Any]]:
    """KL in half octaves, each at its geometric middle, with the interval over documents."""
    kl, edges = _sums(records, "kl"), np.array(records[0].edges)
    powers = [2 ** (half / 2) for half in range(2 * int(edges[-1]).bit_length() + 1)]
    bounds = sorted(
        {FIRST_SHOWN, *(int(edges[np.abs(edges - power).argmin()]) for power in powers if power > FIRST_SHOWN)}
    )
    for first, end in pairwise(bounds):
        inside = (edges[:-1] >= first) & (edges[:-1] < end)
        sums = kl[:, inside].sum(1) / (end - first)
        mean, low, high = _interval(lambda rows, sums=sums: sums[rows].mean(1), len(records), f"at {first}")
        yield {"position": float(np.sqrt(first * end)), "kl": mean, "low": low, "high": high}


def _state(records: list[DriftRecord], copy: str, at: int) -> np.ndarray:
    """Errors ``[documents,layers,heads]`` at one of the recorded positions."""
    return np.array([r.state_error[copy][at] for r in records], dtype=np.float64)


def _states(records: list[DriftRecord]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Errors by position, mean and worst over layers and heads; and by layer and head at the last position."""
    positions = records[0].state_error.get("positions") or []
    over = []
    for at, position in enumerate(positions):
        update, read = (_state(records, copy, at).mean(0) for copy in ("update", "read"))
        row = {"position": position, "update": update.mean(), "update_worst": update.max()}
        over.append(row | {"read": read.mean(), "read_worst": read.max()})
    heads = []
    if positions:
        update, read = (_state(records, copy, -1).mean(0) for copy in ("update", "read"))
        for layer, head in np.ndindex(update.shape):
            place = {"position": positions[-1], "layer": layer, "head": head}
            heads.append(place | {"update": update[layer, head], "read": read[layer, head]})
    return over, heads


def _output_error(records: list[DriftRecord]) -> np.ndarray:
    """Mean squared relative error of the outputs over the second half of the positions, ``[sequences]``."""
    half = records[0].edges[-1] // 2
    return _sums(records, "output_error", half).sum(1) / _widths(records[0], half).sum()


def _layer_row(records: list[DriftRecord]) -> dict[str, Any]:
    """Root mean square of the outputs' relative errors, and the states' at the last position, over sequences."""
    squares, states = _output_error(records), _state(records, "update", -1).mean((1, 2))
    name = records[0].arm
    output = _interval(lambda rows: np.sqrt(squares[rows].mean(1)), len(records), f"output {name}")
    state = _interval(lambda rows: states[rows].mean(1), len(records), f"state {name}")
    named = zip(("output_error", "output_low", "output_high"), output, strict=True)
    return dict(named) | {
        **dict(zip(("state_error", "state_low", "state_high"), state, strict=True)),
        "read_error": _state(records, "read", -1).mean(),
    }


def _layer_ratio(one: list[DriftRecord], other: list[DriftRecord]) -> dict[str, Any]:
    """Of both errors over those of another arm, sequences paired."""
    above, below = _output_error(one), _output_error(other)
    states = [_state(records, "update", -1).mean((1, 2)) for records in (one, other)]
    name = f"{one[0].arm} {other[0].arm}"
    output = _interval(lambda rows: np.sqrt(above[rows].sum(1) / below[rows].sum(1)), len(one), f"output {name}")
    state = _interval(lambda rows: states[0][rows].sum(1) / states[1][rows].sum(1), len(one), f"state {name}")
    named = zip(("output_ratio", "output_low", "output_high"), output, strict=True)
    return dict(named) | dict(zip(("state_ratio", "state_low", "state_high"), state, strict=True))


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {k: digits(float(v)) if isinstance(v, float | np.floating) else v for k, v in row.items()}
