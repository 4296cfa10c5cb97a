"""One arm of a decode case, ready to generate: a cache behind the prompt, a step, and a view of what its layers got.

All rows have the same prompt, which is read once, unless each is given its own; `restart` puts every row behind it
again. With random weights only a prompt's first tokens are read, whose states are as good as any, and the tokens that
follow are forced, those of a seeded stream, another for each row: all arms then do the same work, and experts are
chosen as by different requests. With a checkpoint each row goes on with its likeliest token.

With staggered phases row r has taken r mod L tokens of its stream before the others begin.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from experiments.decode_case import RANDOM, DecodeCase
from experiments.inputs import DTYPES
from experiments.measure import devices
from replayssm.engine import Step, new_cache
from replayssm.kernels.torch.replay import ordered_ring
from replayssm.models import Decoder, ReplayStates, States, StoredStates
from replayssm.recurrence import FAMILIES, gdn, mamba2

GATE_ERROR = 1 + 6 * 2.0**-23
"""What a gate computed in float32 may be off by: the kernels' own are tested to be within 6 units."""
CHUNK = 256
"""Tokens of a prompt that are read at a time."""
PROMPT_ROWS = 8
"""Prompts that are read at a time, where each row has its own."""


@dataclass
class Seen:
    """What a layer's step got and gave; the tensors of a graph, which each replay writes anew."""

    inputs: Any
    out: Tensor
    more: dict[str, Any]


class Watched:
    """States of an arm whose steps leave what they saw of the layers in ``of``."""

    def __init__(self, states: States, of: set[int]) -> None:
        self.geometry, self.layers, self.slots = states.geometry, states.layers, states.slots
        self.window = getattr(states, "window", None)
        self.inner, self.of = states, of
        self.seen: dict[int, Seen] = {}
        self.load, self.fill, self.commit = states.load, states.fill, states.commit

    def step(self, number: int, out: Tensor, inputs: Any, slots: Tensor, **more: Any) -> None:
        self.inner.step(number, out, inputs, slots, **more)
        if number in self.of:
            self.seen[number] = Seen(inputs, out, more)


