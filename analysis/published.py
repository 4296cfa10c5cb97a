"""The published numbers (``results/paper/published.csv``) that figures draw beside ours."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pandas as pd

TUNED, UNTOLD = "tuned vLLM native", "vLLM native (tuned or default not stated)"
KERNEL, MODELS, DRAFTED, WINDOWS = "kernel_standard", "e2e_standard", "e2e_spec", "kernel_spec"
"""Experiments of the published rows: one layer's step, whole models', theirs with drafts, and one layer's windows."""
SNAPSHOTS = "native per-token snapshots"
"""What published speedups of windows are over."""
NATIVE, PLAIN = "native vLLM spec", "standard (no-spec) decode"
"""What published throughputs with drafts are over."""


def read(path: Path) -> pd.DataFrame:
    """All published rows with a ``key``, the model's name in ``configs/model``; ``value`` becomes a number or NaN."""
    frame = pd.read_csv(path, dtype=str, keep_default_na=False)
    frame["key"] = frame["model"].map(model_key)
    for name in ("value", "batch_size", "interval_length"):
        frame[name] = pd.to_numeric(frame[name], errors="coerce")
    return frame


def model_key(name: str) -> str:
    """``NVIDIA-Nemotron-3-Super-120B-A12B`` -> ``nemotron_3_super_120b``."""
    plain = re.sub(r"[^a-z0-9]+", "_", name.lower().removeprefix("nvidia-"))
    return re.sub(r"_a\d+b(_nvfp4)?$", "", plain)


def display_names(published: pd.DataFrame) -> dict[str, str]:
    """Name in ``configs/model`` -> the name that the model is published under, without vendor and active size."""
    return {key: re.sub(r"-A\d+B.*$", "", name.removeprefix("NVIDIA-")) for key, name in _names(published)}


def curves(published: pd.DataFrame, model: str, experiment: str = KERNEL) -> dict[str, pd.DataFrame]:
    """Speedups over tuned baselines, fp32 state, interval length 16: card -> rows by batch size. Of whole models also
    those over a baseline of which the source does not say whether it was tuned."""
    rows = _speedup_rows(published, experiment)
    baselines = (TUNED,) if experiment == KERNEL else (TUNED, UNTOLD)
    rows = rows[(rows["key"] == model) & rows["baseline"].isin(baselines)]
    return {str(card): part.sort_values("batch_size") for card, part in rows.groupby("hardware")}


def four_models(published: pd.DataFrame, experiment: str = KERNEL) -> tuple[int, float, float]:
    """Batch size, lowest and highest speedup that the paper gives for its four models together."""
    rows = _speedup_rows(published, experiment)
    rows = rows[rows["model"].str.startswith("range over 4")].dropna(subset=["value"])
    return int(rows["batch_size"].iloc[0]), float(rows["value"].min()), float(rows["value"].max())


def drafted(published: pd.DataFrame, model: str, baseline: str) -> pd.DataFrame:
    """Throughput ratios with drafts, fp32 state, interval length 16, with the ``window`` of each; of equal settings
    the last published."""
    rows = published[(published["experiment"] == DRAFTED) & (published["metric"] == "throughput_ratio")]
    rows = rows[(rows["baseline"] == baseline) & (rows["key"] == model) & (rows["interval_length"] == 16)]
    window = pd.to_numeric(rows["draft_tokens"].str.extract(r"T=(\d+)")[0], errors="coerce")
    rows = rows.assign(window=window).dropna(subset=["window", "value", "batch_size"])
    return rows.drop_duplicates(["batch_size", "window"], keep="last").sort_values(["window", "batch_size"])


def windows(published: pd.DataFrame, family: str) -> pd.DataFrame:
    """Speedups of kernels that verify a window over those that keep snapshots, fp32 state, with the ``window`` of each:
    of a family, since their source names no model."""
    rows = published[(published["experiment"] == WINDOWS) & (published["metric"] == "speedup")]
    rows = rows[(rows["baseline"] == SNAPSHOTS) & (rows["state_dtype"] == "float32")]
    rows = rows[(rows["ssm_family"] == family) & (rows["model"] == "")]
    window = pd.to_numeric(rows["draft_tokens"].str.extract(r"width (\d+)")[0], errors="coerce")
    rows = rows.assign(window=window).dropna(subset=["window", "value", "batch_size"])
    return rows.astype({"window": int}).sort_values(["window", "hardware", "batch_size"])


def concurrency(published: pd.DataFrame, model: str) -> dict[str, float]:
    """Requests that fit at once as published, with snapshots and with replay, where they are."""
    rows = published[(published["key"] == model) & published["value"].notna()]
    found = dict(zip(rows["metric"], rows["value"], strict=True))
    named = {"snapshots": "max_concurrency_native_spec", "verify": "max_concurrency_replay_spec"}
    return {kind: found[metric] for kind, metric in named.items() if metric in found}


def sources(published: pd.DataFrame, experiment: str, models: Iterable[str]) -> list[str]:
    """Where the values come from that figures draw beside ours: of whole experiments, or of these models' speedups."""
    rows = published[(published["experiment"] == experiment) & published["value"].notna()]
    if experiment == DRAFTED:
        rows = pd.concat([drafted(published, m, b) for m in sorted(set(rows["key"])) for b in (NATIVE, PLAIN)])
    if experiment == WINDOWS:
        rows = pd.concat([windows(published, family) for family in sorted(set(rows["ssm_family"]))])
    if experiment in (KERNEL, MODELS):
        drawn = [curve for model in models for curve in curves(published, model, experiment).values()]
        shared = _speedup_rows(published, experiment)
        rows = pd.concat([*drawn, shared[shared["model"].str.startswith("range over 4")]])
    return sorted(set(rows["source"]))


def model_inferred(curve: pd.DataFrame) -> bool:
    """Whether the source of a row does not name the model, which was inferred, as ``notes`` says, from the card."""
    return any("model" in fields.split(";") for fields in curve["inferred_fields"])


def _speedup_rows(published: pd.DataFrame, experiment: str) -> pd.DataFrame:
    wanted = (published["experiment"] == experiment) & (published["metric"] == "speedup")
    setting = (published["state_dtype"] == "float32") & (published["interval_length"] == 16)
    return published[wanted & setting & published["batch_size"].notna()]


def _names(published: pd.DataFrame) -> list[tuple[str, str]]:
    pairs = published[["key", "model"]].drop_duplicates()
    return [(k, m) for k, m in pairs.itertuples(index=False) if m and " " not in m]
