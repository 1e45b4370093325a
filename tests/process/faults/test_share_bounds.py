"""A largest share that too few members can keep: training continues, in micro-batches, whichever way members go."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from tests.process.faults.checked_run import checked_run

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]


def test_loss_below_the_largest_shares_ends_no_member(tmp_path: Path) -> None:
    settings = ("shares.max=20", "backoff_s=60", "backoff_max_s=60")
    with checked_run(tmp_path, "1:4", settings, pause_s=0.01, epochs=8, batch=64) as run:
        run.until_size(4)
        first = run.pids()
        run.kill("local/3")
        run.until_size(3)
        run.kill("local/2", signal.SIGTERM)
        run.until_size(2)
        name = run.name
        run.shoal("scale", name, "1:1")
        run.until_size(1)
        run.until_step(run.step() + 5)
        reasons = [d["reason"] for d in run.shoal("status", name)["decided"] if d["what"] == "bounds"]
        assert reasons == [
            "the largest shares of 1 members sum to 20 of 64 samples: shares exceed them, in micro-batches that do not"
        ]
        run.finish()
        run.check()
        assert "warning[S105] with fewer than 4 members (MIN is 1) shares will exceed shares.max=20" in run.output
        assert {event["pid"] for event in run.events_of("done")} <= set(first.values()), "training started over"
        assert not run.journal("ExceptionReported"), "a member's script failed"
