"""What the records of a run prove: every sample counted once, one result of every step, that of one process.

Pure functions of the task and of the records that its scripts write (`shoal.testing.scripts.task.RunRecord`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np

from shoal.testing.scripts.task import TrainingTask

Event: TypeAlias = Mapping[str, Any]
# By step and world: the numbers of the samples that each member computed.
Given: TypeAlias = dict[tuple[int, int], dict[str, list[int]]]


def given(events: Iterable[Event]) -> Given:
    """The samples that each member computed of every committed step, in the last world that committed it.

    They are recorded before they are computed, so even those are known whose member died before it could say that the
    step was committed.
    """
    events = list(events)
    last: dict[int, int] = {}
    for one in events:
        if one["event"] == "commit":
            last[one["step"]] = max(one["world"], last.get(one["step"], 0))
    found: Given = {place: {} for place in last.items()}
    for one in events:
        if one["event"] == "given" and (one["step"], one["world"]) in found:
            found[one["step"], one["world"]][one["member"]] = one["ids"]
    return found


def check_samples(task: TrainingTask, events: Iterable[Event], steps: int) -> None:
    """Each of the first steps had its batch and nothing else, so each sample counted once an epoch."""
    order, counted = task.order, Counter[tuple[int, int]]()
    for (step, world), members in given(events).items():
        seen = sorted(one for ids in members.values() for one in ids)
        batch = sorted(order.ids(step, 0, order.size_of(step)).tolist())
        assert seen == batch, f"step {step} of world {world} has other samples than its batch"
        counted.update((order.cursor(step).epoch, one) for one in seen)
    assert set(counted.values()) <= {1}, "a sample was counted twice in an epoch"
    assert len(counted) == sum(order.size_of(step) for step in range(steps)), "samples are missing"


def check_results(task: TrainingTask, events: Iterable[Event], steps: int, bound: float) -> None:
    """All members had the same parameters after each of the first steps: those of one undisturbed process."""
    reference = task.trajectory(steps)
    results: dict[tuple[int, int], set[tuple[float, ...]]] = {}
    for one in events:
        if one["event"] == "commit":
            results.setdefault((one["step"], one["world"]), set()).add(tuple(one["parameters"]))
    assert {step for step, _ in results} == set(range(steps)), "there are steps that nobody recorded"
    for (step, world), found in results.items():
        assert len(found) == 1, f"members of world {world} differ after step {step}"
        off = float(np.abs(np.array(next(iter(found))) - reference[step]).max())
        assert off < bound, f"after step {step} parameters differ by {off} from those of one undisturbed process"


def check_end(task: TrainingTask, events: Iterable[Event]) -> None:
    """Whoever trained to the end did all steps and ended with the same parameters."""
    done = [one for one in events if one["event"] == "done"]
    assert done, "nobody trained to the end"
    assert {one["step"] for one in done} == {task.order.total_steps}, "a member ended at another step"
    assert len({tuple(one["parameters"]) for one in done}) == 1, "members end with different parameters"
