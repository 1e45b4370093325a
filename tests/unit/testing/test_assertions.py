"""The conformance suite can fail: records of a run that broke a promise are found out."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.testing import assertions
from shoal.testing.scripts.task import TrainingTask

TASK = TrainingTask(samples=20, batch=8, epochs=2)
STEPS = TASK.order.total_steps
BOUND = 1e-10


def records() -> list[dict[str, Any]]:
    """Of two members that share every batch; in step 2 the world breaks and it is done again in the next one."""
    found: list[dict[str, Any]] = []
    for step, parameters in enumerate(TASK.trajectory(STEPS)):
        ids = TASK.order.ids(step, 0, TASK.order.size_of(step)).tolist()
        worlds = (1, 2) if step == 2 else (1,) if step < 2 else (2,)
        for world in worlds:
            base = {"step": step, "world": world}
            for member, part in (("a", ids[:3]), ("b", ids[3:])):
                found.append({"event": "given", "member": member, "ids": part, **base})
            if world == worlds[-1]:
                for member in ("a", "b"):
                    found.append({"event": "commit", "member": member, "parameters": parameters.tolist(), **base})
    last = found[-1]["parameters"]
    return found + [{"event": "done", "member": one, "step": STEPS, "parameters": last} for one in ("a", "b")]


def first(found: list[dict[str, Any]], event: str, step: int) -> dict[str, Any]:
    return next(one for one in found if one["event"] == event and one["step"] == step)


def check(found: list[dict[str, Any]]) -> None:
    assertions.check_samples(TASK, found, STEPS)
    assertions.check_results(TASK, found, STEPS, BOUND)
    assertions.check_end(TASK, found)


def test_a_run_that_kept_its_promises_is_believed() -> None:
    check(records())


def test_one_that_died_before_it_could_say_so_counts_all_the_same() -> None:
    found = records()
    found.remove(first(found, "commit", 1))
    check(found)


def test_a_lost_sample_is_found() -> None:
    found = records()
    first(found, "given", 1)["ids"].pop()
    with pytest.raises(AssertionError, match="other samples than its batch"):
        check(found)


def test_a_sample_that_two_members_had_is_found() -> None:
    found = records()
    mine = first(found, "given", 3)["ids"]
    next(one for one in found if one["event"] == "given" and one["step"] == 3 and one["ids"] != mine)["ids"].append(
        mine[0]
    )
    with pytest.raises(AssertionError, match="other samples than its batch"):
        check(found)


def test_a_step_that_nobody_did_is_found() -> None:
    found = [one for one in records() if one["step"] != 4]
    with pytest.raises(AssertionError, match="samples are missing"):
        assertions.check_samples(TASK, found, STEPS)
    with pytest.raises(AssertionError, match="nobody recorded"):
        assertions.check_results(TASK, found, STEPS, BOUND)


def test_members_that_differ_in_the_last_bit_are_found() -> None:
    found = records()
    first(found, "commit", 1)["parameters"] = [one * (1 + 2**-52) for one in first(found, "commit", 1)["parameters"]]
    with pytest.raises(AssertionError, match="members of world 1 differ after step 1"):
        check(found)


def test_one_sample_counted_twice_in_the_gradient_is_found() -> None:
    found = records()
    off = [a + 1e-9 for a in first(found, "commit", 5)["parameters"]]
    for one in found:
        if one["event"] == "commit" and one["step"] == 5:
            one["parameters"] = off
    with pytest.raises(AssertionError, match="one undisturbed process"):
        check(found)


def test_a_member_that_ended_early_is_found() -> None:
    found = records()
    found[-1]["step"] = STEPS - 1
    with pytest.raises(AssertionError, match="another step"):
        check(found)
