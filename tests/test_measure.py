"""Journal, sources, timing and order of checks of `experiments.measure`: what does not need a kernel."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from pathlib import Path

import pytest
import records

from experiments.case import known_arms
from experiments.measure import journal, provenance, sources, timing, worker
from experiments.measure.journal import Journal, finished
from experiments.measure.record import Comparison, Correctness, Record
from replayssm.peers import fla, flashinfer, mamba_ssm, vllm


def test_a_journal_is_created_once_and_only_grows(tmp_path: Path) -> None:
    group = records.group()
    mine = Journal(tmp_path / "new", "kernel")
    assert not (tmp_path / "new").exists()
    mine.append(group[:2])
    before = mine.path.read_bytes()
    mine.append(group[2:])
    assert mine.path.read_bytes().startswith(before)
    assert [Record.from_json(line) for line in mine.path.read_text().splitlines()] == group
    other = Journal(tmp_path / "new", "kernel")
    other.append(group)
    assert other.path != mine.path


def test_a_journal_refuses_a_file_that_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal.secrets, "token_hex", lambda size: "same")
    monkeypatch.setattr(journal.time, "strftime", lambda *arguments: "now")
    Journal(tmp_path, "kernel").append(records.group())
    with pytest.raises(FileExistsError):
        Journal(tmp_path, "kernel").append(records.group())


def test_finished_skips_torn_incomplete_and_repeatable(tmp_path: Path) -> None:
    whole = records.group(replicate=0)
    cut = records.group(replicate=1)[:-1]
    late = records.group(replicate=2, failed={"replay/cpu": "timeout"})
    torn = records.group(replicate=3)
    records.write(tmp_path, whole, cut, late)
    (tmp_path / "torn.jsonl").write_text("\n".join(r.to_json() for r in torn))  # no newline at the end
    expected = [{r.key for r in whole}, {r.key for r in late if r.arm != "replay/cpu"}]
    assert sorted(finished(tmp_path), key=len) == sorted(expected, key=len)
    assert [text for path, _, text in journal.read_lines(tmp_path) if path.stem == "torn"][-1] is None


def test_finished_of_no_folder_is_empty(tmp_path: Path) -> None:
    assert finished(tmp_path / "absent") == []


def test_a_second_run_waits_for_the_first(tmp_path: Path) -> None:
    said: list[str] = []
    events: list[str] = []

    def second() -> None:
        with journal.alone(tmp_path, said.append):
            events.append("second")

    with journal.alone(tmp_path, said.append):
        waiting = threading.Thread(target=second)
        waiting.start()
        while not said:
            time.sleep(0.01)
        events.append("first")
    waiting.join()
    assert events == ["first", "second"]
    assert len(said) == 1
    assert str(tmp_path) in said[0]


def test_a_case_is_done_only_within_one_group(tmp_path: Path) -> None:
    one = records.group(arms={"stored/cpu": 1.0, "replay/torch": 1.3})
    other = records.group(arms={"stored/torch": 1.4, "replay/cpu": 0.8}, seed=1)
    records.write(tmp_path, one, other)
    asked = {r.key for r in (*one, *other) if r.arm in ("stored/cpu", "replay/cpu")}
    assert asked <= set().union(*finished(tmp_path))
    assert not any(asked <= group for group in finished(tmp_path))


def test_the_caches_of_all_cores_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = {0: ("0-1", 3, "32768K"), 1: ("0-1", 3, "32768K"), 2: ("2-3", 3, "32768K"), 3: ("2-3", 3, "32768K")}
    for core, (shared, level, size) in layout.items():
        for index, values in ((2, ("2", "1024K", str(core))), (3, (str(level), size, shared))):
            folder = tmp_path / f"cpu{core}" / "cache" / f"index{index}"
            folder.mkdir(parents=True)
            for name, value in zip(("level", "size", "shared_cpu_list"), values, strict=True):
                (folder / name).write_text(f"{value}\n")
    monkeypatch.setattr(provenance, "_CPU", tmp_path)
    monkeypatch.setattr(provenance.os, "sched_getaffinity", lambda process: {0, 1, 2, 3})
    assert provenance.cpu()["last_level_cache_bytes"] == 2 * 32768 * 1024
    monkeypatch.setattr(provenance.os, "sched_getaffinity", lambda process: {2})
    assert provenance.cpu()["last_level_cache_bytes"] == 32768 * 1024


@pytest.mark.parametrize(
    ("word", "told"),
    [
        (f"{sources.ROOT}/experiments/kernel.py", "experiments/kernel.py"),
        ("records=/home/somebody/my records/new", "records=.../new"),
        ("hydra.searchpath=[file:///home/somebody/a,/tmp/b/]", "hydra.searchpath=[file:.../a,.../b]"),
        ("'weights=~/models/tiny'", "'weights=.../tiny'"),
        ("/home/somebody/a:/home/somebody/b", ".../a:.../b"),
        ("arms=[stored/cpu,replay/cpu]", "arms=[stored/cpu,replay/cpu]"),
        ("records=results/local/records", "records=results/local/records"),
        (".../new", ".../new"),
    ],
)
def test_a_record_tells_no_place_outside_of_the_checkout(word: str, told: str) -> None:
    assert provenance.without_places(word) == told


def test_arm_sources_are_what_runs_inside_a_sample() -> None:
    of_replay, of_stored = (sources.arm_sources(arm, "any CPU") for arm in ("replay/torch", "stored/torch"))
    assert "experiments/arms/replay_torch.py" in of_replay
    assert {"replayssm/cache.py", "replayssm/recurrence/gdn.py", "replayssm/kernels/torch/replay.py"} <= set(of_replay)
    assert {p for p in of_replay if p.startswith("experiments/measure")} == {
        "experiments/measure/__init__.py",
        "experiments/measure/devices.py",
        "experiments/measure/layers.py",
        "experiments/measure/timing.py",
    }
    assert not {p for p in of_replay if p.startswith("replayssm/kernels/cpu") or "bandwidth" in p}
    assert "replayssm/kernels/cpu/gdn.py" not in of_replay
    of_cpu = sources.arm_sources("replay/cpu", "any CPU")
    assert {f"replayssm/kernels/cpu/{name}.py" for name in ("mamba2", "gdn", "kda", "delta", "lanes")} <= set(of_cpu)
    assert "replayssm/kernels/torch/stored.py" in of_stored
    of_triton = sources.arm_sources("replay/triton", "NVIDIA H200")
    assert {f"replayssm/kernels/triton/{name}.py" for name in ("mamba2", "gdn", "kda", "launch", "commit")} <= set(
        of_triton
    )
    assert "experiments/measure/tuning.py" in sources.arm_sources("stored/vllm-tuned", "NVIDIA H200")
    assert "experiments/measure/peer_layers.py" in sources.arm_sources("replay/vllm", "NVIDIA H200")


def test_the_launch_table_of_the_device_alone_belongs_to_an_arm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = tmp_path / "replayssm" / "kernels" / "triton"
    (kernels / "launches").mkdir(parents=True)
    (tmp_path / "experiments" / "arms").mkdir(parents=True)
    (tmp_path / "experiments" / "arms" / "replay_new.py").write_text("import replayssm.kernels.triton.launch_table\n")
    (kernels / "launch_table.py").write_text("")
    monkeypatch.setattr(sources, "ROOT", tmp_path)

    def hashes() -> tuple[str, str]:
        return sources.arm_hash("replay/new", "NVIDIA H200"), sources.arm_hash("replay/new", "NVIDIA A100-SXM4-80GB")

    none, _ = hashes()
    (kernels / "launches" / "nvidia_h200.csv").write_text("rows")
    mine, other = hashes()
    assert mine != none == other
    (kernels / "launches" / "nvidia_a100_sxm4_80gb.csv").write_text("rows")
    assert hashes()[0] == mine
    assert hashes()[1] != other


def test_a_device_s_table_is_the_one_that_the_kernels_read() -> None:
    launch_table = pytest.importorskip("replayssm.kernels.triton.launch_table")
    for name in ("NVIDIA H200", "NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 4090"):
        assert launch_table.path_of(name).name == f"{sources.file_name(name)}.csv"


def test_how_samples_are_taken_belongs_to_every_arm() -> None:
    for arm in known_arms():
        found = sources.arm_sources(arm, "NVIDIA H200")
        assert {"experiments/measure/devices.py", "experiments/measure/timing.py"} <= set(found), arm
        assert not {"experiments/measure/worker.py", "experiments/measure/gates.py"} & set(found), arm


def test_arm_hash_follows_a_change_in_an_imported_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arms, library = tmp_path / "experiments" / "arms", tmp_path / "replayssm" / "kernels"
    arms.mkdir(parents=True)
    library.mkdir(parents=True)
    (arms / "replay_new.py").write_text("from replayssm.kernels import fast\n")
    (library / "fast.py").write_text("import replayssm.deep\n")
    (tmp_path / "replayssm" / "deep.py").write_text("x = 1\n")
    monkeypatch.setattr(sources, "ROOT", tmp_path)
    before = sources.arm_hash("replay/new", "any CPU")
    assert sources.arm_hash("replay/new", "any CPU") == before
    (tmp_path / "replayssm" / "deep.py").write_text("x = 2\n")
    assert sources.arm_hash("replay/new", "any CPU") != before


@pytest.mark.parametrize(
    ("distribution", "arms"),
    [
        ("triton", {"stored/triton", "replay/triton", "stored/vllm", "replay/vllm", "stored/fla", "replay/flashinfer"}),
        ("vllm", {"stored/vllm", "stored/vllm-tuned", "replay/vllm", "snapshots/vllm", "snapshots/vllm-tuned"}),
        ("fla-core", {"stored/fla"}),
        ("mamba-ssm", {"stored/mamba-ssm"}),
        ("flashinfer-python", {"stored/flashinfer", "replay/flashinfer"}),
    ],
)
def test_arm_hash_follows_what_is_installed(distribution: str, arms: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Else an arm that was unsupported for want of its peer would be skipped once that is there."""
    of_all = known_arms()
    monkeypatch.setattr(sources, "_version", lambda name: None)
    before = {arm: sources.arm_hash(arm, "NVIDIA H200") for arm in of_all}
    monkeypatch.setattr(sources, "_version", lambda name: "1.0" if name == distribution else None)
    changed = {arm for arm in of_all if sources.arm_hash(arm, "NVIDIA H200") != before[arm]}
    assert arms <= changed
    assert not changed & {"stored/cpu", "replay/cpu", "stored/torch", "replay/torch"}
    if distribution != "triton":
        assert changed == arms


