"""Views of runs, members and stories with sensible fields, for tests of what is shown."""

from __future__ import annotations

from typing import Any

from shoal.wire.api import AdjustmentView, MemberView, RunView, StoryLine


def run_view(run: str = "train-7f3k", **changes: Any) -> RunView:
    """Return a run in training at step 1234 of 5000, with two members."""
    fields: dict[str, Any] = {
        "run": run,
        "name": "train",
        "status": "training",
        "reason": "",
        "since": 100.0,
        "started": 100.0,
        "ended": None,
        "exit_code": None,
        "argv": ("train.py",),
        "members_min": 1,
        "members_max": 4,
        "world": 3,
        "world_size": 2,
        "step": 1234,
        "total_steps": 5000,
        "epoch": 2,
        "loss": 0.25,
        "samples_per_s": 812.0,
        "metrics": {},
        "members": (member_view("local/0", rank=0), member_view("local/1", rank=1)),
        "losses": 1,
        "joins": 2,
        "last_change": "",
        "checkpoint_step": None,
        "checkpoint_path": "",
        "directory": "/somewhere/train-7f3k",
    }
    return RunView(**{**fields, **changes})


def member_view(member: str, **changes: Any) -> MemberView:
    """Return a connected trainer that computes."""
    fields: dict[str, Any] = {
        "member": member,
        "incarnation": "a",
        "status": "training",
        "rank": None,
        "agent": "local",
        "pid": 42,
        "host": "127.0.0.1",
        "step": 1234,
        "share": 256,
        "phase": "compute",
        "phase_age_s": 0.1,
        "heartbeat_age_s": 0.2,
        "samples_per_s": 400.0,
        "connected": True,
    }
    return MemberView(**{**fields, **changes})


def story_line(seq: int, kind: str, text: str = "", **changes: Any) -> StoryLine:
    """Return a line of the story at 100 + `seq` seconds."""
    fields: dict[str, Any] = {
        "at": 100.0 + seq,
        "run": "r",
        "member": "",
        "world": None,
        "step": None,
        "reason": "",
    }
    return StoryLine(seq=seq, kind=kind, text=text, **{**fields, **changes})


def balanced_run() -> RunView:
    """Return a run of two members with unequal shares, and a spare member."""
    members = (
        member_view("local/0", rank=0, share=51, data_s=0.0003, compute_s=0.051, wait_s=0.0012, exchange_s=0.004),
        member_view("local/1", rank=1, share=13, data_s=0.0003, compute_s=0.052, exchange_s=0.004),
        member_view("local/2", status="spare", share=0, samples_per_s=0.0),
    )
    adjustment = AdjustmentView(
        "shares", 12, {"local/0": 51, "local/1": 13}, "local/1 is slow: 51, 13 instead of 32, 32"
    )
    return run_view(members=members, batch=64, noise=1310.4, idle_before=0.38, idle_now=0.0172, decided=(adjustment,))
