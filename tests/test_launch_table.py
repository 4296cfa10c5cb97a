"""Launch tables: which row answers, what a bad row says, and who asks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from experiments.measure import sources
from replayssm.geometry import Geometry
from replayssm.kernels.triton import launch_csv, launch_table, verify_launch_table
from replayssm.kernels.triton.launch import Launch, replay_launch, stored_launch
from replayssm.kernels.triton.launch_csv import REACH
from replayssm.kernels.triton.launch_table import Entry, choose, nearest, read, write

NANO, SUPER = Geometry("mamba2", 96, 8, 80, 128), Geometry("mamba2", 128, 8, 64, 128)
QWEN, LARGE = Geometry("gdn", 32, 16, 128, 128), Geometry("gdn", 64, 16, 128, 128)
CUDA = torch.device("cuda", 0)


def entry(geometry: Geometry, batch_size: int, interval_length: int | None = 16, state: str = "fp32") -> Entry:
    """Each with a launch of its own."""
    operation, staggered_us = ("stored", None) if interval_length is None else ("replay", 12.5)
    launch = Launch(16, batch_size, 2, 8, eager=geometry is LARGE, registers=interval_length, at_once=geometry is QWEN)
    return Entry(operation, geometry, state, interval_length, batch_size, launch, 10.25, staggered_us, 5, "abc1234")


TABLE = [
    *(entry(NANO, batch) for batch in (1, 8, 64)),
    entry(NANO, 64, 40),
    entry(NANO, 8, state="fp16"),
    entry(NANO, 8, None),
    entry(QWEN, 16, 8),
    entry(QWEN, 16, 16),
    entry(QWEN, 512),
    entry(LARGE, 256),
]


@pytest.fixture(autouse=True)
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder of tables, on a device called ``NVIDIA H200``."""
    monkeypatch.setattr(launch_csv, "TABLES", tmp_path / "launches")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    launch_csv.device_name.cache_clear()
    launch_table.forget()
    yield tmp_path / "launches"
    launch_csv.device_name.cache_clear()
    launch_table.forget()


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ((NANO, 1, 4, 16), (NANO, 1, 16, "fp32")),
        ((NANO, 2, 4, 16), (NANO, 1, 16, "fp32")),
        ((NANO, 3, 4, 16), (NANO, 8, 16, "fp32")),  # by ratio
        ((NANO, 8, 4, 9), (NANO, 8, 16, "fp32")),
        ((NANO, 64, 4, 64), (NANO, 64, 40, "fp32")),  # rings of 64
        ((NANO, 64, 4, 17), None),  # of 32
        ((NANO, 10, 2, 16), (NANO, 8, 16, "fp16")),  # bf16, whose elements are as large, too
        ((NANO, 10, 4, None), (NANO, 8, None, "fp32")),
        ((NANO, 10, 2, None), None),
        ((NANO, 192, 4, 16), (NANO, 64, 16, "fp32")),
        ((NANO, 193, 4, 16), None),  # further than the reach
        ((SUPER, 8, 4, 16), None),  # another head_dim
        ((QWEN, 16, 4, 5), (QWEN, 16, 8, "fp32")),
        ((QWEN, 16, 4, 12), (QWEN, 16, 16, "fp32")),
        ((LARGE, 256, 4, 16), (LARGE, 256, 16, "fp32")),  # as many heads as QWEN at 512
        ((QWEN, 512, 4, 16), (QWEN, 512, 16, "fp32")),
        ((dataclasses.replace(QWEN, family="kda", groups=32), 16, 4, 16), None),
        ((dataclasses.replace(QWEN, state_dim=64), 16, 4, 16), None),
        ((QWEN, 0, 4, 16), None),
    ],
)
def test_the_nearest_row_of_the_same_kind_answers(question: tuple, answer: tuple | None) -> None:
    found = nearest(TABLE, *question)
    assert (found and (found.geometry, found.batch_size, found.interval_length, found.state)) == answer
    assert REACH == 3


@pytest.mark.parametrize("order", [1, -1])
def test_of_two_as_near_the_one_with_fewer_heads_answers(order: int) -> None:
    found = nearest([entry(QWEN, 32), entry(LARGE, 4)][::order], QWEN, 16, 4, 16)
    assert found == entry(LARGE, 4)


def test_a_table_is_read_as_it_was_written(tables: Path) -> None:
    path = launch_table.path_of("NVIDIA H200")
    assert path == tables / "nvidia_h200.csv"
    write(path, "NVIDIA H200", reversed(TABLE))
    assert sorted(TABLE, key=lambda e: e.key) == read(path)
    assert [f.name for f in tables.iterdir()] == ["nvidia_h200.csv"]
    assert "NVIDIA H200" in path.read_text().splitlines()[0]


