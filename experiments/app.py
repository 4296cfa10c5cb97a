"""Runs an experiment as a Hydra application that answers a wrong request with one line.

    if __name__ == "__main__":
        run("kernel", main)  # main(config: dict) -> int | None

Everything that a person can get wrong is found before the first job runs: the command line is parsed and every job of
it, of a whole sweep too, is composed and checked here, and only then Hydra is let loose. A refusal is one line on
stderr and exit code 2, Ctrl-C one line and exit code 130, a reader of stdout that leaves (``| head -1``) no line and
exit code 141. An exception out of the task is a bug of ours and keeps its traceback.

Caveats. Nothing heavy may be imported before ``run`` has called the task: ``task`` imports what it needs itself. A
launcher that runs jobs in other processes (Slurm, Ray) returns no exit codes; look at the records then.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import select
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra._internal.utils import get_args_parser  # the parser of hydra.main, which has no public name
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf._utils import yaml  # the PyYAML that it reads files with, which is no requirement of ours
from omegaconf.errors import (
    OmegaConfBaseException,
)

from experiments.case import case_from_config
from experiments.help_page import groups_of, help_page, primary_configs
from experiments.names import CONFIGS, is_choice, with_model_named, with_timing_named
from experiments.options import ConfigError, refuse, shown
from experiments.refusals import choices_of, describe, unknown_choice, unreadable

VERSION_BASE = "1.3"
NOBODY_READS = 141  # what a shell reports for a process that SIGPIPE ended
NEVER_SWEPT = ("arms",)  # arms of one case are timed together; apart, their times could not be compared
COMPARING = "accuracy, pg19 and layer_drift"
"""Experiments whose arms are precisions."""

Config = dict[str, Any]
Task = Callable[[Config], int | None]


def run(
    config_name: str,
    task: Task,
    check: Callable[[Config], object] = case_from_config,
    sweep: Callable[[list[Config]], int | None] | None = None,
) -> NoReturn:
    """Run ``task`` on every job of the command line and exit: 0, the first nonzero value that it returned, 2 after a
    refusal, 130 after Ctrl-C, 141 if nobody reads the output. ``check`` raises ``ConfigError`` on a config that cannot
    be run, which no task gets. ``sweep`` gets all jobs of ``-m`` together, unless a setting of Hydra's own, such as a
    launcher, says how to run them.
    """
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises instead of printing and exiting by itself
    try:
        code = _run(config_name, task, check, sweep)
        sys.stdout.flush()
    except BrokenPipeError:
        if not _nobody_reads():
            raise
        code = NOBODY_READS
    except ConfigError as error:
        print(error, file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        print("interrupted; what is recorded stays, and the same command goes on from there", file=sys.stderr)
        code = 130
    sys.exit(code)


def _nobody_reads() -> bool:
    """Whether the reader of stdout has left; then what is still to be written goes nowhere, without an error."""
    reader = select.poll()
    reader.register(sys.stdout.fileno(), 0)
    if not reader.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def _run(
    config_name: str,
    task: Task,
    check: Callable[[Config], object],
    sweep: Callable[[list[Config]], int | None] | None,
) -> int:
    args = _arguments()
    config_name = args.config_name or config_name
    if not args.config_dir and config_name not in primary_configs(CONFIGS):
        known = ", ".join(primary_configs(CONFIGS))
        raise ConfigError(f"--config-name={config_name} is unknown; accepted: {known}")
    if args.help:
        print(help_page(CONFIGS, config_name, sys.modules[task.__module__].__doc__ or ""))
        return 0
    if not (args.hydra_help or args.info or args.shell_completion):
        jobs = []
        for config in _jobs(args, config_name):
            if not args.cfg:
                check(config)
                jobs.append(config)
        if sweep is not None and args.multirun and not any(o.lstrip("+~").startswith("hydra") for o in args.overrides):
            return sweep(jobs) or 0

    typed = sys.argv
    codes: list[int] = []
    in_task = False

    @functools.wraps(task)
    def job(cfg: DictConfig) -> None:
        nonlocal in_task
        config = to_plain(cfg)
        sys.argv = typed  # what a record quotes
        try:
            check(config)
            in_task = True
            codes.append(task(config) or 0)
        except ConfigError as error:
            print(error, file=sys.stderr)
            codes.append(2)
        except BrokenPipeError:
            if not _nobody_reads():
                raise
            sys.exit(NOBODY_READS)
        in_task = False

    try:
        with _arguments_of_hydra(args):
            hydra.main(config_path=str(CONFIGS), config_name=config_name, version_base=VERSION_BASE)(job)()
    except (HydraException, OmegaConfBaseException) as error:
        if in_task:
            raise
        raise ConfigError(describe(error, [])) from None
    except OSError as error:
        if in_task or isinstance(error, BrokenPipeError):
            raise
        raise ConfigError(_unusable(error, args.overrides)) from None
    return next((code for code in codes if code), 0)


def _unusable(error: OSError, overrides: Sequence[str]) -> str:
    """The line for a folder in which Hydra can write nothing: one of its own settings, or the temporary folder."""
    places = ("hydra.run.", "hydra.sweep.", "hydra.output_subdir")
    asked = " ".join(o for o in overrides if o.lstrip("+").startswith(places)) or "the temporary folder"
    where = f"{error.filename}: " if error.filename else ""
    return f"{asked} cannot be used ({where}{error.strerror}); accepted: folders that can be made and written"


@contextlib.contextmanager
def _arguments_of_hydra(args: Any) -> Iterator[None]:
    """``sys.argv`` with a temporary folder for the file that Hydra writes about a sweep; it is gone afterwards."""
    typed = sys.argv
    if not (args.multirun or any(o.startswith("hydra.mode=") for o in args.overrides)):
        yield
        return
    at = typed.index(args.overrides[0]) if args.overrides else len(typed)  # before one of the user's own, which wins
    with tempfile.TemporaryDirectory(prefix="replayssm-") as folder:
        sys.argv = [*typed[:at], f"hydra.sweep.dir={folder}", *typed[at:]]
        try:
            yield
        finally:
            sys.argv = typed


def to_plain(cfg: DictConfig) -> Config:
    """The composed config as nested dicts, interpolations resolved, without Hydra's own part. A model or timing that
    was overridden has another name (`experiments.names`).
    """
    own = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
    config: Config = OmegaConf.to_container(own, resolve=True, throw_on_missing=True)  # type: ignore[assignment]
    return with_timing_named(with_model_named(config))


def _arguments() -> Any:
    parser = get_args_parser()

    def error(message: str) -> NoReturn:
        raise ConfigError(f"{message}; accepted: option=value, -m, --help, --cfg job and the flags of --hydra-help")

    parser.error = error  # type: ignore[method-assign]
    args = parser.parse_args()
    if args.config_path:
        raise ConfigError(f"--config-path={args.config_path} is not supported; accepted: --config-dir=FOLDER")
    if args.experimental_rerun:
        raise ConfigError("--experimental-rerun is not supported; accepted: the options of the run, again")
    if args.config_dir and not Path(args.config_dir).is_dir():
        raise ConfigError(f"--config-dir={args.config_dir} is not a folder; accepted: a folder laid out like configs/")
    commands = {"--run": args.run, "--cfg": args.cfg, "--multirun": args.multirun, "--info": args.info}
    given = [name for name, value in commands.items() if value]
    if len(given) > 1:
        raise ConfigError(f"{' '.join(given)} cannot be combined; accepted: one of {', '.join(commands)}")
    if args.resolve and not args.cfg:
        raise ConfigError("--resolve alone does nothing; accepted: --cfg job --resolve")
    return args


def _jobs(args: Any, config_name: str) -> Iterator[Config]:
    """The plain config of every job, in some order; refuses what cannot be composed."""
    folders = [CONFIGS, *([Path(args.config_dir).resolve()] if args.config_dir else [])]
    searched = [f"hydra.searchpath=[file://{folder}]" for folder in folders[1:]]
    overrides: list[Override] = []
    try:
        with hydra.initialize_config_dir(str(CONFIGS), version_base=VERSION_BASE, job_name=config_name):
            parser = OverridesParser.create(GlobalHydra.instance().config_loader())
            overrides = parser.parse_overrides(args.overrides)
            _refuse_choices(overrides, parser, folders, config_name)
            first = hydra.compose(config_name, searched + _first(overrides), return_hydra_config=True)
            multirun = args.multirun or first.hydra.mode == RunMode.MULTIRUN
            if multirun and first.hydra.sweeper.get("params"):
                params = [f"{key}={value}" for key, value in first.hydra.sweeper.params.items()]
                overrides = parser.parse_overrides(params) + overrides
            _refuse_sweeps(overrides, multirun)
            yield from _product(config_name, searched, overrides, parser)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(unreadable(error, folders)) from None
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(describe(error, overrides, folders)) from None


def _first(overrides: Sequence[Override]) -> list[str]:
    """The overrides with each sweep replaced by its first value."""
    return [f"{o.get_key_element()}={_values(o)[0]}" if o.is_sweep_override() else str(o.input_line) for o in overrides]


def _values(override: Override) -> list[str]:
    """A sweep's values, as written on the command line."""
    if not override.is_discrete_sweep():
        raise ConfigError(f"{override.input_line} is no list of values; accepted: a,b or choice(a,b) or range(a,b)")
    values = list(override.sweep_string_iterator())
    if not values:
        raise ConfigError(f"{override.input_line} matches nothing; accepted: at least one value")
    return values


