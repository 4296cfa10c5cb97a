"""Launch tables of windows: which row answers, what a bad row says, and who asks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from experiments.arms import snapshots_triton, verify_triton
from experiments.case import Precision, Timing, WindowCase
from experiments.measure import sources
from replayssm.cache import ReplayCache
from replayssm.geometry import Geometry
from replayssm.kernels.triton import launch_csv, verify_launch_table
from replayssm.kernels.triton.launch import Launch
from replayssm.kernels.triton.verify_launch import WindowLaunch, snapshots_launch, verify_launch
from replayssm.kernels.triton.verify_launch_table import (
    Entry,
    choose,
    nearest,
    read,
    snapshots_launch_for,
    verify_launch_for,
    write,
)

NANO, SUPER = Geometry("mamba2", 96, 8, 80, 128), Geometry("mamba2", 128, 8, 64, 128)
QWEN, LARGE = Geometry("gdn", 32, 16, 128, 128), Geometry("gdn", 64, 16, 128, 128)
CUDA = torch.device("cuda", 0)


def entry(
    geometry: Geometry, batch_size: int, window: int = 4, interval_length: int | None = 16, state: str = "fp32"
) -> Entry:
    """Each with a launch of its own."""
    if interval_length is None:
        launch: Launch | WindowLaunch = Launch(8, batch_size, 1, 16, window, registers=168)
        return Entry("snapshots", geometry, state, None, window, batch_size, launch, 3, 10.25, None, 5, "abc1234")
    launch = WindowLaunch(16, batch_size, window, 2, registers=None, eager=geometry is LARGE, chunks=4)
    return Entry("verify", geometry, state, interval_length, window, batch_size, launch, 3, 10.25, 12.5, 5, "abc1234")


TABLE = [
    *(entry(NANO, batch) for batch in (1, 8, 64)),
    entry(NANO, 8, 6),
    entry(NANO, 64, 4, 40),
    entry(NANO, 8, state="fp16"),
    entry(NANO, 8, interval_length=None),
    entry(QWEN, 16, 3, 8),
    entry(QWEN, 16, 4, 16),
    entry(QWEN, 512),
    entry(LARGE, 256),
    entry(LARGE, 64, 4, 8),
    entry(LARGE, 64, 4, 16),
]


@pytest.fixture(autouse=True)
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder of tables, on a device called ``NVIDIA H200``."""
    monkeypatch.setattr(launch_csv, "TABLES", tmp_path / "launches")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    launch_csv.device_name.cache_clear()
    verify_launch_table.forget()
    yield tmp_path / "launches"
    launch_csv.device_name.cache_clear()
    verify_launch_table.forget()


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ((NANO, 1, 4, 4, 16), (NANO, 1, 4, 16, "fp32")),
        ((NANO, 2, 4, 4, 16), (NANO, 1, 4, 16, "fp32")),
        ((NANO, 3, 4, 4, 16), (NANO, 8, 4, 16, "fp32")),  # by ratio
        ((NANO, 8, 4, 5, 16), (NANO, 8, 6, 16, "fp32")),  # the nearer window
        ((NANO, 8, 4, 1, 9), (NANO, 8, 4, 16, "fp32")),  # a product takes 8 columns for it, too
        ((NANO, 64, 4, 8, 16), (NANO, 64, 4, 16, "fp32")),  # heads before windows
        ((NANO, 8, 4, 9, 16), None),  # 16 columns
        ((QWEN, 16, 4, 5, 16), None),  # 8 of GDN
        ((NANO, 64, 4, 4, 64), (NANO, 64, 4, 40, "fp32")),  # rings of 64
        ((NANO, 64, 4, 4, 17), None),  # of 32
        ((NANO, 10, 2, 4, 16), (NANO, 8, 4, 16, "fp16")),  # bf16, whose elements are as large, too
        ((NANO, 10, 4, 4, None), (NANO, 8, 4, None, "fp32")),
        ((NANO, 10, 2, 4, None), None),
        ((NANO, 192, 4, 4, 16), (NANO, 64, 4, 16, "fp32")),
        ((NANO, 193, 4, 4, 16), None),  # further than the reach
        ((SUPER, 8, 4, 4, 16), None),  # another head_dim
        ((QWEN, 16, 4, 4, 8), (QWEN, 16, 4, 16, "fp32")),  # windows before intervals
        ((QWEN, 16, 4, 3, 16), (QWEN, 16, 3, 8, "fp32")),
        ((LARGE, 256, 4, 4, 16), (LARGE, 256, 4, 16, "fp32")),  # as many heads as QWEN at 512
        ((LARGE, 64, 4, 4, 9), (LARGE, 64, 4, 8, "fp32")),
        ((LARGE, 64, 4, 4, 15), (LARGE, 64, 4, 16, "fp32")),
        ((QWEN, 512, 4, 4, 16), (QWEN, 512, 4, 16, "fp32")),
        ((dataclasses.replace(QWEN, family="kda", groups=32), 16, 4, 4, 16), None),
        ((dataclasses.replace(QWEN, state_dim=64), 16, 4, 4, 16), None),
        ((QWEN, 0, 4, 4, 16), None),
    ],
)
def test_the_nearest_row_of_the_same_kind_answers(question: tuple, answer: tuple | None) -> None:
    found = nearest(TABLE, *question)
    assert (found and (found.geometry, found.batch_size, found.window, found.interval_length, found.state)) == answer


