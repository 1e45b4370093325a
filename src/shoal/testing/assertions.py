"""Checks of a run's records: every sample counted once, one result of every step, that of a single process.

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
    """Return the samples that each member computed of every committed step, in the last world that committed it.

    Samples are recorded before they are computed, so those of a member that died before it could record the commit are
    included.
    """
    events = list(events)
    last_world: dict[int, int] = {}
    for event in events:
        if event["event"] == "commit":
            last_world[event["step"]] = max(event["world"], last_world.get(event["step"], 0))
    samples: Given = {place: {} for place in last_world.items()}
    for event in events:
        if event["event"] == "given" and (event["step"], event["world"]) in samples:
            samples[event["step"], event["world"]][event["member"]] = event["ids"]
    return samples


def check_samples(task: TrainingTask, events: Iterable[Event], steps: int) -> None:
    """Fail unless each of the first steps had exactly its batch, so that each sample counted once an epoch."""
    order, counted = task.order, Counter[tuple[int, int]]()
    for (step, world), members in given(events).items():
        seen = sorted(sample for ids in members.values() for sample in ids)
        batch = sorted(order.ids(step, 0, order.size_of(step)).tolist())
        assert seen == batch, f"step {step} of world {world} has other samples than its batch"
        counted.update((order.cursor(step).epoch, sample) for sample in seen)
    assert set(counted.values()) <= {1}, "a sample was counted twice in an epoch"
    assert len(counted) == sum(order.size_of(step) for step in range(steps)), "samples are missing"


def check_results(task: TrainingTask, events: Iterable[Event], steps: int, bound: float) -> None:
    """Fail unless all members had the same parameters after each of the first steps, those of a single process."""
    reference = task.trajectory(steps)
    results: dict[tuple[int, int], set[tuple[float, ...]]] = {}
    for event in events:
        if event["event"] == "commit":
            results.setdefault((event["step"], event["world"]), set()).add(tuple(event["parameters"]))
    assert {step for step, _ in results} == set(range(steps)), "there are steps that no member recorded"
    for (step, world), variants in results.items():
        assert len(variants) == 1, f"members of world {world} differ after step {step}"
        off = float(np.abs(np.array(next(iter(variants))) - reference[step]).max())
        assert off < bound, f"after step {step} parameters differ by {off} from those of one undisturbed process"


def check_end(task: TrainingTask, events: Iterable[Event]) -> None:
    """Fail unless every member that finished did all steps and ended with the same parameters."""
    done = [event for event in events if event["event"] == "done"]
    assert done, "no member trained to the end"
    assert {event["step"] for event in done} == {task.order.total_steps}, "a member ended at another step"
    assert len({tuple(event["parameters"]) for event in done}) == 1, "members end with different parameters"
