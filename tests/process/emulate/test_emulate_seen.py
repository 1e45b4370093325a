"""Status of a run on unequal machines: shares, where the time goes, and why."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.process.faults.checked_run import CheckedRun

from shoal.testing.emulated_speeds import machines

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

SPEEDS = machines(1, 0.25, sample_s=0.002)
SLOWER_SOON = machines(1, "1:0.25@4", sample_s=0.002)


class MonitoredRun(CheckedRun):
    """A run on two machines, one of which has a quarter of the other's speed, from the beginning or soon after it."""

    def begin(self, *arguments: str) -> subprocess.Popen[bytes]:
        # With learned shares the slow machine begins fast: emulated speeds decide the first split.
        return self.start("run", "--emulate", SPEEDS if self.plan["shares"] == "equal" else SLOWER_SOON, *arguments)

    def view(self, ready: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        """Return the first `shoal status --json` that satisfies the condition."""
        views: list[dict[str, Any]] = []

        def satisfied() -> bool:
            views.append(self.shoal("status"))
            return ready(views[-1])

        self.until_step(3)
        self.until(satisfied, what)
        return views[-1]


@contextlib.contextmanager
def monitored_run(path: Path, shares: str) -> Iterator[MonitoredRun]:
    stage = MonitoredRun(path, "2:2", batch=32, epochs=1000, shares=shares)
    try:
        yield stage
    finally:
        stage.close()


def members(view: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    fast, slow = sorted(view["members"], key=lambda member: member["member"])
    return fast, slow


# Other load on the machine lengthens single steps, so the tests wait for what is seen in the end.


def test_status_shows_the_fast_member_waiting_with_equal_shares(tmp_path: Path) -> None:
    def waits(view: dict[str, Any]) -> bool:
        if view["step"] <= 10 or not view["idle_now"]:
            return False
        fast, slow = members(view)
        # Of the 128 ms of the slow member the fast one works 32.
        fast_waits, slow_waits = fast["wait_s"] > 1.5 * fast["compute_s"], slow["wait_s"] > 0.5 * slow["compute_s"]
        return fast_waits and not slow_waits and view["idle_now"] > 0.2

    with monitored_run(tmp_path, "equal") as run:
        view = run.view(waits, "the fast member to wait and the slow one not to")
        fast, slow = members(view)
        assert (fast["share"], slow["share"], view["batch"]) == (16, 16, 32)
        assert view["idle_now"] == view["idle_before"]
        assert view["decided"] == []


def test_status_and_why_explain_the_larger_share_of_the_fast_member(tmp_path: Path) -> None:
    def settled(view: dict[str, Any]) -> bool:
        if view["step"] <= 40 or not view["decided"]:
            return False
        fast, slow = members(view)
        busy = fast["share"] > 2 * slow["share"] > 0 and fast["wait_s"] < 0.5 * fast["compute_s"]
        return busy and view["idle_now"] < 0.15

    with monitored_run(tmp_path, "model") as run:
        view = run.view(settled, "shares to settle")
        fast, _ = members(view)
        assert fast["compute_s"] > fast["data_s"] > 0 < fast["exchange_s"]
        assert view["idle_before"] > 0.25
        (shares,) = view["decided"]
        assert shares["what"] == "shares"
        assert sum(shares["values"].values()) == view["batch"] == 32
        for subject in ((), ("local/1",)):
            lines = [line for line in run.shoal("why", *subject) if line["kind"] == "SharesDecided"]
            assert lines[0]["text"].startswith("shares from step")
            assert lines[0]["reason"].startswith("local/1 takes")
            assert shares["reason"] in [line["reason"] for line in lines]
