"""The time of a step by ring length, after everything else of a group."""

from __future__ import annotations

from experiments.measure import devices
from experiments.measure.arm import Arm
from experiments.measure.assemble import Group, order_seed
from experiments.measure.failures import refuse_lost, told
from experiments.measure.timing import RaisedError, interleave, warm_up


def time_phases(arms: list[Arm], group: Group) -> None:
    """Time a step of the arms that are right at each ring length: all rows at it, without a commit. The layers hold
    nothing of meaning afterwards. An arm that raises here keeps its samples of whole cycles, which passed all checks.
    """
    case, device = group.case, devices.of(group.case)
    if not case.timing.phase_rounds:
        return
    standing = {arm.name: arm for arm in arms if arm.layers is not None and not arm.phases_fault}
    places = {f"{name} {p}": (arm, p) for name, arm in standing.items() for p in range(arm.layers.positions)}
    steps: dict[str, devices.Run] = {}

    def elapsed_ns(place: tuple[Arm, int]) -> int:
        arm, position = place
        if arm.name not in steps:
            steps[arm.name] = device.repeated(arm.layers.run_steps)
        arm.layers.place(position)
        return device.elapsed_ns(steps[arm.name])

    try:
        warm_up(places, case.timing.warmup_limit_s, case.timing.warmup_tolerance, elapsed_ns)
        samples = interleave(places, case.timing.phase_rounds, order_seed(case, group.replicate), elapsed_ns)
    except RaisedError as raised:
        arm, _ = places[raised.name]
        refuse_lost(arm, case, raised.__cause__)
        arm.phases_fault = told(raised.__cause__)
        return time_phases(arms, group)
    for name, arm in standing.items():
        found = (samples.elapsed_ns[f"{name} {p}"] for p in range(arm.layers.positions))
        arm.phases_ns = tuple(map(tuple, found))
