"""The figure of the small models' training, from a log of a few lines."""

import json
import lzma

import matplotlib.pyplot as plt
import pytest

from analysis import training
from analysis.__main__ import same

POSITIONS = {"0-511": 2.5, "512-1023": 2.25, "1024-2047": 2.0}


@pytest.fixture
def models(tmp_path):
    """Two models of 30 logged steps: recall grows longer at step 12, bits per byte fall from 8 by 0.1 a step."""
    for name in ("tiny-a", "tiny-b"):
        (tmp_path / name).mkdir()
        lines = [
            {"step": step, "bits_per_byte": 8 - step / 10, "recall": step / 30, "asked": 128 if step < 12 else 256}
            for step in range(30)
        ]
        log = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / name / "training.jsonl.xz").write_bytes(lzma.compress(log.encode()))
        (tmp_path / name / "evaluation.json").write_text(json.dumps({"bits_per_byte_by_position": POSITIONS}))
    return tmp_path


def test_every_value_of_log_and_evaluation_is_drawn(models):
    figure = training.draw(training.read(models))
    loss, recall, held_out = figure.axes
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["tiny-a", "tiny-b"]
    raw, mean = loss.lines[:2]
    assert raw.get_xydata().tolist() == [[step, 8 - step / 10] for step in range(30)]
    assert mean.get_ydata()[15] == pytest.approx(8 - sum(range(5, 25)) / 20 / 10)
    assert recall.lines[0].get_ydata()[-1] == pytest.approx(100 * 29 / 30)
    assert recall.lines[2].get_xdata().tolist() == [12, 12]
    assert [line.get_xydata().tolist() for line in held_out.lines] == 2 * [[[9, 2.5], [10, 2.25], [11, 2.0]]]
    assert [label.get_text() for label in held_out.get_xticklabels()] == ["512", "1024", "2048"]
    plt.close(figure)


def test_the_command_writes_the_same_bytes_again(models, tmp_path):
    for out in ("one", "two"):
        assert training.main(["--models", str(models), "--out", str(tmp_path / out)]) == 0
    for name in ("training.svg", "training.png"):
        assert same(tmp_path / "one" / name, tmp_path / "two" / name)


@pytest.mark.parametrize(
    ("file", "data", "told"),
    [
        ("evaluation.json", None, r"tiny-a is incomplete \(.*No such file.*accepted: a folder of train_tiny"),
        (
            "training.jsonl.xz",
            lzma.compress(b'{"step": 0'),
            r"tiny-a is incomplete \(Expecting.*accepted: a folder of train_tiny",
        ),
        ("training.jsonl.xz", b"no log", r"tiny-a is incomplete \(Input format.*accepted: a folder of train_tiny"),
        (
            "training.jsonl.xz",
            lzma.compress(b'{"step": 0, "asked": 1}\n'),
            r"training\.jsonl\.xz has no bits_per_byte, recall; accepted: a",
        ),
    ],
)
def test_a_bad_folder_gives_one_line(models, capsys, file, data, told):
    path = models / "tiny-a" / file
    path.unlink() if data is None else path.write_bytes(data)
    with pytest.raises(ValueError, match=told):
        training.read(models)
    assert training.main(["--models", str(models)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_folder_without_models_gives_one_line(tmp_path, capsys):
    assert training.main(["--models", str(tmp_path)]) == 2
    assert "holds no */training.jsonl.xz; accepted: a folder of trained models" in capsys.readouterr().err
