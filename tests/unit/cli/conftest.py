"""Runs, members and stories to show."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.wire.api import MemberView, RunView, StoryLine


class Make:
    """Builds views with sensible fields."""

    def run(self, run: str = "train-7f3k", **changes: Any) -> RunView:
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
            "members": (self.member("local/0", rank=0), self.member("local/1", rank=1)),
            "losses": 1,
            "joins": 2,
            "last_change": "",
            "checkpoint_step": None,
            "checkpoint_path": "",
            "directory": "/somewhere/train-7f3k",
        }
        return RunView(**{**fields, **changes})

    def member(self, member: str, **changes: Any) -> MemberView:
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
            "beat_age_s": 0.2,
            "samples_per_s": 400.0,
            "connected": True,
        }
        return MemberView(**{**fields, **changes})

    def line(self, seq: int, kind: str, text: str = "", **changes: Any) -> StoryLine:
        fields: dict[str, Any] = {
            "at": 100.0 + seq,
            "run": "r",
            "member": "",
            "world": None,
            "step": None,
            "reason": "",
        }
        return StoryLine(seq=seq, kind=kind, text=text, **{**fields, "reason": "", **changes})


@pytest.fixture
def make() -> Make:
    return Make()
