"""`Engine`: requests in, tokens out as they come."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from replayssm.engine.arms import new_cache
from replayssm.engine.sampling import Sampler, Sampling
from replayssm.engine.step import Step
from replayssm.models import Decoder, ModelCache, ModelError
from replayssm.models.prompt import common_beginning
from replayssm.precision import Precision


@dataclass(frozen=True)
class Request:
    """A prompt of token numbers, and how it goes on: until a token of ``stop``, or ``max_new_tokens``."""

    prompt: Sequence[int]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Token:
    """The next ``token`` of the request of that number; ``finished`` is "stop" or "length" with its last one."""

    request: int
    token: int
    finished: str | None = None


@dataclass
class _Row:
    """A request in its slot."""

    number: int
    request: Request
    length: int
    """Tokens in the cache."""
    made: int = 0


@dataclass
class Engine:
    """Decodes up to ``slots`` requests at a time, each of up to ``capacity`` tokens, prompt included.

    A slot whose request ends is given to the next one while the others go on. Prompts are read ``prompt_rows`` at a
    time, ``chunk`` tokens of each, what they begin with in common once. ``precision`` and ``rounding_seed`` are as in
    `new_cache`, as its errors are. Raises `ModelError` on an arm that cannot run where the model is.
    """

    model: Decoder
    arm: str
    slots: int
    capacity: int
    interval_length: int = 16
    state_dtype: torch.dtype = torch.float32
    precision: Precision | None = None
    rounding_seed: int = 0
    prompt_rows: int = 8
    chunk: int = 512
    _rows: dict[int, _Row] = field(default_factory=dict, init=False)
    """By slot."""
    _coming: deque[Token] = field(default_factory=deque, init=False)
    """Of the last step, what its caller has not seen yet."""

    def __post_init__(self) -> None:
        self.cache = self._new_cache()
        device = self.model.embedding.device
        self.sampler = Sampler(self.slots, device)
        self._tokens = torch.zeros(self.slots, dtype=torch.int64, device=device)
        self._live = torch.full((self.slots,), -1, dtype=torch.int64, device=device)
        self._steps = {greedy: self._step(greedy) for greedy in (True, False)}

    def _new_cache(self, ahead: int = 0, window: int | None = None) -> ModelCache:
        """With room for so many tokens ``ahead`` of a request's last one."""
        return new_cache(
            self.model,
            self.arm,
            slots=self.slots,
            capacity=self.capacity + ahead,
            interval_length=self.interval_length,
            state_dtype=self.state_dtype,
            precision=self.precision,
            seed=self.rounding_seed,
            window=window,
        )

    def generate(self, requests: Iterable[Request]) -> Iterator[Token]:
        """Tokens of all requests as they come, those of one request in order; requests are numbered from 0.

        All requests are checked first: raises `ModelError` on one that does not fit, one line. Only one ``generate``
        runs at a time; one that is closed early gives its slots back.
        """
        waiting = deque(enumerate(requests))
        for number, request in waiting:
            self._refuse(number, request)
        if self._rows:
            raise ModelError("another generate of this engine has not ended; accepted: one at a time")
        return self._generate(waiting)

    def end(self, number: int) -> None:
        """Give up the slot of a request that ``generate`` is making tokens of, as at a text that its caller waited for;
        nothing more comes of it. One that is not running is left as it is."""
        for slot in [slot for slot, row in self._rows.items() if row.number == number]:
            del self._rows[slot]
            self._live[slot] = -1
        self._coming = deque(token for token in self._coming if token.request != number)

    def _generate(self, waiting: deque[tuple[int, Request]]) -> Iterator[Token]:
        try:
            while waiting or self._rows:
                if waiting and len(self._rows) < self.slots:
                    yield from self._admit(waiting)
                elif self._rows:
                    yield from self._advance()
        finally:
            self._rows.clear()
            self._coming.clear()
            self._live.fill_(-1)

    def _admit(self, waiting: deque[tuple[int, Request]]) -> Iterator[Token]:
        """Read the next prompts into free slots; yields their first tokens."""
        free = [slot for slot in range(self.slots) if slot not in self._rows]
        slots = free[: min(len(waiting), self.prompt_rows)]
        taken = [waiting.popleft() for _ in slots]
        lengths = [len(request.prompt) for _, request in taken]
        tokens = torch.zeros(len(slots), max(lengths), dtype=torch.int64)
        for row, (_, request) in zip(tokens, taken, strict=True):
            row[: len(request.prompt)] = torch.tensor(request.prompt)
        logits = self._read(slots, tokens, lengths)
        for slot, (number, request), length in zip(slots, taken, lengths, strict=True):
            self.sampler.start(slot, request.sampling)
            self._rows[slot] = _Row(number, request, length)
        index = torch.tensor(slots, device=self._tokens.device)
        self._tokens[index] = self.sampler.choose(logits, index, greedy=False)
        self._live[index] = index
        self._begin(slots, tokens, lengths)
        first = self._tokens.tolist()
        yield from self._emit({slot: [first[slot]] for slot in slots})

    def _read(self, slots: list[int], tokens: Tensor, lengths: list[int]) -> Tensor:
        """Logits ``[B,vocabulary]`` behind the prompts ``tokens [B,P]``."""
        shared = min(common_beginning(tokens), min(lengths) - 1) if len(slots) > 1 else 0
        return self.model.prefill(tokens, self.cache, slots, lengths, chunk=self.chunk, shared=shared)

    def _begin(self, slots: list[int], tokens: Tensor, lengths: list[int]) -> None:
        """Prompts have been read, and their first tokens chosen."""

    def _advance(self) -> Iterator[Token]:
        """One step of all live slots; yields a token of each."""
        greedy = all(row.request.sampling.temperature == 0 for row in self._rows.values())
        self._steps[greedy](span=1 + max(row.length for row in self._rows.values()))
        for row in self._rows.values():
            row.length += 1
        tokens = self._tokens.tolist()
        yield from self._emit({slot: [tokens[slot]] for slot in sorted(self._rows)})

    def _emit(self, made: dict[int, list[int]]) -> Iterator[Token]:
        """The tokens that slots have got, up to the last of a request; those that are finished are given up before
        anybody sees one."""
        for slot, tokens in made.items():
            row = self._rows[slot]
            for token in tokens:
                row.made += 1
                finished = "stop" if token in row.request.stop else None
                if finished is None and row.made == row.request.max_new_tokens:
                    finished = "length"
                self._coming.append(Token(row.number, token, finished))
                if finished:
                    del self._rows[slot]
                    self._live[slot] = -1
                    break
        while self._coming:
            yield self._coming.popleft()

    def _step(self, greedy: bool) -> Step:
        """Of the engine's parts and not of itself, so that an engine that nobody holds goes at once, memory and all."""
        sampler, live = self.sampler, self._live

        def choose(logits: Tensor) -> Tensor:
            return sampler.choose(logits, live, greedy)

        return Step(self.model, self.cache, self.arm, self._tokens, live, choose)

    def _refuse(self, number: int, request: Request) -> None:
        vocabulary, longest = len(self.model.embedding), self.capacity
        if not request.prompt or any(not 0 <= token < vocabulary for token in request.prompt):
            raise ModelError(
                f"the prompt of request {number} is impossible; accepted: at least one token, each of 0 to "
                f"{vocabulary - 1}"
            )
        if request.max_new_tokens < 1 or len(request.prompt) + request.max_new_tokens > longest:
            raise ModelError(
                f"request {number} asks for {request.max_new_tokens} tokens behind {len(request.prompt)}; accepted: at "
                f"least 1, and {longest} together, the capacity"
            )
