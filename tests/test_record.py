"""Reading records back: every odd line is refused in one line, by `Record` itself, so that all readers agree."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import pytest
import records

from analysis.load import load
from experiments.measure.journal import finished
from experiments.measure.record import Record, read_lines

ROOT = Path(__file__).resolve().parent.parent


def edited(path: str, value: Any) -> str:
    """The line of a good record, with the field at a dotted path replaced."""
    data = json.loads(records.group()[0].to_json())
    *parents, last = path.split(".")
    inner = data
    for name in parents:
        inner = inner[int(name)] if name.isdigit() else inner[name]
    inner[last] = value
    return json.dumps(data)


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else 0


def with_number(text: str) -> str:
    return edited("traffic.floor_ns", "NUMBER").replace('"NUMBER"', text)


ODD = {
    "no object": "[1, 2]",
    "endless": "[" * 100_000,
    "deep": edited("case.deep", nested(400)),
    "NaN": with_number("NaN"),
    "infinity": with_number("-Infinity"),
    "float overflow": with_number("1e999"),
    "integer overflow": with_number("1" + "0" * 400),
    "error overflow": edited("correctness.0.comparisons.0.error", 0).replace('"error": 0', '"error": 1' + "0" * 400, 1),
    "no device name": edited("device", {}),
    "device name": edited("device.name", ["a"]),
    "group": edited("group", ["l"]),
    "status": edited("status", ["ok"]),
    "arms": edited("arms", {"stored/torch": 1}),
    "arm names": edited("arms", ["stored/torch", 2]),
    "argv": edited("argv", "word"),
    "replicate": edited("replicate", True),
    "seeds": edited("seeds", [1]),
    "samples": edited("samples_ns", [3]),
    "quantity": edited("correctness.0.comparisons.0.quantity", {}),
    "budget": edited("correctness.0.comparisons.0.budget", "1"),
    "cursor flag": edited("correctness.0.cursor_equal", "no"),
    "flush count": edited("correctness.0.flushes_counted", 12.0),
    "unknown field": edited("more", 1),
    "no UTF-8": edited("message", "WORD").replace("WORD", "\udcff"),
}


@pytest.mark.parametrize("line", ODD.values(), ids=ODD)
def test_an_odd_line_is_refused_in_one_line_by_every_reader(tmp_path: Path, line: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011, the next line looks at the message
        Record.from_json(line)
    assert type(caught.value) is not UnicodeEncodeError
    assert 0 < len(str(caught.value)) < 200
    assert "\n" not in str(caught.value)
    records.write(tmp_path, records.group())
    (tmp_path / "odd.jsonl").write_bytes(line.encode("utf-8", "surrogateescape") + b"\n")
    evidence = load([tmp_path])
    assert (len(evidence.records), [e.where for e in evidence.exclusions]) == (4, ["odd.jsonl:1"])
    assert len(finished(tmp_path)) == len(finished(records.write(tmp_path / "alone", records.group())))


def test_what_is_accepted_can_be_written_again() -> None:
    for record in (*records.group(), *records.group(failed={"replay/cpu": "oom"})):
        assert Record.from_json(record.to_json()) == record


def test_records_of_earlier_versions_are_read_and_written_as_they_are() -> None:
    lines = [text for _, _, text in read_lines(ROOT / "results" / "records") if text]
    committed = [line for line in lines if json.loads(line)["schema"].startswith("replayssm.record/")]
    assert committed
    for line in committed:
        record = Record.from_json(line)
        assert json.loads(record.to_json()) == json.loads(line)
    old = json.loads(records.group()[0].to_json()) | {"schema": "replayssm.record/2", "peak_memory_bytes": 7}
    del old["group_peak_memory_bytes"], old["layers_memory_bytes"], old["decode"]
    record = Record.from_json(json.dumps(old))
    assert (record.group_peak_memory_bytes, record.layers_memory_bytes) == (7, None)
    assert json.loads(record.to_json()) == old


def test_lines_are_numbered_and_a_tail_without_an_end_has_no_text(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.jsonl").write_bytes(b"one\n\n  \ntwo\ncut")
    (tmp_path / "deep" / "b.jsonl").write_bytes(b"\xff\n \n")
    (tmp_path / "c.json").write_bytes(b"other\n")
    found = [(path.name, number, text) for path, number, text in read_lines(tmp_path)]
    assert found == [("a.jsonl", 1, "one"), ("a.jsonl", 4, "two"), ("a.jsonl", 5, None), ("b.jsonl", 1, "\udcff")]
    assert list(read_lines(tmp_path / "absent")) == []


def test_compressed_files_are_read_and_damaged_ones_are_told(tmp_path: Path) -> None:
    whole = lzma.compress(b"one\ntwo\ncut")
    (tmp_path / "a.jsonl.xz").write_bytes(whole)
    (tmp_path / "b.jsonl.xz").write_bytes(whole[:-9])
    (tmp_path / "c.jsonl.xz").write_bytes(whole[:12] + bytes(8) + whole[20:])
    (tmp_path / "d.jsonl.xz").write_bytes(b"one\n")
    found = [(path.name, number, text) for path, number, text in read_lines(tmp_path)]
    assert found[:3] == [("a.jsonl.xz", 1, "one"), ("a.jsonl.xz", 2, "two"), ("a.jsonl.xz", 3, None)]
    assert found[3:] == [(f"{name}.jsonl.xz", 1, None) for name in "bcd"]
