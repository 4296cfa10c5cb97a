"""Speculative decoding with snapshots on a CPU, what replay is compared with: a state is stored behind every token.

``states [S,T,H,P,N]`` holds of each slot a state for every token of its last window; the next window starts from that
of the last accepted one. A task (see `arguments`) reads each row of its heads' states once and writes it T times. The
formulas are those of `window`.
"""

from __future__ import annotations

from typing import Any

import numba
import torch
from torch import Tensor

from replayssm.kernels.cpu.arguments import (
    SHARED_CONFIG,
    Sizes,
    faulty_slot,
    new_scratch,
    own_scratch,
    refuse,
    tasks_per_row,
)
from replayssm.kernels.cpu.compilation import compiled, inlined, pasted
from replayssm.kernels.cpu.lanes import (
    FLOAT32,
    INT64,
    LINE,
    ONE,
    ROW,
    WIDTH,
    advance,
    dot,
    dot_row,
    exp,
    fence,
    fma,
    load,
    load_input,
    load_part,
    load_row,
    mul,
    pointer,
    splat,
    splat_row,
    store,
    store_part,
    store_past_caches,
    widen,
)
from replayssm.kernels.cpu.window import Scratch, Token, faulty_count, gather_window, split, window_token, write_output

PAST_CACHES = True
"""Whether states of 128 wide rows are written past the caches, which need not read what is overwritten."""
CONFIG: dict[str, Any] = {
    **SHARED_CONFIG,
    "heads_at_a_time": 1,
    "rows_at_a_time": 1,
    "past_caches": PAST_CACHES,
    "chosen": (
        "by the shortest of interleaved runs at batch 16 on one core of a 2-core CPU (AMD EPYC), T = 4, float32 state, "
        "bfloat16 inputs: states written past the caches, time over that of plain writes 0.69 (Mamba-2 of "
        "Nemotron-3-Nano-4B) and 0.86 (GDN of Qwen3.5-4B)"
    ),
}
"""The launch configuration and how it was chosen, as a record keeps it."""


def snapshots_step(family: str, out: Tensor, states: Tensor, inputs: Any, slots: Tensor, accepted: Tensor) -> None:
    """The recurrence for a window of T tokens a row, from the state behind token ``accepted`` of the last window.

    ``out [B,T,H,P]``, ``states [S,T,H,P,N]`` float32; ``inputs`` of Mamba-2 or GDN with a T axis behind the rows,
    bfloat16 or float32 with dt, A, D, g and beta in float32; ``slots [B]`` int64, -1 for padding; all contiguous.
    ``accepted [B]`` of integers, 1 to T, counts the tokens of the last window that were. Mutates ``out`` and
    ``states``. Raises ``ValueError``, one line, on anything else, before it changes anything.
    """
    if states.dim() != 5:
        raise ValueError(f"states has shape {list(states.shape)}; accepted: [S, T, H, P, N]")
    T = states.shape[1]
    counts = accepted.to(torch.int64).contiguous()
    token, sizes = window_token(family, out, states, inputs, slots, counts, (T, T))
    past_caches = PAST_CACHES and sizes.N == ROW and token.state % LINE == 0
    fault = _snapshots(token, sizes, int(past_caches))
    refuse(fault, slots, sizes.state_slots, f"1 to {T} accepted tokens")


@compiled
def _snapshots(token: Token, sizes: Sizes, past_caches: int) -> int:
    fault = faulty_slot(token.slots, sizes.rows, sizes.state_slots)
    if fault < 0:
        fault = faulty_count(token.counts, token.slots, sizes.rows, 1, sizes.window)
    if fault < 0:
        scratch = new_scratch(sizes, 1)
        for task in numba.prange(sizes.rows * tasks_per_row(sizes)):
            _task(token, sizes, task, scratch, past_caches)
            if past_caches:
                fence()
    return fault


