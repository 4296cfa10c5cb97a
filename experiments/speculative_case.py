"""The case of the speculative experiment: a `DecodeCase` with a window of tokens, and where their drafts come from.

Standard library only, but for what reads the model's configuration, last of all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from experiments.case import OPTIONS, arms_from_config, check_run_options, choice
from experiments.decode_case import RANDOM, DecodeCase, decode_fields, model_config, with_geometry
from experiments.measure import nvidia
from experiments.options import ConfigError, get, integer, number, only, refuse, text
from experiments.weights import digest, refuse_incomplete, refused_by
from replayssm.arms import ARMS as DECODE_ARMS
from replayssm.arms import MAX_WINDOW, WINDOW_ARMS

ARMS = (*(arm for arm in DECODE_ARMS if arm.startswith("replay/")), *WINDOW_ARMS)
"""Without speculation, with snapshots, with replay that verifies."""
CONTROLLED, DRAFT_MODEL = "controlled", "draft_model"
DRAFTERS = (CONTROLLED, "mtp", "ngram", DRAFT_MODEL)
WORD_PROBLEMS = "word_problems"
PROMPTS = f"{WORD_PROBLEMS}, a JSON-lines file with a question a line, or a data set of the Hugging Face hub"


@dataclass(frozen=True)
class SpeculativeCase(DecodeCase):
    """``window`` T = 1 + drafts; ``drafter`` makes them; ``acceptance`` is the chance of a controlled draft to be
    accepted, given that those before it were, else 0. ``prompts`` as the option; empty where tokens are forced, when
    all rows have one random prompt. ``draft_weights`` is the draft model's folder. Digests tell files from others.
    """

    window: int = 4
    drafter: str = CONTROLLED
    acceptance: float = 0.0
    prompts: str = ""
    prompts_digest: str = ""
    draft_weights: str = ""
    draft_digest: str = ""

    @property
    def forced(self) -> bool:
        return self.weights == RANDOM or self.drafter == CONTROLLED

    @property
    def head(self) -> bool:
        """Whether the model is loaded with its MTP head."""
        return self.drafter == "mtp"

    def capacity(self, window: int | None) -> int:
        return self.context + (self.steps + 5 * self.interval_length) * (window or 1)

    @property
    def longest(self) -> int:
        """Tokens that a row is given at most, when every draft of every step is accepted."""
        return self.capacity(self.window)


def case_from_config(config: Mapping[str, Any]) -> SpeculativeCase:
    """Check the whole config, arms and run options too, and build the case. Raises ``ConfigError``."""
    decode = ("weights", "context", "steps", "blocks")
    only(config, (*OPTIONS, *decode, "window", "drafter", "acceptance", "prompts", "draft_weights"))
    choice(config, "experiment", ["speculative"])
    longest = min(MAX_WINDOW, integer(config, "interval_length", 1, 64))
    window = integer(config, "window", 1, longest, "at most 16 tokens, and no longer than the interval")
    drafter = choice(config, "drafter", DRAFTERS)
    chance = number(config, "acceptance", 0.0, 1.0, equal=True)
    drafts = _draft_model(config, drafter)
    text(config, "prompts", PROMPTS)
    speculative_arms(config)
    check_run_options(config)
    fields = decode_fields(config)
    if not config["dry_run"]:
        nvidia.refuse_without(fields["device"])
    if fields["weights"] == RANDOM and drafter != CONTROLLED:
        raise refuse("drafter", drafter, f"{CONTROLLED}, or weights=FOLDER", "drafts for no random weights")
    if drafter != CONTROLLED and not (Path(fields["weights"]) / "tokenizer.json").is_file():
        raise refuse(
            "weights", fields["weights"], f"a folder with one, or drafter={CONTROLLED}", "lacks tokenizer.json"
        )
    case = SpeculativeCase(
        experiment="speculative",
        **fields,
        window=window,
        drafter=drafter,
        acceptance=chance if drafter == CONTROLLED else 0.0,
        **({} if drafter == CONTROLLED else _prompts(config)),
        **drafts,
    )
    if case.head:
        _refuse_headless(case)
    if case.draft_weights:
        _refuse_other_vocabulary(case)
    return with_geometry(case)  # imports torch


def speculative_arms(config: Mapping[str, Any]) -> tuple[str, ...]:
    """As `arms_from_config`, of the arms that decode a token or a window a step."""
    return arms_from_config(config, ARMS, mixed=True)


def _draft_model(config: Mapping[str, Any], drafter: str) -> dict[str, str]:
    folder = "a folder with config.json and safetensors, of the same vocabulary"
    if drafter != DRAFT_MODEL:
        if get(config, "draft_weights", "null") is not None:
            raise refuse("draft_weights", config["draft_weights"], f"null, or drafter={DRAFT_MODEL} as well")
        return {}
    if get(config, "draft_weights", folder) is None:
        raise ConfigError(f"drafter={DRAFT_MODEL} needs weights of its own; accepted: draft_weights={folder}")
    path = Path(text(config, "draft_weights", folder))
    if not path.is_dir():
        raise refuse("draft_weights", str(path), folder, "is no folder")
    refuse_incomplete("draft_weights", str(path), path, "config.json", accepted=folder)
    return {"draft_weights": str(path.resolve()), "draft_digest": digest(path)}


def _prompts(config: Mapping[str, Any]) -> dict[str, str]:
    """Prompts by name, by file or from the hub, which is not asked yet."""
    named = text(config, "prompts", PROMPTS)
    if named == WORD_PROBLEMS:
        return {"prompts": named}
    file = Path(named)
    if file.is_file():
        questions_of(file)
        return {"prompts": str(file.resolve()), "prompts_digest": sha256(file.read_bytes()).hexdigest()[:16]}
    if named.count("/") != 1 or named.startswith(("/", ".")) or named.endswith((".jsonl", "/")):
        raise refuse("prompts", named, PROMPTS, "is no file")
    return {"prompts": named}


def questions_of(file: Path) -> list[str]:
    """The ``question`` of each line of JSON that is not blank. Raises ``ConfigError`` on a line without."""
    found = []
    for place, line in enumerate(file.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            question = json.loads(line)["question"]
        except (ValueError, TypeError, LookupError):  # no JSON, no object, no question
            question = None
        if not isinstance(question, str):
            raise refuse("prompts", str(file), PROMPTS, f"has no question in line {place}")
        found.append(question)
    if not found:
        raise refuse("prompts", str(file), PROMPTS, "has no line")
    return found


def _refuse_headless(case: SpeculativeCase) -> None:
    from replayssm.models import ModelError, check_folder

    try:
        check_folder(case.weights, head=True)
    except ModelError as error:
        raise refuse("drafter", case.drafter, "controlled, ngram, draft_model", f"finds no head: {error}") from None


def _refuse_other_vocabulary(case: SpeculativeCase) -> None:
    from replayssm.models import check_folder, config_from_folder

    with refused_by("draft_weights", case.draft_weights):
        drafts = config_from_folder(case.draft_weights).vocab_size
        if drafts != (own := model_config(case).vocab_size):
            accepted = f"a model of {own}, as weights={case.weights} has"
            raise refuse("draft_weights", case.draft_weights, accepted, f"is a model of {drafts} tokens")
        check_folder(case.draft_weights)


def in_words(case: SpeculativeCase) -> str:
    """Window and drafter."""
    chance = f" at {case.acceptance:g}" if case.drafter == CONTROLLED else ""
    return f"window {case.window}, drafts {case.drafter}{chance}"