def _refuse_sweeps(overrides: Sequence[Override], multirun: bool) -> None:
    for override in overrides:
        if not override.is_sweep_override():
            continue
        key = override.key_or_group
        if key in NEVER_SWEPT:
            raise ConfigError(f"{override.input_line} is a sweep; accepted: one list, {key}=[...], timed together")
        if override.is_hydra_override():
            raise ConfigError(f"{override.input_line} is a sweep; accepted: one value, as for all of hydra's options")
        if not multirun:
            raise ConfigError(
                f"{override.input_line} is a sweep; accepted: one value, [a,b] for a list, or -m to sweep"
            )


def _refuse_choices(
    overrides: Sequence[Override], parser: OverridesParser, folders: Sequence[Path], config_name: str
) -> None:
    """Hydra answers a choice that is no word with a traceback, and takes one with a slash for another group. What is an
    arm's file it would compose.
    """
    for override in overrides:
        if not override.key_or_group:
            raise ConfigError(f"{override.input_line} names no option; accepted: option=value")
        group = CONFIGS / override.key_or_group
        if override.is_delete() or not group.is_dir():
            continue
        for text in _values(override) if override.is_sweep_override() else [override.get_value_element_as_str()]:
            value = parser.parse_override(f"{override.key_or_group}={text}").value()
            if not isinstance(value, str) or "/" in value:
                raise ConfigError(unknown_choice(override.key_or_group, text, folders))
            files = [folder / override.key_or_group / f"{value}.yaml" for folder in folders]
            if any(f.exists() and not is_choice(f) for f in files):
                accepted = f"arms=[{value}]"
                if override.key_or_group in groups_of(CONFIGS, config_name):
                    accepted = f"{choices_of(override.key_or_group, value, folders)}; or {accepted} there"
                raise refuse(override.key_or_group, value, accepted, f"is an arm of {COMPARING}")


