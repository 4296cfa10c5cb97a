"""FLOPs of one layer, one row. Standard library only.

Counted are additions and multiplications on vectors and matrices, a fused multiply-add being two. Left out are gates,
norms, exponentials and work on one scalar a head. The counts follow the formulas of ``replayssm.recurrence``.
"""

from __future__ import annotations

from replayssm.geometry import Geometry


def stored(geometry: Geometry) -> int:
    """Mamba-2: dt x, decay, outer product, S C. GDN, KDA: decay, S k, d, outer product, S q."""
    rows = geometry.heads * geometry.head_dim
    per_element, per_row = (5, 1) if geometry.family == "mamba2" else (7, 2)
    return per_element * geometry.state_elements + per_row * rows


def read(geometry: Geometry, ring_tokens: int, window: int) -> int:
    """Outputs of ``window`` tokens from the state and the ring, the state not materialised."""
    g, p, w = geometry, ring_tokens, window
    rows, keys, elements = g.heads * g.head_dim, g.groups * g.state_dim, g.state_elements
    pairs, earlier = w * (w + 1) // 2, w * (w - 1) // 2  # in the window: with itself, and strictly before
    if g.family == "mamba2":  # S C, its decay, then (B . C) x for each token of the ring and the window
        return w * (2 * elements + rows) + (w * p + pairs) * (2 * keys + 2 * rows)
    # S q and S k and their decay; in the ring k.q, k.k and d times either; in the window the two Gram matrices, the
    # residual, the triangular solve and the outputs.
    vector = g.family == "kda"
    decay = 2 * keys if vector else 2 * rows
    history = w * (4 * elements + decay + p * (4 * keys + 4 * rows + vector * keys))
    gram = 2 * keys * (pairs + earlier) + vector * earlier * keys
    return history + gram + 2 * rows * (w + earlier + pairs)


def fold(geometry: Geometry, ring_tokens: int, raw: bool) -> int:
    """The ring's outer products, without the decay of the state; ``raw`` first solves for d, chunkwise and exactly."""
    g, p = geometry, ring_tokens
    rows, keys, elements = g.heads * g.head_dim, g.groups * g.state_dim, g.state_elements
    vector = g.family == "kda"
    decay = keys if vector else rows
    products = p * (2 * elements + decay)
    if not raw or g.family == "mamba2":
        return products
    # S k and its decay, the residual; then for each earlier token k.k and a term of the triangular solve.
    earlier = p * (p - 1) // 2
    return products + p * (2 * elements + decay + 2 * rows) + earlier * (2 * keys + vector * keys + 2 * rows)


def flush(geometry: Geometry, ring_tokens: int, window: int | None, raw: bool) -> int:
    """Standard: fold, then the plain step. Window: fold and its decay, then verify against an empty ring."""
    folded = fold(geometry, ring_tokens, raw)
    if window is None:
        return folded + stored(geometry)
    return folded + geometry.state_elements + read(geometry, 0, window)
