"""The page that answers for a model: predictions are those of the traffic model, verdicts those of the tables."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pandas as pd
import pytest
from records import decode_group, gpu_group, write

from analysis import choose, tables
from analysis.__main__ import ROOT
from analysis.load import load
from replayssm import traffic

MODELS = {model.name: model for model in choose.models(ROOT / "configs" / "model")}
NANO = MODELS["nemotron_3_nano_4b"]


def answers(folder, *groups):
    evidence = load([write(folder, *groups)])
    return choose.answers(tables.build(evidence), evidence, ROOT / "configs" / "model")


def test_models_are_read_from_their_files():
    assert (NANO.layers, NANO.geometry.heads, NANO.geometry.head_dim, NANO.routed) == (21, 96, 80, False)
    assert NANO.token_bytes == 4 * 2 * 8 * 128 * 2  # layers, keys and values, heads, elements, bytes
    assert MODELS["qwen3_5_122b"].routed
    assert MODELS["kimi_linear_48b"].token_bytes is None  # latent attention


def test_a_step_of_weights_alone_gains_nothing_and_one_of_states_alone_all_that_bytes_allow():
    ideal = traffic.ideal_speedup(NANO.geometry, 16, "fp32", ring=choose.RING)
    assert choose.whole_step(NANO, 0, 16, "fp32", 8, 0) == pytest.approx(ideal)
    assert choose.whole_step(NANO, 1e18, 16, "fp32", 8, 0) == pytest.approx(1)
    stored = NANO.layers * 2 * 4 * NANO.geometry.state_elements  # read and written, fp32
    steps = [choose.whole_step(NANO, 5 * stored, 16, "fp32", batch, context) for batch, context in ((1, 0), (64, 0))]
    assert steps[0] == pytest.approx(6 / (5 + 1 / ideal))
    assert 1 < steps[0] < steps[1] < ideal
    assert choose.whole_step(NANO, 5 * stored, 16, "fp32", 64, 100_000) < steps[1]


def test_a_request_holds_its_copies_and_a_ring():
    stored, replay = choose.request_bytes(NANO, 16, "fp16", "nvfp4")
    assert stored == 21 * 2 * NANO.geometry.state_elements
    rows, ring = 96 * 80, 96 * 80 * 2 + 8 * 128 * 2 + 96 * 4
    assert replay == stored + 21 * (rows * (128 // 2 + 128 // 16 + 4) + 15 * ring)


def test_a_pair_is_as_good_as_the_reference_or_it_is_not_chosen():
    formats = {
        "dual_fp32_nvfp4": ("fp32", "nvfp4"),
        "dual_fp16_sr_nvfp4": ("fp16", "nvfp4"),
        "shared_nvfp4": ("nvfp4", None),
    }
    known = pd.DataFrame(
        [(arm, "mamba2", *told) for arm, told in formats.items()], columns=["arm", "family", "update", "read"]
    )
    empty = {"drift_ratios": pd.DataFrame(columns=["arm", "over", "family", "high"]), "drift_kl": known[:0]}
    for high, arm in ((1.05, "dual_fp16_sr_nvfp4"), (1.2, "dual_fp32_nvfp4")):
        over = {"over": "dual_fp32_nvfp4", "family": "mamba2"}
        rows = [{"arm": "dual_fp16_sr_nvfp4", "output_high": high}, {"arm": "shared_nvfp4", "output_high": 0.5}]
        layers = {"layer_ratios": pd.DataFrame([row | over for row in rows]), "layer_drift": known}
        pair = choose.best_pair(NANO, empty | layers)
        assert pair is not None
        assert (pair.arm, pair.read, pair.shown) == (arm, "nvfp4", "output error of one layer")
        assert choose.best_pair(MODELS["qwen3_5_4b"], empty | layers) is None  # of another family


def row(speedup, low, high, verdict, **more):
    told = {"arm": "replay/triton", "interval_length": 16, "remarks": "power cap"}
    told |= {"processes": 3, "rounds": 30, "aa_noise": 0.001}
    return SimpleNamespace(speedup=speedup, low=low, high=high, verdict=verdict, **told | more)


@pytest.mark.parametrize(
    ("whole", "layer", "kind", "text"),
    [
        (
            {1024: (1.4, 1.35, 1.45, "FASTER")},
            None,
            "yes",
            "use replay/triton, L = 16: a step of the whole model is 1.40",
        ),
        (
            {1024: (0.7, 0.6, 0.8, "SLOWER")},
            (1.8, 1.7, 1.9, "FASTER"),
            "no",
            "do not use: batch 8: a step of the whole",
        ),
        ({1024: (1.0, 0.99, 1.01, "AMBIGUOUS")}, None, "no", "do not use: batch 8"),
        ({1024: (1.1, 0.9, 1.3, "AMBIGUOUS")}, None, "no", "do not use: batch 8"),
        ({1024: (1.01, 1.005, 1.015, "FASTER")}, None, "no", "do not use: batch 8"),
        (
            {1024: (1.4, 1.3, 1.5, "AMBIGUOUS")},
            None,
            "open",
            "probably replay/triton, L = 16: a step of the whole model",
        ),
        ({4096: (1.4, 1.3, 1.5, "FASTER")}, None, "yes", "as fast; measured at context 4,096 only"),
        (
            {16: (1.4, 1.3, 1.5, "FASTER")},
            None,
            "open",
            "probably replay/triton, L = 16: a step of the whole model is 1.40 times as fast; measured at context 16 "
            "only, and a longer one gains less",
        ),
        (
            {},
            (1.8, 1.7, 1.9, "FASTER"),
            "open",
            "promising: replay/triton, L = 16: a layer's step is 1.80 times as fast; no",
        ),
        ({}, (0.6, 0.6, 0.6, "SLOWER"), "no", "do not use: batch 8: a layer's step is 0.60 times as fast"),
    ],
)
def test_verdicts_are_plain(whole, layer, kind, text):
    entry = {"layer": row(*layer) if layer else None, "whole": {context: row(*told) for context, told in whole.items()}}
    found, told, why = choose.verdict(8, 1024, entry)
    assert found == kind
    assert text in f"{told}: {why}"
    assert ("unproven: power cap" in why) == ("AMBIGUOUS" in str(whole))


def test_what_one_process_measured_is_not_proven():
    layer = row(1.8, 1.7, 1.9, "FASTER", processes=1, rounds=10)
    entry = {"layer": layer, "whole": {1024: layer}}
    found, told, why = choose.verdict(8, 1024, entry)
    assert (found, told) == ("open", "probably replay/triton, L = 16")
    assert why == "a step of the whole model is 1.80 times as fast, unproven: one process"


def test_what_a_device_cannot_hold_is_not_recommended(tmp_path):
    one = 21 * (4 * NANO.geometry.state_elements) / 1e9
    assert choose.beyond(NANO, 8e9, "fp32", 64, 1024, 20e9) == ""
    assert choose.beyond(NANO, 8e9, "fp32", 64, 1024, None) == ""
    told = choose.beyond(NANO, 8e9, "fp32", 256, 131072, 150e9)
    needed = float(told.split()[0].replace(",", ""))
    assert told.endswith(" GB of 150 GB")
    assert 8 + 256 * (one + 131072 * NANO.token_bytes / 1e9) < needed < 8 + 256 * (1.2 * one + 2.2)
    found = answers(tmp_path, gpu_group(), decode_group())
    entry = next(entry for entry in found["measured"].values() if entry["whole"])
    kinds = [entry["verdicts"][at][:2] for at in entry["verdict"]]
    assert kinds[0][0] != "no"
    assert kinds[-1][0] == "no"
    assert kinds[-1][1].startswith("does not fit: ")


def test_what_is_like_for_like_goes_before_what_is_faster():
    like, faster = (row(x, x, x, "FASTER", like_for_like=told) for x, told in ((1.2, "yes"), (1.5, "no")))
    assert max(faster, like, key=choose._rank) is like


def test_steps_of_routed_experts_are_not_predicted():
    of = {name: choose._of_state(MODELS[name], "fp32", None, 1e9, [1], [1024]) for name in MODELS}
    assert len(of["nemotron_3_nano_4b"]["whole"]) == 1
    assert "context_mb" in of["qwen3_5_122b"]
    assert "whole" not in of["qwen3_5_122b"]


def test_the_slower_phase_counts_and_the_nearest_context_answers(tmp_path):
    slow = [
        dataclasses.replace(r, samples_ns=tuple((3 * ns,) for (ns,) in r.samples_ns)) if r.arm == "replay/triton" else r
        for r in gpu_group(fields={"phase": "staggered"})
    ]
    cut = decode_group(batch=32, fields={"blocks": 8})  # no whole model
    found = answers(tmp_path, gpu_group(), slow, decode_group(), cut)
    assert not any(key.endswith("|32") for key in found["measured"])
    layer = found["measured"]["qwen3_5_4b|NVIDIA H200|fp32|256"]["layer"]
    rows = tables.build(load([tmp_path]))["kernel_speedups"]
    by_arm = rows[rows["kind"] == "replay"].groupby("arm")["speedup"].min()
    assert layer[2] == by_arm.max() != rows[rows["kind"] == "replay"]["speedup"].max()
    whole = next(entry for entry in found["measured"].values() if entry["whole"])
    assert len(whole["verdict"]) == len(found["contexts"])
    assert "<" not in choose.embedded({"text": "</script>"})
