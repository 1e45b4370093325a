"""A member whose parameters differ from those of the others is noticed, and the setting decides what happens."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.process.faults.checked_run import checked_run

pytestmark = [pytest.mark.process, pytest.mark.faults, pytest.mark.timeout(600)]

# All members are in the first world, whose states are compared before steps 0, 1, 3 and 7.
ALL = "regroup_s=60"


def test_divergence_stops_the_run_and_names_the_tensor(tmp_path: Path) -> None:
    settings = (ALL, "restarts.user=0")
    with checked_run(tmp_path, "2", settings, drift=["local/1", 6], shares="equal") as run:
        run.release()
        assert run.process.wait(120) != 0
        assert run.step() == 6
        assert "error[S350] members no longer hold the same state" in run.output
        assert "2.weight differs (" in run.output


def test_repaired_member_copies_the_state_of_the_majority(tmp_path: Path) -> None:
    settings = (ALL, "on_divergence=repair")
    with checked_run(tmp_path, "3", settings, drift=["local/1", 6], shares="equal") as run:
        run.finish()
        run.check()
        assert {event["member"]: event["pid"] for event in run.events_of("done")} == run_of_first_lives(run.events())
        assert any("local/1 diverged" in str(entry["fields"].get("cause", "")) for entry in run.journal())


def run_of_first_lives(events: list[dict[str, object]]) -> dict[object, object]:
    """Return the process of every member when it first was ready; none was restarted if these finished."""
    first: dict[object, object] = {}
    for event in events:
        if event["event"] == "ready":
            first.setdefault(event["member"], event["pid"])
    return first