@pytest.mark.parametrize("order", [1, -1])
def test_of_two_as_near_the_one_with_fewer_heads_answers(order: int) -> None:
    found = nearest([entry(QWEN, 32), entry(LARGE, 4)][::order], QWEN, 16, 4, 4, 16)
    assert found == entry(LARGE, 4)


def test_a_table_is_read_as_it_was_written(tables: Path) -> None:
    path = verify_launch_table.path_of("NVIDIA H200")
    assert path == tables / "nvidia_h200_windows.csv"
    write(path, "NVIDIA H200", reversed(TABLE))
    assert sorted(TABLE, key=lambda e: e.key) == read(path)
    lines = path.read_text().splitlines()
    assert "NVIDIA H200" in lines[0]
    assert lines[5].startswith(
        "operation,family,heads,groups,head_dim,state_dim,state,interval_length,window,batch_siz"
    )
    assert lines[6] == "snapshots,mamba2,96,8,80,128,fp32,,4,8,8,8,,1,16,4,168,,,3,10.25,,5,abc1234"
    assert lines[7] == "verify,gdn,32,16,128,128,fp32,8,3,16,16,16,3,2,,3,,false,4,3,10.25,12.5,5,abc1234"


def case(geometry: Geometry, batch_size: int) -> WindowCase:
    timing = Timing("test", 2, 1, 5.0, 0.01, 1.0, 1, 60.0)
    shared = ("window", "test", geometry, batch_size, 16, "aligned", Precision("fp32", "bf16"), "cuda", 0, 3, timing)
    return WindowCase(*shared, window=4, accepted=3)


def test_kernels_and_records_take_what_the_table_says(tables: Path) -> None:
    write(verify_launch_table.path_of("NVIDIA H200"), "NVIDIA H200", TABLE)
    measured = "table nvidia_h200_windows, measured at 96x80x128, batch 8"
    verify = choose(NANO, 10, 4, 4, 16, CUDA)
    assert verify == (TABLE[1].launch, f"{measured}, L 16, window 4, state fp32")
    snapshots = choose(NANO, 10, 4, 4, None, CUDA)
    assert snapshots == (TABLE[6].launch, f"{measured}, window 4, state fp32")
    for arm, found in ((verify_triton, verify), (snapshots_triton, snapshots)):
        told = arm.describe(case(NANO, 10))
        assert told["chosen"] == found.how
        assert told.items() >= dataclasses.asdict(found.launch).items()
    far = choose(SUPER, 8, 4, 4, 16, CUDA)
    assert far == (verify_launch(SUPER, 8, 4), "heuristic: table nvidia_h200_windows holds nothing near")


def test_a_device_without_a_table_takes_the_heuristic(tables: Path) -> None:
    reason = "heuristic: no table of windows for NVIDIA H200"
    assert choose(NANO, 8, 4, 4, 16, CUDA) == (verify_launch(NANO, 8, 4), reason)
    assert choose(QWEN, 64, 2, 4, None, CUDA) == (snapshots_launch(QWEN, 64, 2), reason)
    assert snapshots_triton.describe(case(QWEN, 64))["chosen"] == reason


