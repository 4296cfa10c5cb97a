"""The statistics: known ratios are recovered, intervals cover, noise is not called a result, biased A/A is refused."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from records import case, group

from analysis.stats import (
    AMBIGUOUS,
    FASTER,
    SLOWER,
    Interval,
    aa_fault,
    aa_log_ratio,
    bootstrap,
    median_step_ns,
    paired_log_speedup,
    verdict,
)

TWO = {"stored/cpu": 1.0, "replay/cpu": 0.8}


def pair(**changes):
    """The stored and the replay record of one process with 30 rounds."""
    of = changes.pop("of", case(timing={**case()["timing"], "rounds": 30}))
    by_arm = {r.arm: r for r in group(of, arms=changes.pop("arms", TWO), **changes)}
    return by_arm["stored/cpu"], by_arm["replay/cpu"]


def test_known_ratio_is_recovered_and_covered():
    interval = bootstrap([paired_log_speedup(*pair(replicate=r, seed=r)) for r in range(4)], "known")
    assert interval.estimate == pytest.approx(1.25, rel=0.01)
    assert interval.low < 1.25 < interval.high
    assert (interval.processes, interval.rounds) == (4, 120)


def test_pairing_cancels_the_drift_that_arms_of_a_round_share():
    stored, replay = pair(noise=0.002)
    assert np.std([math.log(s) for (s,) in stored.samples_ns]) > 0.02
    assert np.std(paired_log_speedup(stored, replay)) < 0.006


def test_step_time_divides_by_layer_steps_and_keeps_every_sample():
    record = replace(pair()[0], samples_ns=((100, 300), (200, 200), (400, 400)), again_samples_ns=())
    assert median_step_ns(replace(record, layer_steps_per_sample=10)) == pytest.approx(20.0)


def test_records_of_two_processes_are_never_paired():
    with pytest.raises(ValueError, match="not timed together"):
        paired_log_speedup(pair(seed=1)[0], pair(seed=2)[1])


@pytest.mark.parametrize("processes", [1, 5])
def test_interval_covers_at_about_its_nominal_rate(processes):
    random, trials, rounds = np.random.default_rng(processes), 150, 20
    spread = 0.0 if processes == 1 else 0.02
    covered = 0
    for trial in range(trials):
        centres = random.normal(0.1, spread, processes)
        interval = bootstrap([random.normal(c, 0.03, rounds) for c in centres], f"trial {trial}")
        covered += interval.log_low <= 0.1 <= interval.log_high
    assert 0.89 <= covered / trials <= 0.995


def test_interval_narrows_with_rounds_but_not_below_the_spread_between_processes():
    random = np.random.default_rng(3)

    def width(rounds: int, spread: float) -> float:
        centres = np.linspace(-spread, spread, 5)
        interval = bootstrap([random.normal(c, 0.05, rounds) for c in centres], "width")
        return interval.log_high - interval.log_low

    assert width(400, 0.0) < 0.5 * width(20, 0.0)
    assert width(400, 0.05) > 0.05


def test_bootstrap_depends_on_its_seed_text_alone():
    values = [np.random.default_rng(0).normal(0, 1, 20)]
    assert bootstrap(values, "a") == bootstrap(values, "a")
    assert bootstrap(values, "a") != bootstrap(values, "b")
    with pytest.raises(ValueError, match="at least one"):
        bootstrap([], "a")


@pytest.mark.parametrize(("factor", "expected"), [(0.8, FASTER), (1.3, SLOWER), (1.0, AMBIGUOUS)])
def test_verdict_names_the_direction_and_calls_noise_ambiguous(factor, expected):
    stored, replay = pair(arms={"stored/cpu": 1.0, "replay/cpu": factor})
    assert verdict(bootstrap([paired_log_speedup(stored, replay)], "v"), aa_noise=0.01) == expected


def test_verdict_needs_an_effect_above_the_aa_noise_and_enough_rounds():
    interval = bootstrap([paired_log_speedup(*pair())], "v")
    assert verdict(interval, aa_noise=0.01) == FASTER
    assert verdict(interval, aa_noise=math.log(1.3)) == AMBIGUOUS
    for processes, rounds, expected in ((1, 4, AMBIGUOUS), (4, 19, AMBIGUOUS), (4, 20, FASTER), (5, 10, FASTER)):
        assert verdict(replace(interval, processes=processes, rounds=rounds), aa_noise=0.01) == expected


@pytest.mark.parametrize(("low", "high"), [(-0.01, 0.3), (-0.3, 0.01)])
def test_verdict_needs_an_interval_that_excludes_one(low, high):
    assert verdict(Interval((low + high) / 2, low, high, 3, 60), aa_noise=0.01) == AMBIGUOUS


def test_few_noisy_rounds_of_equal_arms_are_rarely_given_a_verdict():
    found = []
    for seed in range(60):
        records = {r.arm: r for r in group(arms={"stored/cpu": 1.0, "replay/cpu": 1.0}, noise=0.04, seed=seed)}
        noise = bootstrap([aa_log_ratio(records["stored/cpu"])], f"aa {seed}").noise
        interval = bootstrap([paired_log_speedup(records["stored/cpu"], records["replay/cpu"])], f"v {seed}")
        found.append(verdict(interval, noise))
    assert found.count(AMBIGUOUS) >= 57


@pytest.mark.parametrize("bias", [1.05, 0.95])
def test_an_aa_bias_of_five_percent_is_refused(bias):
    faults = [aa_fault(pair(aa_bias=bias, seed=s)[0]) for s in range(10)]
    assert all("stored/cpu timed twice differs by" in f for f in faults)


@pytest.mark.parametrize("bias", [1.0, 1.005, 0.995])
def test_an_aa_difference_of_half_a_percent_passes(bias):
    assert [aa_fault(pair(aa_bias=bias, seed=s)[0]) for s in range(10)] == [""] * 10


def test_an_aa_bias_hidden_in_noise_widens_the_noise_that_a_verdict_has_to_exceed():
    stored, replay = pair(aa_bias=1.05, noise=0.15, arms={"stored/cpu": 1.0, "replay/cpu": 0.96})
    noise = bootstrap([aa_log_ratio(stored)], "aa").noise
    assert noise > 0.05
    assert verdict(bootstrap([paired_log_speedup(stored, replay)], "v"), noise) == AMBIGUOUS
