"""Precision arms in torch against the plain recurrence: what is read, what is fed back, and what leaks where."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from experiments import precisions
from experiments.inputs import make_inputs, make_state
from replayssm.cache import ReplayCache
from replayssm.engine import new_cache
from replayssm.formats import Rounding
from replayssm.geometry import Geometry
from replayssm.kernels.torch import replay_step
from replayssm.models import Decoder, ModelError, config_from_geometry, random_model
from replayssm.packed import Packed, pack, unpack
from replayssm.precision import Precision
from replayssm.recurrence import FAMILIES

LENGTH, ROWS, SLOTS = 4, 2, 3
EXACT = 2e-5
"""Relative, of a float32 step."""
COARSE = {"fp32": 0.0, "fp16": 1e-3, "fp8_e4m3": 0.05, "int8": 0.02, "nvfp4": 0.2, "mxfp4": 0.3}
"""Relative error by norm that rounding a state once may have."""
PRECISIONS = [
    Precision("nvfp4"),
    Precision("int8"),
    Precision("fp16", stochastic=True),
    Precision("fp32", "nvfp4"),
    Precision("fp8_e4m3", "mxfp4", stochastic=True),
    Precision("fp32", "nvfp4", fold="raw"),
    Precision("fp32", "fp8_e4m3", ring="fp8_e4m3"),
]


def geometry(family: str) -> Geometry:
    return Geometry(family, 2, 2 if family == "kda" else 1, 20, 24)


def relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def copies(cache: ReplayCache) -> tuple[Tensor, Tensor]:
    """Update and read copy of the two slots that are stepped, in float32."""
    update = unpack(cache.packed) if cache.packed is not None else cache.state.float()
    read = update if cache.read_copy is None else unpack(cache.read_copy)
    return update[0, [2, 0]], read[0, [2, 0]]


def decayed(family: str, state: Tensor, tokens: list[Any]) -> Tensor:
    """The state decayed over the tokens, nothing added."""
    for token in tokens:
        log = token.A * token.dt if family == "mamba2" else token.g
        state = state * torch.exp(log)[..., None, :] if family == "kda" else state * torch.exp(log)[..., None, None]
    return state


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
def test_outputs_come_from_the_read_copy_and_flushes_from_the_update_copy(family: str, precision: Precision) -> None:
    """The plain recurrence from the read copy gives the outputs between flushes; a flush starts from the update copy.
    Folding GDN and KDA from d adds what the read copy's recurrence added; folding from raw inputs uses it nowhere."""
    if family == "mamba2" and precision.fold == "raw":
        precision = Precision(precision.update, precision.read)
    shape, step = geometry(family), FAMILIES[family].step
    tokens = make_inputs(shape, ROWS, 3 * LENGTH, dtype=torch.float32, seed=3)
    cache = ReplayCache(shape, slots=SLOTS, interval_length=LENGTH, input_dtype=torch.float32, precision=precision)
    slots = {slot.index: slot for slot in cache.allocate(3)}
    batch = cache.batch([slots[2], slots[0]])
    cache.load_state(batch, make_state(shape, ROWS, dtype=torch.float32, seed=4)[None])
    rounding = Rounding(5) if precision.stochastic else None
    loose = 0.15 if precision.ring else EXACT
    held: list[Any] = []
    update, read = copies(cache)
    state = read
    for number, token in enumerate(tokens):
        out = torch.full((ROWS, shape.heads, shape.head_dim), torch.nan)
        replay_step(out, cache.layer(0), token, cache.index(batch), rounding=rounding)
        if number % LENGTH < LENGTH - 1:
            expected, state = step(state, token)
            held.append(token)
            assert relative(out, expected) < loose
        else:
            if family == "mamba2" or precision.fold == "raw":
                start = update
                for old in held:
                    start = step(start, old)[1]
            else:
                start = state + decayed(family, update - read, held)
            expected, folded = step(start, token)
            assert relative(out, expected) < loose
            update, read = copies(cache)
            for copy, format in ((update, precision.update), (read, precision.read or precision.update)):
                assert relative(copy, folded) <= COARSE[format] + loose
                assert format == "fp32" or relative(copy, folded) > 1e-6
            state, held = read, []
        cache.commit(batch)
    assert cache.flushes[0, [2, 0]].tolist() == [3, 3]
    assert cache.flushes[0, 1] == 0


def test_both_copies_hold_one_state_each_rounded_once() -> None:
    """The read copy is made from the folded state, not from the update copy that was rounded before."""
    shape = geometry("mamba2")
    wide, dual = (
        ReplayCache(shape, slots=1, interval_length=1, input_dtype=torch.float32, precision=precision)
        for precision in (Precision("fp32"), Precision("fp8_e4m3", "nvfp4", stochastic=True))
    )
    token = make_inputs(shape, 1, 1, dtype=torch.float32, seed=3)[0]
    for cache in (wide, dual):
        batch = cache.batch(cache.allocate())
        rounding = Rounding(1) if cache is dual else None
        replay_step(torch.empty(1, 2, 20), cache.layer(0), token, cache.index(batch), rounding=rounding)
    folded = wide.state[:, 0]
    for name, part in pack(folded, "nvfp4").parts.items():
        assert torch.equal(part, dual.read_copy.parts[name][:, 0])
    assert relative(unpack(dual.packed)[:, 0], folded) < COARSE["fp8_e4m3"]


