"""The saved dashboard of a project: the paper's panels over the runs of `experiments.tracking.runs`.

    python -m experiments.upload --dashboard

Needs ``wandb-workspaces``, which the extra ``wandb`` brings. Saving makes a new saved view of the project.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from experiments.tracking.options import Tracker

NAME = "ReplaySSM"


@dataclass(frozen=True)
class Panel:
    """``y`` over ``x`` (a metric of a series, or a config key) as a ``line`` or a ``scatter``, or ``y`` a run as
    ``bar``; ``by`` is the config key that makes one line or bar of several runs."""

    kind: str
    title: str
    y: str
    x: str = ""
    by: str = "arm"
    log_x: bool = False
    log_y: bool = False


SECTIONS: dict[str, tuple[Panel, ...]] = {
    "Layer kernels": (
        Panel("scatter", "Speedup over fastest stored arm by batch", "speed/speedup", "case.batch_size", log_x=True),
        Panel("scatter", "Time of a layer step by batch (us)", "time/layer_step_us", "case.batch_size", log_x=True),
        Panel("scatter", "Speedup by interval length", "speed/speedup", "case.interval_length"),
        Panel("scatter", "Share of the roof by batch", "speed/share_of_roof", "case.batch_size", log_x=True),
        Panel("bar", "Achieved bandwidth by arm (bytes/s)", "speed/achieved_bytes_per_s"),
        Panel("line", "Time of a layer step by round (us)", "time/layer_step_round_us", "round"),
    ),
    "Whole models": (
        Panel("scatter", "Tokens a second by batch", "speed/tokens_per_s", "case.batch_size", log_x=True),
        Panel("scatter", "Time of a model step by batch (ms)", "time/model_step_ms", "case.batch_size", log_x=True),
        Panel("scatter", "Share of state-space layers by context", "decode/state_share", "case.context", log_x=True),
        Panel("bar", "Memory of state and ring by arm (bytes)", "memory/layers_memory_bytes"),
    ),
    "Precision over documents": (
        Panel("line", "KL by position (nats)", "by_position/kl_nats", "position", log_x=True, log_y=True),
        Panel("line", "Same likeliest token by position", "by_position/agreement_share", "position", log_x=True),
        Panel("bar", "Mean KL by arm (nats)", "drift/mean_kl_nats"),
        Panel("scatter", "KL against bytes moved", "drift/mean_kl_nats", "traffic/step_bytes_per_element", log_y=True),
    ),
}


def workspace(tracker: Tracker, entity: str) -> Any:
    """The dashboard as an object of wandb-workspaces; nothing is sent."""
    import wandb_workspaces.workspaces as ws

    sections = [
        ws.Section(name=name, panels=[_drawn(panel) for panel in panels], is_open=True)
        for name, panels in SECTIONS.items()
    ]
    return ws.Workspace(
        name=NAME, entity=entity, project=tracker.project, sections=sections, auto_generate_panels=False
    )


def save(tracker: Tracker) -> str:
    """Save the dashboard; returns its URL. Raises what wandb raises."""
    import wandb

    found = workspace(tracker, tracker.entity or wandb.Api().default_entity or "")
    found.save()
    return str(found.url)


def _drawn(panel: Panel) -> Any:
    import wandb_workspaces.reports.v2 as wr

    if panel.kind == "scatter":
        x = wr.Config(panel.x) if panel.x.startswith("case.") else wr.SummaryMetric(panel.x)
        y = wr.SummaryMetric(panel.y)
        return wr.ScatterPlot(title=panel.title, x=x, y=y, log_x=panel.log_x, log_y=panel.log_y)
    groupby = wr.Config(panel.by)
    if panel.kind == "bar":
        return wr.BarPlot(title=panel.title, metrics=[wr.SummaryMetric(panel.y)], groupby=groupby)
    scales = {"log_x": panel.log_x, "log_y": panel.log_y}
    return wr.LinePlot(title=panel.title, x=wr.Metric(panel.x), y=[wr.Metric(panel.y)], groupby=groupby, **scales)
