"""Decoding with whole models: prompts, steps, sampling, and slots that are taken again while other rows go on.

    engine = Engine(model, "replay/cpu", slots=8, capacity=4096)
    for token in engine.generate([Request(prompt, max_new_tokens=100, sampling=Sampling(0.7, top_p=0.9, seed=1))]):
        print(token.request, token.token, token.finished)

The arm says where recurrent states are kept and which back end steps them; everything else is the same for all arms. On
a GPU a step is one CUDA graph, in which nothing waits for the host and nothing is allocated. `predict_memory` says what
a model, its cache and its steps will take before any of it exists.
"""

from replayssm.arms import ARMS, WINDOW_ARMS
from replayssm.engine.arms import new_cache
from replayssm.engine.engine import Engine, Request, Token
from replayssm.engine.memory import Memory, predict_memory
from replayssm.engine.sampling import Sampling
from replayssm.engine.speculative import DRAFTERS, SpeculativeEngine, new_drafter
from replayssm.engine.step import Step
from replayssm.engine.windows import WindowStep

__all__ = [
    "ARMS",
    "DRAFTERS",
    "WINDOW_ARMS",
    "Engine",
    "Memory",
    "Request",
    "Sampling",
    "SpeculativeEngine",
    "Step",
    "Token",
    "WindowStep",
    "new_cache",
    "new_drafter",
    "predict_memory",
]
