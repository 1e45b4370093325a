"""Shares that are too large: for their bounds when members go, and for the memory of a member's loss."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from tests.process.faults.checked_run import checked_run

pytestmark = [pytest.mark.process, pytest.mark.faults, pytest.mark.timeout(600)]


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
            "the largest shares of 1 member sum to 20 of 64 samples: shares exceed them, in micro-batches that do not"
        ]
        run.finish()
        run.check()
        assert "warning[S105] with fewer than 4 members (MIN is 1) shares will exceed shares.max=20" in run.output
        assert {event["pid"] for event in run.events_of("done")} <= set(first.values()), "training started over"
        assert not run.journal("ExceptionReported"), "a member's script failed"


def test_member_whose_loss_does_not_fit_starts_again_with_smaller_micro_batches(tmp_path: Path) -> None:
    plan = {"pause_s": 0.01, "epochs": 6, "loss_fits": {"local/1": 10}}
    with checked_run(tmp_path, "1:2", ("shares.policy=equal", "backoff_s=0.05"), **plan) as run:
        # The members of a commit are recorded: the second process of local/1 takes part with its share of 32.
        run.until(lambda: any(c["member"] == "local/1" and len(c["ids"]) == 32 for c in run.commits()), "its share")
        run.finish()
        run.check_steps(run.order().total_steps)
        run.check_parameters(torch.load(run.records / "final.pt", weights_only=True))
        limits = [e["fields"]["values"] for e in run.journal("AdjustmentReported") if e["fields"]["what"] == "memory"]
        assert limits[0] == {"local/1": 8}
        assert "error[S328] memory ran out with 32 samples at once" in run.output
        assert len(run.journal("ExceptionReported")) == 1
