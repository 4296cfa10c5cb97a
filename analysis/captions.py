"""What each figure shows, and where the published values in it come from."""

from __future__ import annotations

import pandas as pd

from analysis import published
from analysis.bearing import PAPER_CARDS

FILE = "captions.md"
PUBLISHED = {"speedup_by_batch": published.KERNEL, "decode_by_batch": published.MODELS}
PUBLISHED |= {"kl_by_position": "precision_pg19_kl"}
PUBLISHED |= dict.fromkeys(("throughput_with_drafts", "throughput_by_window"), published.DRAFTED)
PUBLISHED |= {"verify_by_batch": published.WINDOWS}
"""Figure -> the experiment of the published values that it draws."""

CAPTIONS = {
    "speedup_by_batch": "Speedup of a layer step over the fastest stored arm, by batch size; whole flush cycles, 95 % "
    "intervals, where a marker does not hide them. Panels are of at least two batch sizes or a failed cell, where "
    "there are such. Grey, open: published, on another card and at L = 16; where a curve says so, its source names "
    "the card only and the model was inferred from it. Dotted: what this machine's bandwidths allow. Staggered phases "
    "stand a little to the right. Coloured and hollow points prove nothing: one process, fewer than five with fewer "
    "than five rounds each, or A/A noise above 25 %.",
    "bandwidth": "Bytes moved over time beside the roof of each arm: reads at the measured read bandwidth, flushes and "
    "stored updates at that of an in-place update. Every case measures both anew; the bands reach from the lowest to "
    "the highest. Of two flush phases the slower. 95 % intervals. Hollow points prove nothing, as above.",
    "decode_by_batch": "Speedup of a whole model's decode step over the fastest stored arm of the same engine, by "
    "batch size, at the shortest context that was run; 95 % intervals. Grey, open: published, on another card and in "
    "another engine. Hollow points prove nothing, as above.",
    "throughput_with_drafts": "Tokens a second of whole models with drafts, over those of replay without drafts in the "
    "same rounds, by batch size: a state kept behind every token of the window, and replay that takes rejected tokens "
    "back by a cursor. Where the former did not fit beside replay without drafts, its ratio is put together from those "
    "that replay with drafts has to either. Same drafts, same acceptance, 95 % intervals. Grey, open: published, on "
    "another card and in another engine. Hollow points prove nothing, as above.",
    "throughput_by_window": "Tokens a second of replay over those of snapshots at the same drafts, by batch size and "
    "window T = 1 + drafts. Dashed, open: published over vLLM's own speculative decoding, on another card, in its "
    "window's colour. Hollow points prove nothing, as above.",
    "requests_that_fit": "Requests whose states, rings and convolutions fit in 100 GB, by window T = 1 + drafts, and "
    "the bytes of each; keys and values, which are the same for all arms, are not counted. Open bars: requests that an "
    "engine on a B300 held at once, at 2,048 tokens each, as published: the ratio of the two is comparable, the "
    "numbers are not.",
    "verify_by_batch": "Speedup of a layer's kernel that verifies a window of T = 1 + drafts over the fastest one that "
    "keeps a state behind every token, by batch size; whole flush cycles, 95 % intervals, where a marker does not hide "
    "them. oracle is a snapshot kernel that is told beforehand what will be accepted, so that it writes one state. "
    "Dotted, in its window's colour: what this machine's bandwidths allow each line. Dashed, open: published, another "
    "engine's kernel over its own snapshots at the same family and width; its source does not name the model. "
    "Staggered phases stand a little to the right. Hollow points prove nothing, as above.",
    "step_by_part": "Time of a whole model's decode step by part, at the shortest context that was run: the "
    "state-space layers' steps and the model's matrix products, both timed alone in the same run, and what remains; "
    "where products alone take longer than all that is not layers, they are cut to that. The error bar is that of the "
    "speedup. Hollow points prove nothing, as above.",
    "decode_by_context": "Left: share of a decode step that the state-space layers' steps take, by context; from half "
    "on they are the largest part for certain. Right: speedup of the whole step over the fastest stored arm, 95 % "
    "intervals. Dotted: up to where the paper says that they dominate. Hollow points prove nothing, as above.",
    "roof_share_by_batch": "Time that an arm's bytes take at the bandwidths of the same run, over its measured time; "
    "of two flush phases the slower. 95 % intervals, where a marker does not hide them. Hollow points prove "
    "nothing, as above.",
    "accuracy_by_arm": "Items right by what the recurrent states are held in, and the difference to shared_fp32 on the "
    "same items; 95 % intervals over passages. damaged forgets its states at the end of the prompt: a task that it "
    "does not lose proves nothing about states.",
    "accuracy_by_distance": "Facts recalled by the number of intervals since they were told; 95 % intervals over "
    "passages. Every token between was decoded, so that a state was folded and rounded once an interval.",
    "step_by_ring_length": "Time of a layer step with all rows at one ring length, without a commit; the last length "
    "flushes. Stored steps do not depend on it.",
    "kl_by_position": "KL divergence of an arm's next-token distribution from that of the stored float32 state, by "
    "position in a document; half octaves, bands are 95 % intervals over documents. Single documents are left out "
    "where a model has several. The dashed values are those of another model and another text: they say how far apart "
    "the two arms are, not where ours should lie.",
    "state_error_by_position": "Relative error of the states against the float32 trajectory, mean over layers, heads "
    "and documents, where all arms stand behind a flush. What is fed back accumulates error or does not; what is only "
    "read is rounded once. A curve that leaves its panel is that of a state that grows without bound: what each flush "
    "rounds, in proportion to the state, adds more energy than decay and the delta rule take away. Numbers: the table.",
    "kl_by_bytes": "KL over the second half of the positions against the bytes that a step moves for an element of the "
    "state, ring included, mean over a cycle. Left and low is better.",
    "kl_by_interval": "KL over the second half of the positions by interval length; 1 is the stored recurrence.",
    "speedup_by_interval": "Speedup by interval length at the batch size with most lengths; 95 % intervals, where a "
    "marker does not hide them; panels of at least two lengths, where there are such. Dashed: bytes alone. Dotted: "
    "what this machine's bandwidths allow.",
}


def markdown(drawn: list[str], paper: pd.DataFrame) -> str:
    """The captions of figures, each with the sources of the published values that it draws."""
    lines = ["# captions", ""]
    for name in drawn:
        lines += [f"## {name}", "", CAPTIONS[name], ""]
        if name in PUBLISHED:
            found = published.sources(paper, PUBLISHED[name], PAPER_CARDS)
            lines += ["Published values, open markers or grey, are from:", "", *(f"- {source}" for source in found), ""]
    return "\n".join(lines)