def test_every_distribution_of_a_peer_is_in_the_hash_and_in_the_record() -> None:
    for peer in (vllm, fla, mamba_ssm, flashinfer):
        name = peer.__name__.rpartition(".")[2]
        assert set(peer.PEER.distributions) <= set(sources.INSTALLED[f"replayssm/peers/{name}.py"])
        assert set(peer.PEER.distributions) <= set(provenance.PACKAGES)


def test_arms_are_compared_with_the_first_and_none_with_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[str, str]] = []

    class Check:
        def __init__(self, *arguments: object) -> None:
            self.moment = "before"

        def run(self, layers: str, cycles: int, graph: None) -> tuple[Correctness, str]:
            return records.check("before"), f"outputs of {layers}"

        def agreement(self, outputs: str, first: str) -> Comparison:
            compared.append((outputs, first))
            return Comparison("output", 1.0 if outputs == "outputs of wrong" else 0.0, 0.5)

    marked: list[str] = []
    monkeypatch.setattr(worker.gates, "Check", Check)
    monkeypatch.setattr(worker.gates, "mark_copies", marked.append)

    def statuses(*names: str) -> list[str]:
        arms = [worker.Arm(name) for name in names]
        for arm in arms:
            arm.layers = arm.name
        worker._check_before(arms, None, 1)
        return [arm.status for arm in arms]

    assert statuses("alone") == ["ok"]
    assert compared == []
    assert statuses("first", "wrong", "right") == ["ok", "incorrect", "ok"]
    assert compared == [("outputs of wrong", "outputs of first"), ("outputs of right", "outputs of first")]
    assert marked == ["alone", "first", "right"]


