"""ReplaySSM decoding for hybrid language models: recurrences, replay cache, kernels and traffic model."""

__version__ = "0.1.0"
