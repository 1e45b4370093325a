"""The conformance suite can fail: records of a run that broke a promise are detected."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.testing import assertions
from shoal.testing.scripts.task import TrainingTask

TASK = TrainingTask(samples=20, batch=8, epochs=2)
STEPS = TASK.order.total_steps
BOUND = 1e-10


def records() -> list[dict[str, Any]]:
    """Return records of two members; the world breaks in step 2, which is repeated in the next world."""
    events: list[dict[str, Any]] = []
    for step, parameters in enumerate(TASK.trajectory(STEPS)):
        ids = TASK.order.ids(step, 0, TASK.order.size_of(step)).tolist()
        worlds = (1, 2) if step == 2 else (1,) if step < 2 else (2,)
        for world in worlds:
            base = {"step": step, "world": world}
            for member, part in (("a", ids[:3]), ("b", ids[3:])):
                events.append({"event": "given", "member": member, "ids": part, **base})
            if world == worlds[-1]:
                for member in ("a", "b"):
                    events.append({"event": "commit", "member": member, "parameters": parameters.tolist(), **base})
    last = events[-1]["parameters"]
    return events + [{"event": "done", "member": name, "step": STEPS, "parameters": last} for name in ("a", "b")]


def first(events: list[dict[str, Any]], kind: str, step: int) -> dict[str, Any]:
    return next(event for event in events if event["event"] == kind and event["step"] == step)


def check(events: list[dict[str, Any]]) -> None:
    assertions.check_samples(TASK, events, STEPS)
    assertions.check_results(TASK, events, STEPS, BOUND)
    assertions.check_end(TASK, events)


def test_correct_records_pass() -> None:
    check(records())


def test_missing_commit_of_a_member_that_died_is_accepted() -> None:
    events = records()
    events.remove(first(events, "commit", 1))
    check(events)


def test_lost_sample_is_detected() -> None:
    events = records()
    first(events, "given", 1)["ids"].pop()
    with pytest.raises(AssertionError, match="other samples than its batch"):
        check(events)


def test_sample_of_two_members_is_detected() -> None:
    events = records()
    ids = first(events, "given", 3)["ids"]
    others = [event["ids"] for event in events if event["event"] == "given" and event["step"] == 3]
    next(other for other in others if other != ids).append(ids[0])
    with pytest.raises(AssertionError, match="other samples than its batch"):
        check(events)


def test_missing_step_is_detected() -> None:
    events = [event for event in records() if event["step"] != 4]
    with pytest.raises(AssertionError, match="samples are missing"):
        assertions.check_samples(TASK, events, STEPS)
    with pytest.raises(AssertionError, match="no member recorded"):
        assertions.check_results(TASK, events, STEPS, BOUND)


def test_difference_in_the_last_bit_is_detected() -> None:
    events = records()
    commit = first(events, "commit", 1)
    commit["parameters"] = [value * (1 + 2**-52) for value in commit["parameters"]]
    with pytest.raises(AssertionError, match="members of world 1 differ after step 1"):
        check(events)


def test_sample_counted_twice_in_the_gradient_is_detected() -> None:
    events = records()
    off = [value + 1e-9 for value in first(events, "commit", 5)["parameters"]]
    for event in events:
        if event["event"] == "commit" and event["step"] == 5:
            event["parameters"] = off
    with pytest.raises(AssertionError, match="one undisturbed process"):
        check(events)


def test_member_that_ended_early_is_detected() -> None:
    events = records()
    events[-1]["step"] = STEPS - 1
    with pytest.raises(AssertionError, match="another step"):
        check(events)
