"""One static HTML page, without scripts or links to other hosts: claims, figures, tables, exclusions, devices.

Figures are the files of ``../figures``, which lie in the same results folder: a page that held them too would be three
times as large and hold everything twice. Move or send the folder, not the page alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from analysis.rules import VERDICTS
from analysis.tables import shown_columns, text

ALWAYS = ("kernel_speedups", "roofs")
TABLES = (
    ("Speedups of kernels", "kernel_speedups"),
    ("Windows of speculative decoding", "window_speedups"),
    ("Speedups of whole models", "decode_speedups"),
    ("Whole models from their first blocks", "decode_depths"),
    ("Replay against each other arm", "kernel_pairs"),
    ("Accuracy", "accuracy"),
    ("Accuracy by distance", "accuracy_by_distance"),
    ("Roofs", "roofs"),
    ("Time by ring length", "kernel_phases"),
    ("Precisions over documents", "drift_kl"),
    ("Precisions against each other", "drift_ratios"),
    ("One layer over random inputs", "layer_drift"),
    ("One layer's precisions against each other", "layer_ratios"),
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


def render(tables: dict[str, pd.DataFrame], claims: pd.DataFrame, figures: list[str]) -> str:
    """The page; ``figures`` are names of files in ``figures/`` beside its folder."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    block = environment.get_template("table.html.j2")
    devices = tables["devices"]
    return environment.get_template("report.html.j2").render(
        records=int(devices["records"].sum()),
        failures=int(devices["failures"].sum()),
        excluded=int((tables["exclusions"]["gate"] != "status").sum()),
        devices=sorted(set(devices["device"])),
        tally=[(v, n) for v in VERDICTS if (n := int((claims["verdict"] == v).sum()))],
        claims=[(g, rows.to_dict("records")) for g, rows in claims.groupby("group", sort=False)],
        figures=[{"name": name, "caption": CAPTIONS[name]} for name in figures],
        tables=[_table(title, tables[name]) for title, name in TABLES if name in ALWAYS or len(tables[name])],
        left_out=[_table("Failures", tables["failures"]), _table("Exclusions", tables["exclusions"])],
        device_table=_table("Devices and versions", devices),
        table_block=lambda table: Markup(block.render(table=table)),
    )


def _table(title: str, frame: pd.DataFrame) -> dict[str, Any]:
    columns = shown_columns(frame)
    rows = [[text(cell) for cell in row] for row in frame[columns].itertuples(index=False)]
    return {"title": title, "columns": [c.replace("_", " ") for c in columns], "rows": rows}
