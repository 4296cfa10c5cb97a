"""Drift of one layer over random inputs: the states' own error by precision, where there is no trained model.

    python -m experiments.layer_drift
    python -m experiments.layer_drift -m model=kimi_linear_48b,qwen3_5_4b 'arms=[dual_fp32_nvfp4,raw_fp32_nvfp4]'
    python -m experiments.layer_drift device=cuda heads=8 count=8 tokens=16384

All arms step the same inputs side by side, as in `experiments.pg19`, from zero states. Recorded are, against the stored
float32 recurrence, the relative error of the states by head over time and of the outputs by bucket of positions. The
question it is for: GDN and KDA compute the corrected value d from the copy that is read, so folding from d lets its
error into the update copy; folding from raw inputs does not.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.app import run
from experiments.case import (
    DEVICES,
    check_run_options,
    interval_length_from_config,
    model_from_config,
    threads_from_config,
)
from experiments.options import choice, get, integer, only, refuse
from experiments.pg19 import edges
from experiments.pg19_case import DEFAULT_ARMS, DriftCase, arms_from_config, case_hash
from experiments.tracking.mirror import Mirror
from experiments.tracking.options import tracker_from_config
from replayssm.geometry import Geometry

OPTIONS = ("experiment", "model", "heads", "count", "tokens", "interval_length", "arms", "device", "threads", "seed")
OPTIONS += ("tracker", "dry_run", "repeat", "records")
RANDOM = "random inputs"
ARMS = ("shared_nvfp4", "dual_fp32_nvfp4", "dual_fp16_sr_nvfp4", "dual_fp8_sr_nvfp4")
RAW_ARMS = ("raw_fp32_nvfp4", "raw_fp8_sr_nvfp4")
NOISE = 1e-9
"""Most mean squared relative output error of the reference run again and of replay with a float32 state."""
LONGEST = 1 << 16


def case_from_config(config: Mapping[str, Any]) -> DriftCase:
    """Check the whole config, arms and run options too, and build the case. Raises ``ConfigError``."""
    only(config, OPTIONS)
    name, geometry = layer_from_config(config)
    case = DriftCase(
        experiment=choice(config, "experiment", ["layer_drift"]),
        model=f"{name}, {geometry.heads} heads",
        weights=RANDOM,
        weights_digest="",
        family=geometry.family,
        documents=RANDOM,
        count=integer(config, "count", 1, 1000),
        tokens=integer(config, "tokens", 16, LONGEST),
        interval_length=interval_length_from_config(config),
        inputs="fp32",
        device=choice(config, "device", DEVICES),
        threads=threads_from_config(config),
        seed=integer(config, "seed", 0, 2**63 - 1),
    )
    layer_arms(config, case)
    check_run_options(config)
    return case


def layer_from_config(config: Mapping[str, Any]) -> tuple[str, Geometry]:
    """Name of the model and its layer's geometry with ``heads`` heads."""
    name, whole = model_from_config(config)
    if get(config, "heads", "an integer, or null") is None:
        return name, whole
    heads, share = integer(config, "heads", 1, whole.heads), whole.heads_per_group
    if heads % share:
        raise refuse("heads", heads, f"a multiple of {share}, the heads of a group")
    return name, replace(whole, heads=heads, groups=heads // share)


def layer_arms(config: Mapping[str, Any], case: DriftCase) -> tuple[Any, ...]:
    """As `experiments.pg19_case.arms_from_config`; ``default`` are the pairs with both folds, where there are two."""
    arms = config.get("arms")
    if arms == DEFAULT_ARMS:
        arms = [*ARMS, *(RAW_ARMS if case.family != "mamba2" else ())]
    return arms_from_config({**config, "arms": arms}, case)


def label(case: DriftCase) -> str:
    """The case in a few words."""
    return f"a layer of {case.model}, {case.count} x {case.tokens:,} tokens, L {case.interval_length}, on {case.device}"


def main(config: dict[str, Any]) -> int:
    """Run one case, or with ``dry_run`` print it. Returns 1 if an arm was wrong or failed."""
    from experiments.measure import devices, nvidia
    from experiments.measure.drift_result import Run, finished
    from experiments.measure.journal import Journal
    from experiments.measure.layer_drift import LayerDrift, records

    case = case_from_config(config)
    arms = layer_arms(config, case)
    if config["dry_run"]:
        print(f"{case_hash(case)}  {label(case)}: {', '.join(arm.name for arm in arms)}")
        return 0
    nvidia.refuse_without(case.device)
    device = devices.DEVICES[case.device]
    device.begin(case)  # type: ignore[arg-type]
    source = "experiments/measure/layer_drift.py"
    group = Run(case, arms, secrets.token_hex(8), device.describe(), tuple(sys.argv), source=source)
    folder = Path(config["records"]).resolve()
    if not config["repeat"] and group.keys() <= finished(folder):
        print(f"{label(case)}: recorded already in {folder}; repeat=true measures it again")
        return 0
    print(f"{label(case)}: {', '.join(arm.name for arm in arms)}", flush=True)
    drift = LayerDrift(layer_from_config(config)[1], arms, case.count, case.tokens, case.seed, device.tensors)
    drift.run()
    made = records(group, drift, edges(case.tokens), NOISE)
    Journal(folder, "layer_drift").append(made)
    Mirror(tracker_from_config(config), folder, sys.argv).send([record.to_json() for record in made])
    for place, arm in enumerate(arms):
        own = [record for record in made if record.arm == arm.name]
        told = next((f"{r.status}: {r.message}" for r in own if r.status != "ok"), "")
        update, read = drift.last_errors(place)
        output = float(drift.output_error[place].mean()) ** 0.5
        print(f"  {arm.name:<22} {told or f'output {output:.2e}  update copy {update:.2e}  read copy {read:.2e}'}")
    return int(any(record.status != "ok" for record in made))


if __name__ == "__main__":
    run("layer_drift", main, check=case_from_config)
