"""The engine as a language model of lm-eval: any of its tasks, at any arm.

    lm = EngineLM(Text(folder), arm, Scorer([arm], rows=32, prefill=None), rows=32, settings=Settings())
    lm_eval.evaluator.evaluate(lm=lm, task_dict=...)

Log-likelihoods are teacher-forced (`experiments.forced`): what is scored comes from decode steps of the arm. Generated
text comes from `replayssm.engine.Engine`, a prompt being read at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.defaults import DEFAULT_MAX_GEN_TOKS

from experiments import chat
from experiments.accuracy_arms import Arm
from experiments.accuracy_scores import Scorer
from experiments.documents import tokenizer_of
from experiments.forced import Asked, Work
from experiments.options import ConfigError, refuse
from replayssm.engine import Request, Sampling

GENERATION = ("until", "max_gen_toks", "do_sample", "temperature", "top_p")
END_OF_THINKING = "</think>"


class Text:
    """The tokenizer of a Hugging Face folder; remembers what it has encoded, since arms ask the same. ``ends`` are the
    tokens that the folder names as the end of a text, the first of which stands for an empty context.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokenizer = tokenizer_of(folder)
        self.ends = chat.ends_of(folder)
        self._known: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """Token numbers, none added at either end."""
        if text not in self._known:
            self._known[text] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return self._known[text]

    def pair(self, context: str, continuation: str) -> Asked:
        """Both as one text; spaces at the end of the context belong to the continuation, as in lm-eval."""
        stripped = context.rstrip()
        continuation = context[len(stripped) :] + continuation
        first = self.encode(stripped) if stripped else [self.prefix]
        whole = self.encode(stripped + continuation) if stripped else [self.prefix, *self.encode(continuation)]
        return Asked(whole, min(len(first), len(whole) - 1))

    @property
    def prefix(self) -> int:
        """The token behind which a text begins."""
        if not self.ends:
            raise ConfigError(
                f"{self.folder} names no eos_token_id, behind which a text begins; accepted: one that does"
            )
        return self.ends[0]


@dataclass
class Settings:
    """How prompts are made and answers drawn; see `experiments.accuracy_case.Task`. ``seed`` is of the random numbers,
    the same for all arms."""

    seed: int = 0
    thinking: bool | None = None
    work: Work = field(default_factory=Work)


class EngineLM(LM):
    """``rows`` sequences are decoded side by side; ``scorer`` does what is teacher-forced."""

    def __init__(self, text: Text, arm: Arm, scorer: Scorer, *, rows: int, settings: Settings) -> None:
        super().__init__()
        self.text, self.arm, self.scorer, self.rows, self.settings = text, arm, scorer, rows, settings

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        return self._score([self.text.pair(*request.args) for request in requests])

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Of whole texts behind the end of another, without windows: the engine has no longest context."""
        texts = [[self.text.prefix, *self.text.encode(request.args[0])] for request in requests]
        return [logprob for logprob, _ in self._score([Asked(tokens, 1) for tokens in texts])]

    def generate_until(self, requests: list[Instance]) -> list[str]:
        asked = [self._request(number, *request.args) for number, request in enumerate(requests)]
        order = sorted(range(len(asked)), key=lambda i: asked[i].prompt)  # neighbours begin alike
        untils = [_until(requests[i].args[1]) for i in order]
        made: list[list[int]] = [[] for _ in order]
        capacity = max(len(request.prompt) + request.max_new_tokens for request in asked)
        engine = self.arm.new_engine(min(self.rows, len(asked)), capacity)
        for token in engine.generate([asked[i] for i in order]):
            if token.token in self.text.ends:
                continue
            made[token.request].append(token.token)
            if not token.finished and self._stopped(made[token.request], untils[token.request]):
                engine.end(token.request)
        self.settings.work.prefilled += sum(len(request.prompt) for request in asked)
        self.settings.work.decoded += sum(map(len, made))
        answers = [""] * len(order)
        for place, tokens, until in zip(order, made, untils, strict=True):
            answers[place] = self._answer(self.text.tokenizer.decode(tokens), until)
        return answers

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        variables = {} if self.settings.thinking is None else {"enable_thinking": self.settings.thinking}
        return chat.render(self.text.folder, chat_history, continues=not add_generation_prompt, **variables)

    @property
    def tokenizer_name(self) -> str:
        return self.text.folder.name

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return chat.template_of(self.text.folder) if chat_template else ""

    def _score(self, asked: Sequence[Asked]) -> list[tuple[float, bool]]:
        found = self.scorer.score(self.arm, asked, self.settings.work)
        return [(each.logprob, each.greedy) for each in found]

    def _request(self, number: int, context: str, options: dict[str, Any]) -> Request:
        if unknown := [name for name in options if name not in GENERATION]:
            raise refuse(f"the task's {unknown[0]}", options[unknown[0]], ", ".join(GENERATION), "is not implemented")
        temperature = float(options.get("temperature") or 0.0) if options.get("do_sample", True) else 0.0
        seed = self.settings.seed * 1_000_003 + number
        sampling = Sampling(temperature, float(options.get("top_p") or 1.0), seed % 2**63)
        prompt = tuple(self.text.encode(context) or [self.text.prefix])
        length = int(options.get("max_gen_toks") or DEFAULT_MAX_GEN_TOKS)
        return Request(prompt, length, sampling, stop=frozenset(self.text.ends))

    def _stopped(self, made: list[int], until: Sequence[str]) -> bool:
        """Whether a stop has come with the last tokens; one of n bytes has at most n tokens."""
        longest = max((len(stop.encode()) for stop in until), default=0)
        tail = self.text.tokenizer.decode(made[-longest - 1 :]) if longest else ""
        return any(stop in tail for stop in until)

    def _answer(self, text: str, until: Sequence[str]) -> str:
        """What is judged: up to the first stop, and of a thinking model only what follows its thoughts."""
        for stop in until:
            text = text.split(stop)[0]
        return text.rpartition(END_OF_THINKING)[2].lstrip() if self.settings.thinking else text


def _until(options: dict[str, Any]) -> list[str]:
    until = options.get("until") or []
    return [stop for stop in ([until] if isinstance(until, str) else until) if stop]