def test_every_participant_runs_once_a_round_in_balanced_order() -> None:
    ran: list[str] = []
    participants = {name: (lambda name=name: ran.append(name)) for name in "abcd"}
    samples = timing.interleave(participants, rounds=6, seed=3)
    assert ran == list(itertools.chain(*samples.order))
    assert all(sorted(order) == list("abcd") for order in samples.order)
    assert all(len(ns) == 6 and all(type(n) is int and n > 0 for n in ns) for ns in samples.elapsed_ns.values())
    for first, second in zip(samples.order[::2], samples.order[1::2], strict=True):
        assert second == first[::-1]
    assert len({tuple(order) for order in samples.order[::2]}) > 1
    assert timing.interleave(participants, rounds=6, seed=3).order == samples.order
    assert timing.interleave(participants, rounds=6, seed=4).order != samples.order


def test_a_warm_up_settles_on_three_like_rounds() -> None:
    elapsed = iter([900, 500, 100, 100, 101, 102])
    warmed = timing.warm_up({"a": lambda: None}, limit_s=30, tolerance=0.02, elapsed_ns=lambda run: next(elapsed))
    assert (warmed.rounds, warmed.settled, warmed.last_ns) == (5, True, {"a": 101})


def test_a_warm_up_that_does_not_settle_ends_at_its_limit() -> None:
    elapsed = itertools.cycle([100, 200])
    warmed = timing.warm_up({"a": lambda: None}, limit_s=0.01, tolerance=0.01, elapsed_ns=lambda run: next(elapsed))
    assert not warmed.settled
    assert warmed.rounds >= 3


def test_the_record_refuses_speed_without_correctness() -> None:
    record = records.group()[1]
    wrong = records.check("after", error=1.0)
    for correctness in ((), record.correctness[:1], (record.correctness[0], wrong)):
        with pytest.raises(ValueError, match="correctness"):
            dataclasses.replace(record, correctness=correctness)
    with pytest.raises(ValueError, match="cannot hold samples"):
        dataclasses.replace(record, status="incorrect", message="wrong")
    with pytest.raises(ValueError, match="positive integers"):
        dataclasses.replace(record, samples_ns=((0,),))
    with pytest.raises(ValueError, match="every round"):
        dataclasses.replace(record, samples_ns=(), again_samples_ns=())
