"""Teacher-forced decoding of whole documents by many precision arms at once, and how far each goes from the reference.

Rows of one batch are arms x documents, each with its own states, rings, convolution, keys and values; the first arm is
the reference. At every position the float64 KL divergence of the reference's next-token distribution to the arm's over
the whole vocabulary, the arm's negative log-likelihood of the token that follows, and whether both arms' likeliest
tokens agree, go to buffers on the device. On a GPU a step is a CUDA graph, one for each token of the arms' period; the
host asks for nothing between snapshots.

A `Drift` can be saved at any position and goes on from there with the same numbers, bit for bit.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.precisions import PrecisionArm
from replayssm.engine.aligned import AlignedArms, aligned_decoding
from replayssm.graphs import capture
from replayssm.kernels.torch import stored_step
from replayssm.models import Decoder, StoredStates

CHECKED = 512
"""Tokens whose likelihoods by the reference are compared with those of a prompt read in chunks."""


class Drift:
    """``tokens [documents,T+1]`` int64. ``kl, nll, agree [arms,documents,T]``; ``done`` positions of them are there.
    ``snapshots`` are `state_errors` at the positions ``wanted``."""

    def __init__(self, model: Decoder, arms: Sequence[PrecisionArm], tokens: Tensor, *, seed: int = 0) -> None:
        self.model, self.arms, self.device = model, list(arms), model.embedding.device
        self.documents, self.length = len(tokens), tokens.shape[1] - 1
        self.states = AlignedArms(
            model.geometry,
            [(arm.precision, arm.interval_length) for arm in arms],
            layers=model.state_layers,
            rows=self.documents,
            input_dtype=model.embedding.dtype,
            seed=seed,
            device=self.device,
        )
        rows = self.states.slots
        self.cache = model.new_cache(self.states, slots=rows, capacity=self.length)
        self.tokens = tokens.to(self.device)
        self.position = torch.zeros(1, dtype=torch.int64, device=self.device)
        places = [self.states.rows_of(number).start // self.documents for number in range(len(arms))]
        self._order = torch.tensor(places, device=self.device)
        made: dict[str, Any] = {"device": self.device}
        self.kl = torch.full((len(arms), self.documents, self.length), torch.nan, **made)
        self.nll = torch.full_like(self.kl, torch.nan)
        self.agree = torch.zeros(self.kl.shape, dtype=torch.uint8, **made)
        self.done, self.elapsed_s = 0, 0.0
        self.wanted = snapshot_positions(self.length, self.states.period)
        self.snapshots: list[dict[str, Any]] = []
        self.graphs = self.device.type == "cuda"
        self._graphs: list[Any] = []

    @torch.no_grad()
    def run(self, until: int) -> None:
        """Decode up to position ``until``, taking the snapshots on the way."""
        started = time.monotonic()
        if self.graphs and not self._graphs:
            self._capture()
        while self.done < until:
            stop = min([until, *(at for at in self.wanted if at > self.done)])
            for _ in range(self.done, stop):
                self._advance()
            if self.done in self.wanted:
                self.snapshots.append({"position": self.done} | state_errors(self.states))
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.elapsed_s += time.monotonic() - started

    def _advance(self) -> None:
        if self._graphs:
            self._graphs[self.done % len(self._graphs)].replay()
            self.states.token = self.done + 1
        else:
            self._step(self.done + 1)
        self.done += 1

    def _step(self, span: int) -> None:
        """One token of every row; reads and writes tensors that exist, so that a graph may hold it."""
        token = self.tokens.index_select(1, self.position)[:, 0].repeat(len(self.arms))
        past = aligned_decoding(self.cache, self.cache.all_slots, span)
        logits = self.model.logits(self.model.hidden(token[:, None], past))[:, 0]
        past.finish()
        own = torch.log_softmax(logits.double(), dim=-1).unflatten(0, (len(self.arms), -1))
        own = own.index_select(0, self._order)
        reference = own[:1]
        likeliest = own.argmax(-1)
        follows = self.tokens.index_select(1, self.position + 1)[None].expand(len(self.arms), -1, -1)
        self.kl.index_copy_(2, self.position, (reference.exp() * (reference - own)).sum(-1, keepdim=True).float())
        self.nll.index_copy_(2, self.position, -own.gather(2, follows).float())
        self.agree.index_copy_(2, self.position, (likeliest == likeliest[:1])[..., None].to(torch.uint8))
        self.position += 1

    def _capture(self) -> None:
        """A graph for each token of a period. What is run to compile and to choose algorithms is undone."""
        token, before = self.states.token, {name: tensor.clone() for name, tensor in self._tensors()}

        def warm_up() -> None:
            for phase in range(self.states.period):
                self.states.token = phase
                self.position.zero_()
                self.cache.length.zero_()
                self._step(self.length)

        on_side_stream(warm_up)
        for name, tensor in self._tensors():
            tensor.copy_(before[name])
        del before
        for phase in range(self.states.period):
            self.states.token = phase
            pool = self._graphs[0].pool() if self._graphs else None
            self._graphs.append(capture(lambda: self._step(self.length), pool))
        self.states.token = token

    def prompt_difference(self) -> float:
        """Mean absolute difference of the reference's negative log-likelihoods, over the first document's first tokens,
        to those of the same tokens read as a prompt: another recurrence, in chunks."""
        count = min(CHECKED, self.done)
        states = StoredStates(
            self.model.geometry, stored_step, slots=1, layers=self.model.state_layers, device=self.device
        )
        cache = self.model.new_cache(states, slots=1, capacity=count)
        logits = self.model.prefill(self.tokens[:1, :count], cache, every=True)[0]
        nll = -torch.log_softmax(logits.double(), -1).gather(1, self.tokens[0, 1 : count + 1, None])[:, 0]
        return float((nll - self.nll[0, 0, :count].double()).abs().mean())

    def _tensors(self) -> list[tuple[str, Tensor]]:
        """All that a step changes; of keys, values and results the positions that are there."""
        done = self.done
        cut = {"keys": self.cache.keys[:, :, :, :done], "values": self.cache.values[:, :, :, :done]}
        cut |= {"kl": self.kl[..., :done], "nll": self.nll[..., :done], "agree": self.agree[..., :done]}
        whole = {"conv": self.cache.conv, "length": self.cache.length, "position": self.position}
        return [*cut.items(), *whole.items(), *self.states.tensors()]

    def save(self, path: Path, identity: str) -> None:
        """Write everything to ``path``, whole or not at all."""
        data = {"identity": identity, "done": self.done, "snapshots": self.snapshots}
        data["elapsed_s"] = self.elapsed_s
        data["tensors"] = {name: tensor.cpu() for name, tensor in self._tensors()}
        unfinished = path.with_suffix(f".{os.getpid()}")
        with open(unfinished, "wb") as file:
            torch.save(data, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)

    def load(self, path: Path, identity: str) -> bool:
        """Go on from ``path``; False, with nothing changed, where it is of another run or not there."""
        if not path.is_file():
            return False
        data = torch.load(path, weights_only=True, map_location="cpu")
        if data["identity"] != identity:
            return False
        self.done, self.snapshots, self.elapsed_s = data["done"], data["snapshots"], data["elapsed_s"]
        self.states.token = self.done
        for name, tensor in self._tensors():
            tensor.copy_(data["tensors"][name])
        return True


def state_errors(states: AlignedArms) -> dict[str, Any]:
    """Relative error by norm of each arm's ``update`` and ``read`` copy against the first arm's state, lists
    ``[arms][documents][layers][heads]``."""
    exact = states.state(0)[0].double()
    norm = exact.square().sum((-2, -1)).sqrt()
    found: dict[str, list[Any]] = {"update": [], "read": []}
    for number in range(len(states.arms)):
        for name, copy in zip(found, states.state(number), strict=True):
            error = (copy.double() - exact).square().sum((-2, -1)).sqrt() / norm
            found[name].append(error.transpose(0, 1).tolist())
    return found


def on_side_stream(run: Callable[[], None]) -> None:
    """Run before a capture: kernels are compiled, libraries get their workspaces."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()


def snapshot_positions(length: int, period: int) -> list[int]:
    """Two in each octave, where all arms stand behind a flush, and the last such."""
    found = {period * max(1, round(2 ** (half / 2) / period)) for half in range(2 * math.ceil(math.log2(length + 1)))}
    return sorted({at for at in found if at <= length} | ({length // period * period} - {0}))