class Session:
    """An arm of ``case`` with ``model``; ``watched`` are the numbers of the state-space layers that will be checked.
    ``prompts`` are one a row; by default all rows have the same random one.

    ``steps`` counts every step since the session began, ``held [B]`` are the tokens that a replay arm's rings hold.
    """

    window: int | None = None
    """Tokens that a step takes at most, where it may be several."""

    def __init__(
        self, case: DecodeCase, model: Decoder, arm: str, watched: set[int], prompts: list[list[int]] | None = None
    ) -> None:
        self.case, self.model, self.arm = case, model, arm
        device = model.embedding.device
        self.state_dtype = DTYPES[case.precision.state]
        kept = {"interval_length": case.interval_length, "state_dtype": self.state_dtype}
        sizes = {"slots": case.batch_size, "capacity": case.capacity(self.window), "window": self.window}
        self.cache = new_cache(model, arm, **sizes, **kept)
        self.states: States = self.cache.states
        self.watched = Watched(self.states, watched)
        self.cache.states = self.watched
        self.rows = torch.arange(case.batch_size, device=device)
        offsets = torch.arange(case.batch_size) % case.interval_length if case.phase == "staggered" else torch.zeros(1)
        self.offsets = offsets.to(device, torch.int64).expand(case.batch_size)
        self.stream = _stream(case, len(model.embedding)).to(device)
        self.taken = torch.zeros(case.batch_size, dtype=torch.int64, device=device)
        self.tokens, self.slots = self.stream[0].clone(), self.rows.clone()
        self.step = self._new_step()
        self.steps, self._span = 0, 0
        self._read(prompts)
        self.restart()

    def _new_step(self) -> Step:
        return Step(self.model, self.cache, self.arm, self.tokens, self.slots, self._next)

    def restart(self) -> None:
        """Every row behind the prompt again, and its phase ahead."""
        self.watched.fill(self._state)
        self.cache.conv.copy_(self._conv)
        self.cache.length.copy_(self._length)
        self.taken.zero_()
        self.tokens.copy_(self._first)
        self._span = self._longest_prompt + (self.window or 1)
        for number in range(self._most_ahead):
            self.slots.copy_(torch.where(self.offsets > number, self.rows, -1))
            self._advance()
        self.slots.copy_(self.rows)

    def run(self, steps: int) -> None:
        """So many tokens of all rows."""
        for _ in range(steps):
            self._advance()
        self.steps += steps

    def eager_cycle(self, of: set[int]) -> dict[int, Seen]:
        """A flush cycle whose last step is not the graph's; gives what the layers ``of`` saw in it."""
        self.run(self.case.interval_length - 1)
        with self.launch_by_launch(of) as seen:
            self.run_eagerly()
        return seen

    @contextlib.contextmanager
    def launch_by_launch(self, of: set[int]) -> Iterator[dict[int, Seen]]:
        """For `run_eagerly`: what the layers ``of`` see goes into the dictionary, and the tensors of a graph are again
        what the session shows afterwards."""
        before = self.watched.of, self.watched.seen, self.step.logits
        self.watched.of, self.watched.seen = of, {}
        try:
            yield self.watched.seen
        finally:
            self.watched.of, self.watched.seen, self.step.logits = before

    def run_eagerly(self) -> None:
        """One step of all rows without the graph, within `launch_by_launch`."""
        self.step.run(self._span)
        self._span += self.window or 1
        self.steps += 1

    def state_steps(self) -> devices.Run:
        """A flush cycle of the state-space layers' steps alone, with the inputs of one model step; on a GPU a graph.
        Rows must be restarted afterwards."""
        seen = self.eager_cycle(set(range(self.states.layers)))

        def steps() -> None:
            for _ in range(self.case.interval_length):
                for number, layer in seen.items():
                    self.states.step(number, layer.out, layer.inputs, self.slots, **layer.more)
                self._commit()

        run = devices.of(self.case).repeated(steps)

        def cycle() -> None:
            run()
            self.steps += self.case.interval_length

        return cycle

    def _commit(self) -> None:
        """Of a step of the state-space layers alone."""
        self.states.commit(self.slots)

    def through(self, state: Tensor, inputs: Any, stored: torch.dtype | None) -> tuple[Tensor, Tensor]:
        """Outputs and next state of one step by the plain recurrence, of the inputs that `inputs` gave; the state is
        rounded to ``stored``, where that is given, and computed with in float32."""
        y, state = FAMILIES[self.states.geometry.family].step(state, inputs)
        return y, state if stored is None else state.to(stored).float()

    def inputs(self, number: int, rows: Tensor) -> tuple[Any, Any]:
        """What the last step of a watched layer got, for some rows: exactly, and as an honest version has it. They
        differ where the step computes the gates, which it does in float32."""
        seen = self.watched.seen[number]
        inputs, gates = seen.inputs.rows(rows), seen.more.get("gates")
        if gates is None:
            return inputs, inputs
        if isinstance(inputs, mamba2.Inputs):
            dt = mamba2.discretize(inputs.dt.double(), gates.dt_bias)
            return inputs._replace(dt=dt), inputs._replace(dt=dt.float() * GATE_ERROR)
        g, beta = gdn.gates(inputs.g.double(), inputs.beta.double(), gates.A_log.double(), gates.dt_bias.double())
        off = {"g": g.float() * GATE_ERROR, "beta": beta.float() * GATE_ERROR}
        return inputs._replace(g=g, beta=beta), inputs._replace(**off)

    def state(self, number: int, rows: Tensor) -> Tensor:
        """Float64 ``[R,H,P,N]``: the state of a watched layer, a replay arm's ring folded into its checkpoint."""
        if not isinstance(self.states, ReplayStates):
            return self.stored[number][rows].double()
        cache = self.states.cache
        A = (self.watched.seen[number].inputs.A,) if cache.geometry.family == "mamba2" else ()
        ring = ordered_ring(cache.layer(number), rows)
        return FAMILIES[cache.geometry.family].fold(cache.state[number][rows].double(), ring, cache.cursor[rows], *A)

    @property
    def flushes(self) -> Tensor:
        """``[layers,B]``; a stored arm has none."""
        if isinstance(self.states, ReplayStates):
            return self.states.cache.flushes
        return torch.zeros(self.states.layers, self.case.batch_size, dtype=torch.int64, device=self.rows.device)

    @property
    def uneven_flushes(self) -> int:
        """By how much counts differ that should be equal: of rows and layers."""
        return int(self.flushes.max() - self.flushes.min())

    def marks(self) -> Tensor:
        """``[layers,B,H]``: a part of each row's state or checkpoint, which a cycle changes; of every head, since one
        that soon forgets has the same state again where a text repeats itself."""
        return self.stored[:, :, :, 0, 0].clone()

    @property
    def flushes_expected(self) -> int:
        """One of each row and layer in L steps."""
        cycles = self.steps // self.case.interval_length if isinstance(self.states, ReplayStates) else 0
        return cycles * self.states.layers * self.case.batch_size

    @property
    def cursor(self) -> Tensor:
        return self.states.cache.cursor if isinstance(self.states, ReplayStates) else torch.zeros_like(self.offsets)

    @property
    def held(self) -> Tensor:
        """``[B]`` tokens that the rings hold after whole cycles."""
        return self.offsets if isinstance(self.states, ReplayStates) else torch.zeros_like(self.offsets)

    @property
    def memory_bytes(self) -> int:
        """Of the cache."""
        kept = self.states.cache if isinstance(self.states, ReplayStates) else self.states
        tensors = [self.stored, *getattr(kept, "ring", {}).values()]
        return sum(t.nbytes for t in (*tensors, self.cache.keys, self.cache.values, self.cache.conv))

    @property
    def stored(self) -> Tensor:
        """States or checkpoints ``[layers,S,H,P,N]``."""
        assert isinstance(self.states, StoredStates | ReplayStates)
        return self.states.cache.state if isinstance(self.states, ReplayStates) else self.states.state

    def _advance(self) -> None:
        self.step(self._span)
        self._span += self.window or 1

    @property
    def _most_ahead(self) -> int:
        longest = min(self.case.batch_size, self.case.interval_length) - 1
        return longest if self.case.phase == "staggered" else 0

    def _next(self, logits: Tensor) -> Tensor:
        """The next token of each row's stream, or its likeliest, which is sought in either case."""
        likeliest = logits.argmax(-1)
        if not self.case.forced:
            return likeliest
        self.taken.add_(self.slots >= 0)
        return self.stream.gather(0, self.taken[None])[0]

    def _read(self, prompts: list[list[int]] | None) -> None:
        """Prompts into their slots, or one random prompt into slot 0, and its keys and values into all; then what
        `restart` gives them. With random weights a chunk of the prompt is read, and the keys and values of what a
        longer one has beyond it are random too."""
        context = self.case.context
        if prompts is None:
            generator = torch.Generator().manual_seed(self.case.seed + 1)
            read = min(context, CHUNK) if self.case.weights == RANDOM else context
            prompts = torch.randint(len(self.model.embedding), (1, read), generator=generator).tolist()
            self._longest_prompt = context
        else:
            context = self._longest_prompt = max(len(prompt) for prompt in prompts)
        lengths = [len(prompt) for prompt in prompts]
        tokens = torch.zeros(len(prompts), max(lengths), dtype=torch.int64)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(prompt)
        logits = []
        for at in range(0, len(prompts), PROMPT_ROWS):
            part, slots = tokens[at : at + PROMPT_ROWS], list(range(at, min(at + PROMPT_ROWS, len(prompts))))
            given = {"chunk": CHUNK, "follow": self._follow(part)}
            logits.append(self.model.prefill(part, self.cache, slots, lengths[at : at + PROMPT_ROWS], **given))
        self._first = self.stream[0] if self.case.forced else torch.cat(logits).argmax(-1).expand(len(self.rows))
        alike, rows = len(prompts) == 1, len(prompts)
        self._length = torch.tensor([context] if alike else lengths, device=self.rows.device)
        self._state, self._conv = self._behind_prompts(rows), self.cache.conv[:, :rows].clone()
        beyond = torch.Generator(self.rows.device).manual_seed(self.case.seed + 2)
        for memory in (self.cache.keys, self.cache.values) if alike else ():
            memory[:, :1, :, lengths[0] : context].normal_(generator=beyond)
            memory[:, 1:, :, :context] = memory[:, :1, :, :context]
        self._begun(tokens, lengths)

    def _behind_prompts(self, read: int) -> Tensor:
        """``[layers,read,H,P,N]`` states of the first slots."""
        return self.stored[:, :read].clone()

    def _follow(self, tokens: Tensor) -> Any:
        """What is shown the prompts as they are read."""

    def _begun(self, tokens: Tensor, lengths: list[int]) -> None:
        """All prompts have been read, and the first token behind each is known."""


def _stream(case: DecodeCase, vocabulary: int) -> Tensor:
    """``[T,B]`` int64, a token more than a row can take."""
    generator = torch.Generator().manual_seed(case.seed)
    return torch.randint(vocabulary, (case.longest - case.context + 1, case.batch_size), generator=generator)
