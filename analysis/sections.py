"""What the report shows, in its order: a section an experiment, with its figures and tables."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Section:
    """``experiments`` are those of records and of the claims' commands; ``tables`` are pairs of title and name."""

    name: str
    title: str
    about: str
    experiments: tuple[str, ...]
    figures: tuple[str, ...]
    tables: tuple[tuple[str, str], ...]


SECTIONS = (
    Section(
        "kernel",
        "One layer's step",
        "A step of one state-space layer at a model's true shape, stored against replay, over whole flush cycles and "
        "states that no cache holds. Speedups are over the fastest stored arm of the same rounds at the same state "
        "format. A verdict needs an interval that excludes 1, and an effect larger than two timings of one arm differ "
        "by (A/A noise).",
        ("kernel",),
        ("speedup_by_batch", "speedup_by_interval", "bandwidth", "roof_share_by_batch", "step_by_ring_length"),
        (
            ("Speedups of kernels", "kernel_speedups"),
            ("Replay against each other arm", "kernel_pairs"),
            ("Roofs", "roofs"),
            ("Time by ring length", "kernel_phases"),
        ),
    ),
    Section(
        "speculative",
        "Speculative decoding",
        "A window of tokens is verified at once, some of them are committed, the others are taken back: by a cursor, "
        "or from a state kept behind every token.",
        ("window", "speculative"),
        ("throughput_with_drafts", "throughput_by_window", "requests_that_fit", "verify_by_batch"),
        (
            ("Throughput of whole models with drafts", "speculative_throughput"),
            ("Windows of speculative decoding", "window_speedups"),
            ("Windows against each other arm", "window_pairs"),
        ),
    ),
    Section(
        "decode",
        "Whole models",
        "A decode step of a whole model as the difference of two generations; all arms share weights, prompt and "
        "everything but the step of the state-space layers.",
        ("decode",),
        ("decode_by_batch", "step_by_part", "decode_by_context"),
        (("Speedups of whole models", "decode_speedups"), ("Whole models from their first blocks", "decode_depths")),
    ),
    Section(
        "precision",
        "Precision over long documents",
        "Documents are forced token by token on many precisions at once, rows of one batch with states of their own, "
        "and compared with the float32 state position by position.",
        ("pg19", "layer_drift"),
        ("kl_by_position", "state_error_by_position", "kl_by_bytes", "kl_by_interval"),
        (
            ("Precisions over documents", "drift_kl"),
            ("Precisions against each other", "drift_ratios"),
            ("One layer over random inputs", "layer_drift"),
            ("One layer's precisions against each other", "layer_ratios"),
            ("KL by position", "drift_positions"),
            ("Errors of states by position", "drift_states"),
            ("Errors of states by layer and head", "drift_heads"),
        ),
    ),
    Section(
        "accuracy",
        "Accuracy",
        "The same questions at several precisions, compared item by item with the float32 state.",
        ("accuracy",),
        ("accuracy_by_arm", "accuracy_by_distance"),
        (("Accuracy", "accuracy"), ("Accuracy by distance", "accuracy_by_distance")),
    ),
)
