"""Hybrid language models in plain PyTorch, for decoding: Nemotron-H and Qwen3.5, a file each, read like the config.

A model knows neither state nor cache: its mixers hand their tokens to a *past*, a `prompt.Prompt` or a
`decoding.Decoding`, which convolves, attends and runs the recurrence behind the tokens seen before. `Decoder.prefill`
and `Decoder.decode` make them. A `ModelCache` holds keys, values and convolution states; the recurrent states are in
its ``states``, a `StoredStates` or a `ReplayStates` built around the step function of any back end, so that exchanging
the arm changes nothing else:

    model = load_model(folder, dtype=torch.bfloat16)
    states = ReplayStates(model.new_replay_cache(slots=8), replay_step)
    cache = model.new_cache(states, slots=8, capacity=4096)
    logits = model.prefill(prompts, cache, slots=range(8), lengths=lengths)
    logits = model.decode(logits.argmax(-1), cache)
"""

from replayssm.models.cache import ModelCache, ReplayStates, States, StoredStates
from replayssm.models.decoder import Decoder
from replayssm.models.loading import (
    check_folder,
    config_from_folder,
    config_from_geometry,
    empty_model,
    load_model,
    random_model,
)
from replayssm.models.options import ModelError

__all__ = [
    "Decoder",
    "ModelCache",
    "ModelError",
    "ReplayStates",
    "States",
    "StoredStates",
    "check_folder",
    "config_from_folder",
    "config_from_geometry",
    "empty_model",
    "load_model",
    "random_model",
]
