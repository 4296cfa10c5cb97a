"""Of a Hugging Face folder the tokens that end a text, and the chat template, rendered as transformers renders it,
without transformers.
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

from experiments.options import ConfigError


def ends_of(folder: Path) -> list[int]:
    """The tokens that generation_config.json and config.json, its text model's among them, name as the end of a text;
    empty where they name none. Raises ``ConfigError`` on what is no token."""
    ends: list[int] = []
    for file in (folder / "generation_config.json", folder / "config.json"):
        config = _object_of(file)
        text_config = config.get("text_config")
        inner = text_config if isinstance(text_config, dict) else {}
        named = config.get("eos_token_id", inner.get("eos_token_id"))
        found = named if isinstance(named, list) else [] if named is None else [named]
        if not all(isinstance(token, int) for token in found):
            raise ConfigError(f"{file}: eos_token_id={named!r} is impossible; accepted: a token, or a list of them")
        ends += found
    return list(dict.fromkeys(ends))


def template_of(folder: Path) -> str | None:
    """The default template: of chat_template.jinja, or of tokenizer_config.json; None where there is none."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = _object_of(folder / "tokenizer_config.json").get("chat_template")
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
    options = _object_of(folder / "tokenizer_config.json")
    tokens = {name: token for name, token in options.items() if name.endswith("_token")}
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


def _object_of(file: Path) -> dict[str, Any]:
    """The object that a folder's file holds; empty without the file. Raises ``ConfigError`` on another content."""
    try:
        found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except ValueError as error:
        raise ConfigError(f"{file} is no JSON ({error}); accepted: a JSON object") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{file} holds a {type(found).__name__}; accepted: a JSON object")
    return found
