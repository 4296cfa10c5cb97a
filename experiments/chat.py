"""The chat template of a Hugging Face folder, rendered as transformers renders it, without transformers."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

from experiments.options import ConfigError


def template_of(folder: Path) -> str | None:
    """The default template: of chat_template.jinja, or of tokenizer_config.json; None where there is none."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = _configuration(folder).get("chat_template")
    if isinstance(found, list):
        found = {entry["name"]: entry["template"] for entry in found}.get("default")
    return found


def render(folder: Path, messages: list[dict[str, str]], *, continues: bool, **variables: Any) -> str:
    """The prompt for ``messages``, behind which the assistant's answer begins, or, where it ``continues``, the last of
    them goes on. ``variables``, such as enable_thinking, are the template's own. Raises ``ConfigError`` where the
    template refuses the messages.
    """
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refused(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals |= {"raise_exception": refused, "strftime_now": lambda form: datetime.now().strftime(form)}
    tokens = {name: token for name, token in _configuration(folder).items() if name.endswith("_token")}
    known = {name: token["content"] if isinstance(token, dict) else token for name, token in tokens.items()}
    given = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": not continues}
    try:
        text = environment.from_string(template_of(folder) or "").render(**known, **given, **variables)
    except TemplateError as error:
        raise ConfigError(f"{folder}: its chat template refuses ({error}); accepted: another task") from None
    if continues:
        last = messages[-1]["content"].strip()
        text = text[: text.rindex(last) + len(last)]
    return text


def _configuration(folder: Path) -> dict[str, Any]:
    file = folder / "tokenizer_config.json"
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return found