@pasted
def _task(token: Token, sizes: Sizes, task: int, scratch: Any, past_caches: int) -> None:
    row = task % sizes.rows
    slot = pointer(token.slots, INT64)[row]
    if slot < 0:
        return
    own, size = split(own_scratch(scratch, sizes, 1), sizes), sizes.heads * sizes.P * sizes.N
    states = advance(pointer(token.state, FLOAT32), slot * sizes.window * size)
    accepted = pointer(token.counts, INT64)[row] - 1
    first, share = task // sizes.rows * sizes.heads_per_task, sizes.heads // sizes.groups
    for head in range(first, min(first + sizes.heads_per_task, sizes.heads)):
        if head == first or head % share == 0:
            gather_window(token, sizes, own, row, head // share, sizes.window, 0)
        _start(token, sizes, own, row, head)
        state = advance(states, head * sizes.P * sizes.N)
        _rows(state, accepted * size, size, sizes, own, token.A == 0, past_caches)
        for t in range(sizes.window):
            at = ((row * sizes.window + t) * sizes.heads + head) * sizes.P
            for v in range(0, sizes.P, WIDTH):
                count, y = sizes.P - v, load(own.history, t * sizes.p_padded + v)
                value = load_input(token.values, at + v, count, sizes.narrow)
                write_output(token, sizes, head, at + v, count, value, y)


@inlined
def _start(token: Token, sizes: Sizes, own: Scratch, row: int, head: int) -> None:
    """Each token's decay, step size, key . query and value, for Mamba-2 times the step size."""
    factor = ONE
    if token.A != 0:
        factor = pointer(token.A, FLOAT32)[head]
    for t in range(sizes.window):
        at = (row * sizes.window + t) * sizes.heads + head
        own.E[t] = factor * pointer(token.decay, FLOAT32)[at]
        own.step[t] = pointer(token.step, FLOAT32)[at]
        own.w[t] = own.products[t * sizes.tokens_padded + t]
        scale = ONE if token.A == 0 else own.step[t]
        widen(advance(own.values, t * sizes.p_padded), token.values, at * sizes.P, sizes.P, scale, sizes.narrow)
    for t in range(sizes.window, WIDTH):
        own.E[t] = FLOAT32
    store(own.E, 0, exp(load(own.E, 0)))


@inlined
def _rows(state: Any, start: int, size: int, sizes: Sizes, own: Scratch, delta: bool, past_caches: int) -> None:
    """Each row from the state ``start`` on, to those that are ``size`` apart, with its outputs in ``history``."""
    N, p = sizes.N, sizes.p_padded
    for v in range(sizes.P):
        if N == ROW:
            s = load_row(state, start + v * ROW)
            for t in range(sizes.window):
                key, E, u = load_row(own.keys, t * ROW), own.E[t], own.values[t * p + v]
                y = E * dot_row(s, load_row(own.vectors, t * ROW))
                if delta:
                    u = own.step[t] * (u - E * dot_row(s, key))
                s = fma(splat_row(E), s, mul(splat_row(u), key))
                own.history[t * p + v] = y + u * own.w[t]
                if past_caches:
                    store_past_caches(state, t * size + v * ROW, s)
                else:
                    store(state, t * size + v * ROW, s)
        else:
            for n in range(0, N, WIDTH):
                store(own.row, n, load_part(state, start + v * N + n, N - n))
            for t in range(sizes.window):
                key, E, u = advance(own.keys, t * sizes.n_padded), own.E[t], own.values[t * p + v]
                y = E * dot(own.row, advance(own.vectors, t * sizes.n_padded), N)
                if delta:
                    u = own.step[t] * (u - E * dot(own.row, key, N))
                own.history[t * p + v] = y + u * own.w[t]
                for n in range(0, N, WIDTH):
                    s = fma(splat(E), load(own.row, n), mul(splat(u), load(key, n)))
                    store(own.row, n, s)
                    store_part(state, t * size + v * N + n, N - n, s)
