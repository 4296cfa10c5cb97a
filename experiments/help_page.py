"""The page that ``--help`` prints: the experiment's docstring, then groups and options read from the config files."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from experiments.names import is_choice

OPTION = re.compile(r"^(?P<name>\w+): (?P<value>.*?)(?:  # (?P<note>.*))?$")
DEFAULT = re.compile(r"^  - (?P<group>\w+): (?P<choice>\w+)$")
FOOTER = """\
Any field of a group can be set too, such as model.ssm.heads=48; see all with --cfg job.

Flags:
  -m            sweep: every combination of comma lists, such as batch_size=1,8,64
  --cfg job     print the composed config and stop
  --config-dir  a further folder laid out like configs/, for models of your own
  --hydra-help  Hydra's own flags"""


def primary_configs(configs: Path) -> list[str]:
    """Names that ``--config-name`` accepts: the files that list defaults and options."""
    return sorted(f.stem for f in configs.glob("*.yaml") if "\ndefaults:\n  - quiet\n" in f.read_text(encoding="utf-8"))


def groups_of(configs: Path, config_name: str) -> dict[str, str]:
    """The groups of a primary config in ``configs``, with their defaults; none of one that lies elsewhere."""
    file = configs / f"{config_name}.yaml"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return {m["group"]: m["choice"] for m in map(DEFAULT.match, lines) if m}


def help_page(configs: Path, config_name: str, about: str) -> str:
    """The page for the primary config ``config_name`` in ``configs``, under the text ``about``."""
    lines = (configs / f"{config_name}.yaml").read_text(encoding="utf-8").splitlines()
    groups = groups_of(configs, config_name)
    lines += _experiment(configs, groups)
    options = [m for m in map(OPTION.match, lines) if m and m["name"] != "experiment"]
    page = [about.strip(), "", "Groups, as group=choice (the first is the default):"]
    for group, default in groups.items():
        files = [f for f in (configs / group).glob("*.yaml") if is_choice(f)]
        others = sorted(f.stem for f in files if f.stem != default)
        choices = textwrap.wrap(", ".join([default, *others]), 100)
        page += [f"  {group if i == 0 else '':<12}{line}" for i, line in enumerate(choices)]
    page += ["", "Options, as option=value, with their defaults:"]
    for m in options:
        given = f"{m['name']}={m['value']}"
        gap = " " * (28 - len(given)) if len(given) < 28 else "\n" + " " * 30
        page.append(f"  {given}{gap}{m['note'] or ''}".rstrip())
    return "\n".join([*page, "", FOOTER])


def _experiment(configs: Path, groups: dict[str, str]) -> list[str]:
    file = configs / "experiment" / f"{groups.get('experiment')}.yaml"
    return file.read_text(encoding="utf-8").splitlines() if file.exists() else []
