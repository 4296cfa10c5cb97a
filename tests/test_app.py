"""The command line as a person meets it: real processes, what they print, how they exit, what they import and write."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import experiments.case
from experiments.app import run
from experiments.case import case_from_config
from experiments.traffic import question_from_config

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "numba", "numpy", "pandas", "rich", "matplotlib", "transformers")
PROBE = f'''"""Shows what the wrapper does.

    example of use
"""
import atexit, json, sys
from pathlib import Path
from typing import Any

import experiments.case

HERE = Path(__file__).parent
experiments.case.ARMS = HERE / "arms"
from experiments.app import run
from experiments.case import case_from_config
from experiments.options import ConfigError

seen = {{"checked": [], "run": []}}


def leave():
    seen["heavy"] = sorted(set({HEAVY!r}) & set(sys.modules))
    (HERE / "seen.json").write_text(json.dumps(seen))


def check(config):
    seen["checked"].append(config)
    case_from_config(config)


def main(config):
    seen["run"].append(config)
    if config["seed"] == 1:
        import numpy
    if config["seed"] == 3:
        return 3
    if config["seed"] == 4:
        raise KeyError("a bug")
    if config["seed"] == 5:
        raise ConfigError("seed=5 is impossible; accepted: another")


if __name__ == "__main__":
    atexit.register(leave)
    run("kernel", main, check)
'''


class Done:
    """A finished process of the probe: exit code, streams, what it saw, and the files in its folder."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, str(folder.parent / "probe.py"), *arguments]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60)
        self.code, self.out, self.err = done.returncode, done.stdout, done.stderr
        seen = json.loads((folder.parent / "seen.json").read_text())
        self.checked, self.run, self.heavy = seen["checked"], seen["run"], seen["heavy"]
        self.files = sorted(str(f.relative_to(folder)) for f in folder.rglob("*"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "probe.py").write_text(PROBE)
    (tmp_path / "arms").mkdir()
    for arm in ("stored_torch", "stored_cpu", "replay_torch", "replay_cpu"):
        (tmp_path / "arms" / f"{arm}.py").write_text("raise AssertionError('imported')")
    (tmp_path / "cwd").mkdir()
    return tmp_path / "cwd"


MODELS = "kimi_k3, kimi_linear_48b"
BAD = {
    "batch_size=0": ["batch_size=0", "an integer from 1 to 1000000"],
    "model=unheard_of": ["model=unheard_of", MODELS],
    "arms=[stored/gpu]": ["arms=stored/gpu", "replay/cpu, replay/torch, stored/cpu, stored/torch"],
    "-m batch_size=1,8,0": ["batch_size=0", "an integer from 1 to 1000000"],
    "dry_run=true records=../probe.py": ["records=../probe.py", "probe.py is not a folder", "can be written"],
}
BAD_TOO = {
    "interval_length=0": ["interval_length=0", "from 1 to 64"],
    "model=glm_5_3_flash": ["model=glm_5_3_flash has no published layer geometry", "kimi_k3"],
    "model.ssm.heads=95": ["model.ssm.heads=95", "model.ssm.groups=8", "a multiple"],
    "precision.state=fp16": ["precision.state=fp16 is held by no arm of device=cpu", "fp32"],
    "device=cuda": ["precision.state=fp32 is held by no arm of device=cuda", "none"],
    "batch_sise=1": ["batch_sise=1", "batch_size"],
    "records=???": ["records is missing", "records=VALUE"],
    "batch_size==1": ["batch_size==1", "option=value"],
    "--nope": ["--nope", "--help"],
    "-m batch_size=1 model=qwen3_5_4b,nope": ["model=nope", MODELS],
    "--cfg job model=nope": ["model=nope", MODELS],
    "batch_size=abc": ["batch_size=abc is text", "an integer from 1"],
    'batch_size="8"': ['batch_size="8" is text', "an integer from 1"],
    "batch_size=": ['batch_size=""', "an integer from 1"],
    "model=null": ["model=null", MODELS],
    "model=[kimi_k3,nope]": ["model=[kimi_k3,nope]", MODELS],
    "model@other=kimi_k3": ["model@other=kimi_k3", "--help"],
    "model.ssm.hedas=3": ["model.ssm.hedas=3", "head_dim"],
    "model.ssm=3": ["model.ssm=3", "the group of numbers heads, groups"],
    "model.ssm=null": ["model.ssm=null", "the group of numbers heads, groups"],
    "~model.ssm": ["model.ssm is missing", "the group of numbers heads, groups"],
    "model=../kernel": ["model=../kernel", MODELS],
    "model=/etc/passwd": ["model=/etc/passwd", MODELS],
    "model=модель": ["model=модель", MODELS],
    "model.name=qwen3_5_4b": ["model.name=qwen3_5_4b is the name of a published model", "a new name"],
    "model.name='qwen3_5_4b+heads=48'": ["model.name=qwen3_5_4b+heads=48", "published model", "a new name"],
    "model.name=Mine": ["model.name=Mine", "lower-case letters"],
    "-m model.name=mine,a/b": ["model.name=a/b", "lower-case letters"],
    "timing.rounds.x=3": ["timing.rounds.x=3", "--help"],
    "precision=fp64": ["precision=fp64", "fp16_bf16, "],
    "timing=nope": ["timing=nope", "smoke"],
    "timing=3": ["timing=3", "smoke"],
    "hydra/launcher=nope": ["hydra/launcher=nope", "basic"],
    "+extra=1": ["extra=1", "batch_size"],
    "+batch_size=1": ["+batch_size=1", "--help"],
    "~seed": ["seed is missing", "from 0"],
    "batch_size": ["batch_size cannot be parsed", "option=value"],
    "batch_size=1,8": ["batch_size=1,8", "-m to sweep"],
    "batch_size=${nope}": ["batch_size=${nope}", "nope", "a value"],
    "hydra.mode=nope": ["hydra.mode=nope", "RUN, MULTIRUN"],
    "hydra.mode=MULTIRUN batch_size=1,0": ["batch_size=0", "an integer from 1"],
    "hydra.nope=1": ["hydra.nope=1", "sweeper"],
    "--config-name=nope": ["--config-name=nope", "traffic"],
    "--config-name=nope --help": ["--config-name=nope", "traffic"],
    "--config-path=nope": ["--config-path=nope", "--config-dir"],
    "--config-dir=/nope": ["--config-dir=/nope", "a folder"],
    "--resolve": ["--resolve", "--cfg job"],
    "-m arms=[stored/cpu],[replay/cpu]": ["arms=[stored/cpu],[replay/cpu]", "one list"],
    "-m model=kimi_k3,3": ["model=3", MODELS],
    "-m model=glob(nope*)": ["model=glob(nope*)", "at least one"],
    "-m model=glob(*)": ["model=glm_5_3_flash has no published layer geometry", "kimi_k3"],
    "-m seed=interval(0,1)": ["seed=interval(0,1)", "a,b"],
    "-m hydra.job.name=a,b": ["hydra.job.name=a,b", "one value"],
    "-m batch_size=${nope},1": ["batch_size=${nope},1", "a value"],
    "-m --cfg job": ["--cfg --multirun", "one of"],
    "=3": ["=3 names no option", "option=value"],
    "-m batch_size=1 +=3,4": ["+=3,4 names no option", "option=value"],
    "precision=shared_nvfp5": ["precision=shared_nvfp5 is unknown", ": bf16_bf16, fp16_bf16, fp32_bf16, fp32_fp32"],
    "precision=shared_nvfp4": ["precision=shared_nvfp4 is an arm of accuracy, pg", "fp32_fp32; or arms=[shared_n"],
    "-m precision=fp32_bf16,shared_nvfp4": ["precision=shared_nvfp4 is an arm of", "accepted: bf16_bf16, fp16_bf16, "],
    "--config-name=pg19 precision=shared_nvfp4": ["precision=shared_nvfp4 is an arm", "accepted: arms=[shared_nvfp4]"],
}
UNWRITABLE = ("hydra.run.dir={}", "-m batch_size=1,2 hydra.sweep.dir={}", "-m hydra.sweep.dir={} hydra/launcher=basic")
BAD_TRAFFIC = {
    "window=4": ["accepted=null", "1 to 4"],
    "accepted=2": ["accepted=2", "window"],
    "window=0 accepted=1": ["window=0", "from 1 to 64"],
    "window=65 accepted=1": ["window=65", "from 1 to 64"],
    "window=4 accepted=5": ["accepted=5", "at most 4"],
    "read_copy=fp7": ["read_copy=fp7", "nvfp4"],
    "bandwidth_gb_s=1e-4": ["bandwidth_gb_s=0.0001", "at least 0.001 and at most 1e+07"],
    "bandwidth_gb_s=1 read_modify_write_gb_s=1e8": ["read_modify_write_gb_s=100000000.0", "at most 1e+07"],
    "read_modify_write_gb_s=5": ["read_modify_write_gb_s=5.0 needs bandwidth_gb_s", "bandwidth_gb_s=..."],
    "batch_size=1000001": ["batch_size=1000001", "from 1 to 1000000"],
    "arms=[stored/cpu]": ["arms=[stored/cpu]", "batch_size"],
    "ring.d=nvfp4": ["ring.d=nvfp4", "bf16"],
}


def assert_one_line(err: str, said: list[str]) -> None:
    assert err.endswith("\n")
    assert len(err.splitlines()) == 1, err
    assert all(words in err for words in said), err
    assert "accepted: " in err


@pytest.mark.parametrize("arguments", BAD)
def test_a_wrong_request_gets_one_line_and_nothing_else(folder: Path, arguments: str) -> None:
    done = Done(folder, *arguments.split())
    assert (done.code, done.out) == (2, "")
    assert_one_line(done.err, BAD[arguments])
    assert (done.run, done.heavy, done.files) == ([], [], [])


@pytest.mark.parametrize(
    ("config", "arguments"), [("kernel", a) for a in BAD_TOO] + [("traffic", a) for a in BAD_TRAFFIC]
)
def test_more_wrong_requests(
    config: str,
    arguments: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The same in this process, which is quicker."""
    said = (BAD_TOO | BAD_TRAFFIC)[arguments]
    assert_refused(config, arguments, said, folder, monkeypatch, capsys)


def assert_refused(
    config: str,
    arguments: str,
    said: list[str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.setattr(sys, "argv", ["experiment", *arguments.split()])
    monkeypatch.setattr(experiments.case, "ARMS", folder.parent / "arms")
    check = case_from_config if config == "kernel" else question_from_config
    with pytest.raises(SystemExit) as leaving:
        run(config, pytest.fail, check)
    assert leaving.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert_one_line(err, said)


@pytest.mark.parametrize("arguments", UNWRITABLE)
def test_a_folder_of_hydra_that_cannot_be_made_is_named(
    arguments: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder.parent / "file").touch()
    place = f"{folder.parent}/file/x"
    assert_refused(
        "kernel", arguments.format(place), [f"dir={place} cannot", "folders that"], folder, monkeypatch, capsys
    )


SSM = "family: gdn\nssm: {heads: 4, groups: 2, head_dim: 8, state_dim: 16}\n"
BAD_FILES = {
    "no yaml": (f"name: mine\n{SSM}moe: {{top_k: 4\n".encode(), ["model/mine.yaml, line 5", "YAML"]),
    "twice": (f"name: mine\nname: mine\n{SSM}".encode(), ["model/mine.yaml, line 2", "duplicate key name", "YAML"]),
    "control character": (b"name: mine\x01\n", ["model/mine.yaml", "#x0001", "YAML"]),
    "no text": (b"\xff\xfe\x00", ["model/mine.yaml", "0xff", "YAML"]),
    "a list": (b"- name: mine\n", ["model=mine", "model/mine.yaml has name: null", "name: mine"]),
    "other name": (f"name: kimi_k3\n{SSM}".encode(), ["model/mine.yaml has name: kimi_k3", "accepted: name: mine"]),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_wrong_model_file_is_named(
    kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    content, said = BAD_FILES[kind]
    (folder.parent / "own/model").mkdir(parents=True)
    (folder.parent / "own/model/mine.yaml").write_bytes(content)
    arguments = f"--config-dir={folder.parent / 'own'} model=mine"
    assert_refused("kernel", arguments, said, folder, monkeypatch, capsys)


def test_a_model_file_does_not_share_its_name_with_a_published_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder.parent / "own/model").mkdir(parents=True)
    (folder.parent / "own/model/kimi_k3.yaml").write_text(f"name: kimi_k3\n{SSM}")
    arguments = f"--config-dir={folder.parent / 'own'} model=kimi_k3"
    said = ["model=kimi_k3 is both", "own/model/kimi_k3.yaml", "a name of its own"]
    assert_refused("kernel", arguments, said, folder, monkeypatch, capsys)


@pytest.mark.parametrize(
    ("experiment", "arguments"),
    [
        ("traffic", "model=kimi_k3"),
        ("kernel", "--help"),
        ("kernel", "--cfg job"),
        ("kernel", "-m dry_run=true batch_size=1,8"),
    ],
)
def test_what_measures_nothing_needs_no_folder_that_can_be_written(
    folder: Path, experiment: str, arguments: str
) -> None:
    """A file where results/ would be stops root too, for whom no folder is read-only."""
    (folder / "results").touch()
    command = [sys.executable, "-m", f"experiments.{experiment}", *arguments.split()]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder.parent / "arms")}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout
    assert [f.name for f in folder.iterdir()] == ["results"]
    assert not [f for f in (folder.parent / "arms").iterdir() if f.suffix != ".py"]


@pytest.mark.parametrize("arguments", ["--help", "--cfg job", "-m dry_run=true batch_size=1,8"])
def test_a_reader_that_leaves_is_no_error(folder: Path, arguments: str) -> None:
    command = [sys.executable, "-m", "experiments.kernel", *arguments.split()]
    read, write = os.pipe()
    os.close(read)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=env, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_the_probe_notices_heavy_imports(folder: Path) -> None:
    done = Done(folder, "seed=1")
    assert (done.code, done.heavy) == (0, ["numpy"])


def test_a_sweep_is_checked_whole_and_runs_as_it_was_checked(folder: Path) -> None:
    sweep = [
        "model=qwen3_5_4b,kimi_k3",
        "batch_size=1,8",
        "timing.name='a b',c",
        "interval_length=16",
        "arms=[replay/cpu]",
    ]
    done = Done(folder, "-m", *sweep)
    assert (done.code, done.out, done.err) == (0, "", "")
    assert len(done.run) == 8
    assert done.checked == done.run * 2  # all before the first job, then each once more in its job
    told = [(c["model"]["name"], c["batch_size"], c["timing"]["name"]) for c in done.run]
    assert told == [(m, b, t) for m in ("qwen3_5_4b", "kimi_k3") for b in (1, 8) for t in ("a b", "c")]
    assert done.files == []


def test_a_single_run_gets_plain_data_and_writes_nothing(folder: Path) -> None:
    done = Done(folder, "model.ssm.heads=104", "records=elsewhere")
    assert (done.code, done.out, done.err, done.files) == (0, "", "", [])
    (config,) = done.run
    assert config["model"]["name"] == "nemotron_3_nano_4b+heads=104"
    assert config["records"] == "elsewhere"
    assert config["arms"] == "default"


def test_a_swept_timing_is_named_after_what_was_changed(folder: Path) -> None:
    done = Done(folder, "-m", "timing.rounds=20,3")
    assert (done.code, done.err) == (0, "")
    assert [c["timing"]["name"] for c in done.run] == ["default", "default+rounds=3"]
    assert done.checked == done.run * 2


def test_what_the_task_returns_is_the_exit_code(folder: Path) -> None:
    assert Done(folder, "-m", "seed=0,3,2").code == 3


def test_a_bug_keeps_its_traceback(folder: Path) -> None:
    done = Done(folder, "seed=4")
    assert done.code == 1
    assert "Traceback" in done.err
    assert "KeyError: 'a bug'" in done.err


def test_a_refusal_out_of_the_task_is_one_line(folder: Path) -> None:
    done = Done(folder, "seed=5")
    assert (done.code, done.err) == (2, "seed=5 is impossible; accepted: another\n")


def test_a_folder_of_own_models(folder: Path) -> None:
    own = folder.parent / "own" / "model"
    own.mkdir(parents=True)
    (own / "mine.yaml").write_text("name: mine\nfamily: gdn\nssm: {heads: 4, groups: 2, head_dim: 8, state_dim: 16}\n")
    done = Done(folder, f"--config-dir={own.parent}", "model=mine")
    assert (done.code, done.err) == (0, "")
    assert done.run[0]["model"]["name"] == "mine"


def test_help_tells_what_it_does_its_groups_and_its_options(folder: Path) -> None:
    done = Done(folder, "--help")
    assert (done.code, done.err, done.run) == (0, "", [])
    assert done.out.startswith("Shows what the wrapper does.")
    for words in ("example of use", "qwen3_5_4b", "kimi_k3", "smoke", "batch_size=64", "arms=[", "-m "):
        assert words in done.out
    assert "  precision   fp32_bf16, bf16_bf16, fp16_bf16, fp32_fp32\n" in done.out, "no arms among them"


def test_cfg_prints_the_composed_config(folder: Path) -> None:
    from omegaconf import OmegaConf

    done = Done(folder, "--cfg", "job", "batch_size=7")
    assert (done.code, done.err, done.run) == (0, "", [])
    assert OmegaConf.create(done.out).batch_size == 7


def traffic(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "experiments.traffic", *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80"}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60)


def test_traffic_card(folder: Path) -> None:
    done = traffic("model=nemotron_3_nano_4b", "batch_size=256", folder=folder)
    assert (done.returncode, done.stderr) == (0, "")
    for words in ("nemotron_3_nano_4b", "1,006.633", "1,107.978", "fewest bytes at L = 21", "1.82", "bandwidth_gb_s="):
        assert words in done.stdout, words


def test_traffic_floor_and_speculation(folder: Path) -> None:
    arguments = ["model=qwen3_5_122b", "batch_size=1", "window=4", "accepted=3"]
    done = traffic(*arguments, "bandwidth_gb_s=1000", "read_modify_write_gb_s=500", folder=folder)
    assert done.returncode == 0
    assert "stored 41.94 us" in done.stdout  # five states of 4 MiB at 500 GB/s
    assert "1000 GB/s read, 500 GB/s read-modify-write" in done.stdout


@pytest.mark.parametrize("experiment", ["kernel", "traffic"])
def test_the_experiments_themselves_refuse_before_anything_heavy_is_imported(folder: Path, experiment: str) -> None:
    command = [sys.executable, "-X", "importtime", "-m", f"experiments.{experiment}", "batch_size=0"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60)
    imports = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    (refusal,) = [line for line in done.stderr.splitlines() if line not in imports]
    assert (done.returncode, refusal) == (2, "batch_size=0 is impossible; accepted: an integer from 1 to 1000000")
    names = {line.rpartition("|")[2].strip() for line in imports}
    assert "hydra" in names
    assert not names & set(HEAVY)


def test_the_jobs_of_a_sweep_are_run_together_unless_hydra_is_told_how(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[list[int]] = []
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.setattr(experiments.case, "ARMS", folder.parent / "arms")

    def alone(config: dict[str, Any]) -> int:
        return seen.append([config["batch_size"]]) or 0

    def together(configs: list[dict[str, Any]]) -> int:
        return seen.append([config["batch_size"] for config in configs]) or 0

    for arguments in ("-m batch_size=1,8", "batch_size=4", "-m batch_size=1,8 hydra/launcher=basic"):
        monkeypatch.setattr(sys, "argv", ["experiment", *arguments.split()])
        with pytest.raises(SystemExit) as leaving:
            run("kernel", alone, sweep=together)
        assert leaving.value.code == 0, capsys.readouterr()
    assert seen == [[1, 8], [4], [1], [8]]
