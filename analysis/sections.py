"""What the report shows, in its order: a section an experiment, with its figures and tables; and what figures mean."""

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
        (),
        (("Windows of speculative decoding", "window_speedups"),),
    ),
    Section(
        "decode",
        "Whole models",
        "A decode step of a whole model as the difference of two generations; all arms share weights, prompt and "
        "everything but the step of the state-space layers.",
        ("decode",),
        ("decode_by_batch",),
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

CAPTIONS = {
    "speedup_by_batch": "Speedup of a layer step over the fastest stored arm, by batch size; whole flush cycles, 95 % "
    "intervals. Grey, open: published, on another card and at L = 16; where a curve says so, its source names the card "
    "only and the model was inferred from it. Dotted: what this machine's bandwidths allow. Staggered phases stand a "
    "little to the right. Coloured and hollow points prove nothing: one process, fewer than five with fewer than five "
    "rounds each, or A/A noise above 25 %.",
    "bandwidth": "Bytes moved over time beside the roof of each arm: reads at the measured read bandwidth, flushes and "
    "stored updates at that of an in-place update. Every case measures both anew; the bands reach from the lowest to "
    "the highest. Of two flush phases the slower. 95 % intervals. Hollow points prove nothing, as above.",
    "decode_by_batch": "Speedup of a whole model's decode step over the fastest stored arm of the same engine, by "
    "batch size, at the shortest context that was run; 95 % intervals. Grey, open: published, on another card and in "
    "another engine. Hollow points prove nothing, as above.",
    "roof_share_by_batch": "Time that an arm's bytes take at the bandwidths of the same run, over its measured time; "
    "of two flush phases the slower. 95 % intervals. Hollow points prove nothing, as above.",
    "accuracy_by_arm": "Items right by what the recurrent states are held in, 95 % intervals over passages. damaged "
    "forgets its states at the end of the prompt: a task that it does not lose proves nothing about states.",
    "accuracy_by_distance": "Facts recalled by the number of intervals since they were told; 95 % intervals over "
    "passages. Every token between was decoded, so that a state was folded and rounded once an interval.",
    "step_by_ring_length": "Time of a layer step with all rows at one ring length, without a commit; the last length "
    "flushes. Stored steps do not depend on it.",
    "kl_by_position": "KL divergence of an arm's next-token distribution from that of the stored float32 state, by "
    "position in a document; half octaves, bands are 95 % intervals over documents. The dashed values are those of "
    "another model and another text: they say how far apart the two arms are, not where ours should lie.",
    "state_error_by_position": "Relative error of the states against the float32 trajectory, mean over layers, heads "
    "and documents, where all arms stand behind a flush. What is fed back accumulates error or does not; what is only "
    "read is rounded once.",
    "kl_by_bytes": "KL over the second half of the positions against the bytes that a step moves for an element of the "
    "state, ring included, mean over a cycle. Left and low is better.",
    "kl_by_interval": "KL over the second half of the positions by interval length; 1 is the stored recurrence.",
    "speedup_by_interval": "Speedup by interval length at the batch size with most lengths; 95 % intervals. Dashed: "
    "bytes alone. Dotted: what this machine's bandwidths allow.",
}