def _refuse_name(cfg: DictConfig) -> None:
    """A model goes by the name of its file, so that two of them never share one; a name that is typed is a new one."""
    chosen = cfg.hydra.runtime.choices.get("model")
    sources = dict.fromkeys(Path(s.path) for s in cfg.hydra.runtime.config_sources if s.schema == "file")
    files = [f for f in (path / "model" / f"{chosen}.yaml" for path in sources) if f.exists()]
    if len(files) > 1:
        raise ConfigError(
            f"model={chosen} is both {files[0]} and {files[1]}; accepted: a name of its own for each file"
        )
    if not files:
        return
    data = OmegaConf.to_container(OmegaConf.load(files[0]))
    inside = data.get("name") if isinstance(data, dict) else None
    if inside != chosen:
        raise ConfigError(f"model={chosen}: {files[0]} has name: {shown(inside)}; accepted: name: {chosen}")
    name = OmegaConf.select(cfg, "model.name")
    if not isinstance(name, str) or name == chosen:
        return
    if not re.fullmatch(r"[a-z0-9_+=.-]+", name):
        raise refuse("model.name", name, "lower-case letters, digits and _ + = . -")
    if (CONFIGS / "model" / f"{name.partition('+')[0]}.yaml").exists():
        raise refuse("model.name", name, f"a new name, or none for {chosen}", "is the name of a published model")


def _product(
    config_name: str, searched: list[str], overrides: Sequence[Override], parser: OverridesParser
) -> Iterator[Config]:
    """Every combination of a sweep.

    Composing takes 50 ms, so only choices of groups are composed anew; a plain value is put into a copy of the
    composed config, which is what Hydra does with it.
    """
    last = {o.get_key_element(): o for o in overrides}  # as in Hydra's sweeper, the last of equal keys counts
    sweeps = [o for o in last.values() if o.is_sweep_override()]
    groups = [o for o in sweeps if _composes(o)]
    plain = [o for o in sweeps if not _composes(o)]
    loose = [[parser.parse_override(f"{o.get_key_element()}={v}").value() for v in _values(o)] for o in plain]
    fixed = [str(o.input_line) for o in last.values() if not o.is_sweep_override()]
    for chosen in itertools.product(*(_values(o) for o in groups)):
        lines = [f"{o.get_key_element()}={value}" for o, value in zip(groups, chosen, strict=True)]
        cfg = hydra.compose(config_name, searched + fixed + lines + _first(plain), return_hydra_config=True)
        _refuse_name(cfg)
        composed = to_plain(cfg)
        for values in itertools.product(*loose):
            config = composed
            for override, value in zip(plain, values, strict=True):
                config = _put(config, override.key_or_group.split("."), value)
            yield with_timing_named(config)


def _composes(override: Override) -> bool:
    """Whether a new value of it can change more than itself."""
    group = (CONFIGS / override.key_or_group).is_dir() or override.package is not None
    return group or override.key_or_group.startswith(("hydra", "model.")) or "${" in str(override.input_line)


def _put(config: Config, path: list[str], value: object) -> Config:
    """A copy with the value at ``path``; what is not on the path is shared."""
    if len(path) == 1:
        return {**config, path[0]: value}
    return {**config, path[0]: _put(config[path[0]], path[1:], value)}
