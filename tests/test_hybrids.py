"""The training forward of the small hybrids: equal to transformers' and to the plain recurrences."""

import pytest
import torch

from experiments import hybrids
from replayssm.engine import new_cache
from replayssm.engine.drafters import Mtp
from replayssm.models import load_model


def random_model(name, size="smoke"):
    """A model whose one-dimensional weights (norms, dt_bias, A_log, D) are not at their neutral starts."""
    model = hybrids.build(name, size, seed=1).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.add_(0.3 * torch.randn(weight.shape, generator=generator))
    return model


@pytest.fixture
def tokens():
    return torch.randint(0, 1024, (2, 300), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", hybrids.MODELS)
@torch.no_grad()
def test_logits_are_those_of_transformers(name, tokens):
    model = random_model(name)
    expected = model.model(tokens, use_cache=False).logits
    found = model.logits(model.trunk(tokens)[0])
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("name", hybrids.MODELS)
@torch.no_grad()
def test_every_block_moves_the_logits(name, tokens):
    model = random_model(name)
    expected = model.logits(model.trunk(tokens)[0])
    layers = model.model.model.layers
    for index in range(len(layers)):
        kept = layers[index]
        model.model.model.layers = torch.nn.ModuleList([*layers[:index], *layers[index + 1 :]])
        assert (model.logits(model.trunk(tokens)[0]) - expected).abs().max() > 0.01 * expected.abs().max()
        assert layers[index] is kept


@pytest.mark.parametrize("name", hybrids.MODELS)
@torch.no_grad()
def test_the_shipped_sizes_fit(name):
    assert 2 * sum(weight.numel() for weight in hybrids.build(name).parameters()) <= 5_500_000


def naive_mamba2(x, dt, a, b, c, state):
    out = []
    for t in range(x.shape[1]):
        state = state * (dt[:, t] * a).exp()[..., None, None]
        state = state + torch.einsum("bh,bhp,bn->bhpn", dt[:, t], x[:, t], b[:, t])
        out.append(torch.einsum("bhpn,bn->bhp", state, c[:, t]))
    return torch.stack(out, 1), state


def naive_delta(q, k, v, g, beta, state):
    out = []
    for t in range(q.shape[1]):
        key = k[:, t] * torch.rsqrt(k[:, t].square().sum(-1, keepdim=True) + 1e-6)
        query = q[:, t] * torch.rsqrt(q[:, t].square().sum(-1, keepdim=True) + 1e-6) * q.shape[-1] ** -0.5
        state = state * g[:, t].exp()[..., None, None]
        d = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", state, key))
        state = state + key[..., None] * d[..., None, :]
        out.append(torch.einsum("bhkv,bhk->bhv", state, query))
    return torch.stack(out, 1), state


@pytest.mark.parametrize("length", [1, 7, 8, 9, 24, 61])
def test_the_chunked_scans_are_the_recurrences(length):
    """In float64, with a state to start from; chunks of 8, so that the tree sees 1, 2, 3 and 8 of them."""
    draw = torch.Generator().manual_seed(length)

    def normal(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    x, dt, b, c = normal(2, length, 3, 4), normal(2, length, 3).exp(), normal(2, length, 5), normal(2, length, 5)
    a, state = -normal(3).exp(), normal(2, 3, 4, 5)
    for found, expected in zip(
        hybrids.scan_mamba2(x, dt, a, b, c, state, 8), naive_mamba2(x, dt, a, b, c, state), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)

    q, k, v = normal(2, length, 3, 4), normal(2, length, 3, 4), normal(2, length, 3, 6)
    g, beta, state = -normal(2, length, 3).exp(), normal(2, length, 3).sigmoid(), normal(2, 3, 4, 6)
    for found, expected in zip(
        hybrids.scan_delta(q, k, v, g, beta, state, 8), naive_delta(q, k, v, g, beta, state), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", hybrids.MODELS)
@torch.no_grad()
def test_a_carried_state_goes_on_where_the_first_half_ended(name, tokens):
    """Attention is masked to one token, so that only the state carries anything; cut where no chunk ends."""
    model = random_model(name)
    whole, last = model.trunk(tokens, window=1)
    first, states = model.trunk(tokens[:, :137], window=1)
    second, states = model.trunk(tokens[:, 137:], states, window=1)
    torch.testing.assert_close(torch.cat([first, second], 1), whole, rtol=1e-4, atol=1e-4)
    for found, expected in zip(states, last, strict=True):
        if expected is not None:
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert (model.trunk(tokens[:, 137:], window=1)[0] - second).abs().max() > 0.01


def test_masked_attention_sees_the_window_alone():
    q, k, v = (torch.randn(2, heads, 150, 8, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2))
    age = torch.arange(150)[:, None] - torch.arange(150)
    for window in (1, 64, 150, 200):
        expected = torch.nn.functional.scaled_dot_product_attention(
            q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), attn_mask=(age >= 0) & (age < window)
        )
        torch.testing.assert_close(hybrids.attend(q, k, v, window), expected.transpose(1, 2).flatten(2))


def test_an_unknown_model_gives_one_clear_line():
    with pytest.raises(ValueError, match=r"model is 'llama'; accepted: nemotron-h, qwen3\.5"):
        hybrids.build("llama")


@pytest.mark.parametrize("folder", ["tiny-nemotron-h", "tiny-qwen3.5"])
def test_the_head_of_the_engine_is_the_trained_one(folder: str) -> None:
    """Logits of the head that ships, over a prompt in two chunks, against the training forward."""
    path = hybrids.vocabulary.FOLDER.parent / "models" / folder
    hybrid, _ = hybrids.load(path)
    model = load_model(path, dtype=torch.float32, head=True)
    tokens = torch.randint(hybrids.vocabulary.SIZE, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        hidden, _ = hybrid.trunk(tokens[:, :-1])
        expected = hybrid.logits(hybrid.ahead(hidden, tokens[:, 1:]))
        cache = new_cache(model, "verify/torch", slots=2, capacity=16, window=2)
        head, seen = Mtp(model, cache, "verify/torch"), []
        follow = head.follow(tokens)
        model.mtp.register_forward_hook(lambda module, given, made: seen.append(model.logits(made)))
        model.prefill(tokens[:, :-1], cache, chunk=7, follow=follow)
    torch.testing.assert_close(torch.cat(seen, dim=1), expected, rtol=2e-4, atol=2e-4)