def test_a_step_asks_for_its_own_sizes(tables: Path) -> None:
    """Of a layer on a device called cpu."""
    asked = [entry(NANO, 8, 12, 24, "fp16"), entry(NANO, 8, 12, None, "fp16")]
    write(verify_launch_table.path_of("cpu"), "cpu", [*asked, entry(NANO, 8), entry(NANO, 8, interval_length=None)])
    small = dataclasses.replace(NANO, heads=1, groups=1)
    cache = ReplayCache(small, slots=1, interval_length=20, window=10, state_dtype=torch.float16)
    assert verify_launch_for(NANO, 9, cache.layer(0)) == asked[0].launch
    states = torch.zeros(1, 10, 1, 80, 128, dtype=torch.float16)
    assert snapshots_launch_for(NANO, 9, states) == asked[1].launch


BAD = {
    "rows=12 is impossible; accepted: a power of two": (10, "12"),
    "rows is empty; accepted: a value": (10, ""),
    "heads_a_program='-1' is impossible; accepted: a whole number": (12, "-1"),
    "heads=0 is impossible; accepted: at least 1": (12, "0"),
    "lanes of verify is given; accepted: of snapshots alone": (14, "16"),
    "registers='few' is impossible; accepted: a whole number": (16, "few"),
    "eager='yes' is unknown; accepted: true, false": (17, "yes"),
    "chunks=3 is impossible; accepted: a power of two": (18, "3"),
    "operation='stored' is unknown; accepted: snapshots, verify": (0, "stored"),
    "interval_length of snapshots is given; accepted: of verify alone": (0, "snapshots"),
    "interval_length is empty; accepted: a value": (7, ""),
    "interval_length=65 is impossible; accepted: 1 to 64": (7, "65"),
    "window=17 with accepted=3 is impossible; accepted: 1 to 16": (8, "17"),
    "window=4 with accepted=5 is impossible; accepted: 1 to 16, with at least 1 and at most all of it": (19, "5"),
    "state='fp8' is unknown; accepted: fp32, bf16, fp16": (6, "fp8"),
    "batch_size=0 or rounds=5 is below 1; accepted: at least 1": (9, "0"),
    "staggered_us is empty; accepted: a value": (21, ""),
    "25 fields; accepted: 24": (23, "abc1234,more"),
}


@pytest.mark.parametrize("message", BAD)
def test_a_bad_row_gets_one_line(message: str, tables: Path) -> None:
    path = verify_launch_table.path_of("NVIDIA H200")
    write(path, "NVIDIA H200", TABLE[:1])
    column, value = BAD[message]
    *lines, row = path.read_text().splitlines()
    fields = row.split(",")
    fields[column] = value
    path.write_text("\n".join([*lines, ",".join(fields)]))
    with pytest.raises(ValueError, match=r"^launch table nvidia_h200_windows.csv, line 7: .+; accepted") as raised:
        choose(NANO, 1, 4, 4, 16, CUDA)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_no_row_holds_a_launch_of_the_other_operation() -> None:
    verify, snapshots = entry(NANO, 8), entry(NANO, 8, interval_length=None)
    with pytest.raises(ValueError, match=r"of verify; accepted: a WindowLaunch$"):
        dataclasses.replace(verify, launch=snapshots.launch)
    with pytest.raises(ValueError, match=r"^interval_length=16 of snapshots; accepted: of verify alone$"):
        dataclasses.replace(snapshots, interval_length=16)


def test_a_table_of_windows_belongs_to_the_sources_of_their_arms(tables: Path) -> None:
    data = sources.DATA["replayssm/kernels/triton/verify_launch_table.py"]
    name = sources.file_name("NVIDIA H200")
    assert data.format(device=name) == f"launches/{verify_launch_table.path_of('NVIDIA H200').name}"
    for arm in ("verify/triton", "snapshots/triton"):
        found = sources.arm_sources(arm, "NVIDIA H200")
        assert "replayssm/kernels/triton/verify_launch_table.py" in found
        assert "replayssm/kernels/triton/launches/nvidia_h200.csv" not in found