def test_a_choice_says_where_it_is_from(tables: Path) -> None:
    write(launch_table.path_of("NVIDIA H200"), "NVIDIA H200", TABLE)
    found = choose(NANO, 10, 4, 16, CUDA)
    assert found.launch == TABLE[1].launch
    assert found.how == "table nvidia_h200, measured at 96x80x128, batch 8, L 16, state fp32"
    stored = choose(NANO, 10, 4, None, CUDA)
    assert stored == (TABLE[5].launch, "table nvidia_h200, measured at 96x80x128, batch 8, state fp32")
    far = choose(SUPER, 8, 4, 16, CUDA)
    assert far == (replay_launch(SUPER, 8, 4), "heuristic: table nvidia_h200 holds nothing near")


def test_a_device_without_a_table_takes_the_heuristic(tables: Path) -> None:
    assert choose(NANO, 8, 4, 16, CUDA) == (replay_launch(NANO, 8, 4), "heuristic: no table for NVIDIA H200")
    cpu = torch.device("cpu")
    assert choose(QWEN, 8, 2, None, cpu) == (stored_launch(QWEN, 8, 2), "heuristic: no table for cpu")


BAD = {
    "rows=0 is impossible; accepted: a power of two": (9, "0"),
    "rows=12 is impossible; accepted: a power of two": (9, "12"),
    "rows is empty; accepted: a value": (9, ""),
    "rows='many' is impossible; accepted: a whole number": (9, "many"),
    "tiles='-1' is impossible; accepted: a whole number": (10, "-1"),
    "lanes=64 is impossible; accepted: at most 32": (12, "64"),
    "eager='yes' is unknown; accepted: true, false": (14, "yes"),
    "at_once='1' is unknown; accepted: true, false": (16, "1"),
    "ahead='2' is unknown; accepted: true, false": (17, "2"),
    "operation='read' is unknown; accepted: stored, replay": (0, "read"),
    "interval_length=16 of stored; accepted: of replay alone": (0, "stored"),
    "interval_length=65 is impossible; accepted: 1 to 64": (7, "65"),
    "family='mamba' is unknown; accepted: mamba2, gdn, kda": (1, "mamba"),
    "heads=97 is not divisible by groups=8": (2, "97"),
    "state='fp8' is unknown; accepted: fp32, bf16, fp16": (6, "fp8"),
    "batch_size=0 or rounds=5 is below 1; accepted: at least 1": (8, "0"),
    "aligned_us='fast' is impossible; accepted: microseconds": (18, "fast"),
    "23 fields; accepted: 22": (21, "abc1234,more"),
}


@pytest.mark.parametrize("message", BAD)
def test_a_bad_row_gets_one_line(message: str, tables: Path) -> None:
    path = launch_table.path_of("NVIDIA H200")
    write(path, "NVIDIA H200", TABLE[:1])
    column, value = BAD[message]
    *lines, row = path.read_text().splitlines()
    fields = row.split(",")
    fields[column] = value
    path.write_text("\n".join([*lines, ",".join(fields)]))
    with pytest.raises(ValueError, match=r"^launch table nvidia_h200.csv, line 6: .+; accepted|divisible") as raised:
        choose(NANO, 1, 4, 16, CUDA)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_rows_measured_twice_and_other_columns_are_refused(tables: Path) -> None:
    path = launch_table.path_of("NVIDIA H200")
    write(path, "NVIDIA H200", TABLE[:1])
    text = path.read_text()
    path.write_text(text + text.splitlines()[-1])
    with pytest.raises(ValueError, match="line 7: the same was measured above; accepted: one row a measurement"):
        read(path)
    path.write_text(text.replace("batch_size", "batch"))
    with pytest.raises(ValueError, match=r"line 5: the columns are operation,.*,batch,.*; accepted: operation,"):
        read(path)


@pytest.mark.parametrize("path", sorted((Path(launch_table.__file__).parent / "launches").glob("*.csv")), ids=str)
def test_committed_tables_are_as_the_tuner_writes_them(path: Path, tables: Path) -> None:
    table = verify_launch_table if path.stem.endswith("_windows") else launch_table
    device = path.read_text().splitlines()[0].partition("measured on: ")[2]
    assert table.path_of(device).name == path.name
    table.write(table.path_of(device), device, table.read(path))
    assert table.path_of(device).read_text() == path.read_text()


def test_a_table_belongs_to_the_sources_of_an_arm() -> None:
    folder = "replayssm/kernels/triton/launches/"
    for arm in ("stored/triton", "replay/triton"):
        assert any(path.startswith(folder) for path in sources.arm_sources(arm, "NVIDIA H200"))
    assert not any(path.startswith(folder) for path in sources.arm_sources("replay/torch", "NVIDIA H200"))