def test_memory_of_a_slot_is_that_of_the_formats() -> None:
    shape = Geometry("gdn", 2, 1, 128, 128)
    sizes = {"slots": 1, "interval_length": 4}
    ring = ReplayCache(shape, **sizes).bytes_per_slot - shape.state_elements * 4
    dual = ReplayCache(shape, **sizes, precision=Precision("fp16", "nvfp4", stochastic=True))
    assert dual.bytes_per_slot - ring == 2 * 128 * (128 * 2 + 64 + 8 + 4)
    narrow = ReplayCache(shape, **sizes, precision=Precision("fp32", ring="fp8_e4m3"))
    assert narrow.bytes_per_slot == shape.state_elements * 4 + 3 * (128 + 4 + 4 + 2 * (128 + 4 + 4))


def test_released_copies_give_nan() -> None:
    cache = ReplayCache(geometry("gdn"), slots=2, precision=Precision("int8", "nvfp4", ring="fp8_e4m3"))
    slots = cache.allocate(2)
    assert (unpack(cache.packed) == 0).all()
    cache.release(slots[:1])
    for copy in (cache.packed, cache.read_copy):
        assert isinstance(copy, Packed)
        assert unpack(copy)[0, slots[0].index].isnan().all()
        assert (unpack(copy)[0, slots[1].index] == 0).all()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"update": "fp4"}, r"update='fp4' is unknown; accepted: fp32, .*"),
        ({"read": "fp32"}, r"read='fp32' is no format of a read copy; accepted: none, bf16, .*"),
        ({"update": "nvfp4", "read": "fp8_e4m3"}, r"read=fp8_e4m3 has more bits than update=nvfp4; accepted: .*"),
        ({"update": "nvfp4", "read": "nvfp4"}, r"read=nvfp4 is the update copy over again; accepted: none, .*"),
        ({"stochastic": True}, r"stochastic=true rounds nothing with update=fp32; accepted: false, .*"),
        ({"ring": "nvfp4"}, r"ring='nvfp4' is unknown; accepted: none, bf16, fp8_e4m3"),
        ({"fold": "both"}, r"fold='both' is unknown; accepted: d, raw"),
    ],
)
def test_what_cannot_be_gets_one_line(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=f"^{told}$"):
        Precision(**options)


@pytest.fixture(scope="module")
def model() -> Decoder:
    sizes = {"heads": 2, "groups": 1, "head_dim": 16, "state_dim": 16, "conv_kernel": 4}
    geometry = {"name": "qwen3_5_tiny", "family": "gdn", "hidden_size": 32, "num_layers": 2, "vocab_size": 31}
    attention = {"heads": 2, "kv_heads": 1, "head_dim": 16, "output_gate": True, "partial_rotary_factor": 0.5}
    geometry |= {"full_attention_interval": 2, "mlp": {"intermediate_size": 40}, "ssm": sizes, "attention": attention}
    return random_model(config_from_geometry(geometry), seed=3, dtype=torch.float32)


def logits(model: Decoder, arm: str = "replay/torch", **options: Any) -> Tensor:
    cache = new_cache(model, arm, slots=2, capacity=16, **options)
    tokens = torch.arange(2 * 12).view(2, 12) % 31
    model.prefill(tokens[:, :4], cache)
    return torch.stack([model.decode(token, cache) for token in tokens[:, 4:].T])


def test_the_engine_makes_every_precision(model: Decoder) -> None:
    """Further from float32 the coarser, nothing but rounding where a format is fine, and the seed decides."""
    exact = logits(model, "stored/torch")
    error = {}
    for name in precisions.names():
        arm = precisions.named(name, 4)
        came = logits(model, interval_length=arm.interval_length, precision=arm.precision, seed=1)
        error[name] = relative(came, exact)
    assert error["shared_fp32"] < 1e-5 < error["shared_fp16"] < error["shared_fp8"] < error["shared_nvfp4"] < 0.5
    assert 1e-3 < error["dual_fp32_nvfp4"] < error["shared_nvfp4"]
    assert error["ring_bf16"] < error["ring_fp8"]
    stochastic = Precision("fp16", stochastic=True)
    first, again, other = (logits(model, precision=stochastic, interval_length=2, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_arms_refuse_what_they_do_not_hold(model: Decoder) -> None:
    with pytest.raises(
        ModelError, match=r"^Precision\(.*\) is not held by arm=stored/torch; accepted: replay/torch, .*"
    ):
        new_cache(model, "stored/torch", slots=1, capacity=8, precision=Precision("nvfp4"))
    with pytest.raises(ModelError, match=r"^update=fp16 is not held by arm=replay/cpu; accepted: fp32$"):
        new_cache(model, "replay/cpu", slots=1, capacity=8, precision=Precision("fp16"))
    plain = new_cache(model, "stored/torch", slots=1, capacity=8, precision=Precision("bf16"))
    assert plain.states.state.dtype == torch.bfloat16


def test_mamba2_has_no_raw_fold() -> None:
    with pytest.raises(ValueError, match=r"^fold=raw is for GDN and KDA; .*accepted: d$"):
        ReplayCache(geometry("mamba2"), slots=1, precision=Precision(fold="raw"))
